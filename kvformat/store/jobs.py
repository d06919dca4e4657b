"""What the encoder process is asked to do, and what it answers. Plain data that can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvformat.identity import Lineage
from kvformat.store.handover import Spec
from kvformat.store.names import ObjectName
from kvformat.store.options import StoreOptions
from kvformat.store.results import ExtentRef, Refusal
from kvformat.store.scope import Scope
from kvformat.tokens import ContentSpan


@dataclass(frozen=True, slots=True)
class Target:
    """One extent to write, as blocks [``start``, ``end``); both 0 for an engine's key.

    ``suspect`` is an object that a reader found damaged: if it still is, it is replaced.
    """

    extent: ExtentRef
    suspect: ObjectName | None = None


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Tensors in shared memory, from position ``first_position`` on, and the extents to write.

    ``token_ids`` are uint32 bytes from position 0 on, None for an engine's key; ``hashes`` are
    h(1), h(2), ... of all whole blocks.
    """

    spec: Spec
    scope: Scope
    track: str
    targets: tuple[Target, ...]
    token_ids: bytes | None
    hashes: tuple[str, ...] = ()
    first_position: int = 0
    content: tuple[ContentSpan, ...] = ()
    lineage: Lineage = field(default_factory=Lineage)

    def names(self, target: Target) -> tuple[ObjectName, ...]:
        """All names under which a target will be found, ascending."""
        extent = target.extent
        if self.token_ids is None:
            return (extent.name,)
        return self.scope.names(self.hashes, extent.start, extent.end)


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
    """What became of one target; ``first_bytes`` are ``file_bytes`` of a first encoding."""

    refusal: Refusal | None
    detail: str = ""
    file_bytes: int = 0
    source_bytes: int = 0
    first_bytes: int = 0
    seconds: float = 0.0
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to a job: one ``Written`` per target, and what an eviction did."""

    written: tuple[Written, ...] = ()
    gauges: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
