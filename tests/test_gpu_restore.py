"""Restoring in torch: bits equal to the CPU reader's, for every dtype, layout, part and target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvformat
import kvformat.gpu as on_device
from kvformat.codecs.base import Decoded
from kvformat.errors import InvalidError, KvformatError, UsageError
from kvformat.gpu.engine import Engine, Errand, Piece, _Work
from kvformat.gpu.sources import array_source, frame_source
from kvformat.gpu.targets import Target
from kvformat.groups import Cell
from kvformat.layout import Layout, candidate_layouts, fault
from kvformat.segments import PartOfSegment, Segment, restore_into
from kvformat.transforms import ROW_BUDGET, LayerTransform, Rotation
from tests.gpu_samples import bits, context_of, pictures, random_set, random_side, torch
from tests.strategies import FLOATS, Sample, canonical_kv, samples, write_bytes

TRACKS = (
    "near-lossless/hevc",
    "near-lossless/zstd",
    "near-lossless/stored",
    "exact/zstd",
    "exact/stored",
)


@st.composite
def layouts(draw: st.DrawFn, tokens: int, channels: int) -> Layout:
    """One of the writer's, or any other that the spec allows."""
    if draw(st.booleans()):
        return draw(st.sampled_from(candidate_layouts(tokens, channels)))
    fold = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tile_width = draw(st.integers(1, channels))
    tile = -(-channels // tile_width), tile_width
    grid = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    held = fold[0] * fold[1] * grid[0] * grid[1]
    frames = -(-tokens // held) + draw(st.integers(0, 1))
    sides = [
        max(144, -(-grid[i] * tile[i] * fold[i] // 16) * 16 + 16 * draw(st.integers(0, 1)))
        for i in (0, 1)
    ]
    layout = Layout(
        draw(st.sampled_from(["time", "raster"])),
        *tile,
        *grid,
        max(frames, 1),
        *fold,
        width=sides[1],
        height=sides[0],
    )
    return (
        layout if not fault(layout, tokens, channels) else candidate_layouts(tokens, channels)[-1]
    )


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A segment, a part of it, and where its integers lie."""
    dtype = draw(st.sampled_from(FLOATS))
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dim = draw(st.sampled_from([1, 3, 16, 64, 80]))
    tokens = draw(st.sampled_from([1, 2, 7, 33, 60]))
    first = draw(st.integers(0, heads - 1))
    count = draw(st.integers(1, heads - first))
    spans = [
        sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))
        for n in (layers, tokens, count)
    ]
    spans = [
        (a, b) if a < b else (0, n)
        for (a, b), n in zip(spans, (layers, tokens, count), strict=True)
    ]
    return {
        "dtype": dtype,
        "shape": (layers, tokens, heads, dim),
        "heads": (first, count),
        "part": PartOfSegment(*(slice(*span) for span in spans)),
        "kind": "".join(letter for letter in "szbot" if draw(st.booleans())),
        "big": draw(st.sampled_from([-3.0, 8.0, 39.0])),
        "layout": draw(layouts(tokens, count * dim)),
        "ranked_rows": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


def build(case: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Context, canonical integers, and the values of the CPU reader for the part."""
    rng = np.random.default_rng(case["seed"])
    layers, tokens, heads, dim = case["shape"]
    first, count = case["heads"]
    item = random_set(rng, layers, heads, dim, kind=case["kind"], big=case["big"])
    cell = Cell(0, 0, layers, first, count, 0, tokens)
    context = context_of(item, case["dtype"], cell, "hevc", case["layout"])
    q = rng.integers(0, 256, (layers, tokens, count, dim), np.uint8)
    side = random_side(rng, item, tokens, count, case["dtype"])
    part = case["part"]
    shape = [part.layers, part.tokens, part.heads]
    out = np.empty((*(s.stop - s.start for s in shape), dim), context.group.numpy_dtype)
    segment = Segment(context, Decoded(q), side)
    restore_into(segment, out, slice(0, out.shape[1]), part)
    return segment, q, out


def dense(out: Any) -> Target:
    """A target for the whole of a tensor."""
    offsets = torch.arange(out.shape[1]) * out.stride(1)
    name = str(out.dtype).removeprefix("torch.")
    return Target(tuple(out), offsets, out.stride(2), out.stride(3), name)


def run(
    segment: Segment, q: Any, part: PartOfSegment, out: Any, *, engine: Engine, how: str
) -> None:
    """Restore from pictures in a mixed order, or from an array."""
    target = dense(out)
    errand = Errand(segment.context, segment.side, [Piece(part, target)], check=False)
    context = segment.context
    if how == "pictures":
        made = torch.from_numpy(pictures(q, context))
        work = _Work(engine, errand, ranked=True)
        for index in np.random.default_rng(1).permutation(len(made)).tolist():
            work.take(frame_source(tuple(made[index]), context.layout, index, engine.tables))
    else:
        order = context.order()
        stored = q if order is None else np.take_along_axis(q, order[:, None].astype(int), axis=3)
        rows = np.ascontiguousarray(stored.transpose(0, 3, 2, 1)).transpose(0, 3, 2, 1)
        work = _Work(engine, errand, ranked=True)
        work.take(array_source(tuple(engine.put(rows)), engine.tables))
    work.finish()


@settings(deadline=None, max_examples=150)
@given(cases(), st.sampled_from(["pictures", "array"]))
def test_bits_are_those_of_the_cpu_reader(case: dict[str, Any], how: str) -> None:
    segment, q, expected = build(case)
    with Engine("cpu", restorer="torch") as engine:
        out = torch.empty(expected.shape, dtype=getattr(torch, case["dtype"]))
        run(segment, q, case["part"], out, engine=engine, how=how)
    assert bits(out) == bits(expected)


@settings(deadline=None, max_examples=40)
@given(samples(tracks=TRACKS[1:]))
def test_whole_artifacts_of_any_shape(sample: Sample) -> None:
    data = sample.write()
    with kvformat.open(data) as artifact, Engine("cpu", restorer="torch") as engine:
        for track in artifact.tracks:
            expected = artifact.read(track=track, allow_partial=True)
            found = on_device.read(artifact, engine=engine, track=track, allow_partial=True)
            assert {name: bits(found[name]) for name in found} == {
                name: bits(expected[name]) for name in expected
            }


@pytest.mark.parametrize("name", FLOATS)
def test_every_codec_and_dtype_of_real_files(name: str) -> None:
    data = write_bytes(canonical_kv(5, 70, 2, 64, name=name), tracks=TRACKS, segment_tokens=32)
    part: dict[str, Any] = {"tokens": (5, 41), "layers": [1, 3, 4], "heads": (1, 2)}
    with kvformat.open(data) as artifact, Engine("cpu", restorer="torch") as engine:
        for track in artifact.tracks:
            for request in ({}, part):
                found = on_device.read(artifact, engine=engine, track=track, check=True, **request)
                expected = artifact.read(track=track, **request)
                assert bits(found.kv) == bits(expected.kv)
                assert found.track == track and found.report.validity.complete
                assert found.lineage == expected.lineage


def test_read_of_the_artifact_itself_with_a_device() -> None:
    data = write_bytes(canonical_kv(2, 20, 2, 64))
    with kvformat.open(data) as artifact:
        found = artifact.read(device="cpu", decoder="software", track="hevc")
        assert bits(found.kv) == bits(artifact.read(track="hevc").kv)
        assert isinstance(found, on_device.DeviceRestored)


def test_the_callers_strides_and_dtype() -> None:
    kv = canonical_kv(3, 40, 2, 64)
    data = write_bytes(kv, tracks=["zstd", "hevc"])
    with kvformat.open(data) as artifact:
        expected = torch.from_numpy(artifact.read(track="zstd").kv.view(np.int16))
        expected = expected.view(torch.bfloat16)
        memory = torch.full((2, 40, 3, 64, 4), 7.0, dtype=torch.bfloat16)
        out = memory[..., ::2].permute(0, 2, 1, 4, 3)  # [2, L, T, H, D], dims far apart
        found = on_device.read(artifact, out=out, track="hevc")
        assert found.kv is out
        assert torch.equal(out, expected)
        assert (memory[..., 1::2] == 7).all()
        for dtype in (torch.float32, torch.float16, torch.float8_e5m2):
            wide = on_device.read(artifact, dtype=dtype, track="hevc").kv
            assert wide.dtype == dtype
            assert bits(wide) == bits(expected.to(dtype))


def test_a_picture_that_a_decoder_conceals_fails_the_check_of_integers() -> None:
    kv = canonical_kv(3, 64, 2, 64)
    data = write_bytes(kv, tracks=["hevc"])

    class Concealing:
        name, sessions = "concealing", 1

        def __init__(self) -> None:
            from kvformat.gpu.software import SoftwareDecoder

            self.inner = SoftwareDecoder(torch.device("cpu"))
            self.device = self.inner.device

        def open(self, width: int, height: int) -> Any:
            session = self.inner.open(width, height)

            class Session:
                def decode(self, payload: bytes, frames: int, where: str) -> Any:
                    for picture in session.decode(payload, frames, where):
                        picture.planes[0][3, 5] ^= 1
                        yield picture

                def close(self) -> None:
                    pass

            return Session()

    with kvformat.open(data) as artifact, Engine("cpu", Concealing()) as engine:
        on_device.read(artifact, engine=engine)
        with pytest.raises(InvalidError) as caught:
            on_device.read(artifact, engine=engine, check=True)
        assert caught.value.code == "segment.integers"


def test_damage_is_refused_before_it_is_decoded() -> None:
    data = bytearray(write_bytes(canonical_kv(3, 64, 2, 64), tracks=["hevc"]))
    data[-100] ^= 1
    with kvformat.open(bytes(data)) as artifact, Engine("cpu") as engine:
        with pytest.raises(InvalidError) as caught:
            on_device.read(artifact, engine=engine)
        assert caught.value.code == "segment.digest"
        assert caught.value.validity is not None
        assert engine.counters.failures == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"device": "tpu"}, "usage.argument"),
        ({"device": "cpu", "decoder": "nvdec"}, "usage.argument"),
        ({"device": "cpu", "decoder": "fast"}, "usage.argument"),
        ({"out": np.zeros(3)}, "usage.argument"),
        ({"out": {"key": None}}, "usage.argument"),
        ({"tokens": (0, 99)}, "usage.selection"),
        ({"track": "none"}, "usage.selection"),
        ({"out": {}, "dtype": "x"}, "usage.argument"),
    ],
)
def test_bad_requests(arguments: dict[str, Any], code: str) -> None:
    data = write_bytes(canonical_kv(2, 20, 2, 64))
    with kvformat.open(data) as artifact:
        with pytest.raises(KvformatError) as caught:
            on_device.read(artifact, **arguments)
        assert caught.value.code == code


