"""Reading in processes that fork, are interrupted, or end in the middle; secrets in URLs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvformat
from kvformat import KvformatError, StorageError
from kvformat.storage import Transport
from kvformat.storage.base import public_name, shown, without_secrets
from tests.faulty_server import Asked, RawServer, Wire, part, raw_server
from tests.remote import arrays, eventually, local, nothing_left, ordinary, threads

DATA = ordinary()
ROOT = Path(__file__).parent.parent


def held(asked: Asked) -> Wire:
    """Behind the front nothing but the head comes, and one half of a segment."""
    if not asked.first:
        return Wire(part(DATA, asked))
    return Wire(part(DATA, asked)[:20_000], "hold")


@pytest.fixture
def holding() -> Iterator[RawServer]:
    with raw_server(held) as server:
        yield server


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs ``code`` with every warning shown."""
    return subprocess.Popen(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out.strip(), err.strip()


ENDINGS = {
    "not closed": "",
    "dropped": "del stream",
    "in a cycle": "knot = [stream]; knot.append(knot); del stream, knot",
    "held by a module": "sys.modules['held'] = stream",
    "an exit": "sys.exit(0)",
    "a second stream": "again = artifact.stream(track='exact/zstd')",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_process_ends_while_a_stream_is_open(holding: RawServer, ending: str) -> None:
    """At once, and without a word."""
    code = f"""
import sys, kvformat
artifact = kvformat.open(sys.argv[1])
stream = artifact.stream(track="exact/zstd")
print("begun")
{ending}
"""
    assert outcome(python(code, holding.url())) == (0, "begun", "")


def test_a_process_ends_behind_some_blocks() -> None:
    code = """
    import sys, kvformat
    artifact = kvformat.open(sys.argv[1])
    stream = artifact.stream(track="exact/zstd")
    for _ in range(5):
        next(stream)
    print("begun")
    """
    with raw_server(lambda asked: Wire(part(DATA, asked))) as server:
        assert outcome(python(code, server.url())) == (0, "begun", "")


def interrupted(process: subprocess.Popen[str], server: RawServer) -> tuple[int, str, str]:
    assert eventually(lambda: len(server.asked) > 1)
    process.send_signal(signal.SIGINT)
    return outcome(process)


@pytest.mark.parametrize(
    "call",
    [
        "artifact.read(track='exact/zstd')",
        "list(artifact.stream(track='exact/zstd'))",
        "kvformat.verify(sys.argv[1], in_child=False)",
        "kvformat.copy(sys.argv[1], sys.argv[2])",
    ],
)
def test_an_interruption_of_a_read_is_raised_at_once(
    holding: RawServer, tmp_path: Path, call: str
) -> None:
    code = f"""
import sys, threading, time, kvformat
def left():
    names = [item.name for item in threading.enumerate() if item.name.startswith("kvformat")]
    return [name for name in names if not name.startswith("kvformat-aio")]  # a pool that stays
try:
    with kvformat.open(sys.argv[1]) as artifact:
        {call}
except KeyboardInterrupt:
    stop = time.monotonic() + 20
    while "stream" in {call!r} and left() and time.monotonic() < stop:
        time.sleep(0.01)  # a stream that nobody closed ends a moment later
    print("interrupted", left())
"""
    process = python(code, holding.url(), str(tmp_path / "a.kvf"))
    assert interrupted(process, holding) == (0, "interrupted []", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["decode", "verify", "cp"])
def test_an_interruption_of_a_command(holding: RawServer, tmp_path: Path, command: str) -> None:
    arguments = [command, holding.url()]
    if command == "decode":
        arguments += ["--output", str(tmp_path / "a.npy"), "--track", "exact/zstd"]
    elif command == "cp":
        arguments.append(str(tmp_path / "a.kvf"))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvformat", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    code, _, err = interrupted(process, holding)
    assert code == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_while_opening() -> None:
    with raw_server(lambda _: Wire(b"", "hold")) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvformat", "inspect", server.url()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert eventually(lambda: bool(server.asked))
        process.send_signal(signal.SIGINT)
        code, out, err = outcome(process)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_a_fork_may_read_again_but_not_what_was_open() -> None:
    """The event loop of fsspec is not in the child; waiting for it would hang."""
    code = """
    import os, sys, warnings
    import kvformat
    warnings.simplefilter("ignore", DeprecationWarning)
    artifact = kvformat.open(sys.argv[1])
    before = artifact.read(track="exact/zstd").kv.tobytes()
    stream = artifact.stream(track="exact/zstd")
    next(stream)
    child = os.fork()
    if not child:
        codes = []
        for call in (lambda: artifact.read(track="exact/zstd"), lambda: list(stream)):
            try:
                call()
            except kvformat.KvformatError as error:
                codes.append(error.code)
        stream.close()
        artifact.close()
        with kvformat.open(sys.argv[1]) as again:
            same = again.read(track="exact/zstd").kv.tobytes() == before
        os._exit(0 if codes == ["usage.argument"] * 2 and same else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(len(list(stream)) > 1, artifact.read(track="exact/zstd").kv.tobytes() == before)
    artifact.close()
    """
    with raw_server(lambda asked: Wire(part(DATA, asked))) as server:
        assert outcome(python(code, server.url())) == (0, "0\nTrue True", "")


def test_the_event_loop_of_fsspec_is_not_blocked() -> None:
    import asyncio

    import fsspec

    with raw_server(lambda asked: Wire(part(DATA, asked))) as server, nothing_left():
        artifact = kvformat.open(server.url())

        async def read() -> None:
            artifact.read(track="exact/zstd")

        future = asyncio.run_coroutine_threadsafe(read(), fsspec.asyn.get_loop())
        with pytest.raises(kvformat.UsageError, match="event loop"):
            future.result(60)
        artifact.close()


def test_many_threads_read_one_artifact_and_one_closes_it() -> None:
    part_of: dict[str, Any] = {"tokens": (300, 900), "track": "exact/zstd"}
    right = local(DATA, **part_of)
    problems: list[object] = []
    with raw_server(lambda asked: Wire(part(DATA, asked))) as server, nothing_left():
        artifact = kvformat.open(server.url())
        begin = threading.Barrier(5)

        def read() -> None:
            begin.wait()
            try:
                while True:
                    if arrays(artifact.read(**part_of)) != right:
                        problems.append("wrong bytes")
            except KvformatError as error:
                if error.code != "usage.argument":
                    problems.append(error)
            except BaseException as error:
                problems.append(error)

        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        begin.wait()
        assert arrays(artifact.read(**part_of)) == right
        artifact.close()
        for reader in readers:
            reader.join()
        assert threads() == []
    assert problems == []


def test_closing_stops_a_read_that_hangs(holding: RawServer) -> None:
    with nothing_left():
        artifact = kvformat.open(holding.url())
        closer = threading.Thread(
            target=lambda: (eventually(lambda: len(holding.asked) > 1), artifact.close())
        )
        closer.start()
        with pytest.raises(kvformat.UsageError, match="closed"):
            artifact.read(track="exact/zstd")
        closer.join()


def test_closing_a_stream_cuts_its_request(holding: RawServer) -> None:
    with nothing_left(), kvformat.open(holding.url()) as artifact:
        stream = artifact.stream(track="exact/zstd")
        assert eventually(lambda: len(holding.asked) > 1)
        stream.close()
        assert threads() == []


# Secrets.

SECRETS = ("hunter2", "5ecret", "s1gn4ture")
URL = "http://user:hunter2@127.0.0.1:{port}/{path}?X-Amz-Signature=s1gn4ture&token=5ecret#5ecret"


def refused(asked: Asked) -> Wire:
    return Wire(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n") if asked else Wire(b"")


def redirected(asked: Asked) -> Wire:
    place = asked.path.replace("a.kvf", "b.kvf")
    return Wire(f"HTTP/1.1 302 F\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode())


def elsewhere(asked: Asked) -> Wire:
    place = f"ftp://user:hunter2@127.0.0.1{asked.path}"
    return Wire(f"HTTP/1.1 302 F\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode())


def garbage(asked: Asked) -> Wire:
    return Wire(f"HTP/9 {asked.path}\r\n\r\n".encode(), "close")


def front_only(asked: Asked) -> Wire:
    return Wire(part(DATA, asked)) if not asked.first else Wire(b"", "close")


FAILING: dict[str, Callable[[Asked], Wire]] = {
    "refused": refused,
    "redirected for ever": redirected,
    "redirected elsewhere": elsewhere,
    "garbage": garbage,
    "silence": lambda _: Wire(b"", "hold"),
    "nothing": lambda _: Wire(b"", "close"),
    "another length": lambda asked: Wire(part(DATA[:-1], asked)),
    "a cut": front_only,
}


@pytest.mark.parametrize("script", FAILING.values(), ids=FAILING)
def test_secrets_of_a_url_are_never_shown(
    script: Callable[[Asked], Wire], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("kvformat.storage.ranged.FIRST_WAIT_S", 1e-4)
    limits = Transport(connect_timeout_s=0.1, stall_timeout_s=0.1, retries=1)
    with raw_server(script) as server:
        url = URL.format(port=server.port, path="a.kvf")
        with pytest.raises(KvformatError) as caught, kvformat.open(url, transport=limits) as opened:
            shown_texts = [opened.name, repr(opened), repr(opened.source.name)]
            assert not any(secret in text for text in shown_texts for secret in SECRETS)
            buffer = opened.read(tokens=(0, 1), layers=(0, 1), track="near-lossless").kv
            report = opened.read_into(
                buffer, tokens=(900, 901), layers=(0, 1), on_error="prefix", track="exact/stored"
            )
            text = f"{report} {report.to_json()}"
            assert not any(secret in text for secret in SECRETS)
            opened.read(track="exact/stored")
        assert all("Authorization: Basic" in asked.head for asked in server.asked[:1])
    told = "".join(traceback.format_exception(caught.value)) + str(caught.value.as_dict())
    told += caplog.text
    assert not any(secret in told for secret in SECRETS)
    assert caught.value.code in told


@pytest.mark.parametrize("command", ["inspect", "verify", "decode", "cp"])
def test_secrets_are_not_shown_by_commands(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    from kvformat.cli.program import cli

    for script in (refused, lambda asked: Wire(part(DATA, asked))):
        with raw_server(script) as server:
            arguments = [command, URL.format(port=server.port, path="a.kvf")]
            if command == "decode":
                arguments += ["--output", str(tmp_path / "a.npy")]
            elif command == "cp":
                arguments += [str(tmp_path / "b.kvf")]
            for extra in ([], ["--json"]):
                with pytest.raises(SystemExit):
                    cli.main([*arguments, *extra])
                shown_text = "".join(capfd.readouterr())
                assert not any(secret in shown_text for secret in SECRETS)
                assert shown_text
                for file in tmp_path.iterdir():
                    file.unlink()


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://h/a.kvf", "http://h/a.kvf"),
        ("http://u:p@h/a.kvf", "http://h/a.kvf"),
        ("http://u@h:8/a@b.kvf", "http://h:8/a@b.kvf"),
        ("http://u:p@q@h/a", "http://h/a"),
        ("http://h/a?b=c", "http://h/a?..."),
        ("http://h/a b?c=d e", "http://h/a b?..."),
        ("simplecache::http://u:p@h/a?s", "simplecache::http://h/a?..."),
        ("zip://x.kvf::http://u:p@h/a.zip", "zip://x.kvf::http://h/a.zip"),
        ("ftp://u:p@[::1]/a", "ftp://[::1]/a"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("/a/b@c", "/a/b@c"),
    ],
)
def test_public_names(url: str, name: str) -> None:
    assert public_name(url) == name
    assert public_name(name) == name


def test_causes_with_secrets_are_not_shown() -> None:
    good, bad = ValueError("at http://h/a"), ValueError("at http://u:p@h/a?s=5ecret, sorry")
    assert without_secrets(str(bad)) == "at http://h/a?..., sorry" or "5ecret" not in (
        without_secrets(str(bad))
    )
    outer = RuntimeError("outer")
    outer.__cause__ = bad
    assert shown(good) is good
    assert shown(bad) is None
    assert shown(outer) is None
    assert shown(None) is None


def test_the_cause_of_an_error_is_kept_where_it_has_no_secret() -> None:
    with pytest.raises(StorageError) as caught:
        kvformat.open("http://127.0.0.1:1/a.kvf", transport=Transport(retries=0))
    assert isinstance(caught.value.__cause__, OSError)
