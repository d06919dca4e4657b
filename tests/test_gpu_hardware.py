"""On a machine with an NVIDIA GPU: real engines, real memory. Skipped elsewhere, and says so."""

from __future__ import annotations

from typing import Any

import pytest

import kvformat
import kvformat.gpu as on_device
from kvformat.gpu.checking import Check
from kvformat.gpu.engine import make_decoder
from kvformat.gpu.nvdec import NvdecDecoder
from kvformat.gpu.pynv import PynvDecoder
from tests.gpu_samples import bits, torch
from tests.strategies import FLOATS, canonical_kv, write_bytes
from tests.test_gpu_restore import TRACKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
KINDS: dict[str, Any] = {"nvdec": NvdecDecoder, "nvdec-pynv": PynvDecoder}


@pytest.mark.parametrize("decoder", ["nvdec", "nvdec-pynv"])
@pytest.mark.parametrize("restorer", ["torch", "triton"])
@pytest.mark.parametrize("name", FLOATS)
def test_every_track_on_the_device(name: str, restorer: Any, decoder: str) -> None:
    data = write_bytes(canonical_kv(5, 70, 2, 64, name=name), tracks=TRACKS, segment_tokens=32)
    device = torch.device("cuda", 0)
    with (
        kvformat.open(data) as artifact,
        on_device.Engine(device, make_decoder(decoder, device), restorer=restorer) as engine,
    ):
        for track in artifact.tracks:
            found = on_device.read(artifact, engine=engine, track=track, check=True)
            assert bits(found.kv) == bits(artifact.read(track=track).kv)


def test_the_whole_proof() -> None:
    device = torch.device("cuda", 0)
    check = Check(device, lambda name, level: KINDS[name](device, level_idc=level), quick=True)
    report = check.run()
    assert report["ok"], report