def test_a_tensor_that_does_not_fit_is_refused() -> None:
    data = write_bytes(canonical_kv(2, 20, 2, 64))
    shape = (2, 2, 20, 2, 64)
    for out in (
        torch.empty((2, 2, 19, 2, 64)),
        torch.empty(shape, dtype=torch.int64),
        torch.empty((2, 2, 20, 2, 1)).expand(shape),
        torch.empty(shape, device="meta"),
    ):
        with kvformat.open(data) as artifact, pytest.raises(UsageError):
            on_device.read(artifact, out=out)


@settings(deadline=None, max_examples=60)
@given(
    cases(),
    st.sampled_from(["none", "half", "interleaved"]),
    st.sampled_from(["pictures", "array"]),
)
def test_transformed_groups(case: dict[str, Any], pairing: str, how: str) -> None:
    """Section 9.5 on the device: the bits of the core's matrix product and rotation."""
    rng = np.random.default_rng(case["seed"])
    layers, tokens, heads, dim = case["shape"]
    channels = heads * dim
    kind = "t" if "t" in case["kind"] else ""
    item = replace(
        random_set(rng, layers, heads, dim, kind=kind, big=3.0),
        zero=np.full((layers, 1, 1), 128, np.int16),
    )
    pairs = 0 if pairing == "none" else dim // 2
    transforms = tuple(random_transform(rng, channels, pairing, pairs) for _ in range(layers))
    cell = Cell(0, 0, layers, 0, heads, 0, tokens)
    plain = context_of(item, case["dtype"], cell, "hevc", candidate_layouts(tokens, channels)[0])
    context = replace(plain, transforms=transforms, first_position=77)
    q = rng.integers(0, 256, (layers, tokens, heads, dim), np.uint8)
    segment = Segment(context, Decoded(q), random_side(rng, item, tokens, heads, case["dtype"]))
    part = PartOfSegment(case["part"].layers, case["part"].tokens, slice(0, heads))
    shape = (part.layers.stop - part.layers.start, part.tokens.stop - part.tokens.start, heads, dim)
    expected = np.empty(shape, context.group.numpy_dtype)
    restore_into(segment, expected, slice(0, shape[1]), part)
    with Engine("cpu", restorer="torch") as engine:
        out = torch.empty(shape, dtype=getattr(torch, case["dtype"]))
        run(segment, q, part, out, engine=engine, how=how)
    assert bits(out) == bits(expected)


