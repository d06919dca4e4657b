"""The quality of a track as somebody measured it, stored in the manifest (registry, Extensions).

The extension changes no restored value and need not be understood. Its numbers are what the
writer says: nothing proves them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvformat.errors import InvalidError
from kvformat.fields import FLOAT64_BITS, Node, float64_bits, float64_of, schema_error
from kvformat.manifest import Extension, Manifest

QUALITY: Final = "org.kvformat.quality"
NUMBERS: Final = ("cross_entropy_change", "kl_max", "kl_mean", "kl_p99", "top1")
_TEXTS: Final = ("content_id", "model", "track")
_COUNTS: Final = ("cached_tokens", "compared_tokens")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One track against the original cache in one model.

    Divergences and the change of cross-entropy are in nats per token, ``top1`` is a share.
    ``content_id`` names the cache on which it was measured, which may be another one.
    """

    track: str
    model: str
    content_id: str
    cached_tokens: int
    compared_tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    cross_entropy_change: float

    @staticmethod
    def parse(node: Node) -> Measurement:
        """From JSON; raises ``manifest.schema``."""
        m = node.members(*_TEXTS, *_COUNTS, *NUMBERS)
        found: dict[str, Any] = {name: m[name].text() for name in _TEXTS}
        found |= {name: m[name].integer() for name in _COUNTS}
        found |= {name: _number(m[name]) for name in NUMBERS}
        return Measurement(**found)

    def to_json(self) -> dict[str, Any]:
        """To JSON, which has no floating-point numbers here (spec section 2)."""
        plain = {name: getattr(self, name) for name in (*_TEXTS, *_COUNTS)}
        return plain | {name: float64_bits(getattr(self, name)) for name in NUMBERS}


def _number(node: Node) -> float:
    bits = node.text()
    value = float64_of(bits) if FLOAT64_BITS.fullmatch(bits) else math.nan
    if not math.isfinite(value):
        raise schema_error("not a finite number", node.pointer, "16 hexadecimal digits", bits)
    return value


def extensions_of(measurements: Iterable[Measurement]) -> dict[str, Extension]:
    """What to give to ``kvformat.write(..., extensions=...)``."""
    return {QUALITY: Extension([item.to_json() for item in measurements])}


def measured(manifest: Manifest) -> tuple[Measurement, ...]:
    """What the manifest says was measured; nothing where it is not understood (EXT-3)."""
    found = manifest.extensions.get(QUALITY)
    if found is None:
        return ()
    try:
        return Node(found.value).each(Measurement.parse)
    except InvalidError:
        return ()
