"""What an operator sets for a store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvformat.errors import UsageError
from kvformat.planning import DEFAULT_QUALITY
from kvformat.storage import Transport, as_text
from kvformat.store.names import CELL_BLOCKS, checked_version, quality_name
from kvformat.tokens import BLOCK_TOKENS
from kvformat.tracks import CODEC_NAMES, EXACT

EXTENT_TOKENS: Final = tuple(BLOCK_TOKENS * blocks for blocks in CELL_BLOCKS)
STORE_TRANSPORT: Final = Transport(connect_timeout_s=2.0, stall_timeout_s=5.0, retries=1)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """All have defaults that are safe.

    ``quality`` of what is written, and ``codec`` of the first version of each extent.
    ``mixed`` allows KV computed on top of restored lossy KV, in a namespace of its own; without
    it such KV is refused. ``extent_tokens`` is the longest extent: 256, 512, 1,024, 2,048 or 4,096.
    ``limit_bytes`` starts eviction, down to ``low_water`` of it. ``write_version`` pins the
    version that is written and looked up, for rolling upgrades.

    ``profile``, the path or URL of a calibration profile (``kvformat calibrate``), makes what is
    written in ``quality`` smaller. Readers need it too: they look for the profiles that objects
    name in ``profile`` and in ``profiles``, files or directories of ``*.kvp``. A profile that is
    not there is a miss, one that does not fit what is put is a refusal, both named ``profile``.
    A profile is of all heads of a layer: an engine's rank that holds some of them cannot write
    with it, but reads its heads of what was written so.

    ``queue_bytes`` bounds the tensors that wait for the encoder, in shared memory; ``when_full``
    refuses new ones or drops the oldest. ``encoder_workers`` are threads of the encoder process,
    ``encoder_nice`` is how much it steps back for others.
    ``popular_loads`` is how often an extent is loaded before it is worth a ``hevc`` object, made
    when the encoder has been idle for ``idle_s``; None makes none.

    ``load_deadline_s`` and ``lookup_deadline_s`` end a call as a miss. ``breaker_failures`` in a
    row take the store out of the path for ``breaker_s``, then longer.
    ``grace_s`` is how long an object of a store without leases stays after it was last marked as
    used. ``mark_s`` is how often a use is marked there.
    """

    quality: str = DEFAULT_QUALITY
    codec: str = "zstd"
    mixed: bool = False
    extent_tokens: int = 1024
    limit_bytes: int | None = None
    low_water: float = 0.9
    write_version: str = "0.9"
    profile: str | os.PathLike[str] | None = None
    profiles: tuple[str | os.PathLike[str], ...] = ()
    queue_bytes: int = 2 * 2**30
    when_full: Literal["refuse", "drop-oldest"] = "refuse"
    encoder_workers: int | None = None
    encoder_nice: int = 10
    popular_loads: int | None = None
    idle_s: float = 30.0
    load_deadline_s: float | None = 30.0
    lookup_deadline_s: float | None = 2.0
    breaker_failures: int = 5
    breaker_s: float = 5.0
    grace_s: float = 3600.0
    mark_s: float = 600.0
    transport: Transport = STORE_TRANSPORT
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        quality_name(self.quality, mixed=self.mixed)
        checked_version(self.write_version)
        places = self.profiles
        if isinstance(places, (str, os.PathLike)) or not isinstance(places, Iterable):
            _require(False, "profiles", "a list of places", type(places).__name__)
        object.__setattr__(self, "profiles", tuple(map(as_text, places)))
        if self.profile is not None:
            object.__setattr__(self, "profile", as_text(self.profile))
            _require(self.quality != EXACT, "profile", "a lossy quality", self.quality)
        _require(self.codec in CODEC_NAMES, "codec", CODEC_NAMES, self.codec)
        _require(self.extent_tokens in EXTENT_TOKENS, "extent_tokens", EXTENT_TOKENS,
                 self.extent_tokens)  # fmt: skip
        _require(self.limit_bytes is None or self.limit_bytes > 0, "limit_bytes", "above 0",
                 self.limit_bytes)  # fmt: skip
        _require(0 < self.low_water <= 1, "low_water", "above 0, at most 1", self.low_water)
        _require(self.queue_bytes > 0, "queue_bytes", "above 0", self.queue_bytes)
        _require(self.when_full in ("refuse", "drop-oldest"), "when_full",
                 "refuse or drop-oldest", self.when_full)  # fmt: skip
        _require(self.breaker_failures >= 1, "breaker_failures", "at least 1",
                 self.breaker_failures)  # fmt: skip
        for name in ("idle_s", "breaker_s", "grace_s", "mark_s"):
            _require(getattr(self, name) >= 0, name, "0 or more", getattr(self, name))

    @property
    def cell_blocks(self) -> int:
        """Blocks of 256 tokens in the longest extent."""
        return self.extent_tokens // BLOCK_TOKENS


def _require(good: bool, name: str, expected: object, found: object) -> None:
    if not good:
        raise UsageError(
            "usage.argument", f"{name} cannot be used", expected=expected, found=ascii(found)[:80]
        )