def random_transform(rng: Any, channels: int, pairing: str, pairs: int) -> LayerTransform:
    """A matrix of whole numbers within PRF-4."""
    most = max(1, ROW_BUDGET // channels)
    slots = rng.integers(-most, most + 1, (channels, channels)).astype(np.float32)
    rotation = None
    if pairs:
        angle = rng.uniform(0, 1, pairs)
        rotation = Rotation(pairing, np.cos(angle), np.sin(angle))
    return LayerTransform(
        rng.standard_normal(channels).astype(np.float32),
        np.exp2(rng.uniform(-20, -8, channels)).astype(np.float32),
        slots,
        rotation,
    )


def test_opaque_bytes_are_not_numbers() -> None:
    for name, one_byte in (("bfloat16", False), ("float8_e4m3fn", True)):
        data = write_bytes(canonical_kv(2, 20, 2, 64, name=name), tracks=["hevc"])
        out = torch.zeros((2, 2, 20, 2, 64), dtype=torch.uint8)
        with kvformat.open(data) as artifact:
            if one_byte:
                on_device.read(artifact, out=out)
                assert bits(out) == bits(artifact.read().kv)
            else:
                with pytest.raises(UsageError):
                    on_device.read(artifact, out=out)


def test_an_exception_of_the_device_becomes_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvformat.gpu import engine as module

    def fails(*of: Any) -> None:
        raise RuntimeError(f"CUDA out of memory\n{len(of)}")

    monkeypatch.setattr(module, "restore_reference", fails)
    data = write_bytes(canonical_kv(2, 20, 2, 64), tracks=["hevc"])
    with pytest.raises(KvformatError) as caught:
        on_device.read(data, device="cpu")
    assert caught.value.code == "codec.unavailable"
    assert caught.value.found == "RuntimeError: CUDA out of memory 2"
    assert caught.value.where == "track near-lossless/hevc, segment 0"
