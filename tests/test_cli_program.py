"""The program as a whole: help, version, doctor, demo, real processes, interruptions."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import kvformat
from kvformat.cli import demo, doctor
from kvformat.cli.failure import INTERNAL, INTERRUPTED, answer
from kvformat.cli.program import COMMANDS, cli
from kvformat.codecs.registry import CODECS
from kvformat.errors import EXIT_CODES
from tests.requirements import covers
from tests.test_cli_common import MODEL, Files, build, is_one_error, make_kv, run

TOOLS = Path(__file__).parent.parent / "tools"
PROGRAM = (sys.executable, "-m", "kvformat")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return build(tmp_path_factory.mktemp("cli"))


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "COLUMNS": "100"} | options.pop("env", {})
    return subprocess.Popen(
        [*PROGRAM, *(str(item) for item in arguments)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options,
        env=environment,
    )


@pytest.mark.parametrize("command", ["", *COMMANDS])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_fits_the_screen(command: str, option: str) -> None:
    result = run(*([command] if command else []), option)
    assert result.exit_code == 0
    assert "Usage: " in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
    assert not result.stderr


def test_the_list_of_commands_is_complete() -> None:
    context = click.Context(cli)
    for name, text in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert text in run("--help").stdout.replace("\n" + " " * 11, " ")
        assert all(item.help for item in command.params if isinstance(item, click.Option))


def test_version() -> None:
    text = run("--version").stdout
    assert kvformat.__version__ in text
    assert f"format version {kvformat.FORMAT_VERSION}" in text


@covers("ERR-2")
def test_no_command_is_a_wrong_request() -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (64, "")
    assert "Commands:" in result.stderr
    assert run("frobnicate").exit_code == 64


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_does_not_load_what_takes_time(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom kvformat.cli.program import cli\n"
        f"try: cli.main({arguments!r})\nexcept SystemExit: pass\n"
        "print(sorted({'rich', 'av', 'fsspec', 's3fs', 'aiohttp', 'safetensors', 'torch'}"
        " & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.strip() == "[]"


@covers("ERR-1", "ERR-2")
def test_real_processes_end_with_the_verdict(files: Files, tmp_path: Path) -> None:
    cases = [
        (0, ("inspect", files.bound)),
        (64, ("inspect",)),
        (65, ("verify", files.npy)),
        (74, ("verify", files.folder / "none.kvf")),
        (76, ("decode", files.bound, "--output", tmp_path / "a.npy", "--expect-model", "x")),
    ]
    for code, arguments in cases:
        with start(*arguments) as process:
            output, errors = process.communicate(timeout=60)
            assert process.returncode == code
            assert "Traceback" not in output + errors
            assert is_one_error(errors) if code else not errors
    assert not list(tmp_path.iterdir())


def test_a_closed_pipe_is_no_news(files: Files) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start("inspect", files.bound, stdout=writing) as process:
        os.close(writing)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (74, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output(files: Files) -> None:
    with Path("/dev/full").open("w") as full:
        for arguments in (("verify", "--json", files.bound), ("inspect", files.bound)):
            with start(*arguments, stdout=full) as process:
                _, errors = process.communicate(timeout=60)
            assert process.returncode == 74
            assert errors.startswith("kvformat: error [io.write]")
            assert is_one_error(errors)
        with start("verify", "--json", files.npy, stdout=full) as process:
            _, errors = process.communicate(timeout=60)
        assert (process.returncode, is_one_error(errors)) == (65, True)


def test_names_that_the_terminal_cannot_show(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "gr\u00fc\u00dfe-\u6a21\u578b.kvf"
    path.write_bytes(files.unbound.read_bytes())
    env = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    with start("inspect", path, env=env) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output.isascii()


@covers("ERR-4", "PUB-1")
@pytest.mark.skipif(os.name != "posix", reason="signals, pseudo-terminals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    import pty

    source, target = tmp_path / "in.npy", tmp_path / "out"
    np.save(source, np.tile(make_kv(1000), (1, 8, 6, 1, 1)))
    target.mkdir()
    arguments = ("encode", source, target / "a.kvf", "--model", MODEL, "--workers", "1")
    leader, follower = pty.openpty()
    with start(*arguments, stderr=follower, env={"TERM": "xterm"}) as process:
        os.close(follower)
        shown = os.read(leader, 4096)
        while b"encoding" not in shown:  # the progress bar: the long work has begun
            shown += os.read(leader, 4096)
        time.sleep(0.2)
        process.send_signal(number)
        shown += read_all(leader)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert (output, b"Traceback" in shown) == ("", False)
    assert not list(target.iterdir())


def read_all(leader: int) -> bytes:
    """What a pseudo-terminal shows until its other end closes."""
    shown = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(leader, 4096):
            shown += chunk
    os.close(leader)
    return shown


@covers("ERR-2")
def test_a_bug_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(kind: type[BaseException]) -> int:
        def act() -> None:
            raise kind("surprise\nwith two lines")

        return answer(act, as_json=True)

    monkeypatch.delenv("KVFORMAT_DEBUG", raising=False)
    for kind, code in ((ValueError, 70), (MemoryError, 70), (OSError, 74)):
        assert fail(kind) == code
        output, errors = capsys.readouterr()
        assert (output, errors.count("\n")) == ("", 1)
    assert fail(KeyboardInterrupt) == 130
    monkeypatch.setenv("KVFORMAT_DEBUG", "1")
    assert fail(ValueError) == 70
    assert "Traceback" in capsys.readouterr().err


def test_doctor_tries_the_codecs() -> None:
    value = json.loads(run("doctor", "--json").stdout)
    assert all(state.startswith("works") for state in value["codecs"].values())
    assert set(value["codecs"]) == {"hevc", "zstd", "stored"}
    assert value["packages"]["numpy"] == np.__version__
    assert value["video_hardware"]["nvidia"]
    text = run("doctor").stdout
    for word in ("libavcodec", "blake3", "works", "cores", "built in"):
        assert word in text


@covers("ERR-1")
@pytest.mark.parametrize("fault", ["raises", "lies"])
def test_doctor_notices_a_broken_codec(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    class Broken:
        name = "zstd"

        def encode(self, integers: Any, shape: Any) -> bytes:
            del shape
            if fault == "raises":
                raise ImportError("no zstd here")
            return (255 - integers).tobytes()

        def decode(self, *arguments: Any, **options: Any) -> Any:
            return CODECS["stored"].decode(*arguments, **options)

        def encoder(self) -> str:
            raise ImportError("no zstd here")

    monkeypatch.setitem(CODECS, "zstd", Broken())  # type: ignore[arg-type]
    assert doctor._try_codec("zstd").startswith("does not work")
    result = run("doctor")
    assert result.exit_code == 69
    assert "[codec.unavailable]" in result.stderr


@covers("CNV-5", "TOK-11", "ARI-8")
def test_demo_tells_the_whole_story(tmp_path: Path) -> None:
    result = run("demo", "--keep", tmp_path / "new")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) < 90
    copied = lines.index("Left for you:")  # below, lines are to be copied
    assert all(len(line) <= 100 for line in lines[:copied])
    text = " ".join(result.stdout.split())
    for word in (
        "near-lossless/hevc",
        "exact/zstd",
        "0 0 yes",
        "[segment.digest]",
        "[identity.tokens]",
        "86 tokens are very few",
        "Identity: what this is the cache of",
        "1 block of up to 256 tokens",
        "error on values is intended",
        "record 17",
        str(tmp_path / "new" / "prefix.kvf"),
        str(tmp_path / "new" / "tokens.json"),
    ):
        assert word in text
    kept = tmp_path / "new"
    assert sorted(path.name for path in kept.iterdir()) == ["prefix.kvf", "tokens.json"]
    ids = json.loads((kept / "tokens.json").read_text())
    assert len(ids) == 86
    verified = run("verify", kept / "prefix.kvf", "--expect-token-ids", kept / "tokens.json")
    assert (verified.exit_code, "the first 86 agree" in verified.stdout) == (0, True)
    for name in ("prefix.kvf", "tokens.json"):
        result = run("demo", "--keep", kept)
        assert (result.exit_code, "io.exists" in result.stderr) == (74, True)
        (kept / name).unlink()


def test_a_demo_that_fails_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "verify", lambda path: None if path.name == "x" else 1 / 0)
    assert run("demo", "--keep", tmp_path).exit_code == 70
    assert not list(tmp_path.iterdir())


def test_demo_cleans_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("demo").exit_code == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
def test_progress_shows_on_a_terminal_only(files: Files) -> None:
    import pty

    leader, follower = pty.openpty()
    with start("verify", files.bound, stderr=follower, env={"TERM": "xterm"}) as process:
        os.close(follower)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"verifying" in read_all(leader)
    assert output.startswith("ok ")


def test_help_lists_every_exit_code() -> None:
    text = " ".join(run("--help").stdout.split())
    codes = {int(number) for number in re.findall(r"\b(?:0|[0-9]{2,3})\b", text.split("codes:")[1])}
    assert {*EXIT_CODES.values(), INTERNAL, INTERRUPTED} <= codes


@pytest.mark.parametrize("columns", [40, 50, 60])
def test_narrow_terminals_cut_nothing(files: Files, tmp_path: Path, columns: int) -> None:
    target = tmp_path / "a.kvf"
    encoding = ("encode", files.npy, target, "--model", MODEL, "--tracks", "hevc,zstd,exact")
    for arguments in (("inspect", files.bound), encoding, ("demo",)):
        narrow = run(*arguments, columns=columns)
        wide = run(*arguments, *(["--overwrite"] if "encode" in arguments else []))
        assert (narrow.exit_code, wide.exit_code) == (0, 0)
        assert "\u2026" not in narrow.stdout
        shown = narrow.stdout.split("Left for you:")[0].splitlines()
        assert all(len(line) <= columns for line in shown if "kvformat demo" not in line)
        for line in wide.stdout.split("Tracks\n")[-1].splitlines():
            if re.match(r"  (near-lossless|exact)/", line):
                for cell in line.split():
                    assert cell in narrow.stdout.split()


def tool(name: str, *arguments: object, path: Path) -> subprocess.CompletedProcess[str]:
    """A tool in a Python in which torch cannot be imported."""
    (path / "torch.py").write_text("raise ImportError('not here', name='torch')\n")
    return subprocess.run(
        [sys.executable, TOOLS / name, *(str(item) for item in arguments)],
        env={**os.environ, "PYTHONPATH": str(path), "COLUMNS": "100"},
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["capture_kv.py", "model_check.py"])
def test_tools_without_torch(tmp_path: Path, name: str) -> None:
    found = tool(name, "--help", path=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert "usage: " in found.stdout
    arguments = ("--output", "a.safetensors") if name == "capture_kv.py" else ("a", "--fp8")
    found = tool(name, *arguments, path=tmp_path)
    assert found.returncode == 2
    assert found.stderr.startswith("error: package torch is not installed")
    assert "pip install" in found.stderr
    assert found.stderr.count("\n") == 1


def test_bench_takes_the_names_of_tracks_that_encode_takes(tmp_path: Path) -> None:
    for options, word in ((("--tracks", "av1"), "unknown codec"), (("none.npy",), "no such file")):
        found = tool("bench.py", *options, path=tmp_path)
        assert (found.returncode, "Traceback" in found.stderr) == (2, False)
        assert word in found.stderr
    found = tool("bench.py", "--quick", "--json", "--tracks", "stored", path=tmp_path)
    assert found.returncode == 0, found.stderr
    assert [item["track"] for item in json.loads(found.stdout)["tracks"]] == [
        "near-lossless/stored"
    ]
