"""The check script, from end to end over the pretend driver, and on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

from kvformat.gpu.checking import Check
from kvformat.gpu.nvdec import NvdecDecoder
from kvformat.gpu.probing import probe
from kvformat.gpu.pynv import PynvDecoder
from tests.fake_driver import compiler, shared_driver
from tests.gpu_samples import torch

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
KINDS: dict[str, Any] = {"nvdec": NvdecDecoder, "nvdec-pynv": PynvDecoder}


@pytest.fixture
def check() -> Iterator[Check]:
    if compiler() is None:
        pytest.skip("there is no C compiler")
    for name in ("PyNvVideoCodec", "triton"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    fake = shared_driver()
    fake.reset()
    probe.cache_clear()
    yield Check(
        CPU, lambda name, level: KINDS[name](CPU, level_idc=level), quick=True, learn=fake.learn
    )
    fake.reset()
    probe.cache_clear()


def test_the_whole_proof_over_the_pretend_driver(check: Check) -> None:
    report = check.run()
    json.dumps(report)
    assert report["ok"], report
    assert check.usable == ("nvdec", "nvdec-pynv")
    assert [row["wrong"] for row in report["exact"]["pictures"]] == [""] * 4
    assert len(report["restore"]["reads"]) == 12
    assert report["level"]["decoders"]["nvdec"] == {"255": "exact"}
    assert set(report["corrupt"]["said"]) == {"nvdec", "nvdec-pynv", "software"}
    assert "refused the bitstream" in report["corrupt"]["said"]["software"]
    assert {row["measured_on"] for row in (report["throughput"], report["end_to_end"])} == {"cpu"}


def test_a_decoder_that_is_wrong_makes_the_report_say_so(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVF_FAKE_FAIL", "corrupt:2")
    report = check.run()
    assert not report["ok"] and check.usable == ()
    said = report["level"]["decoders"]["nvdec"]["255"]
    assert said == "plane 0 of picture 1 has other samples"


def test_a_device_without_a_decoder(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVF_FAKE_OFF", "1")
    report = check.run()
    assert not report["ok"]
    assert "cuInit failed" in report["hardware"]["problem"]
    assert "no usable NVIDIA video decoder" in report["level"]["decoders"]["nvdec"]["255"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_script_without_a_gpu(tmp_path: Path) -> None:
    ended = subprocess.run(
        [ROOT / "tools" / "gpu_check.sh", "--json", tmp_path / "report.json"],
        env={**os.environ, "KVFORMAT_GPU_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 69
    assert ended.stderr.startswith("[codec.unavailable] torch finds no CUDA device")
    assert not (tmp_path / "report.json").exists()
