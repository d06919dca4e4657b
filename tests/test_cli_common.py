"""Helpers of the command line's tests; there are no tests here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

import kvformat
from kvformat.cli.program import cli
from kvformat.digests import digest
from tests.requirements import SPEC

TOKENS = 300
MODEL = "example/model"
SCHEMA = json.loads((SPEC.parent / "schema" / "verdict.schema.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Files:
    """A folder with inputs and artifacts; tests must not change them."""

    folder: Path
    npy: Path
    ids: Path
    salt: Path
    bound: Path
    unbound: Path
    salted: Path
    window: Path
    kv: np.ndarray[Any, Any]


def make_kv(tokens: int = TOKENS, dtype: Any = np.float16) -> np.ndarray[Any, Any]:
    """A canonical array with some structure along tokens and channels."""
    random = np.random.default_rng(7)
    kv = random.normal(size=(2, 4, tokens, 2, 32))
    kv += random.normal(size=(2, 4, 1, 2, 32))
    return kv.astype(dtype)


def build(folder: Path) -> Files:
    """Inputs, and artifacts written with the library."""
    kv, ids = make_kv(), list(range(1000, 1000 + TOKENS))
    files = Files(
        folder,
        folder / "kv.npy",
        folder / "ids.json",
        folder / "salt",
        folder / "bound.kvf",
        folder / "unbound.kvf",
        folder / "salted.kvf",
        folder / "window.kvf",
        kv,
    )
    np.save(files.npy, kv)
    files.ids.write_text(json.dumps(ids))
    files.salt.write_bytes(b"tenant seven\n")
    model = kvformat.Model(MODEL, "r1")
    bound = kvformat.Identity(model, 4, "float16")
    unbound = kvformat.Identity(model, 4, "float16", "unbound")
    kvformat.write(files.bound, kv, identity=bound, token_ids=ids, tracks="hevc,zstd,exact")
    kvformat.write(files.unbound, kv[:, :, :8], identity=unbound, tracks="zstd")
    kvformat.write(
        files.salted,
        kv[:, :, :8],
        identity=bound,
        token_ids=ids[:8],
        salt=files.salt.read_bytes(),
        tracks="zstd",
    )
    kvformat.write(
        files.window,
        {"layers.0.key": kv[0, 0, :40], "layers.1.key": kv[0, 1, :16]},
        identity=unbound,
        tracks="zstd",
    )
    return files


def run(*arguments: object, columns: int = 100) -> Result:
    """The command in this process; fails on anything that would be a traceback."""
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, [str(item) for item in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result


def refused(exit_code: int, code: str, *arguments: object) -> Result:
    """Run, and expect one line with this code on standard error, and one with what to try."""
    result = run(*arguments)
    assert (result.exit_code, code in result.stderr) == (exit_code, True), result.output
    assert is_one_error(result.stderr)
    assert result.stderr.startswith(f"kvformat: error [{code}] ")
    return result


def is_one_error(stderr: str) -> bool:
    """One line for the error, and perhaps one for the next step."""
    first, *rest = stderr.splitlines()
    steps = [line for line in rest if line.startswith("  try: ")]
    return first.startswith("kvformat: error [") and rest == steps and len(rest) <= 1


def verdict(result: Result) -> dict[str, Any]:
    """The one JSON object on standard output, checked against its schema."""
    value: dict[str, Any] = json.loads(result.stdout)
    Draft202012Validator(SCHEMA).validate(value)
    return value


def damaged(files: Files, name: str = "damaged.kvf") -> Path:
    """A copy of ``bound`` with one bit flipped in the last segment."""
    data = bytearray(files.bound.read_bytes())
    data[-1] ^= 1
    path = files.folder / name
    path.write_bytes(data)
    return path


def of_version(files: Files, minor: int) -> Path:
    """A copy of ``bound`` that says to be of another version, with a good header check."""
    data = bytearray(files.bound.read_bytes())
    data[10:12] = minor.to_bytes(2, "little")
    data[16:48] = digest(bytes(data[:16]) + bytes(data[48:128]))
    path = files.folder / f"version-{minor}.kvf"
    path.write_bytes(data)
    return path
