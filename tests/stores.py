"""Stores for tests: KV that tells of which tokens it is, an encoder in the same process, faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from blake3 import blake3
from numpy.typing import NDArray

import kvformat
from kvformat.cache import Cache, GroupTensors
from kvformat.errors import StorageError
from kvformat.groups import Extent, Group
from kvformat.store import Hit, LoadReport, ObjectName, Store, StoreOptions, View
from kvformat.store.backend import Entry
from kvformat.store.handover import SharedMemory
from kvformat.store.jobs import EncodeJob
from kvformat.store.local import LocalBackend
from kvformat.store.publishing import Publisher
from kvformat.store.queueing import EncoderQueue
from tests.builder import seal_header
from tests.transformed import Transform, profile_file

BLOCK = 256
LAYERS, HEADS, DIM = 2, 1, 8
IDENTITY = kvformat.Identity(kvformat.Model("acme/small", "1"), LAYERS, "float16")
EXACT = StoreOptions(quality="exact", extent_tokens=1024, idle_s=0.05)


def tokens(*blocks: int, extra: int = 0) -> NDArray[np.uint32]:
    """One block of 256 ids per number, and ``extra`` more tokens."""
    parts = [np.random.default_rng(block).integers(0, 50_000, BLOCK) for block in blocks]
    parts.append(np.arange(extra))
    return np.concatenate(parts).astype(np.uint32)


def kv_of(ids: NDArray[np.uint32]) -> NDArray[np.float16]:
    """``[2, L, T, H, D]``: each block's values depend on every token up to its end."""
    result = np.zeros((2, LAYERS, len(ids), HEADS, DIM), np.float16)
    hasher = blake3()
    for start in range(0, len(ids), BLOCK):
        part = ids[start : start + BLOCK]
        hasher.update(part.tobytes())
        seed = int.from_bytes(hasher.digest()[:8], "little")
        values = np.random.default_rng(seed).standard_normal((2, LAYERS, len(part), HEADS, DIM))
        result[:, :, start : start + len(part)] = values
    return result


def load(view: View, ids: NDArray[np.uint32]) -> tuple[kvformat.store.LoadReport, int]:
    """Look up and load; asserts that every token that is said to be good is right."""
    with view.lookup(ids) as hit:
        out = np.full((2, LAYERS, hit.tokens, HEADS, DIM), np.nan, np.float16)
        report = view.load_into(hit, out)
        good = kv_of(ids)[:, :, : report.tokens]
        assert np.array_equal(out[:, :, : report.tokens].view("u2"), good.view("u2"))
        return report, hit.tokens


class InlineQueue(EncoderQueue):
    """Encodes at once, in this thread: for tests that are not about processes."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.backend.url, store.options, store.metrics)
        self.publisher = Publisher(store.backend, store.options)

    def submit(self, job: EncodeJob, memory: SharedMemory) -> bool:
        answer = self.publisher.encode(job, memory.cache(job.spec))
        self._enter(answer.written)
        for name, value in answer.counts.items():
            self._metrics.count(name, by=value)
        for name, value in answer.gauges.items():
            self._metrics.set(name, value)
        self.cancel(memory.size_bytes)
        memory.close()
        return True


def inline_store(root: Path | str, options: StoreOptions = EXACT) -> Store:
    """A store that has stored what was put when ``put`` returns."""
    store = kvformat.store.open(str(root), options)
    store.queue = InlineQueue(store)
    return store


class FaultyBackend(LocalBackend):
    """A directory that counts questions and fails on demand."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.probes = 0
        self.listings = 0
        self.fail: StorageError | None = None

    def present(self, name: ObjectName) -> bool:
        self.probes += 1
        if self.fail is not None:
            raise self.fail
        return super().present(name)

    def entries(self) -> Iterator[Entry]:
        self.listings += 1
        return super().entries()


