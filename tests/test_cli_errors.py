"""Every way in which a command refuses: exit codes, one line, nothing left behind."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvformat.cli.failure import one_line, plain
from kvformat.cli.foreign import parsing
from kvformat.errors import CODES, EXIT_CODES, UsageError
from tests.requirements import covers
from tests.test_cli_common import (
    MODEL,
    TOKENS,
    Files,
    build,
    damaged,
    is_one_error,
    make_kv,
    of_version,
    refused,
    run,
    verdict,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return build(tmp_path_factory.mktemp("cli"))


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def _text(path: Path) -> None:
    path.write_text("this is no array\n")


def _objects(path: Path) -> None:
    array = np.empty((2, 1, 1, 1, 1), object)
    array[...] = Bomb(path.parent / "exploded")
    np.save(path, array, allow_pickle=True)


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(path.parent / "exploded")))


def _truncated(path: Path) -> None:
    np.save(path, make_kv(20))
    path.write_bytes(path.read_bytes()[:-100])


def _cut_header(path: Path) -> None:
    np.save(path, make_kv(20))
    path.write_bytes(path.read_bytes()[:20])


def _code_in_header(path: Path) -> None:
    np.save(path, make_kv(20))
    path.write_bytes(path.read_bytes().replace(b"'descr'", b"__imp__"))


def _not_finite(path: Path) -> None:
    kv = make_kv(20)
    kv[1, 2, 13, 1, 5] = np.nan
    np.save(path, kv)


def _saved(make: Callable[[], Any]) -> Callable[[Path], None]:
    return lambda path: np.save(path, make())


BAD_INPUTS: dict[str, tuple[Callable[[Path], None], int, str, str]] = {
    "missing": (lambda _: None, 74, "io.not-found", "no such file"),
    "directory": (Path.mkdir, 74, "io.read", "directory"),
    "empty": (Path.touch, 64, "usage.argument", "neither"),
    "text": (_text, 64, "usage.argument", "neither"),
    "objects": (_objects, 64, "usage.argument", "never loaded"),
    "pickle": (_pickle, 64, "usage.argument", "neither"),
    "truncated": (_truncated, 64, "usage.argument", "truncated"),
    "cut header": (_cut_header, 64, "usage.argument", "cannot be read"),
    "code in header": (_code_in_header, 64, "usage.argument", "cannot be read"),
    "three axes": (_saved(lambda: make_kv(20)[0, 0]), 64, "input.shape", "[2, layers"),
    "three roles": (_saved(lambda: np.zeros((3, 1, 4, 1, 8), "f2")), 64, "input.shape", "[2, "),
    "no layers": (_saved(lambda: np.zeros((2, 0, 4, 1, 8), "f2")), 64, "input.shape", ""),
    "no dims": (_saved(lambda: np.zeros((2, 1, 4, 1, 0), "f2")), 64, "input.shape", ""),
    "float64": (_saved(lambda: make_kv(20, np.float64)), 64, "input.dtype", "float64"),
    "complex": (_saved(lambda: make_kv(20, np.complex64)), 64, "input.dtype", "complex64"),
    "text array": (_saved(lambda: np.full((2, 1, 4, 1, 8), "a")), 64, "input.dtype", "U1"),
    "fields": (_saved(lambda: np.zeros((2, 1, 4, 1, 8), "i1,i1")), 64, "input.dtype", "f0"),
    "raw": (_saved(lambda: make_kv(20).view("V2")), 64, "input.dtype", "--dtype"),
    "uint16": (_saved(lambda: make_kv(20).view("u2")), 64, "input.dtype", "--dtype"),
    "not finite": (_not_finite, 64, "input.non-finite", "group value, layer 2"),
}


@covers("ERR-1", "ERR-2", "ERR-3", "ERR-4", "ARI-7", "SEC-2", "PUB-1")
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_a_bad_input_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    make, exit_code, code, text = BAD_INPUTS[name]
    source = tmp_path / "in.npy"
    make(source)
    before = sorted(tmp_path.iterdir())
    result = refused(exit_code, code, "encode", source, tmp_path / "out.kvf", "--model", MODEL)
    assert text in result.stderr
    assert sorted(tmp_path.iterdir()) == before
    assert not result.stdout


def test_a_nan_is_named_by_its_place(tmp_path: Path) -> None:
    _not_finite(tmp_path / "in.npy")
    result = run("encode", tmp_path / "in.npy", tmp_path / "out.kvf", "--model", MODEL)
    assert "token 13" in result.stderr
    assert "head 1" in result.stderr


def _header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


BAD_SAFETENSORS = {
    "empty": b"",
    "short": b"\1\2\3",
    "huge header": b"\xff" * 16,
    "no json": _header(b"{{{{"),
    "a list": _header(b"[1]"),
    "bad metadata": _header(b'{"__metadata__":[1]}'),
    "bad tensor": _header(b'{"layers.0.key":7}'),
    "deep": _header(b"[" * 100_000),
    "outside": _header(b'{"layers.0.key":{"dtype":"F16","shape":[1,1,8],"data_offsets":[0,16]}}'),
    "negative": _header(b'{"layers.0.key":{"dtype":"F16","shape":[1,-1,8],"data_offsets":[16,0]}}'),
    "other size": _header(
        b'{"layers.0.key":{"dtype":"F16","shape":[1,1,8],"data_offsets":[0,8]}}12345678'
    ),
}


@covers("ERR-1", "ERR-4")
@pytest.mark.parametrize("name", BAD_SAFETENSORS)
def test_a_bad_safetensors_file_is_refused(tmp_path: Path, name: str) -> None:
    source = tmp_path / "in.safetensors"
    source.write_bytes(BAD_SAFETENSORS[name])
    refused(64, "usage.argument", "encode", source, tmp_path / "out.kvf", "--model", MODEL)
    assert list(tmp_path.iterdir()) == [source]


DIGITS = "9" * 5000


def _entry(shape: str, *, name: str = "layers.0.key", stop: str = "0") -> bytes:
    entry = f'{{"dtype":"F16","shape":{shape},"data_offsets":[0,{stop}]}}'
    return _header(f'{{"{name}":{entry}}}'.encode())


def _said(**metadata: str) -> bytes:
    """A good cache of one tensor with this metadata."""
    header = {
        "__metadata__": {"model_id": MODEL, **metadata},
        "layers.0.key": {"dtype": "F16", "shape": [1, 1, 8], "data_offsets": [0, 16]},
    }
    return _header(json.dumps(header).encode()) + bytes(16)


def _lineage(generations: str, quality: str = "a", profile: str = "null") -> bytes:
    text = f'{{"generations":{generations},"quality":"{quality}","profile":{profile}}}'
    return _said(**{"kvformat.lineage": text})


def _zero_axes() -> bytes:
    ids = '"token_ids":{"dtype":"I64","shape":[],"data_offsets":[16,24]}'
    key = '"layers.0.key":{"dtype":"F16","shape":[1,1,8],"data_offsets":[0,16]}'
    return _header(f"{{{key},{ids}}}".encode()) + bytes(24)


HOSTILE_SAFETENSORS: dict[str, tuple[str, bytes]] = {
    "huge empty shape": ("usage.argument", _entry(f"[0,{2**62},{2**62}]")),
    "empty shape beyond numpy": ("usage.argument", _entry(f"[0,{2**52},{2**52}]")),
    "100 axes": ("usage.argument", _entry(f"[{','.join('1' * 100)}]", stop="2") + b"ab"),
    "infinite side": ("usage.argument", _entry("[1e400,1,1]")),
    "no number": ("usage.argument", _entry("[NaN,1,1]")),
    "fraction": ("usage.argument", _entry("[0.5,1,1]")),
    "true": ("usage.argument", _entry("[true,1,1]", stop="2") + b"ab"),
    "digits in text": ("usage.argument", _entry('["1",1,1]', stop="2") + b"ab"),
    "infinite offset": ("usage.argument", _entry("[1,1,1]", stop="1e400")),
    "side of many digits": ("usage.argument", _entry(f"[{DIGITS},1,1]")),
    "shape is an object": ("usage.argument", _entry("{}")),
    "layer of many digits": ("input.shape", _entry("[0,1,1]", name=f"layers.{DIGITS}.key")),
    "layer beyond 64 bits": ("input.shape", _entry("[0,1,1]", name=f"layers.{'9' * 20}.key")),
    "surrogate in a name": ("usage.argument", _entry("[0,1,1]", name="\\ud800")),
    "UTF-16": ("usage.argument", _header('{"a":1}'.encode("utf-16"))),
    "not UTF-8": ("usage.argument", _header(b'{"\xff":1}')),
    "token_ids without an axis": ("input.shape", _zero_axes()),
    "num_layers of many digits": ("usage.argument", _said(num_layers=DIGITS)),
    "num_layers beyond the format": ("usage.argument", _said(num_layers="9" * 30)),
    "surrogate in the model": ("usage.argument", _said(model_id="m\ud800")),
    "surrogate in a key": ("usage.argument", _said(**{"\ud800": "x"})),
    "infinite lineage": ("input.identity", _lineage("1e400")),
    "lineage of many digits": ("input.identity", _lineage(DIGITS)),
    "lineage without number": ("input.identity", _lineage("true")),
    "surrogate in the lineage": ("input.identity", _lineage("2", "exact\\ud800")),
    "surrogate in the profile": ("input.identity", _lineage("2", "a", '"\\ud800"')),
    "lineage is a list": ("input.identity", _said(**{"kvformat.lineage": "[1]"})),
    "deep lineage": ("input.identity", _said(**{"kvformat.lineage": "[" * 100_000})),
}


@covers("ERR-1", "ERR-2", "ERR-4")
@pytest.mark.parametrize("name", HOSTILE_SAFETENSORS)
def test_a_hostile_safetensors_file_is_a_wrong_request(tmp_path: Path, name: str) -> None:
    code, data = HOSTILE_SAFETENSORS[name]
    source = tmp_path / "in.safetensors"
    source.write_bytes(data)
    model = () if b"model_id" in data else ("--model", MODEL)
    result = refused(64, code, "encode", source, tmp_path / "out.kvf", *model)
    assert len(result.stderr) < 1000
    assert list(tmp_path.iterdir()) == [source]


def test_the_cache_of_the_hostile_files_is_good(tmp_path: Path) -> None:
    source = tmp_path / "in.safetensors"
    source.write_bytes(_said(num_layers="7"))
    assert run("encode", source, tmp_path / "out.kvf").exit_code == 0
    source.write_bytes(_lineage("2", "balanced"))
    assert run("encode", source, tmp_path / "out.kvf", "--overwrite").exit_code == 0


def test_parsers_that_fail_are_one_error() -> None:
    for kind in (ValueError, OverflowError, RecursionError, MemoryError, KeyError, SyntaxError):
        with pytest.raises(UsageError) as caught, parsing("here", "no", next_step="Go"):
            raise kind("words")
        error = caught.value
        assert (error.code, error.where, error.next_step) == ("usage.argument", "here", "Go")
    with pytest.raises(UsageError) as caught, parsing("here", "no"):
        "\ud800".encode()
    for passing in (OSError, KeyboardInterrupt, AssertionError):
        with pytest.raises(passing), parsing("here", "no"):
            raise passing


ENCODE_OPTIONS = {
    "lineage digits": (64, "usage.argument", ["--lossy-source", f"near-lossless:{DIGITS}"]),
    "lineage beyond the format": (64, "usage.argument", ["--lossy-source", "small:" + "9" * 17]),
    "lineage of zero": (64, "usage.argument", ["--lossy-source", "small:0"]),
    "model is no text": (64, "usage.argument", ["--model", "\udcff"]),
    "revision is no text": (64, "usage.argument", ["--revision", "\udcff"]),
    "tokenizer is no text": (64, "usage.argument", ["--tokenizer", "\udcff"]),
    "adapter is no text": (64, "usage.argument", ["--adapter", "\udcff"]),
    "tracks are no text": (64, "usage.argument", ["--tracks", "\udcff"]),
    "endless ids": (64, "usage.argument", ["--token-ids", "/dev/zero"]),
    "unknown track": (64, "usage.argument", ["--tracks", "av1"]),
    "no track": (64, "usage.argument", ["--tracks", ""]),
    "exact hevc": (64, "usage.argument", ["--tracks", "exact/hevc"]),
    "unknown quality": (64, "usage.argument", ["--quality", "best"]),
    "unknown order": (64, "usage.argument", ["--order", "random"]),
    "alignment": (64, "usage.argument", ["--alignment", "3"]),
    "segment tokens": (64, "usage.argument", ["--segment-tokens", "0"]),
    "large segments": (64, "usage.argument", ["--segment-tokens", "70000"]),
    "workers": (64, "usage.argument", ["--workers", "0"]),
    "wrong dtype": (64, "input.dtype", ["--dtype", "float32"]),
    "same size dtype": (64, "input.dtype", ["--dtype", "bfloat16"]),
    "unknown dtype": (64, "usage.argument", ["--dtype", "int4"]),
    "unknown option": (64, "usage.argument", ["--frobnicate"]),
    "layers total": (64, "input.identity", ["--layers-total", "2"]),
    "heads total": (64, "input.identity", ["--heads-total", "1"]),
    "head start": (64, "input.identity", ["--head-start", "1", "--heads-total", "2"]),
    "weights": (64, "input.identity", ["--weights-digest", "md5:1"]),
    "lineage": (64, "usage.argument", ["--lossy-source", "exact"]),
    "salt without ids": (64, "usage.argument", ["--salt-file", "{salt}"]),
    "few ids": (64, "input.identity", ["--token-ids", "{salt}.ids"]),
    "missing ids": (74, "io.not-found", ["--token-ids", "{salt}.none"]),
    "position": (64, "input.identity", ["--token-ids", "{ids}", "--first-position", "7"]),
}


@covers("ERR-1", "ERR-4", "TRK-3", "LIM-1")
@pytest.mark.parametrize("name", ENCODE_OPTIONS)
def test_a_bad_option_of_encode(files: Files, tmp_path: Path, name: str) -> None:
    exit_code, code, options = ENCODE_OPTIONS[name]
    Path(f"{files.salt}.ids").write_text("1 2 3")
    options = [item.format(salt=files.salt, ids=files.ids) for item in options]
    target = tmp_path / "out.kvf"
    refused(exit_code, code, "encode", files.npy, target, "--model", MODEL, *options)
    assert not list(tmp_path.iterdir())


def test_encode_wants_a_model(files: Files, tmp_path: Path) -> None:
    result = refused(64, "input.identity", "encode", files.npy, tmp_path / "out.kvf")
    assert "--model" in result.stderr
    assert "model_id" in result.stderr


TARGETS = {
    "long name": (74, "io.write", "{folder}/" + "n" * 300 + ".kvf"),
    "long folder": (74, "io.write", "{folder}/" + "n" * 300 + "/out.kvf"),
    "very long": (74, "io.write", "n" * 5000),
    "existing": (74, "io.exists", "{folder}/salt"),
    "directory": (74, "io.exists", "{folder}"),
    "no directory": (74, "io.not-found", "{folder}/none/out.kvf"),
    "file as directory": (74, "io.", "{folder}/salt/out.kvf"),
    "device": (74, "io.exists", "/dev/null"),
    "unwritable": (74, "io.", "/proc/out.kvf"),
    "empty": (64, "usage.argument", ""),
    "standard output": (64, "usage.argument", "-"),
}


@covers("PUB-3", "ERR-4")
@pytest.mark.parametrize("name", TARGETS)
def test_a_bad_target(files: Files, name: str) -> None:
    exit_code, code, target = TARGETS[name]
    before = files.salt.read_bytes()
    target = target.format(folder=files.folder)
    result = run("encode", files.npy, target, "--model", MODEL)
    assert (result.exit_code, is_one_error(result.stderr)) == (exit_code, True)
    assert f"[{code}" in result.stderr
    assert files.salt.read_bytes() == before


def test_overwrite_replaces_files_only(files: Files) -> None:
    options = ("--model", MODEL, "--overwrite")
    refused(74, "io.exists", "encode", files.npy, "/dev/null", *options)
    refused(74, "io.exists", "encode", files.npy, files.folder, *options)
    result = refused(64, "usage.argument", "encode", files.npy, files.npy, *options)
    assert "replace the input" in result.stderr


DECODE_OPTIONS = {
    "track is no text": (64, "usage.argument", ["--track", "\udcff"]),
    "roles are no text": (64, "usage.argument", ["--roles", "\udcff"]),
    "model is no text": (64, "usage.argument", ["--expect-model", "\udcff"]),
    "tokens outside": (64, "usage.selection", ["--tokens", f"0:{TOKENS + 1}"]),
    "token outside": (64, "usage.selection", ["--tokens", f"{TOKENS}"]),
    "layers outside": (64, "usage.selection", ["--layers", "3:5"]),
    "heads outside": (64, "usage.selection", ["--heads", "1:3"]),
    "heads behind": (64, "usage.selection", ["--heads", "2:"]),
    "unknown role": (64, "usage.selection", ["--roles", "latent"]),
    "no role": (64, "usage.argument", ["--roles", ","]),
    "unknown track": (64, "usage.selection", ["--track", "small/zstd"]),
    "backwards": (64, "usage.argument", ["--tokens", "5:3"]),
    "nothing": (64, "usage.argument", ["--tokens", "5:5"]),
    "negative": (64, "usage.argument", ["--tokens", "-1:"]),
    "words": (64, "usage.argument", ["--layers", "all"]),
    "step": (64, "usage.argument", ["--layers", "0:4:2"]),
    "empty text": (64, "usage.argument", ["--heads", ""]),
    "very long": (64, "usage.argument", ["--tokens", "9" * 5000]),
    "wrong model": (76, "identity.field", ["--expect-model", "another/model"]),
    "wrong revision": (76, "identity.field", ["--expect-revision", "r2"]),
    "short digest": (64, "usage.argument", ["--expect-weights-digest", "sha256:" + "0" * 63]),
    "other digest": (64, "usage.argument", ["--expect-weights-digest", "md5:" + "0" * 32]),
    "upper-case digest": (64, "usage.argument", ["--expect-weights-digest", "blake3:" + "A" * 64]),
    "bare digest": (64, "usage.argument", ["--expect-weights-digest", "0" * 64]),
    "no weights": (76, "identity.missing", ["--expect-weights-digest", "sha256:" + "0" * 64]),
    "no tokenizer": (76, "identity.missing", ["--expect-tokenizer", "t"]),
    "wrong tokens": (76, "identity.tokens", ["--expect-token-ids", "{wrong}"]),
    "late tokens": (76, "identity.tokens", ["--expect-token-ids", "{late}"]),
    "salt": (76, "identity.tokens", ["--expect-token-ids", "{ids}", "--salt-file", "{salt}"]),
    "salt alone": (64, "usage.argument", ["--salt-file", "{salt}"]),
    "empty salt": (
        64,
        "usage.argument",
        ["--expect-token-ids", "{ids}", "--salt-file", "{empty}"],
    ),
    "no ids": (64, "usage.argument", ["--expect-token-ids", "{npy}"]),
}


@covers("ERR-1", "ERR-4", "PAR-4", "TOK-11", "TOK-13")
@pytest.mark.parametrize("name", DECODE_OPTIONS)
def test_a_bad_request_of_decode(files: Files, tmp_path: Path, name: str) -> None:
    exit_code, code, options = DECODE_OPTIONS[name]
    ids = list(range(1000, 1000 + TOKENS))
    texts = {"wrong": [1, *ids[1:]], "late": [*ids[:-1], 5], "empty": []}
    places = {key: files.folder / f"{key}.txt" for key in texts}
    for key, values in texts.items():
        places[key].write_text(" ".join(str(value) for value in values))
    options = [
        item.format(salt=files.salt, ids=files.ids, npy=files.npy, **places) for item in options
    ]
    output = tmp_path / "out.npy"
    refused(exit_code, code, "decode", files.bound, "--output", output, *options)
    assert not list(tmp_path.iterdir())


@covers("TOK-12", "LEN-3")
def test_what_an_artifact_cannot_promise(files: Files, tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    ids = ("--expect-token-ids", files.ids)
    refused(76, "identity.missing", "decode", files.unbound, "--output", output, *ids)
    refused(76, "identity.tokens", "decode", files.salted, "--output", output, *ids)
    wanted = ("--output", output, "--tokens", "0:10")
    refused(76, "tokens.length", "decode", files.window, *wanted)
    assert not list(tmp_path.iterdir())
    assert run("decode", files.window, *wanted, "--allow-partial").exit_code == 0


@covers("ERR-1", "ERR-4", "PAR-2")
@pytest.mark.parametrize("command", ["inspect", "verify", "decode", "extract"])
def test_every_command_refuses_what_is_no_artifact(
    files: Files, tmp_path: Path, command: str
) -> None:
    suffix = {"decode": ".npy", "extract": ".hevc"}.get(command)
    options = ["--output", tmp_path / f"out{suffix}"] if suffix else []
    cases = {
        "none.kvf": (74, "io.not-found"),
        "": (64, "usage.argument"),
        ".": (74, "io.read"),
        "kv.npy": (65, "header.magic"),
    }
    for name, (exit_code, code) in cases.items():
        url = files.folder / name if name else ""
        refused(exit_code, code, command, url, *options)
    refused(69, "version.unknown", command, of_version(files, 99), *options)
    short = files.folder / "short.kvf"
    short.write_bytes(files.bound.read_bytes()[:-1])
    refused(65, "file.size", command, short, *options)
    refused(64, "usage.argument", command, "nosuchprotocol://bucket/a.kvf", *options)
    assert not list(tmp_path.iterdir())


@covers("ERR-4", "PAR-2", "CNV-5")
def test_damage_leaves_no_output(files: Files, tmp_path: Path) -> None:
    path = damaged(files)
    options = ("--output", tmp_path / "out.npy")
    refused(65, "segment.digest", "decode", path, *options)
    refused(65, "segment.digest", "verify", path)
    assert not list(tmp_path.iterdir())
    assert run("decode", path, *options, "--track", "hevc").exit_code == 0


@covers("ERR-1", "ERR-2", "ERR-3")
def test_verdicts_as_json(files: Files) -> None:
    cases = [
        (files.bound, (), "ok", None),
        (damaged(files, "again.kvf"), (), "invalid", "segment.digest"),
        (of_version(files, 98), (), "unsupported", "version.unknown"),
        (files.folder / "none.kvf", (), "io_error", "io.not-found"),
        (files.bound, ("--expect-model", "x"), "mismatch", "identity.field"),
        (files.bound, ("--workers", "many"), "usage", "usage.argument"),
        (files.bound, ("--no-such-option",), "usage", "usage.argument"),
    ]
    for path, options, name, code in cases:
        result = run("verify", "--json", path, *options)
        value = verdict(result)
        assert (value["verdict"], value["code"]) == (name, code)
        assert result.exit_code == EXIT_CODES[name]
        assert code is None or code in CODES[name]


@covers("ERR-1")
def test_other_commands_also_fail_as_json(files: Files, tmp_path: Path) -> None:
    result = run("inspect", "--json", files.npy)
    assert verdict(result)["code"] == "header.magic"
    result = run("encode", "--json", files.npy, tmp_path / "out.kvf")
    assert verdict(result)["code"] == "input.identity"


def test_nothing_is_written_to_standard_output(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases: list[tuple[object, ...]] = [
        ("encode", files.npy, "-", "--model", MODEL),
        ("decode", files.bound, "--output", "-"),
        ("extract", files.bound, "--output", "-"),
        ("demo", "--keep", "-"),
    ]
    for arguments in cases:
        result = refused(64, "usage.argument", *arguments)
        assert "standard output" in result.stderr
        assert not result.stdout
    assert not list(tmp_path.iterdir())
    assert run("encode", files.npy, "./-", "--model", MODEL, "--tracks", "zstd").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["-"]


@pytest.mark.parametrize(
    "options",
    [("--tracks", "av1"), ("--quality", "best"), ("--lossy-source", "exact")],
)
def test_a_wrong_request_is_told_before_an_existing_output(
    files: Files, options: tuple[str, str]
) -> None:
    arguments = ("encode", files.npy, files.salt, "--model", MODEL)
    refused(64, "usage.argument", *arguments, *options)
    refused(74, "io.exists", *arguments)
    wanted = ("decode", files.bound, "--output", files.npy)
    refused(64, "usage.argument", *wanted, "--expect-weights-digest", "x")
    refused(74, "io.exists", *wanted)


def test_digests_are_short_for_people_and_whole_in_json(files: Files) -> None:
    path = damaged(files, "digests.kvf")
    result = refused(65, "segment.digest", "verify", path)
    assert not re.search(r"[0-9a-f]{13}", result.stderr)
    assert re.search(r"\b[0-9a-f]{12}\.\.\.", result.stderr)
    value = verdict(run("verify", "--json", path))
    assert re.fullmatch(r"[0-9a-f]{64}", value["expected"])


def test_a_path_is_never_shortened(tmp_path: Path) -> None:
    for name in ("a" * 64, "a" * 64 + ".kvf"):
        assert str(tmp_path / name) in run("verify", tmp_path / name).stderr
    name = "sha256:" + "a" * 64
    assert plain(name) == "sha256:" + "a" * 12 + "..."
    assert plain(f"dir/{'a' * 64} {'b' * 64}.") == f"dir/{'a' * 64} {'b' * 12}...."


def test_the_next_step_has_a_line_of_its_own(files: Files) -> None:
    result = refused(74, "io.not-found", "verify", files.folder / "none.kvf")
    assert result.stderr.splitlines()[1] == "  try: check the path"
    result = refused(64, "usage.argument", "verify", "--frobnicate")
    assert result.stderr.splitlines()[1].endswith(" verify --help")


def test_lists_are_values_with_commas() -> None:
    cases = {
        "['key', 'value']": "key, value",
        "('a', \"b's\")": "a, b's",
        "('a',)": "a",
        "one of ['a'], not": "one of a, not",
        "[]": "none",
        "[256, 300]": "256, 300",
        "tokens from 0 to one of [256, 300]": "tokens from 0 to one of 256, 300",
        "[2, layers, tokens, heads, head_dim]": "[2, layers, tokens, heads, head_dim]",
        "int64 [3, 4]": "int64 [3, 4]",
        "(at 'x)": "(at 'x)",
        "[red]x[/red]": "[red]x[/red]",
    }
    for text, wanted in cases.items():
        assert plain(text) == wanted
    assert plain("[3, 4]", shape=True) == "[3, 4]"  # a shape is written like that everywhere
    error = UsageError("usage.argument", "m", expected=["a", "b"], found=[1, 2], next_step="Go")
    assert one_line(error) == "[usage.argument] m; expected a, b, found 1, 2"


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [("verfy", "kvformat verify"), ("DECODE", "kvformat decode"), ("zzz", "kvformat --help")],
)
def test_an_unknown_command_has_a_neighbour(typed: str, suggested: str) -> None:
    result = refused(64, "usage.argument", typed)
    assert result.stderr.splitlines()[1] == f"  try: {suggested}"
    assert typed in result.stderr


def test_decode_fails_as_json(files: Files, tmp_path: Path) -> None:
    output = tmp_path / "a.npy"
    cases: list[tuple[int, str, tuple[object, ...]]] = [
        (65, "segment.digest", (damaged(files, "json.kvf"), "--output", output)),
        (64, "usage.selection", (files.bound, "--output", output, "--tokens", "900:")),
        (64, "usage.argument", (files.bound, "--output", tmp_path / "a.txt")),
        (76, "identity.field", (files.bound, "--output", output, "--expect-model", "x")),
    ]
    for exit_code, code, arguments in cases:
        result = run("decode", "--json", *arguments)
        assert (result.exit_code, verdict(result)["code"]) == (exit_code, code)
    assert not list(tmp_path.iterdir())


LONG = "n" * 300


@covers("ERR-1", "ERR-4")
@pytest.mark.parametrize("url", ["file://[", "https://[::1", LONG, "n" * 5000, "zip://x::y"])
def test_a_strange_url_is_never_a_bug(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (("inspect", url), ("decode", url, "--output", tmp_path / "a.npy")):
        result = run(*arguments)
        assert (result.exit_code in {64, 74}, is_one_error(result.stderr)) == (True, True)
    assert not list(tmp_path.iterdir())


@covers("ERR-4")
def test_a_long_output_name_cannot_be_written(files: Files, tmp_path: Path) -> None:
    for arguments in (
        ("decode", files.bound, "--output", tmp_path / f"{LONG}.npy"),
        ("extract", files.bound, "--output", tmp_path / f"{LONG}.hevc"),
        ("demo", "--keep", tmp_path / LONG),
    ):
        refused(74, "io.write", *arguments)
    refused(74, "io.read", "encode", LONG, tmp_path / "a.kvf", "--model", MODEL)
    assert not list(tmp_path.iterdir())
