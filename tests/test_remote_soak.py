"""A short run of ``tools/soak_remote.py``, and the memory of reading a large file slowly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvformat
from tests.web_server import WebServer, web_server  # noqa: F401 - the fixture is used by name

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))

import soak_remote  # noqa: E402

MOST_BYTES = 128 * 2**20


def test_reads_with_random_faults_lose_and_leak_nothing() -> None:
    figures = soak_remote.soak(300, seed=11, threads=4)
    assert figures["wrong"] == []
    assert figures["ok"], figures
    assert figures["server"]["requests"] > figures["server"]["good"] > 300
    assert sum(figures["errors"].values()) <= 30  # on a busy machine good replies stall too
    assert set(figures["kinds"]) == {"read", "into", "prefix", "stream", "cancel"}


READER = r"""
import json, re, sys, time
from pathlib import Path
import kvformat

def peak():
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024

with kvformat.open(sys.argv[1]) as artifact:
    before = peak()
    values = 0
    with artifact.stream(track=sys.argv[2]) as stream:
        for block in stream:
            values += block.array.size
            time.sleep(float(sys.argv[3]))
    print(json.dumps({"before": before, "grown": peak() - before, "values": values}))
"""


@pytest.mark.parametrize("track", ["near-lossless/zstd", "exact/stored"])
def test_memory_of_a_slow_consumer(
    web_server: WebServer,  # noqa: F811
    track: str,
) -> None:
    """The restored cache would be 168 MB, the exact track as much; neither is ever in memory."""
    layers, tokens, heads, dims = 12, 3_500, 8, 125
    random = np.random.default_rng(1)
    cache = random.standard_normal((2, layers, tokens, heads, dims), np.float32).astype(np.float16)
    kvformat.write(
        web_server.directory / "a.kvf",
        cache,
        identity=kvformat.Identity(kvformat.Model("m"), layers, "float16", "unbound"),
        tracks=[track],
    )
    process = subprocess.run(
        [sys.executable, "-c", READER, web_server.url("a.kvf"), track, "0.01"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    figures = json.loads(process.stdout)
    assert figures["values"] == cache.size
    print(figures)
    assert figures["grown"] < MOST_BYTES
