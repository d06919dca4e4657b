"""Real processes whose streams are closed or full, or that are interrupted at start-up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvformat.cli.show import make_console
from tests.requirements import covers
from tests.test_cli_common import MODEL, Files, build, is_one_error, run

pytestmark = pytest.mark.skipif(os.name != "posix", reason="shells, signals")
Argument = str | bytes | Path
PROGRAM = (sys.executable, "-m", "kvformat")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return build(tmp_path_factory.mktemp("cli"))


def shell(redirection: str, *arguments: Argument, **env: str) -> subprocess.CompletedProcess[bytes]:
    """The program with a redirection of the shell, for example ``2>&-``."""
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *PROGRAM, *arguments],
        env={**os.environ, **env},
        capture_output=True,
        check=False,
        timeout=60,
    )


def cases(files: Files, folder: Path) -> list[tuple[int, Sequence[Argument]]]:
    """Exit codes and commands, one for each kind of message on standard error."""
    return [
        (0, ("decode", files.unbound, "--output", folder / "o.npy", "--overwrite")),  # a warning
        (65, ("verify", files.npy)),
        (64, ()),
    ]


@covers("ERR-1", "ERR-2")
@pytest.mark.parametrize("redirection", ["2>&- <&-", "2>/dev/full"])
def test_standard_error_never_changes_the_verdict(
    files: Files, tmp_path: Path, redirection: str
) -> None:
    if "full" in redirection and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    for code, arguments in cases(files, tmp_path):
        found = shell(redirection, *arguments, KVFORMAT_DEBUG="1")
        assert (found.returncode, found.stderr) == (code, b""), arguments
        assert bool(found.stdout) == (code == 0)


@covers("ERR-1", "ERR-2", "ERR-4")
def test_a_closed_standard_output_is_a_failure_of_the_storage(files: Files, tmp_path: Path) -> None:
    silent: list[Sequence[Argument]] = [
        ("inspect", files.unbound),
        ("verify", "--json", files.unbound),
        ("--help",),
        ("encode", files.npy, tmp_path / "a.kvf", "--model", MODEL),
        ("decode", files.unbound, "--output", tmp_path / "a.npy"),
    ]
    for arguments in silent:
        found = shell(">&-", *arguments)
        errors = found.stderr.decode()
        assert (found.returncode, is_one_error(errors)) == (74, True), (arguments, errors)
        assert errors.startswith("kvformat: error [io.write]")
        assert "standard output" in errors
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    for code, arguments in cases(files, tmp_path):
        if code:
            found = shell(">&-", *arguments)
            assert (found.returncode, found.stderr != b"") == (code, True)


@covers("ERR-1")
def test_no_file_takes_the_place_of_a_closed_stream(files: Files, tmp_path: Path) -> None:
    found = shell("2>&- <&-", "encode", files.npy, tmp_path / "a.kvf", "--model", MODEL)
    assert found.returncode == 0
    assert shell("<&- >&- 2>&-", "inspect", tmp_path / "a.kvf").returncode == 74
    assert run("verify", tmp_path / "a.kvf").exit_code == 0


SLOW = "import os, time\nos.write(1, b'importing')\ntime.sleep(60)\n"


@covers("ERR-2")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("module", ["click", "numpy"])
def test_an_interruption_at_start_up_is_no_traceback(
    tmp_path: Path, module: str, number: int, code: int
) -> None:
    """``click`` is what the program imports first, ``numpy`` what a subcommand does."""
    (tmp_path / f"{module}.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [*PROGRAM, "inspect", "x.kvf"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(9) == b"importing"
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (code, b"", b"")


def test_what_is_imported_before_the_handlers_takes_no_time() -> None:
    code = (
        "import sys\nimport kvformat.cli.main\n"
        "print(sorted({'click', 'numpy', 'json', 'traceback', 'kvformat.errors'}"
        " & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@covers("ERR-2")
def test_arguments_that_are_no_text(files: Files, tmp_path: Path) -> None:
    target = tmp_path / "a.kvf"
    found = shell("", "encode", files.npy, target, "--model", b"\xff\xfe")
    assert (found.returncode, is_one_error(found.stderr.decode())) == (64, True)
    assert b"UTF-8" in found.stderr
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    name = "gr\u00fc\u00dfe"
    found = shell("", "encode", files.npy, target, "--model", name.encode(), **plain)
    assert found.returncode == 0, found.stderr
    assert run("verify", target, "--expect-model", name).exit_code == 0
    odd = bytes(tmp_path) + b"/\xff\xfe.kvf"
    os.rename(target, odd)  # noqa: PTH104 - bytes
    assert shell("", "inspect", odd).returncode == 0  # a file name need not be text


@pytest.mark.parametrize("columns", ["9" * 5000, "\u00b2", "0", "-1", "many", ""])
def test_a_width_that_is_none(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with Path(os.devnull).open("w") as stream:
        assert make_console(stream).width == 100


def test_a_full_side_file_is_not_read_to_its_end(tmp_path: Path, files: Files) -> None:
    np.save(tmp_path / "ids.npy", np.arange(1000, 1300, dtype="<i8"))
    result = run("verify", files.bound, "--expect-token-ids", tmp_path / "ids.npy")
    assert result.exit_code == 0
    result = run("verify", files.bound, "--expect-token-ids", "/dev/zero")
    assert (result.exit_code, bool(re.search("too large", result.stderr))) == (64, True)
