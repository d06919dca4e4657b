"""What the format promises on a real model's cache of 2,048 tokens.

The cache is made by ``tools/capture_kv.py`` and named by ``KVFORMAT_REAL_CACHE``; ``.ci/run`` does
both. Without it these tests are skipped and say so.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kvformat

pytestmark = pytest.mark.real
CAPTURE = os.environ.get("KVFORMAT_REAL_CACHE", "")
TOKENS = 2048


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    if not CAPTURE:
        pytest.skip("no real cache: set KVFORMAT_REAL_CACHE to a capture of tools/capture_kv.py")
    raw = Path(CAPTURE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name.startswith("layers."):
            begin, end = entry["data_offsets"]
            data = raw[8 + length + begin : 8 + length + end]
            found[name] = np.frombuffer(data, ml_dtypes.bfloat16).reshape(entry["shape"])[:TOKENS]
    assert {array.shape for array in found.values()} == {(TOKENS, 3, 64)}
    return found


def written(tensors: dict[str, np.ndarray], path: Path, *tracks: str) -> kvformat.WriteReport:
    identity = kvformat.Identity(kvformat.Model("SmolLM2-135M"), 30, "bfloat16", kind="unbound")
    return kvformat.write(path, tensors, identity=identity, tracks=tracks)


@pytest.mark.parametrize(
    ("track", "most_bits"),
    [
        ("near-lossless/hevc", 4.25),
        ("near-lossless/zstd", 4.2),
        ("balanced/hevc", 2.6),
        ("balanced/zstd", 2.6),
    ],
)
def test_bits_of_the_whole_file(
    tensors: dict[str, np.ndarray], tmp_path: Path, track: str, most_bits: float
) -> None:
    report = written(tensors, tmp_path / "one.kvf", track)
    assert report.values == 2 * 30 * TOKENS * 3 * 64
    assert report.file_bytes == (tmp_path / "one.kvf").stat().st_size
    assert report.bits_per_value <= most_bits


def test_all_tracks_restore_what_they_should(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    path = tmp_path / "all.kvf"
    written(tensors, path, "hevc", "zstd", "stored", "exact/zstd", "exact/stored")
    with kvformat.open(path) as artifact:
        restored = {name: artifact.read(track=name, check=True).kv for name in artifact.tracks}
    source = np.stack(
        [
            np.stack([tensors[f"layers.{layer}.{role}"] for layer in range(30)])
            for role in ("key", "value")
        ]
    )
    bits = {name: array.view(np.uint16) for name, array in restored.items()}
    for name in ("exact/zstd", "exact/stored"):
        np.testing.assert_array_equal(bits[name], source.view(np.uint16))
    for name in ("near-lossless/zstd", "near-lossless/stored"):
        np.testing.assert_array_equal(bits[name], bits["near-lossless/hevc"])
    lossy = restored["near-lossless/hevc"].astype(np.float32)
    sinks = source[:, :, :4].view(np.uint16)
    np.testing.assert_array_equal(bits["near-lossless/hevc"][:, :, :4], sinks)
    error = np.sqrt(((lossy - source.astype(np.float32)) ** 2).mean(axis=(1, 2, 3, 4)))
    size = np.sqrt((source.astype(np.float32) ** 2).mean(axis=(1, 2, 3, 4)))
    assert (error / size < (0.05, 0.15)).all()
