"""What hardware there is, found out in a child process: a driver may end the process that asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Final

from kvformat.errors import UnsupportedError, UsageError
from kvformat.gpu.driver import Device, Hardware

SECONDS: Final = 60.0
DOCTOR: Final = "kvformat doctor --gpu says what is missing; decoder='software' needs no GPU"


@lru_cache(maxsize=1)
def probe() -> Hardware:
    """The devices of this machine; never raises and never ends this process. Asked once."""
    return probe_now()


def probe_now() -> Hardware:
    """Ask again."""
    environment = dict(os.environ)
    home = str(Path(__file__).resolve().parent.parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([*filter(os.path.isabs, sys.path), home])
    command = [sys.executable, "-P", "-m", "kvformat.gpu.driver"]
    try:
        ended = subprocess.run(
            command, capture_output=True, timeout=SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return Hardware(problem=f"the driver did not answer within {SECONDS:.0f} s")
    try:
        return Hardware.from_json(json.loads(ended.stdout))
    except (ValueError, KeyError, TypeError):
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        why = f": {said[-1][:200]}" if said else ""
        return Hardware(problem=f"the probe ended with exit status {ended.returncode}{why}")


def require_device(index: int) -> Device:
    """The device that decodes 4:4:4; raises ``codec.unavailable`` with what is missing."""
    hardware = probe()
    if hardware.problem:
        raise UnsupportedError(
            "codec.unavailable",
            "there is no usable NVIDIA video decoder",
            found=hardware.problem,
            next_step=DOCTOR,
        )
    if index >= len(hardware.devices):
        raise UsageError(
            "usage.argument",
            "no such CUDA device",
            expected=f"below {len(hardware.devices)}",
            found=index,
        )
    device = hardware.devices[index]
    able = device.capability()
    problem = able.refusal(*able.least)
    if not problem and not able.engines:
        problem = "the device has no video decoder (a small MIG slice has none)"
    if problem:
        raise UnsupportedError(
            "codec.unavailable",
            f"{device.name} does not decode the codec hevc",
            found=problem,
            next_step="HEVC 4:4:4 needs Turing, A100 or newer; read a zstd track there",
        )
    return device
