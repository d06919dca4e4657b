"""The NVENC writer, with libx265 in the encoder's place, and refused where there is no encoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvformat
from kvformat.codecs.base import SegmentShape
from kvformat.codecs.bitstream import encode_pictures, parse_nal_units
from kvformat.codecs.registry import CODECS
from kvformat.errors import InvalidError, UnsupportedError
from kvformat.gpu.nvenc import NvencCodec, conforming
from kvformat.layout import candidate_layouts
from tests.requirements import covers
from tests.strategies import canonical_kv, unbound

X265 = {
    "preset": "ultrafast",
    "x265-params": "log-level=none:lossless=1:info=0:bframes=0:ref=1:keyint=-1:scenecut=0"
    ":rc-lookahead=0:wpp=0:pools=none:frame-threads=1:aud=1:repeat-headers=1",
}
LOSSY = {**X265, "x265-params": X265["x265-params"].replace("lossless=1", "qp=30:cu-lossless=1")}


def planes(frames: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (frames, 3, 144, 160), np.uint8)


@covers("HEV-5", "HEV-9")
def test_foreign_units_go_and_messages_come() -> None:
    samples = planes()
    whole = encode_pictures(samples)
    bare = bytearray()
    for unit in parse_nal_units(whole, ""):
        if unit.kind == 40:
            continue
        if unit.kind <= 20:
            bare += (
                b"\0\0\0\1"
                + bytes((35 << 1, 1, 0x50))
                + b"\0\0\1"
                + bytes((39 << 1, 1, 5, 1, 9, 0x80))
            )
        bare += b"\0\0\0\1" + whole[unit.start : unit.stop]
    found = conforming(bytes(bare), samples, "")
    assert [found[unit.start : unit.stop] for unit in parse_nal_units(found, "")] == [
        whole[unit.start : unit.stop] for unit in parse_nal_units(whole, "")
    ]


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_another_number_of_pictures_is_refused(frames: int) -> None:
    samples = planes()
    with pytest.raises(InvalidError):
        conforming(encode_pictures(planes(frames)), samples, "")


def segment() -> tuple[Any, SegmentShape]:
    layout = candidate_layouts(48, 64)[-1]
    shape = SegmentShape(3, 48, 2, 32, layout=layout)
    return np.random.default_rng(0).integers(0, 256, shape.integers_shape, np.uint8), shape


def test_its_streams_decode_to_the_integers() -> None:
    integers, shape = segment()
    payload = NvencCodec("libx265", X265).encode(integers, shape)
    decoded = CODECS["hevc"].decode(payload, shape, "", strict=True)
    np.testing.assert_array_equal(decoded.integers, integers)
    assert decoded.clean


def test_without_the_hardware_it_is_refused(tmp_path: Any) -> None:
    integers, shape = segment()
    with pytest.raises(UnsupportedError) as caught:
        NvencCodec().encode(integers, shape)
    assert caught.value.code == "codec.unavailable"
    path = tmp_path / "a.kvf"
    with pytest.raises(UnsupportedError):
        kvformat.write(
            path, canonical_kv(2, 20, 2, 64), identity=unbound(), tracks=["hevc"], encoder="nvenc"
        )
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_encoder_is_refused(tmp_path: Any) -> None:
    with pytest.raises(kvformat.UsageError) as caught:
        kvformat.write(
            tmp_path / "a.kvf",
            canonical_kv(2, 20, 2, 64),
            identity=unbound(),
            tracks=["hevc"],
            encoder="magic",
        )
    assert caught.value.code == "usage.argument"


@covers("HEV-7")
def test_an_encoder_that_loses_is_found_out(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvformat import writer as writing

    def lossy(name: str) -> Any:
        assert name == "nvenc"
        return NvencCodec("libx265", LOSSY)

    monkeypatch.setattr(writing, "video_encoder", lossy)
    path = tmp_path / "a.kvf"
    with pytest.raises(kvformat.KvformatError) as caught:
        kvformat.write(
            path, canonical_kv(2, 90, 2, 64), identity=unbound(), tracks=["hevc"], encoder="nvenc"
        )
    assert caught.value.code in ("segment.bitstream", "segment.integers", "codec.unavailable")
    assert list(tmp_path.iterdir()) == []


def test_a_file_written_through_it_is_valid(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvformat import writer as writing

    monkeypatch.setattr(writing, "video_encoder", lambda _: NvencCodec("libx265", X265))
    path = tmp_path / "a.kvf"
    kvformat.write(
        path, canonical_kv(2, 40, 2, 64), identity=unbound(), tracks=["hevc"], encoder="nvenc"
    )
    assert kvformat.verify(path).checked["segments"] == 2
    with kvformat.open(path) as artifact:
        assert artifact.track("hevc").encoder.startswith("libx265 through PyAV")
