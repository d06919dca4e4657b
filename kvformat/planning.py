"""The writer's choices that need no data: tracks, qualities, segmentation (spec 7.3, registry)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from kvformat.errors import UsageError
from kvformat.groups import ALIGNMENTS, ORDERS, Group, GroupSegmentation, Segmentation
from kvformat.limits import LIMITS
from kvformat.tracks import CODEC_NAMES, EXACT

RELATIVE_STEPS: Final = MappingProxyType(
    {"high": 0.14, "near-lossless": 0.24, "balanced": 0.8, "small": 1.2}
)
ROLE_FACTORS: Final = MappingProxyType({"key": math.sqrt(0.5), "value": math.sqrt(2)})
"""Keys carry more of the error than values at equal step (measured, see the rationale)."""
DEFAULT_QUALITY: Final = "near-lossless"
DEFAULT_TRACKS: Final = ("hevc", "zstd")
SEGMENT_BYTES: Final = 32 * 2**20
SEGMENT_LIMIT_BYTES: Final = LIMITS.decoded_bytes_per_segment // 2
"""Half the limit: the pictures of a segment are larger than its integers."""


@dataclass(frozen=True, slots=True)
class TrackPlan:
    """A track to write: its name's two parts."""

    quality: str
    codec: str

    @property
    def name(self) -> str:
        """``quality/codec``."""
        return f"{self.quality}/{self.codec}"


def parse_tracks(names: Iterable[str], quality: str = DEFAULT_QUALITY) -> tuple[TrackPlan, ...]:
    """``near-lossless/hevc``, or short forms: a codec in ``quality``, or ``exact`` in zstd."""
    if isinstance(names, str):
        names = names.split(",")
    try:
        names = [str(name) if isinstance(name, str) else "" for name in names]
    except TypeError:
        names = [""]
    _require_quality(quality)
    plans: list[TrackPlan] = []
    for text in names:
        name = text.strip()
        first, slash, second = name.partition("/")
        if not slash:
            first, second = (EXACT, "zstd") if name == EXACT else (quality, name)
        if first in CODEC_NAMES and second in (*RELATIVE_STEPS, EXACT):
            first, second = second, first
        _require_quality(first)
        if second not in CODEC_NAMES:
            raise UsageError(
                "usage.argument",
                "unknown codec",
                where=f"track {name!a}",
                expected=", ".join(CODEC_NAMES),
                found=ascii(second),
            )
        if first == EXACT and second == "hevc":
            raise UsageError(
                "usage.argument",
                "codec hevc cannot hold the exact bytes",
                where=f"track {name}",
                expected="exact/zstd or exact/stored",
            )
        plan = TrackPlan(first, second)
        if plan in plans:
            raise UsageError("usage.argument", "a track is named twice", found=plan.name)
        plans.append(plan)
    if not plans:
        raise UsageError("usage.argument", "no tracks are named")
    return tuple(plans)


def relative_step(quality: str, role: str) -> float:
    """The step of a role over the RMS of its layer, in a quantised quality."""
    return RELATIVE_STEPS[quality] * ROLE_FACTORS.get(role, 1.0)


def _require_quality(name: str) -> None:
    if not isinstance(name, str) or (name not in RELATIVE_STEPS and name != EXACT):
        raise UsageError(
            "usage.argument",
            "unknown quality",
            expected=", ".join((*RELATIVE_STEPS, EXACT)),
            found=ascii(name),
        )


def plan_tracks(plans: Sequence[TrackPlan], groups: Sequence[Group]) -> tuple[TrackPlan, ...]:
    """The plans for these groups: without a group to quantise every quality is ``exact``."""
    if any(group.quantisable for group in groups):
        return tuple(plans)
    result: list[TrackPlan] = []
    for plan in plans:
        exact = TrackPlan(EXACT, "zstd" if plan.codec == "hevc" else plan.codec)
        if exact not in result:
            result.append(exact)
    return tuple(result)


def plan_segmentation(
    groups: Sequence[Group],
    token_count: int,
    *,
    segment_tokens: int | None = None,
    order: str = "token-major",
    alignment: int = 1,
    whole: Collection[int] = (),
) -> Segmentation:
    """Segments that grow with the artifact, so that its front stays small.

    The heads of the groups numbered in ``whole`` stay together (TRF-2).
    """
    if order not in ORDERS or alignment not in ALIGNMENTS:
        raise UsageError(
            "usage.argument",
            "unknown order or alignment",
            expected=f"{', '.join(ORDERS)}; {ALIGNMENTS}",
            found=f"{order}; {alignment}",
        )
    if segment_tokens is not None:
        largest = largest_segment_tokens(groups)
        if not isinstance(segment_tokens, (int, np.integer)) or not 1 <= segment_tokens <= largest:
            raise UsageError(
                "usage.argument",
                "segment_tokens is out of range for this cache",
                expected=f"1 to {largest}",
                found=segment_tokens,
            )
        tokens = int(segment_tokens)
    else:
        tokens = default_segment_tokens(groups, token_count)
    budget = 2**20 if tokens <= 1024 else 2**21
    cuts = []
    for number, group in enumerate(groups):
        layers = min(LIMITS.layers_per_segment, len(group.layers))
        step = 1 if group.tokens.kind == "state" else tokens
        heads = max(1, min(group.heads, budget // (group.head_dim * step)))
        cuts.append(GroupSegmentation(layers, group.heads if number in whole else heads))
    return Segmentation(tokens, tuple(cuts), order, int(alignment))


def largest_segment_tokens(groups: Sequence[Group]) -> int:
    """What ``decoded_bytes_per_segment`` leaves for the widest head of three layers."""
    widest = max((group.head_dim * group.numpy_dtype.itemsize for group in groups), default=1)
    bytes_per_token = widest * LIMITS.layers_per_segment
    return max(1, min(LIMITS.tokens_per_segment, SEGMENT_LIMIT_BYTES // bytes_per_token))


def default_segment_tokens(groups: Sequence[Group], token_count: int) -> int:
    """256 tokens for short artifacts, 1,024, then 2,048; fewer where one head is very wide."""
    tokens = 256 if token_count <= 1024 else 1024 if token_count <= 65_536 else 2048
    widest = max(
        (
            group.head_dim * group.numpy_dtype.itemsize * LIMITS.layers_per_segment
            for group in groups
            if group.tokens.kind != "state"
        ),
        default=1,
    )
    return max(1, min(tokens, SEGMENT_BYTES // widest))
