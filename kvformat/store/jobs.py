"""What the encoder process is asked to do, and what it answers. Plain data that can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvformat.identity import Identity, Lineage
from kvformat.store.handover import Spec
from kvformat.store.names import ObjectName
from kvformat.store.options import StoreOptions
from kvformat.store.results import ExtentRef, Refusal
from kvformat.tokens import ContentSpan


@dataclass(frozen=True, slots=True)
class Target:
    """One extent to write: its names in ascending order and those of all extents before it.

    ``fresh_tokens`` are those that no shorter extent of the cell holds already.
    """

    extent: ExtentRef
    names: tuple[ObjectName, ...]
    ancestors: tuple[ObjectName, ...]
    fresh_tokens: int
    replace: bool = False


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Tensors in shared memory, from position ``first_position`` on, and the extents to write.

    ``token_ids`` are uint32 bytes from position 0 on, None for an engine's key.
    """

    spec: Spec
    identity: Identity
    salt: bytes
    track: str
    targets: tuple[Target, ...]
    token_ids: bytes | None
    first_position: int = 0
    content: tuple[ContentSpan, ...] = ()
    lineage: Lineage = field(default_factory=Lineage)
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ConvertJob:
    """Make another encoding of an extent beside it, and let it take its place when it is free."""

    name: ObjectName
    codec: str


@dataclass(frozen=True, slots=True)
class EvictJob:
    """Look at the size of the store, and evict if it is too large."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message to a new encoder."""

    url: str
    options: StoreOptions


@dataclass(frozen=True, slots=True)
class Written:
    """What became of one target."""

    refusal: Refusal | None
    detail: str = ""
    file_bytes: int = 0
    source_bytes: int = 0
    logical_bytes: int = 0
    seconds: float = 0.0
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to a job: one ``Written`` per target, and what an eviction did."""

    written: tuple[Written, ...] = ()
    gauges: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    extra: Any = None
