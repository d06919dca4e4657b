"""The store itself: backend, encoder process, counters, breaker, and views on it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from kvformat.groups import Group
from kvformat.identity import Identity
from kvformat.store.names import WHOLE
from kvformat.store.options import StoreOptions
from kvformat.store.view import View


class Store:
    """A directory or object-store prefix, shared by any number of processes and machines.

    Make one per process with ``open_store``; it starts the encoder process at the first ``put``.
    """

    def view(
        self,
        identity: Identity,
        *,
        salt: bytes = b"",
        part: str = WHOLE,
        groups: Sequence[Group] | None = None,
        windowed: bool = False,
        window_tokens: int | None = None,
    ) -> View:
        """The KV of one model for one tenant.

        ``identity`` is compared whole with that of each artifact. ``salt`` is the tenant's secret
        (PRV-1). ``part`` labels which layers and heads an engine's rank holds
        (``names.part_name``); ranks of another topology open other parts. ``groups``, where
        given, must agree with each artifact's in role, dtype, layers, heads and head dim.
        ``windowed`` is for models with sliding windows or states, ``window_tokens`` the largest
        window; only ends that were put can then be served.
        """
        raise NotImplementedError

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was put is written or refused; False after the time."""
        raise NotImplementedError

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the encoder. What is queued is written in the given time, or dropped and counted."""
        raise NotImplementedError

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """A store at a directory, which is made, or at an fsspec URL of an object store.

    Raises ``UsageError`` and, where the directory cannot be made, ``StorageError``.
    """
    raise NotImplementedError
