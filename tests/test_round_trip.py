"""Write, open, read: the laws that hold for every cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvformat
from kvformat import Cache, Extent, Group, GroupTensors, KvformatError
from kvformat.artifact import Artifact
from tests.reference import DTYPES, cut_up, parse_set, reference_restore
from tests.requirements import covers
from tests.strategies import (
    FLOATS,
    Sample,
    canonical_kv,
    make_values,
    raw,
    samples,
    unbound,
    write_bytes,
)

few = settings(
    max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
some = settings(few, max_examples=60)
ALL = ("near-lossless/hevc", "near-lossless/zstd", "near-lossless/stored")


def read(artifact: Artifact, track: str, **selection: Any) -> dict[str, Any]:
    """Everything, whatever the valid lengths are, integer digests compared."""
    return dict(artifact.read(track=track, check=True, allow_partial=True, **selection))


def equal(one: Any, other: Any) -> None:
    """The same arrays, bit for bit."""
    assert set(one) == set(other)
    for name in one:
        assert one[name].shape == other[name].shape, name
        assert one[name].dtype == other[name].dtype, name
        assert raw(one[name]) == raw(other[name]), name


def digests(file: bytes) -> dict[str, list[bytes]]:
    """Integer digests of every track."""
    return {
        name: [row["integer_digest"] for row in rows]
        for name, rows in cut_up(file).segments.items()
    }


# --- exact -----------------------------------------------------------------------------------


@covers("ARI-8", "GRP-7", "STO-1", "ZST-4", "PAR-1", "FEA-4", "SEG-1", "CNV-1")
@some
@given(samples(tracks=("exact/zstd", "exact/stored"), bits=True))
def test_exact_tracks_restore_every_bit(sample: Sample) -> None:
    file = sample.write()
    with kvformat.open(file) as artifact:
        for track in artifact.tracks:
            equal(read(artifact, track), sample.source())
    found = digests(file)
    assert found["exact/zstd"] == found["exact/stored"]


@covers("ARI-8")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("track", ["exact/zstd", "exact/stored"])
def test_nan_payloads_infinities_and_signed_zeros_survive(dtype: str, track: str) -> None:
    kind = DTYPES[dtype]
    codes = np.arange(2 ** (8 * min(kind.itemsize, 2)), dtype=np.uint32)
    if kind.itemsize == 4:
        codes = np.concatenate([codes << 16, (codes << 16) | 0x7FC1_0001, codes])
    values = codes.astype(f"u{kind.itemsize}").view(kind).reshape(-1, 1, 64)
    cache = Cache.from_tensors({"layers.3.value": values})
    with kvformat.open(write_bytes(cache, tracks=[track])) as artifact:
        assert raw(artifact.read(check=True)["value"]) == raw(values)


# --- quantised -------------------------------------------------------------------------------


@covers("ARI-1", "ARI-2", "ARI-3", "ARI-4", "ARI-5", "ARI-6", "INT-1", "REC-6", "SID-1", "SET-3")
@some
@given(samples())
def test_values_are_those_of_the_reference(sample: Sample) -> None:
    file = sample.write()
    expected = reference_restore(file)
    with kvformat.open(file) as artifact:
        for track in artifact.tracks:
            equal(read(artifact, track), expected[track])
        equal(expected[artifact.tracks[0]], expected[artifact.tracks[1]])
    first, second = digests(file).values()
    assert first == second


@covers("ARI-6", "HEV-2", "HEV-7", "HEV-8", "LAY-5", "LAY-2", "INT-1", "REC-6")
@settings(few, max_examples=12)
@given(samples(tracks=ALL))
def test_all_codecs_restore_the_same(sample: Sample) -> None:
    file = sample.write()
    expected = reference_restore(file)
    with kvformat.open(file) as artifact:
        for track in artifact.tracks:
            equal(read(artifact, track), expected[track])
            equal(expected[track], expected[artifact.tracks[0]])
    found = list(digests(file).values())
    assert all(item == found[0] for item in found)


@covers("LAY-1", "LAY-2", "LAY-3", "LAY-5", "HEV-2", "HEV-8", "ARI-6")
@pytest.mark.parametrize(
    ("layers", "tokens", "heads", "dims"),
    [(1, 1, 1, 1), (2, 40, 2, 64), (3, 30, 8, 80), (4, 70, 1, 576), (3, 300, 2, 3)],
)
def test_pictures_hold_small_shapes(layers: int, tokens: int, heads: int, dims: int) -> None:
    kv = canonical_kv(layers, tokens, heads, dims)
    file = write_bytes(kv, tracks=ALL, segment_tokens=64 if tokens < 100 else 256)
    expected = reference_restore(file)
    with kvformat.open(file) as artifact:
        assert "hevc" in artifact.track("hevc").codecs
        for track in artifact.tracks:
            equal(read(artifact, track), expected[ALL[2]])
    found = digests(file)
    assert found[ALL[0]] == found[ALL[1]] == found[ALL[2]]


@covers("ARI-4", "SET-4")
@pytest.mark.parametrize("quality", ["high", "near-lossless", "balanced", "small"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_value_is_further_off_than_half_a_step(quality: str, dtype: str) -> None:
    kv = canonical_kv(3, 120, 2, 64, name=dtype)
    file = write_bytes(kv, tracks=["stored"], quality=quality, segment_tokens=50)
    with kvformat.open(file) as artifact:
        restored = artifact.read(check=True).kv.astype(np.float64)
    cut = cut_up(file)
    row = cut.sets[quality][0]
    item = parse_set(cut.data[row["offset"] : row["offset"] + row["bytes"]])
    steps = np.broadcast_to(item.scale, (3, 2, 64))
    levels = np.ones((3, 120, 1, 1))
    for row in cut.segments[f"{quality}/stored"]:
        if row["group"] == 0:
            side = cut.data[row["offset"] :]
            index = np.frombuffer(side, np.uint8, 3 * row["token_count"]).reshape(3, -1)
            start = row["token_start"]
            levels[:, start : start + row["token_count"], 0, 0] = item.token_scale[index]
    error = np.abs(restored[0] - kv[0].astype(np.float64))
    rounding = np.abs(kv[0].astype(np.float64)) * 2.0**-8
    assert (error <= 0.504 * steps[:, None] * levels + rounding + 1e-6).all()


@covers("SID-4", "ARI-5")
@pytest.mark.parametrize("dtype", FLOATS)
def test_first_four_tokens_are_exact(dtype: str) -> None:
    kv = canonical_kv(2, 20, 2, 64, name=dtype)
    kv[:, :, :2] = (kv[:, :, :2].astype(np.float32) * 30).astype(kv.dtype)
    with kvformat.open(write_bytes(kv, tracks=["zstd"], segment_tokens=3)) as artifact:
        restored = artifact.read(check=True).kv
    assert raw(restored[:, :, :4]) == raw(kv[:, :, :4])
    assert raw(restored) != raw(kv)


@covers("ARI-5")
def test_a_token_that_does_not_fit_is_exact() -> None:
    kv = np.random.default_rng(0).standard_normal((2, 1, 100, 8, 512)).astype(np.float32)
    kv[0, 0, 17, 1, 5] = 50  # one of 4,096 channels: the token's scale hardly sees it
    with kvformat.open(write_bytes(kv, tracks=["stored"])) as artifact:
        restored = artifact.read(check=True).kv
    assert raw(restored[0, 0, 17]) == raw(kv[0, 0, 17])
    assert raw(restored[0, 0, 16]) != raw(kv[0, 0, 16])


NANS = {
    "float32": (0x7FC00000, 0x7F800001, 0xFF800000),
    "float16": (0x7E00, 0x7C01, 0xFC00),
    "bfloat16": (0x7FC0, 0x7F81, 0xFF80),
    "float8_e4m3fn": (0x7F, 0xFF),
    "float8_e5m2": (0x7E, 0x7D, 0xFC),
}


@covers("ARI-7", "SID-5", "ERR-4", "PUB-1")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("token", [0, 5])
def test_a_quantised_track_refuses_nan_and_infinity(dtype: str, token: int, tmp_path: Path) -> None:
    for code in NANS[dtype]:
        kv = canonical_kv(1, 6, 2, 4, name=dtype)
        kv.view(f"u{kv.itemsize}")[1, 0, token, 1, 3] = code
        for tracks in (["zstd"], ["hevc", "exact/zstd"]):
            with pytest.raises(KvformatError) as caught:
                kvformat.write(tmp_path / "a.kvf", kv, identity=unbound(), tracks=tracks)
            assert caught.value.code == "input.non-finite"
            assert f"token {token}, head 1, dim 3" in caught.value.where
        assert list(tmp_path.iterdir()) == []
        with kvformat.open(write_bytes(kv, tracks=["exact/zstd"])) as artifact:
            assert raw(artifact.read().kv) == raw(kv)


@covers("ARI-2", "SET-5")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_constant_channels_and_zeros_are_exact(dtype: str) -> None:
    kv = canonical_kv(2, 30, 2, 64, name=dtype)
    kv[:, :, :, :, 7] = np.float32(-3.25)
    kv[:, :, :, 1, 8] = np.float32(0)
    zeros = np.zeros((2, 1, 30, 1, 3), DTYPES[dtype])
    with kvformat.open(write_bytes(kv, tracks=["zstd"])) as artifact:
        restored = artifact.read(check=True).kv
    assert raw(restored[..., 7]) == raw(kv[..., 7])
    assert raw(restored[:, :, :, 1, 8]) == raw(kv[:, :, :, 1, 8])
    with kvformat.open(write_bytes(zeros, tracks=["zstd"])) as artifact:
        assert raw(artifact.read(check=True).kv) == raw(zeros)


@covers("GRP-1", "LAY-2")
@pytest.mark.parametrize("dims", [1, 3, 64, 80, 96, 128, 192, 256, 257, 512, 576])
def test_head_dims(dims: int) -> None:
    tensors = {
        "layers.0.key": make_values((9, 2, dims), "bfloat16", "drift", dims),
        "layers.4.key": make_values((9, 2, dims), "bfloat16", "normal", dims + 1),
        "layers.0.value": make_values((9, 1, dims), "float16", "constant", dims),
    }
    tracks = (*ALL[1:], "exact/zstd") if dims not in (3, 64, 576) else (*ALL, "exact/zstd")
    file = write_bytes(tensors, tracks=tracks, segment_tokens=5)
    expected = reference_restore(file)
    with kvformat.open(file) as artifact:
        for track in artifact.tracks:
            equal(read(artifact, track), expected[track])
        exact = artifact.read(track="exact/zstd").tensors()
    for name, tensor in tensors.items():
        assert raw(exact[name]) == raw(tensor)


# --- parts -----------------------------------------------------------------------------------


@covers("PAR-1", "PAR-2")
@some
@given(samples(tracks=("near-lossless/zstd", "near-lossless/stored", "exact/zstd")), st.data())
def test_a_part_equals_the_part_of_the_whole(sample: Sample, data: st.DataObject) -> None:
    count = sample.cache.token_count
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    groups = [item.group for item in sample.cache.groups]
    roles = data.draw(st.sets(st.sampled_from([item.role for item in groups]), min_size=1))
    numbers = sorted({n for item in groups if item.role in roles for n in item.layers})
    layers = sorted(data.draw(st.sets(st.sampled_from(numbers), min_size=1)))
    with kvformat.open(sample.write()) as artifact:
        for track in artifact.tracks:
            whole = artifact.read(track=track, allow_partial=True)
            part = artifact.read(
                track=track, tokens=(begin, end), layers=layers, roles=roles, allow_partial=True,
                workers=2,
            )  # fmt: skip
            wanted = [g.name for g in groups if g.role in roles and set(layers) & set(g.layers)]
            assert sorted(part) == sorted(wanted)
            for name, found in part.groups.items():
                group, tensor = found.group, whole[name]
                chosen = [i for i, layer in enumerate(group.layers) if layer in layers]
                assert found.layers == tuple(group.layers[i] for i in chosen)
                first, last = group.held(count)
                if group.tokens.kind == "state":
                    expected = tensor[chosen]
                else:
                    low = min(max(begin, first), last)
                    high = max(low, min(end, last))
                    assert found.token_start == low
                    expected = tensor[chosen, low - first : high - first]
                assert found.array.shape == expected.shape
                assert raw(found.array) == raw(expected)


@covers("PAR-1")
@pytest.mark.parametrize("track", ["hevc", "zstd", "stored", "exact/zstd"])
def test_heads_of_a_shard(track: str) -> None:
    kv = canonical_kv(4, 33, 6, 16)
    cache = Cache.from_kv(kv, head_start=2, heads_total=8)
    file = write_bytes(cache, tracks=[track], segment_tokens=8)
    with kvformat.open(file) as artifact:
        whole = artifact.read().kv
        for begin, end in ((2, 8), (3, 4), (2, 5), (7, 8), (4, 4)):
            part = artifact.read(heads=(begin, end), tokens=slice(5, 29), layers=[0, 3])
            assert part.groups["key"].head_start == begin
            assert raw(part.kv) == raw(whole[:, [0, 3], 5:29, begin - 2 : end - 2])


@covers("PAR-4")
@pytest.mark.parametrize(
    "selection",
    [
        {"tokens": (0, 34)}, {"tokens": (-1, 3)}, {"tokens": (5, 4)}, {"tokens": slice(0, 9, 2)},
        {"layers": [9]}, {"layers": (0, 5)}, {"layers": []}, {"roles": ["latent"]}, {"roles": []},
        {"heads": (0, 3)}, {"heads": (1, 9)}, {"heads": (7, 9)}, {"track": "exact"},
        {"track": "near-lossless/none"}, {"tokens": "ab"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_held_is_refused(selection: dict[str, Any]) -> None:
    cache = Cache.from_kv(canonical_kv(4, 33, 6, 16), head_start=2, heads_total=8)
    file = write_bytes(cache, tracks=["zstd"])
    with kvformat.open(file) as artifact, pytest.raises(KvformatError) as caught:
        artifact.read(**selection)
    assert caught.value.code == "usage.selection"


# --- what must not matter --------------------------------------------------------------------


@covers("PAR-1", "SEG-2", "SEG-3", "SEG-1", "DAT-2", "SEG-4")
@settings(few, max_examples=15)
@given(samples(), st.data())
def test_order_alignment_and_segment_size_change_no_value(
    sample: Sample, data: st.DataObject
) -> None:
    with kvformat.open(sample.write()) as artifact:
        track = artifact.tracks[0]
        whole = read(artifact, track)
    changes = {
        "order": data.draw(st.sampled_from(["token-major", "layer-major"])),
        "alignment": data.draw(st.sampled_from([1, 4096])),
        "segment_tokens": data.draw(st.sampled_from([2, 3, 8, 1000])),
    }
    file = sample.write(**changes)
    rows = cut_up(file).segments[track]
    assert all(row["offset"] % changes["alignment"] == 0 for row in rows)
    with kvformat.open(file) as artifact:
        equal(read(artifact, track), whole)


def keys_of(
    rows: list[dict[str, Any]], groups: list[dict[str, Any]], step: int, order: str
) -> list[Any]:
    keys = []
    for row in rows:
        group = groups[row["group"]]
        block = row["token_start"] // step
        layer = group["layers"][row["layer_index"]]
        key = (layer, row["group"], row["head_start"])
        keys.append((block, *key) if order == "token-major" else (*key, block))
    return keys


@covers("SEG-2", "SEG-3", "SEG-1")
@pytest.mark.parametrize("order", ["token-major", "layer-major"])
def test_segments_ascend_as_the_order_says(order: str) -> None:
    tensors = {f"layers.{n}.key": make_values((20, 2, 8), "float16", "normal", n) for n in range(7)}
    tensors |= {
        f"layers.{n}.value": make_values((20, 1, 4), "float16", "normal", n) for n in (1, 5)
    }
    for role, heads, dim in (("key", 2, 8), ("value", 1, 4)):
        tensors[f"layers.2.{role}"] = make_values((11, heads, dim), "float16", "normal", 3)
    file = write_bytes(tensors, tracks=["stored"], order=order, segment_tokens=6)
    cut = cut_up(file)
    keys = keys_of(cut.segments["near-lossless/stored"], cut.manifest["groups"], 6, order)
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    held = sum(
        row["layer_count"] * row["token_count"] * row["head_count"]
        for row in cut.segments["near-lossless/stored"]
    )
    assert held == (6 * 20 + 11) * 2 + 2 * 20 + 11


@covers("HEV-7")
@settings(few, max_examples=6)
@given(samples(tracks=("near-lossless/hevc", "near-lossless/zstd", "exact/zstd")))
def test_files_do_not_depend_on_the_number_of_workers(sample: Sample) -> None:
    one, three, again = (sample.write(workers=n) for n in (1, 3, 3))
    assert one == three == again


@covers("PUB-2", "PUB-3")
def test_an_artifact_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.kvf"
    kvformat.write(path, canonical_kv(1, 3, 1, 4), identity=unbound(), tracks=["zstd"])
    before = path.read_bytes()
    with pytest.raises(KvformatError) as caught:
        kvformat.write(path, canonical_kv(1, 4, 1, 4), identity=unbound(), tracks=["zstd"])
    assert caught.value.code == "io.exists"
    assert path.read_bytes() == before
    kvformat.write(
        path, canonical_kv(1, 4, 1, 4), identity=unbound(), tracks=["zstd"], overwrite=True
    )
    assert path.read_bytes() != before
    assert [item.name for item in tmp_path.iterdir()] == ["a.kvf"]


# --- corners ---------------------------------------------------------------------------------


@covers("SEG-1", "TAB-3")
@pytest.mark.parametrize("tracks", [["zstd"], ["hevc"], ["exact/stored"], ["hevc", "exact/zstd"]])
def test_zero_tokens(tracks: list[str]) -> None:
    kv = np.zeros((2, 3, 0, 2, 8), np.float16)
    with kvformat.open(write_bytes(kv, tracks=tracks)) as artifact:
        for track in artifact.tracks:
            assert artifact.read(track=track).kv.shape == (2, 3, 0, 2, 8)


def windowed() -> Cache:
    def group(name: str, role: str, layer: int, extent: Extent, dims: int) -> Group:
        return Group(name, role, "float16", (layer,), 2, dims, 2, tokens=extent)

    window = Extent("window", held_start=12, cumulative_tokens=20)
    state = Extent("state", shape=(2, 4))
    parts = [
        (group("full", "key", 0, Extent(), 8), 20),
        (group("near", "key", 1, window, 8), 8),
        (group("recurrent", "state", 2, state, 8), 1),
    ]
    return Cache(
        20,
        tuple(
            GroupTensors(item, (make_values((tokens, 2, 8), "float16", "normal", seed),))
            for seed, (item, tokens) in enumerate(parts)
        ),
    )


@covers("LEN-1", "LEN-3", "PAR-1")
@pytest.mark.parametrize("order", ["token-major", "layer-major"])
def test_windows_and_states(order: str) -> None:
    cache = windowed()
    options: dict[str, Any] = {"segment_tokens": 5, "order": order, "valid_lengths": [4]}
    with kvformat.open(write_bytes(cache, tracks=["zstd", "exact/zstd"], **options)) as artifact:
        assert artifact.manifest.valid_lengths == (4, 20)
        exact = artifact.read(track="exact/zstd")
        for item in cache.groups:
            assert raw(exact[item.group.name][0]) == raw(item.layers[0])
        assert artifact.read(track="near-lossless/zstd")["recurrent"].tobytes() == raw(
            cache.groups[2].layers[0]
        )
        assert artifact.read(tokens=(0, 4))["near"].shape == (1, 0, 2, 8)
        assert exact.tensors()["layers.2.state"].shape == (2, 2, 4)
        for tokens in ((0, 5), (0, 19), (1, 20), (4, 20), (0, 0)):
            with pytest.raises(KvformatError) as caught:
                artifact.read(tokens=tokens)
            assert caught.value.code == "tokens.length"
        part = artifact.read(tokens=(10, 15), track="exact/zstd", allow_partial=True)
        assert raw(part["near"]) == raw(exact["near"][:, :3])
        assert raw(part["full"]) == raw(exact["full"][:, 10:15])
