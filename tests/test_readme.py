"""The Python examples of the README run as they stand."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kvformat

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
READING, WRITING, STREAMING = range(3)
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
    Path("demo").mkdir()
    Path("demo/tokens.json").write_text(json.dumps(list(range(86))))
    options = {"identity": identity, "token_ids": np.arange(86), "tracks": "zstd"}
    kvformat.write("demo/prefix.kvf", sample_tensors(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # json.load(open(...)) is for reading
        if number == STREAMING:
            exec(BLOCKS[WRITING], {})
            capsys.readouterr()
        exec(BLOCKS[number], {})
    shown = capsys.readouterr().out
    starts = "(2, 10, 86, 3, 64) bfloat16", "<kvformat.WriteReport near-lossless", "key (0, 1, 2)"
    assert shown.startswith(starts[number])


def test_there_are_examples_of_reading_and_writing() -> None:
    assert len(BLOCKS) == 3
