"""Artifacts at fsspec URLs as a torch ``Dataset`` or, with prefetching, an ``IterableDataset``.

::

    source = Source(selection={"track": "near-lossless/zstd"})
    stream = ArtifactStream(urls, source, ahead=4)
    for item in DataLoader(stream, batch_size=None, num_workers=2):
        item.groups["key"]  # [L, T, H, D], in the dtype of the source

Workers of a ``DataLoader`` share the URLs of a stream among them. Lengths differ from artifact to
artifact, so batches are the caller's to make (``batch_size=None``, or a ``collate_fn``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from kvformat.dtypes import name_of
from kvformat.errors import KvformatError, UsageError
from kvformat.expectations import Expectation
from kvformat.integrations.torch_arrays import as_tensor
from kvformat.plainload import load
from kvformat.profile_shelf import ProfilePlaces

Expect = Callable[[str], Expectation | None]
OnError = Literal["raise", "skip"]
ON_ERROR: Final = ("raise", "skip")
_log = logging.getLogger("kvformat.dataset")


@dataclass(frozen=True)
class Item:
    """One artifact: its groups as tensors ``[L, T, H, D]``."""

    url: str
    tokens: int
    groups: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Source:
    """How artifacts are opened and what of them is read. Can be pickled if ``expect`` can.

    ``expect`` gives the expectation of a URL; ``selection`` is that of ``Artifact.read``,
    ``profiles`` are those of ``kvformat.open``.
    """

    expect: Expect | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    selection: Mapping[str, Any] = field(default_factory=dict)
    profiles: ProfilePlaces = ()

    def item(self, url: str) -> Item:
        """Restore one; raises what ``kvformat.open`` and ``Artifact.read`` raise."""
        tokens, arrays = load(
            url,
            expect=self.expect(url) if self.expect else None,
            storage_options=self.storage_options or None,
            profiles=self.profiles,
            **self.selection,
        )
        groups = {name: as_tensor(array, name_of(array.dtype)) for name, array in arrays.items()}
        return Item(url, tokens, groups)


class ArtifactDataset(Dataset[Item]):
    """Item ``i`` is the artifact at ``urls[i]``."""

    def __init__(self, urls: Sequence[str], source: Source | None = None) -> None:
        self.urls = list(urls)
        self.source = source or Source()

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> Item:
        return self.source.item(self.urls[index])


class ArtifactStream(IterableDataset[Item]):
    """The artifacts in the order of ``urls``, ``ahead`` of them fetched before their turn.

    ``on_error="skip"`` leaves out what cannot be served, with a warning in the log
    ``kvformat.dataset``; ``skipped`` has the URLs of the last pass with their error codes, in the
    process that iterated.
    """

    def __init__(
        self,
        urls: Sequence[str],
        source: Source | None = None,
        *,
        ahead: int = 2,
        on_error: OnError = "raise",
    ) -> None:
        if ahead < 1 or on_error not in ON_ERROR:
            raise UsageError(
                "usage.argument", "the stream cannot be made",
                expected="ahead of 1 or more, on_error raise or skip",
                found=ascii((ahead, on_error))[:60],
            )  # fmt: skip
        self.urls = list(urls)
        self.source = source or Source()
        self.ahead, self.on_error = ahead, on_error
        self.skipped: list[tuple[str, str]] = []

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        mine = self.urls if worker is None else self.urls[worker.id :: worker.num_workers]
        self.skipped = []
        pool = ThreadPoolExecutor(self.ahead, thread_name_prefix="kvformat-dataset")
        rest, pending = deque(mine), deque[tuple[str, Future[Item]]]()
        try:
            while rest or pending:
                while rest and len(pending) < self.ahead:
                    url = rest.popleft()
                    pending.append((url, pool.submit(self.source.item, url)))
                item = self._result(*pending.popleft())
                if item is not None:
                    yield item
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _result(self, url: str, future: Future[Item]) -> Item | None:
        try:
            return future.result()
        except KvformatError as error:
            if self.on_error == "raise":
                raise
            self.skipped.append((url, error.code))
            _log.warning("skipped: %s", error)
            return None
