"""The Python examples of the README run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kvformat

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
SAMPLE = ROOT / "kvformat" / "data" / "smollm2-135m-sample.safetensors"


def sample_tensors() -> dict[str, np.ndarray]:
    """The committed cache of SmolLM2-135M, read without safetensors' numpy frontend."""
    raw = SAMPLE.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + length])
    tensors = {}
    for name, entry in head.items():
        if name.startswith("layers."):
            begin, end = entry["data_offsets"]
            data = raw[8 + length + begin : 8 + length + end]
            tensors[name] = np.frombuffer(data, ml_dtypes.bfloat16).reshape(entry["shape"])
    return tensors


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_examples_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = kvformat.Model("HuggingFaceTB/SmolLM2-135M-Instruct")
    identity = kvformat.Identity(model, 30, "bfloat16")
    tensors = sample_tensors()
    kvformat.write("prefix.kvf", tensors, identity=identity, token_ids=np.arange(86), tracks="zstd")
    scope: dict[str, object] = {}
    exec(BLOCKS[number], scope)
    if "kv" in scope:
        assert scope["kv"].shape == (2, 10, 64, 3, 64)  # type: ignore[attr-defined]
    else:
        assert "bits per value" in capsys.readouterr().out


def test_there_are_examples_of_reading_and_writing() -> None:
    assert len(BLOCKS) == 2
