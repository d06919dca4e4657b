"""One tenant's KV of one model in a store: what an engine integration talks to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from numpy.typing import ArrayLike, NDArray

from kvformat.artifact import Artifact
from kvformat.cache import Cache, RestoredGroup
from kvformat.identity import EXACT_LINEAGE, EngineKey, Lineage
from kvformat.reading import Order
from kvformat.store.results import ExtentRef, Hit, LoadReport, Miss, Receipt
from kvformat.streaming import Block
from kvformat.tokens import ContentSpan


class HeldHit:
    """A hit whose extents no eviction deletes until ``release`` (or the end of a ``with`` block).

    What is held where: ``backend``. It can be given wherever a ``Hit`` is wanted. A process that
    dies gives its holds back.
    """

    hit: Hit

    @property
    def tokens(self) -> int:
        """Tokens of the stored prefix, 0 for a miss."""
        raise NotImplementedError

    @property
    def miss(self) -> Miss | None:
        """Why it is not longer; None if nothing went wrong and the whole request is stored."""
        raise NotImplementedError

    def release(self) -> None:
        """Let go. May be called twice."""
        raise NotImplementedError

    def __enter__(self) -> HeldHit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Loaded:
    """New arrays with a restored prefix, by group name, and the report.

    ``RestoredGroup.token_start`` is a *position* here: a window holds the last tokens of the
    prefix, a state one pseudo-token. Arrays end at position ``report.tokens``.
    """

    groups: dict[str, RestoredGroup]
    report: LoadReport


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A restored block (``Block``) of one extent, and the position of its first token."""

    extent: ExtentRef
    block: Block
    position: int


class View:
    """Lookups, loads and puts in one namespace. Safe to share between threads.

    Made by ``Store.view``. Storage faults never raise here; wrong arguments raise
    ``UsageError``.
    """

    def lookup(self, token_ids: ArrayLike, *, content: tuple[ContentSpan, ...] = ()) -> HeldHit:
        """The longest stored prefix of a request, held.

        ``token_ids`` are those of the request from position 0 on; only whole blocks of 256 count.
        At most ``lookup.probe_limit`` questions to the storage, no listing.
        """
        raise NotImplementedError

    def probe(self, token_ids: ArrayLike, *, content: tuple[ContentSpan, ...] = ()) -> Hit:
        """``lookup`` without holding: for a scheduler that plans while another process loads.

        A ``Hit`` can be pickled and given to ``load_into`` of the same view elsewhere.
        """
        raise NotImplementedError

    def hold(self, hit: Hit) -> HeldHit:
        """Hold what a ``probe`` found, as far as it is still there; the rest is cut off."""
        raise NotImplementedError

    def load_into(
        self,
        hit: Hit | HeldHit,
        buffers: NDArray[Any] | Mapping[str, NDArray[Any]],
        *,
        tokens: tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> LoadReport:
        """Restore positions ``tokens`` of a hit, by default [0, hit.tokens), into memory.

        ``buffers`` is ``[2, L, T, H, D]`` or a mapping of group names to ``[L, T, H, D]``, where
        index 0 of the token axis is position ``tokens[0]``; strides are free but for the last
        axis. ``layers`` and ``heads`` are global numbers. For windows and states use ``load``.
        """
        raise NotImplementedError

    def load(self, hit: Hit | HeldHit) -> Loaded:
        """Restore the whole hit into new arrays; windows and states of its end included."""
        raise NotImplementedError

    def blocks(
        self,
        hit: Hit | HeldHit,
        *,
        tokens: tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
        order: Order = "token-major",
    ) -> BlockStream:
        """Restored blocks while later ones download, for engines that start layer by layer.

        With ``layer-major`` all extents give the lowest layers first. Iteration ends at the first
        fault of an extent; ``report`` of the stream then says how many tokens are good.
        """
        raise NotImplementedError

    def opened(
        self, hit: Hit | HeldHit, extent: ExtentRef
    ) -> AbstractContextManager[Artifact | None]:
        """An extent as an artifact, its identity and chain compared with the hit's; or None."""
        raise NotImplementedError

    def put(
        self,
        cache: Cache | NDArray[Any] | Mapping[str, NDArray[Any]],
        token_ids: ArrayLike,
        *,
        first_position: int = 0,
        content: tuple[ContentSpan, ...] = (),
        lineage: Lineage = EXACT_LINEAGE,
    ) -> Receipt:
        """Store the KV of a request: copied to shared memory now, encoded and published later.

        ``cache`` is what ``kvformat.write`` takes, for positions [``first_position``,
        ``first_position`` + T) of ``token_ids``. Only what is not stored yet is copied: whole
        cells, and a last shorter extent where it is worth it. Give ``first_position`` and the
        tensors behind a hit to avoid work; it must be a multiple of the extent length, or the
        part before the next multiple is left out. ``lineage`` is that of the tensors: after a
        load from a lossy store, ``LoadReport.lineage``.

        With windows or states in the cache, an extent can end only where they are known: at T,
        and, if the view knows ``window_tokens``, where the cache holds enough. An engine with such
        layers should put at the ends of cells (chunked prefill).
        """
        raise NotImplementedError

    def contains_key(self, key: EngineKey) -> bool:
        """Whether something is filed under an engine's own key; one probe."""
        raise NotImplementedError

    def load_key(
        self, key: EngineKey, buffers: NDArray[Any] | Mapping[str, NDArray[Any]]
    ) -> LoadReport:
        """Restore all of what is filed under ``key``; tokens are not verified (spec 6.3)."""
        raise NotImplementedError

    def put_key(
        self,
        key: EngineKey,
        cache: Cache | NDArray[Any] | Mapping[str, NDArray[Any]],
        *,
        lineage: Lineage = EXACT_LINEAGE,
    ) -> Receipt:
        """Store under an engine's own key. The view's identity must be of kind ``engine_key``."""
        raise NotImplementedError

    def remove_key(self, key: EngineKey) -> bool:
        """Delete it unless a reader holds it; whether it is gone."""
        raise NotImplementedError


class BlockStream:
    """An iterator of ``PlacedBlock``; close it, or use it as a context manager."""

    @property
    def report(self) -> LoadReport:
        """The account so far."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop everything at once."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[PlacedBlock]:
        raise NotImplementedError

    def __enter__(self) -> BlockStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
