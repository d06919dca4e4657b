"""Pages of serving engines: layouts, slots, heads of a rank, events of layers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvformat
import kvformat.gpu as on_device
from kvformat.errors import KvformatError, StorageError, UsageError
from kvformat.gpu import LayerEvents, Pages, slots_of_blocks
from tests.gpu_samples import bits, torch
from tests.strategies import canonical_kv, write_bytes

LAYERS, TOKENS, HEADS, DIM = 5, 37, 4, 16
BLOCK, BLOCKS = 8, 9


@pytest.fixture(scope="module")
def data() -> bytes:
    kv = canonical_kv(LAYERS, TOKENS, HEADS, DIM)
    return write_bytes(kv, tracks=["hevc", "exact/zstd"], segment_tokens=16)


def kv_of(data: bytes, **arguments: Any) -> Any:
    with kvformat.open(data) as artifact:
        return on_device.read(artifact, **arguments).kv


def empty(layout: str, heads: int, dtype: Any, kv_axis: int) -> dict[int, Any]:
    """vLLM's tensors, every element 7."""
    shape = [BLOCKS, BLOCK, heads, DIM] if layout == "NHD" else [BLOCKS, heads, BLOCK, DIM]
    shape.insert(kv_axis, 2)
    return {layer: torch.full(shape, 7.0, dtype=dtype) for layer in range(LAYERS)}


