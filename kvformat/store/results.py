"""What the store answers: hits, loads, receipts, and the reasons for misses and refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvformat.identity import EXACT_LINEAGE, Lineage
from kvformat.store.names import ObjectName
from kvformat.tokens import BLOCK_TOKENS


class Miss(StrEnum):
    """Why KV was not served; also the label of a counter."""

    ABSENT = "absent"
    """Never stored, or evicted before the lookup."""
    EVICTED = "evicted"
    """There at the lookup and gone at the load."""
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    OTHER_TOKENS = "other-tokens"
    """The object's chain is not the request's: stale, or filed under a wrong name."""
    OTHER_MODEL = "other-model"
    OTHER_DTYPE = "other-dtype"
    OTHER_IDENTITY = "other-identity"
    OTHER_SHAPE = "other-shape"
    LINEAGE = "lineage"
    """Lossy where the namespace holds none of that."""
    QUALITY = "quality"
    """The object has no track of the namespace's quality."""
    PROFILE = "profile"
    """It needs a calibration profile that is not among the store's, or is of something else."""
    UNKNOWN_VERSION = "unknown-version"
    UNSUPPORTED = "unsupported"
    DENIED = "denied"
    STORAGE = "storage"
    SLOW = "slow"
    BREAKER = "breaker"
    """The store failed often and is left alone for a while."""
    CLOSED = "closed"
    INTERNAL = "internal"
    """A bug; it is logged with its traceback."""


class Refusal(StrEnum):
    """Why KV was not stored."""

    QUEUE_FULL = "queue-full"
    DROPPED = "dropped"
    """Taken, and then dropped from the queue for something newer."""
    PRESENT = "present"
    NO_PARENT = "no-parent"
    """What comes before it is not stored, so no lookup would reach it."""
    SHORT = "short"
    """Less than a block, or where the grid is sparse less than to its next end."""
    LINEAGE = "lineage"
    WINDOW = "window"
    """A window or a state is not known at the end of this extent."""
    INPUT = "input"
    """The tensors cannot be stored, a NaN in a quantised track for example."""
    PROFILE = "profile"
    """The calibration profile cannot be read, or has nothing for these tensors."""
    FULL_DISK = "full-disk"
    STORAGE = "storage"
    BREAKER = "breaker"
    ENCODER = "encoder"
    """The encoder process died over it."""
    CLOSED = "closed"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class ExtentRef:
    """Blocks [``start``, ``end``) of the sequence, found under ``name``.

    In a hit these are cells; one may consist of several objects, each behind its parent.
    """

    name: ObjectName
    start: int
    end: int

    @property
    def tokens(self) -> tuple[int, int]:
        """Positions in the sequence."""
        return self.start * BLOCK_TOKENS, self.end * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Hit:
    """The answer of a lookup: the longest stored prefix as cells in ascending order.

    ``tokens`` may be 0; ``miss`` then says why. ``hashes`` are h(1), h(2), ... of the request's
    whole blocks. ``probes`` counts the questions to the storage.
    """

    extents: tuple[ExtentRef, ...]
    hashes: tuple[str, ...]
    probes: int
    miss: Miss | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the prefix, a multiple of 256."""
        return self.extents[-1].tokens[1] if self.extents else 0

    def __bool__(self) -> bool:
        return bool(self.extents)


@dataclass(frozen=True, slots=True)
class ExtentFault:
    """An extent that could not be served, why, and the error's text for the log."""

    extent: ExtentRef
    miss: Miss
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did. Positions [0, ``tokens``) of what was asked for are restored and verified.

    Everything behind must be computed anew; whatever a buffer holds there is undefined.
    ``lineage`` is that of the restored tensors: pass it to ``put`` with what is computed on top.
    ``predicted_s`` is what the cost model expected, where it was asked.
    """

    tokens: int
    asked: int
    seconds: float = 0.0
    stored_bytes: int = 0
    faults: tuple[ExtentFault, ...] = ()
    lineage: Lineage = EXACT_LINEAGE
    predicted_s: float | None = None
    tracks: tuple[str, ...] = field(default=())

    @property
    def complete(self) -> bool:
        """Whether all that was asked for is there."""
        return self.tokens == self.asked


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer of ``put``: extents that will be written, and those that will not, and why.

    Writing happens later in another process; ``Store.drain`` waits for it and the counters tell
    what became of it.
    """

    queued: tuple[ExtentRef, ...] = ()
    refused: tuple[tuple[ExtentRef | None, Refusal], ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that are on their way."""
        return sum(item.tokens[1] - item.tokens[0] for item in self.queued)
