"""Facts about the machine, for ``tools/bench.py``: none of them is needed to measure."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import av
import numpy as np
import zstandard

import kvformat
from kvformat.workers import cores


def machine() -> dict[str, str]:
    """Facts that the numbers depend on."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    zstd = ".".join(map(str, zstandard.ZSTD_VERSION))
    return {
        "cpu": model,
        "cores": str(cores()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvformat": kvformat.__version__,
        "numpy": np.__version__,
        "zstandard": f"{zstandard.__version__} (zstd {zstd})",
        "av": f"{av.__version__} ({'.'.join(map(str, av.library_versions['libavcodec']))})",
    }


def jiffies() -> tuple[float, float]:
    """Seconds that all processors worked since the start of the machine, and this process tree."""
    try:
        line = Path("/proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return 0.0, 0.0
    fields = [int(item) for item in line.split()[1:9]]
    mine = os.times()
    own = mine.user + mine.system + mine.children_user + mine.children_system
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK"), own