def expected_pages(kv: Any, slots: list[int], heads: int) -> Any:
    """``[L, 2, slots, heads, D]`` made by hand."""
    out = torch.full((LAYERS, 2, BLOCKS * BLOCK, heads, DIM), 7.0, dtype=kv.dtype)
    for token, slot in enumerate(slots):
        if slot >= 0:
            out[:, :, slot] = kv[:, :, token].transpose(0, 1)
    return out


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """A layout of pages, a part of the cache, and a slot for each of its tokens."""
    tokens = draw(st.sampled_from([(0, TOKENS), (3, 20)]))
    count = tokens[1] - tokens[0]
    slots = draw(st.permutations(range(BLOCKS * BLOCK)))[:count]
    for index in draw(st.sets(st.integers(0, count - 1), max_size=4)):
        slots[index] = -1
    return {
        "layout": draw(st.sampled_from(["NHD", "HND"])),
        "axis": draw(st.sampled_from([0, 1])),
        "dtype": getattr(torch, draw(st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"]))),
        "slots": slots,
        "part": {
            "tokens": tokens,
            "heads": draw(st.sampled_from([(0, 4), (1, 3), (3, 4)])),
            "track": draw(st.sampled_from(["hevc", "exact"])),
        },
    }


@settings(deadline=None, max_examples=30)
@given(request=requests())
def test_pages_hold_what_a_dense_read_gives(data: bytes, request: dict[str, Any]) -> None:
    slots, axis, layout = request["slots"], request["axis"], request["layout"]
    heads = request["part"]["heads"][1] - request["part"]["heads"][0]
    caches = empty(layout, heads, request["dtype"], axis)
    pages = Pages.from_vllm(caches, layout=layout, kv_axis=axis)
    report = on_device.read_paged(data, pages, slots, **request["part"])
    assert report.validity.complete
    kv = kv_of(data, **request["part"]).to(request["dtype"])
    wanted = expected_pages(kv, slots, heads)
    for layer, tensor in caches.items():
        found = torch.stack(tensor.unbind(axis))
        found = found.transpose(2, 3) if layout == "HND" else found
        assert bits(found.reshape(2, BLOCKS * BLOCK, heads, DIM)) == bits(wanted[layer])


def test_views_that_were_permuted_are_pages_too(data: bytes) -> None:
    memory = torch.zeros((2, BLOCKS, HEADS, BLOCK, DIM), dtype=torch.bfloat16)
    caches = {layer: memory.clone().permute(0, 1, 3, 2, 4) for layer in range(LAYERS)}
    slots = slots_of_blocks([7, 2, 0, 5, 1], TOKENS, BLOCK)
    on_device.read_paged(data, Pages.from_vllm(caches), slots, track="hevc")
    kv = kv_of(data, track="hevc")
    for layer, tensor in caches.items():
        rows = tensor.reshape(2, BLOCKS * BLOCK, HEADS, DIM)[:, slots]
        assert bits(rows) == bits(kv[:, layer])


def test_a_latent_has_pages_without_heads() -> None:
    kv = canonical_kv(2, 20, 1, 32)
    tensors = {f"layers.{layer}.latent": kv[0, layer] for layer in range(2)}
    data = write_bytes(tensors, tracks=["zstd"])
    pages = Pages({"latent": {i: torch.zeros((4, 8, 32), dtype=torch.bfloat16) for i in range(2)}})
    on_device.read_paged(data, pages, list(range(20)), roles=None)
    with kvformat.open(data) as artifact:
        expected = artifact.read(track="zstd")["latent"]
    for layer in range(2):
        found = pages.tensors["latent"][layer].reshape(32, 32)[:20]
        assert bits(found) == bits(expected[layer, :, 0])


@pytest.mark.parametrize(
    ("blocks", "tokens", "expected"),
    [
        ([3, 1], 3, [6, 7, 2]),
        ([3, -1, 0], 5, [6, 7, -1, -1, 0]),
        ([], 0, []),
    ],
)
def test_slots_of_blocks(blocks: list[int], tokens: int, expected: list[int]) -> None:
    assert slots_of_blocks(blocks, tokens, 2).tolist() == expected


def test_a_short_block_table_is_refused() -> None:
    with pytest.raises(UsageError):
        slots_of_blocks([1], 9, 8)


@pytest.mark.parametrize(
    ("slots", "change"),
    [
        (list(range(TOKENS - 1)), {}),
        ([0] * TOKENS, {}),
        ([BLOCKS * BLOCK, *range(1, TOKENS)], {}),
        (list(range(TOKENS)), {"heads": (0, 2)}),
        (list(range(TOKENS)), {"drop": 3}),
        (list(range(TOKENS)), {"dtype": torch.int32}),
    ],
)
def test_pages_that_do_not_fit_are_refused(data: bytes, slots: Any, change: Any) -> None:
    caches = empty("NHD", HEADS, change.pop("dtype", torch.bfloat16), 0)
    caches.pop(change.pop("drop", -1), None)
    with pytest.raises(UsageError) as caught:
        on_device.read_paged(data, Pages.from_vllm(caches), slots, **change)
    assert caught.value.code == "usage.argument"
    assert all((tensor == 7).all() for tensor in caches.values())


def test_layers_are_announced_from_the_lowest_on(data: bytes) -> None:
    caches = empty("NHD", HEADS, torch.bfloat16, 0)
    load = on_device.load_paged(
        data, Pages.from_vllm(caches), list(range(TOKENS)), track="hevc", workers=1
    )
    kv = kv_of(data, track="hevc")
    for layer in range(LAYERS):
        load.wait_layer(layer, timeout_s=60)
        rows = caches[layer].reshape(2, BLOCKS * BLOCK, HEADS, DIM)[:, :TOKENS]
        assert bits(rows) == bits(kv[:, layer])
    assert load.result().validity.complete
    assert load.events.complete == tuple(range(LAYERS))
    with pytest.raises(UsageError):
        load.wait_layer(99)


def test_who_waits_for_a_layer_gets_the_error(data: bytes) -> None:
    broken = bytearray(data)
    broken[-20] ^= 1
    caches = empty("NHD", HEADS, torch.bfloat16, 0)
    pages = Pages.from_vllm(caches)
    load = on_device.load_paged(bytes(broken), pages, list(range(TOKENS)), track="exact")
    with pytest.raises(KvformatError) as caught:
        load.wait_layer(LAYERS - 1, timeout_s=60)
    assert caught.value.code == "segment.digest"
    with pytest.raises(KvformatError):
        load.result()


def test_a_load_can_be_cancelled(data: bytes) -> None:
    started, go = threading.Event(), threading.Event()

    class Slow:
        name, sessions, device = "slow", 1, torch.device("cpu")

        def open(self, *size: int) -> Any:
            assert len(size) == 2
            return self

        def decode(self, *of: Any) -> Any:
            started.set()
            assert go.wait(60), of
            raise UsageError("usage.argument", "stopped")
            yield

        def close(self) -> None:
            pass

    engine = on_device.Engine("cpu", Slow())
    caches = empty("NHD", HEADS, torch.bfloat16, 0)
    load = on_device.load_paged(
        data, Pages.from_vllm(caches), list(range(TOKENS)), track="hevc", engine=engine
    )
    assert started.wait(60)
    stopper = threading.Thread(target=load.cancel)
    stopper.start()
    go.set()
    stopper.join()
    with pytest.raises(UsageError):
        load.result()
    assert engine.counters.busy_peak == 1


def test_a_layer_that_does_not_come_in_time() -> None:
    events = LayerEvents("cpu")
    with pytest.raises(StorageError) as caught:
        events.wait(0, timeout_s=0)
    assert caught.value.code == "io.timeout"
