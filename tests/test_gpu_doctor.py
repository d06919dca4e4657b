"""What ``kvformat doctor --gpu`` prints, with the pretend driver and without any."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kvformat.cli import doctor_gpu
from kvformat.cli.doctor import command
from kvformat.cli.doctor_gpu import capability_row, gpu_report, show_gpu
from kvformat.gpu.driver import Capability, Device, Hardware

ABLE = Capability(
    "4:4:4", 8, supported=True, engines=7, output_mask=4, least=(144, 144), most=(8192, 8192),
    most_blocks=262144,
)  # fmt: skip


@pytest.mark.parametrize(
    ("item", "row"),
    [
        (ABLE, ("4:4:4", "8", "yes", "7", "yes", "144 x 144", "8192 x 8192")),
        (Capability("4:0:0", 8, supported=False), ("4:0:0", "8", "no", "", "", "", "")),
        (
            Capability("4:4:4", 8, True, 3, 1, (144, 144), (4096, 4096), 262144),
            ("4:4:4", "8", "yes", "3", "no", "144 x 144", "4096 x 4096"),
        ),
    ],
)
def test_a_line_of_the_table(item: Capability, row: tuple[str, ...]) -> None:
    assert capability_row(item) == row


def test_what_a_machine_with_a_device_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = Hardware("CUDA 13.0", (Device(0, "A GPU", 2**34, (ABLE,)),), encode_library=True)
    monkeypatch.setattr(doctor_gpu, "probe", lambda: hardware)
    monkeypatch.setattr(doctor_gpu, "try_decoder", lambda name, _: f"{name} works")
    found = gpu_report()
    json.dumps(found)
    show_gpu(found)
    said = capsys.readouterr().out
    for words in ("CUDA 13.0", "Device 0: A GPU, 16 GiB", "8192 x 8192", "nvdec-pynv works"):
        assert words in said


def test_without_a_device_the_command_still_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Hardware(problem="libcuda.so.1 cannot be loaded")
    monkeypatch.setattr(doctor_gpu, "probe", lambda: problem)
    ended = CliRunner().invoke(command, ["--gpu", "--json"])
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)["gpu"]
    assert found["problem"] == problem.problem
    assert found["devices"] == []
    assert found["software"] == doctor_gpu.EXACT or "needs torch" in found["software"]
