"""A measured quality in an artifact: written, read back, shown, ignored where it is strange."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvformat
from kvformat.fields import Node
from kvformat.measured import QUALITY, Measurement, extensions_of, measured
from tests.requirements import covers
from tests.test_cli_common import MODEL, Files, build, make_kv, refused, run

ONE = Measurement("near-lossless/zstd", MODEL, "0" * 64, 8, 100, 0.001, 0.01, 0.1, 0.98, -0.002)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return build(tmp_path_factory.mktemp("measured"))


def report(path: Path, *entries: Measurement, **more: Any) -> Path:
    listed = [item.to_json() for item in entries]
    path.write_text(json.dumps({"verdict": "ok", "measurements": listed} | more))
    return path


def encode(files: Files, out: Path, measured_file: Path, *options: object) -> tuple[object, ...]:
    given = ("--model", MODEL, "--token-ids", files.ids, "--tracks", "zstd,exact")
    return ("encode", files.npy, out, *given, "--measured", measured_file, *options)


@given(NUMBER, NUMBER, st.integers(0, 2**53 - 1))
def test_json_gives_the_same_bits_back(a: float, b: float, count: int) -> None:
    item = replace(ONE, kl_mean=a, cross_entropy_change=b, compared_tokens=count)
    again = Measurement.parse(Node(json.loads(json.dumps(item.to_json()))))
    assert again == item
    assert math.copysign(1, again.kl_mean) == math.copysign(1, item.kl_mean)


@covers("EXT-3", "EXT-4")
def test_encode_states_what_was_measured(files: Files, tmp_path: Path) -> None:
    other = replace(ONE, track="balanced/zstd")
    source = report(tmp_path / "q.json", ONE, other)
    result = run(*encode(files, tmp_path / "a.kvf", source))
    assert result.exit_code == 0, result.output
    with kvformat.open(tmp_path / "a.kvf") as artifact:
        assert measured(artifact.manifest) == (ONE,)
        assert not artifact.manifest.extensions[QUALITY].must_understand
        stated = artifact.read(track="zstd").kv
    plain = tmp_path / "b.kvf"
    assert run("encode", files.npy, plain, "--model", MODEL, "--tracks", "zstd").exit_code == 0
    with kvformat.open(plain) as artifact:
        assert measured(artifact.manifest) == ()
        assert artifact.read().kv.tobytes() == stated.tobytes()
    assert "another cache" in run("inspect", tmp_path / "a.kvf").stdout
    assert "Quality" not in run("inspect", plain).stdout


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{}", b'{"measurements": 3}', b'{"measurements": [{}]}', b"[" * 5000],
)
def test_other_files_are_refused(files: Files, tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "q.json"
    source.write_bytes(content)
    refused(64, "usage.argument", *encode(files, tmp_path / "a.kvf", source))
    assert list(tmp_path.iterdir()) == [source]


def test_what_does_not_belong_here_is_refused(files: Files, tmp_path: Path) -> None:
    out = tmp_path / "a.kvf"
    model = report(tmp_path / "model.json", replace(ONE, model="acme/other"))
    assert "another model" in refused(64, "usage.argument", *encode(files, out, model)).stderr
    track = report(tmp_path / "track.json", replace(ONE, track="small/zstd"))
    assert "small/zstd" in refused(64, "usage.argument", *encode(files, out, track)).stderr
    refused(74, "io.not-found", *encode(files, out, tmp_path / "none.json"))
    assert not out.exists()


@covers("EXT-3")
@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        [1],
        [{**ONE.to_json(), "more": 1}],
        [{**ONE.to_json(), "kl_mean": "7ff8000000000000"}],
        [{**ONE.to_json(), "kl_mean": "x"}],
        [{**ONE.to_json(), "cached_tokens": "8"}],
    ],
)
def test_a_strange_value_is_ignored(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "a.kvf"
    identity = kvformat.Identity(kvformat.Model(MODEL), 4, "float16", "unbound")
    extension = {QUALITY: kvformat.Extension(value)}
    kvformat.write(path, make_kv(5), identity=identity, tracks="exact", extensions=extension)
    with kvformat.open(path) as artifact:
        assert measured(artifact.manifest) == ()
    assert run("inspect", path).exit_code == 0


def test_an_extension_of_nothing_is_empty() -> None:
    assert extensions_of([])[QUALITY].value == []