def faulty_store(root: Path, options: StoreOptions = EXACT) -> tuple[Store, FaultyBackend]:
    """A store on such a backend."""
    backend = FaultyBackend(root)
    store = Store(backend, options)
    store.queue = InlineQueue(store)
    return store, backend


def windowed_cache(count: int, window: int, first: int = 0) -> Cache:
    """Layer 0 with all tokens, layer 1 with a window, and a state at the end."""
    positions = np.arange(first, first + count, dtype=np.float32)
    full = np.broadcast_to(positions[:, None, None], (count, HEADS, DIM)).astype(np.float16)
    held = min(window, count)

    def group(name: str, role: str, layer: int, extent: Extent, array: Any) -> GroupTensors:
        kind = Group(name, role, "float16", (layer,), HEADS, DIM, HEADS, tokens=extent)
        return GroupTensors(kind, (np.ascontiguousarray(array),))

    window_extent = Extent("window", held_start=count - held, cumulative_tokens=first + count)
    state = np.full((1, HEADS, DIM), first + count, np.float16)
    return Cache(
        count,
        (
            group("key", "key", 0, Extent(), full),
            group("key-2", "key", 1, window_extent, full[count - held :] + 1),
            group("state", "state", 1, Extent("state", shape=(DIM,)), state),
        ),
    )


def objects(root: Path) -> list[Path]:
    """All names in the store."""
    return sorted(root.glob("*/*/*/*/*/*.kvf"))


def the_file(root: Path, end: int) -> Path:
    """The one object of that end."""
    (found,) = root.glob(f"*/*/*/*/*/*-{end}.kvf")
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def newer(path: Path) -> None:
    data = path.read_bytes()
    fields = (
        *(int.from_bytes(data[at : at + 8], "little") for at in (48, 56, 64)),
        data[72:104],
        bytes(24),
    )
    fixed = data[:10] + (10).to_bytes(2, "little") + data[12:16]
    path.write_bytes(seal_header(fixed, fields) + data[128:])


def load_by(way: str, view: View, hit: Hit) -> LoadReport:
    """Load a hit in one of three ways."""
    if way == "load_into":
        return view.load_into(hit, np.zeros((2, LAYERS, hit.tokens, HEADS, DIM), np.float16))
    if way == "load":
        return view.load(hit).report
    with view.blocks(hit) as stream:
        for placed in stream:
            assert placed.block.array.size
    return stream.report


def stepwise_profile(
    shape: tuple[int, int, int],
    step: float,
    *,
    model: str,
    quality: str = "near-lossless",
    turns: NDArray[np.float64] | None = None,
) -> bytes:
    """A calibration profile for writers, of a model with ``shape`` layers, KV heads and dims.

    Coefficients are the values themselves, in steps of ``step``; keys are turned by ``turns``,
    cosines and sines ``[2, pairs]``.
    """
    layers, heads, dims = shape
    count = heads * dims
    slots = [(c % dims) * heads + c // dims for c in range(count)]  # d * H + h of each channel
    matrix = np.zeros((count, count), np.int64)
    matrix[range(count), slots] = 1
    tensors: dict[str, NDArray[Any]] = {}
    found = []
    for role in ("key", "value"):
        turned = turns is not None and role == "key"
        rotation: dict[str, Any] = {"pairing": "half", "turns": turns} if turned else {}
        for layer in range(layers):
            name = f"{quality}.{role}.{layer}"
            tensors[f"{role}.{layer}.forward"] = matrix.astype(np.float32)
            tensors[f"{name}.step"] = np.array([step], np.float32)
            tensors[f"{name}.component"] = np.arange(count, dtype=np.int32)
            tensors[f"{name}.multiple"] = np.ones(count, np.int32)
            mean, scales = np.zeros(count, np.float32), np.full(count, step, np.float32)
            item = Transform(quality, role, layer, heads, dims, mean, scales, matrix, **rotation)
            found.append(item)
    said = {"id": model, "revision": None, "weights_digest": None}
    return profile_file(found, model=said, writer=safetensors.numpy.save(tensors))
