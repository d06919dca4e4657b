"""Layouts of paged caches and parts of topologies, on torch tensors in place of an engine's.

The kernels here are stand-ins that put numbers in the places that real ones are known to use; the
real CPU kernel is in ``test_vllm``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat
from kvformat.errors import UsageError

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvformat.integrations.vllm import layout as layouts  # noqa: E402
from kvformat.integrations.vllm.identity import Tenant  # noqa: E402
from kvformat.integrations.vllm.orders import LoadOrder, PartHit, SaveOrder  # noqa: E402
from kvformat.integrations.vllm.topology import Model, Topology, even_split  # noqa: E402
from kvformat.integrations.vllm.transfers import LoadJob, Loads, Paged, Saves  # noqa: E402
from kvformat.integrations.vllm.views import Shape, Views  # noqa: E402
from kvformat.store import StoreOptions  # noqa: E402
from kvformat.store import open as open_store  # noqa: E402

HEADS, TOKENS, WIDTH = 2, 32, 16
Kernel = Callable[[Mapping[str, Any], Any, Any], None]
NOBODY = Tenant()


def plain(rows: Mapping[str, Any], cache: Any, slots: Any) -> None:
    """Keys beside values, token by token."""
    for number, slot in enumerate(slots.tolist()):
        cell = cache[slot // TOKENS, :, slot % TOKENS]
        cell[:, :WIDTH] = rows["key"][number]
        cell[:, WIDTH:] = rows["value"][number]


def transposed(rows: Mapping[str, Any], cache: Any, slots: Any) -> None:
    """All keys of a block, dim by dim, in front of all values."""
    flat = cache.view(cache.shape[0], cache.shape[1], -1)
    half = TOKENS * WIDTH
    for number, slot in enumerate(slots.tolist()):
        block, token = divmod(slot, TOKENS)
        flat[block, :, token:half:TOKENS] = rows["key"][number]
        flat[block, :, half + token * WIDTH : half + (token + 1) * WIDTH] = rows["value"][number]


def packed(rows: Mapping[str, Any], cache: Any, slots: Any) -> None:
    """Pairs of dims beside each other, as instructions for matrix tiles want them."""
    flat = cache.view(cache.shape[0], cache.shape[1], -1)
    half = TOKENS * WIDTH
    dims = torch.arange(WIDTH)
    for number, slot in enumerate(slots.tolist()):
        block, token = divmod(slot, TOKENS)
        flat[block, :, dims // 2 * TOKENS * 2 + token * 2 + dims % 2] = rows["key"][number]
        flat[block, :, half + token * WIDTH : half + (token + 1) * WIDTH] = rows["value"][number]


def forgetful(rows: Mapping[str, Any], cache: Any, slots: Any) -> None:
    plain({"key": rows["key"], "value": rows["key"]}, cache, slots)


def uneven(rows: Mapping[str, Any], cache: Any, slots: Any) -> None:
    plain(rows, cache, slots)
    cache[0, 1] = cache[0, 1].flip(0)


def paged(blocks: int, dtype: Any = torch.bfloat16, heads: int = HEADS) -> Any:
    return torch.zeros(blocks, heads, TOKENS, 2 * WIDTH, dtype=dtype)


def by_token(blocks: int) -> Any:
    """Tokens in front of heads in memory, as most kernels of GPUs have them."""
    return torch.zeros(blocks, TOKENS, HEADS, 2 * WIDTH, dtype=torch.bfloat16).permute(0, 2, 1, 3)


WIDTHS = {"key": WIDTH, "value": WIDTH}


def found(cache: Any, kernel: Kernel) -> layouts.Layout:
    return layouts.find_layout({"layer": cache}, {"layer": kernel}, WIDTHS, HEADS, TOKENS)


@pytest.mark.parametrize(
    ("cache", "kernel", "keys"),
    [(paged(9), plain, (0, 32, 1)), (paged(9, torch.float32), transposed, (0, 1, TOKENS)),
     (paged(9, torch.float16), packed, None), (by_token(9), plain, (0, 64, 1))],
)  # fmt: skip
def test_what_is_written_is_what_the_kernel_would_write(
    cache: Any, kernel: Kernel, keys: tuple[int, int, int] | None
) -> None:
    layout = found(cache, kernel)
    assert layout.places["key"].strides == keys
    assert not cache.any()  # the probe leaves nothing behind
    rows = {role: torch.randn(2 * TOKENS, HEADS, WIDTH).to(cache.dtype) for role in WIDTHS}
    blocks = [7, 3]
    slots = torch.tensor([block * TOKENS + i for block in blocks for i in range(TOKENS)])
    kernel(rows, cache, slots)
    mine = torch.zeros_like(cache)
    for role in WIDTHS:
        assert torch.equal(layout.read(cache, role, blocks), rows[role])
        for head in range(HEADS):
            part = rows[role][:, head : head + 1]
            layout.write(mine, role, blocks, part, (head, head + 1))
    assert torch.equal(mine, cache)


@pytest.mark.parametrize("kernel", [forgetful, uneven])
def test_a_layout_that_is_not_understood_is_refused(kernel: Kernel) -> None:
    with pytest.raises(UsageError, match="not understood"):
        found(paged(2), kernel)


def test_layers_of_unlike_layouts_and_shapes_are_refused() -> None:
    caches = {"one": paged(2), "two": paged(2)}
    with pytest.raises(UsageError, match="layers before it"):
        layouts.find_layout(caches, {"one": plain, "two": transposed}, WIDTHS, HEADS, TOKENS)
    with pytest.raises(UsageError, match=r"expected \[blocks, 3, 32, 32\]"):
        layouts.find_layout({"one": paged(2)}, {"one": plain}, WIDTHS, 3, TOKENS)


# Parts of topologies, through a real store.

LAYERS, ALL_HEADS, COUNT = 5, 4, 1280
IDENTITY = kvformat.Identity(kvformat.Model("acme/parts", "1"), LAYERS, "bfloat16")
MODEL = Model(LAYERS, ALL_HEADS, even_split)
SHAPE = Shape("bfloat16", (("key", WIDTH), ("value", WIDTH)))
BLOCKS = tuple(range(40, 0, -1))


@pytest.fixture
def views(tmp_path: Path) -> Iterator[Views]:
    with open_store(str(tmp_path), StoreOptions(quality="exact")) as store:
        yield Views(store, IDENTITY, b"", SHAPE)


def rank(topology: Topology, tp_rank: int, pp_rank: int) -> Paged:
    part = MODEL.part(topology, tp_rank, pp_rank)
    heads = part.heads[1] - part.heads[0]
    caches = {layer: paged(41, heads=heads) for layer in range(*part.layers)}
    layout = layouts.find_layout(
        {str(layer): cache for layer, cache in caches.items()},
        {str(layer): transposed for layer in caches}, WIDTHS, heads, TOKENS,
    )  # fmt: skip
    return Paged(part, caches, layout, TOKENS)


def ranks(topology: Topology) -> list[tuple[int, Paged]]:
    return [
        (tp_rank, rank(topology, tp_rank, pp_rank))
        for pp_rank in range(topology.pp)
        for tp_rank in range(topology.tp)
    ]


WHOLE = {role: torch.randn(LAYERS, COUNT, ALL_HEADS, WIDTH).to(torch.bfloat16) for role in WIDTHS}
IDS = tuple(int(x) for x in np.random.default_rng(0).integers(0, 9999, COUNT))


def mine(item: Paged, role: str, layer: int) -> Any:
    return WHOLE[role][layer, :, slice(*item.part.heads)]


def store_all(views: Views, topology: Topology) -> None:
    for tp_rank, item in ranks(topology):
        for layer, cache in item.caches.items():
            for role in WIDTHS:
                rows = mine(item, role, layer)
                item.layout.write(cache, role, BLOCKS, rows, (0, rows.shape[1]))
        if MODEL.writes(topology, tp_rank):
            order = SaveOrder("r", NOBODY, IDS, BLOCKS, 0, lossy=False)
            Saves(views, item, Counter()).run(order, None, nothing)
    assert views.store.drain(60)


def nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def load(
    views: Views, topology: Topology, item: Paged, begin: int, *, layerwise: bool = False
) -> LoadJob:
    parts = tuple(
        PartHit(part, views.get(NOBODY, part).probe(IDS)) for part in MODEL.parts(topology)
    )
    order = LoadOrder(
        "r", NOBODY, parts, begin, COUNT, BLOCKS[begin // TOKENS :], layerwise=layerwise
    )
    job = LoadJob(order, begin)
    Loads(views, item).run(job, nothing)
    assert job.done
    return job


ONE, TWO, EIGHT = Topology(1, 1), Topology(2, 1), Topology(8, 1)
STAGES, BOTH = Topology(1, 3), Topology(4, 2)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(ONE, ONE), (ONE, BOTH), (TWO, ONE), (TWO, EIGHT), (EIGHT, TWO), (STAGES, BOTH),
     (BOTH, STAGES)],
    ids=str,
)  # fmt: skip
def test_what_one_topology_stores_another_loads(
    views: Views, writer: Topology, reader: Topology
) -> None:
    store_all(views, writer)
    for begin, layerwise in ((0, True), (96, False)):
        _, item = ranks(reader)[-1]
        job = load(views, writer, item, begin, layerwise=layerwise)
        assert job.good_end == COUNT
        for layer, cache in item.caches.items():
            for role in WIDTHS:
                got = item.layout.read(cache, role, BLOCKS)
                assert torch.equal(got[begin:], mine(item, role, layer)[begin:])
                assert not got[:begin].any()


@pytest.mark.parametrize(("lost", "good"), [(0, 0), (1, 1024)])
def test_a_part_that_lacks_an_extent_limits_all(views: Views, lost: int, good: int) -> None:
    writer = Topology(2, 1)
    store_all(views, writer)
    view = views.get(NOBODY, MODEL.parts(writer)[1])
    hit = view.probe(IDS)
    item = rank(Topology(1, 1), 0, 0)
    parts = tuple(PartHit(part, views.get(NOBODY, part).probe(IDS)) for part in MODEL.parts(writer))
    Path(views.store.backend.locate(hit.extents[lost].name)).unlink()
    job = LoadJob(LoadOrder("r", NOBODY, parts, 0, COUNT, BLOCKS, layerwise=False), 0)
    Loads(views, item).run(job, nothing)
    assert job.good_end == good
    assert job.bad_blocks(TOKENS) == BLOCKS[good // TOKENS :]


def test_replicated_heads_are_written_by_one_rank() -> None:
    topology = Topology(8, 1)
    writers = [number for number in range(8) if MODEL.writes(topology, number)]
    assert writers == [0, 2, 4, 6]
    assert [MODEL.part(topology, number, 0).heads for number in writers] == [
        (0, 1), (1, 2), (2, 3), (3, 4),
    ]  # fmt: skip


def test_a_load_that_was_abandoned_writes_nothing(views: Views) -> None:
    topology = Topology(1, 1)
    store_all(views, topology)
    item = rank(topology, 0, 0)
    part = MODEL.parts(topology)[0]
    parts = (PartHit(part, views.get(NOBODY, part).probe(IDS)),)
    job = LoadJob(LoadOrder("r", NOBODY, parts, 0, COUNT, BLOCKS, layerwise=False), 0)
    job.abandon()
    Loads(views, item).run(job, nothing)
    assert not any(cache.any() for cache in item.caches.values())
    assert job.bad_blocks(TOKENS) == BLOCKS
