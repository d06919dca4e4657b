"""Publication in local files and through fsspec backends other than S3 (spec section 11.4)."""

from __future__ import annotations

import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

import kvformat
from kvformat.errors import KvformatError, StorageError, UsageError
from kvformat.storage import ensure_absent, publish
from tests.requirements import covers

DATA = bytes(range(256)) * 40_000  # more than one block of copying


def put(data: bytes) -> Callable[[IO[bytes]], None]:
    """A ``write`` for ``publish`` that writes ``data``, its first bytes last."""

    def write(file: IO[bytes]) -> None:
        file.seek(10)
        file.write(data[10:])
        file.seek(0)
        file.write(data[:10])

    return write


def code(call: Callable[[], None]) -> str:
    with pytest.raises(KvformatError) as caught:
        call()
    return caught.value.code


# --- URLs that nothing is written to ---------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://127.0.0.1:9/a.kvf", "object store"),
        ("https://127.0.0.1:9/a.kvf", "object store"),
        ("simplecache::s3://bucket/a.kvf", "last URL of the chain"),
        ("filecache::memory://a.kvf", "last URL of the chain"),
        ("zip://a.kvf::memory://b.zip", "last URL of the chain"),
        ("memory://folder/", "names a folder"),
        ("nosuchprotocol://a.kvf", "Check the protocol"),
        ("data://a.kvf", "can be read but not written"),
    ],
)
def test_targets_that_cannot_be_written_are_refused_with_a_way_out(url: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint) as caught:
        publish(url, put(DATA))
    assert caught.value.code == "usage.argument"


@pytest.mark.parametrize("url", ["https://127.0.0.1:9/a.kvf", "simplecache::s3://bucket/a.kvf"])
def test_they_are_refused_before_anything_is_encoded(url: str) -> None:
    encoded: list[tuple[int, int]] = []
    identity = kvformat.Identity(kvformat.Model("example/model", "1"), 2, "float16")
    with pytest.raises(UsageError):
        kvformat.write(
            url,
            np.zeros((2, 2, 8, 1, 32), np.float16),
            identity=identity,
            token_ids=np.arange(8),
            progress=lambda done, total: encoded.append((done, total)),
        )
    assert encoded == []
    with pytest.raises(UsageError):
        ensure_absent(url, overwrite=True)


# --- local files -----------------------------------------------------------------------------


@covers("PUB-1", "PUB-3", "PUB-5")
def test_of_many_local_writers_at_once_one_wins(tmp_path: Path) -> None:
    target = tmp_path / "a.kvf"

    def attempt(number: int) -> str:
        try:
            publish(target, put(bytes([number]) * 100_000))
        except StorageError as error:
            return error.code
        return "ok"

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(attempt, range(8)))
    assert sorted(outcomes) == ["io.exists"] * 7 + ["ok"]
    assert target.read_bytes() == bytes([outcomes.index("ok")]) * 100_000
    assert [item.name for item in tmp_path.iterdir()] == ["a.kvf"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@covers("PUB-1", "PUB-6")
def test_a_failing_local_writer_leaves_things_as_they_were(
    tmp_path: Path, overwrite: bool, failure: BaseException
) -> None:
    target = tmp_path / "a.kvf"
    if overwrite:
        target.write_bytes(b"before")

    def write(file: IO[bytes]) -> None:
        file.write(DATA)
        raise failure

    with pytest.raises((StorageError, KeyboardInterrupt)):
        publish(target, write, overwrite=overwrite)
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == (
        {"a.kvf": b"before"} if overwrite else {}
    )


# --- memory ----------------------------------------------------------------------------------


@pytest.fixture(name="memory_url")
def memory_url_fixture() -> Iterator[str]:
    yield "memory://publish-test/a.kvf"
    MemoryFileSystem().rm("/publish-test", recursive=True)


def stored(url: str) -> bytes:
    return bytes(MemoryFileSystem().cat_file(url))


@covers("PUB-3", "PUB-5")
def test_memory_creates_refuses_and_overwrites(memory_url: str) -> None:
    publish(memory_url, put(DATA))
    assert stored(memory_url) == DATA
    assert code(lambda: publish(memory_url, lambda _: pytest.fail("written"))) == "io.exists"
    assert stored(memory_url) == DATA
    publish(memory_url, put(DATA[2:]), overwrite=True)
    assert stored(memory_url) == DATA[2:]


@covers("PUB-3", "PUB-5")
def test_of_many_writers_to_memory_at_once_one_wins(memory_url: str) -> None:
    """All have looked before the first of them is through."""
    everyone = threading.Barrier(4)

    def attempt(number: int) -> str:
        def write(file: IO[bytes]) -> None:
            everyone.wait(60)
            file.write(bytes([number]) * 100_000)

        try:
            publish(memory_url, write)
        except StorageError as error:
            return error.code
        return "ok"

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(attempt, range(4)))
    assert sorted(outcomes) == ["io.exists"] * 3 + ["ok"]
    assert stored(memory_url) == bytes([outcomes.index("ok")]) * 100_000


def test_a_failing_spool_is_a_storage_error(memory_url: str) -> None:
    MemoryFileSystem().pipe_file(memory_url, b"before")

    def write(_: IO[bytes]) -> None:
        raise OSError(28, "No space left on device")

    assert code(lambda: publish(memory_url, write, overwrite=True)) == "io.write"
    assert stored(memory_url) == b"before"


# --- servers that rename ---------------------------------------------------------------------


class Renaming(LocalFileSystem):
    """A local folder that behaves as SFTP does. ``log`` holds what was opened and renamed."""

    protocol = ("kvfrename", "sftp")
    cachable = False
    log: tuple[tuple[str, str], ...] = ()
    refuses_rename_onto_files = False
    keeps_bytes: int | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return os.fspath(path).removeprefix("kvfrename://")

    def note(self, doing: str, path: str) -> None:
        type(self).log += ((doing, Path(path).name),)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.note(mode, path)
        return super().open(path, mode, **options)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        self.note("mv", path2)
        if self.refuses_rename_onto_files and Path(path2).exists():
            return  # as WebHDFS: the answer is false, and nobody looks at it
        Path(path1).replace(path2)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        info: dict[str, Any] = super().info(path)
        if self.keeps_bytes is not None:
            info["size"] = self.keeps_bytes
        return info


@pytest.fixture(name="renaming")
def renaming_fixture(tmp_path: Path) -> tuple[type[Renaming], Path, str]:
    """A class of its own to set up, the local file behind the target, its URL."""

    class Backend(Renaming):
        pass

    fsspec.register_implementation("kvfrename", Backend, clobber=True)
    target = tmp_path / "a.kvf"
    return Backend, target, f"kvfrename://{target}"


@covers("PUB-4")
def test_a_renaming_server_never_sees_the_name_before_the_end(
    renaming: tuple[type[Renaming], Path, str],
) -> None:
    backend, target, url = renaming
    publish(url, put(DATA))
    assert target.read_bytes() == DATA
    (opened, temporary), moved = backend.log
    assert opened == "wb"
    assert temporary.startswith(".")
    assert temporary.endswith(".kvf.tmp")
    assert moved == ("mv", "a.kvf")
    assert [item.name for item in target.parent.iterdir()] == ["a.kvf"]


@covers("PUB-3", "PUB-5")
def test_a_renaming_server_is_asked_before(renaming: tuple[type[Renaming], Path, str]) -> None:
    backend, target, url = renaming
    target.write_bytes(b"before")
    assert code(lambda: publish(url, put(DATA))) == "io.exists"
    assert backend.log == ()
    assert target.read_bytes() == b"before"
    publish(url, put(DATA), overwrite=True)
    assert target.read_bytes() == DATA


@covers("PUB-3", "PUB-5")
def test_a_renaming_server_is_asked_again_after_the_upload(
    renaming: tuple[type[Renaming], Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer comes while this one uploads."""
    _, target, url = renaming
    copy = shutil.copyfileobj

    def slow(*arguments: Any) -> None:
        copy(*arguments)
        target.write_bytes(b"faster")

    monkeypatch.setattr(shutil, "copyfileobj", slow)
    assert code(lambda: publish(url, put(DATA))) == "io.exists"
    assert {item.name: item.read_bytes() for item in target.parent.iterdir()} == {
        "a.kvf": b"faster"
    }


@covers("PUB-1", "PUB-6")
def test_a_rename_that_did_not_happen_is_noticed(
    renaming: tuple[type[Renaming], Path, str],
) -> None:
    backend, target, url = renaming
    backend.refuses_rename_onto_files = True
    target.write_bytes(b"before")
    with pytest.raises(StorageError, match="Remove that file first") as caught:
        publish(url, put(DATA), overwrite=True)
    assert caught.value.code == "io.exists"
    assert {item.name: item.read_bytes() for item in target.parent.iterdir()} == {
        "a.kvf": b"before"
    }


@covers("PUB-1", "PUB-6")
def test_a_server_that_keeps_less_is_noticed_before_the_rename(
    renaming: tuple[type[Renaming], Path, str],
) -> None:
    backend, target, url = renaming
    backend.keeps_bytes = 7
    assert code(lambda: publish(url, put(DATA))) == "io.write"
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (PermissionError("no"), "io.denied"),
        (FileNotFoundError("no"), "io.not-found"),
        (TimeoutError(), "io.timeout"),
        (ConnectionResetError("no"), "io.write"),
        (RuntimeError("no"), "io.write"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@covers("PUB-1", "PUB-6")
def test_failures_of_a_server_have_their_codes_and_leave_nothing(
    renaming: tuple[type[Renaming], Path, str],
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    expected: str,
) -> None:
    backend, target, url = renaming

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(backend, "mv", fail)
    assert code(lambda: publish(url, put(DATA))) == expected
    assert list(target.parent.iterdir()) == []


# --- stores that commit on close -------------------------------------------------------------


class CommittedFile(AbstractBufferedFile):
    """Collects blocks; the object appears when the last one has come."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if self.fs.fails_after == len(self.parts):
            raise KeyboardInterrupt
        self.parts.append(self.buffer.getvalue())
        if final:
            if "x" in self.mode and self.path in self.fs.objects:
                raise FileExistsError(self.path)
            self.fs.objects[self.path] = b"".join(self.parts)[: self.fs.keeps_bytes]
        return True

    def discard(self) -> None:
        self.fs.discarded += 1


class Committing(AbstractFileSystem):
    """An object store as gcsfs and adlfs are: mode ``xb`` decides when the upload is committed."""

    protocol = "kvfcommit"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.modes: list[str] = []
        self.knows = {"wb", "xb"}
        self.hides_objects = False
        self.fails_after: int | None = None
        self.keeps_bytes: int | None = None
        self.discarded = 0

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        self.modes.append(mode)
        if mode not in self.knows:
            raise NotImplementedError(mode)
        return CommittedFile(self, path, mode, block_size=2**20)

    def exists(self, path: str, **_: Any) -> bool:
        return path in self.objects and not self.hides_objects

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.objects[path]), "type": "file"}

    def rm_file(self, path: str) -> None:
        del self.objects[path]


@pytest.fixture(name="committing")
def committing_fixture(monkeypatch: pytest.MonkeyPatch) -> Committing:
    fs = Committing()
    fsspec.register_implementation("kvfcommit", Committing, clobber=True)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **_: (fs, url.split("://")[1]))
    return fs


URL, PATH = "kvfcommit://bucket/a.kvf", "bucket/a.kvf"


@covers("PUB-4", "PUB-5")
def test_a_committing_store_is_asked_to_create_only(committing: Committing) -> None:
    publish(URL, put(DATA))
    assert committing.objects == {PATH: DATA}
    committing.hides_objects = True  # as from a writer that came after the look
    assert code(lambda: publish(URL, put(DATA[1:]))) == "io.exists"
    committing.hides_objects = False
    assert code(lambda: publish(URL, put(DATA[1:]))) == "io.exists"
    assert committing.objects == {PATH: DATA}
    publish(URL, put(DATA[2:]), overwrite=True)
    assert committing.objects == {PATH: DATA[2:]}
    assert committing.modes == ["xb", "xb", "wb"]


@covers("PUB-5")
def test_a_store_without_exclusive_mode_is_looked_at_before(committing: Committing) -> None:
    committing.knows = {"wb"}
    publish(URL, put(DATA))
    assert committing.objects == {PATH: DATA}
    assert committing.modes == ["xb", "wb"]
    assert code(lambda: publish(URL, put(DATA))) == "io.exists"


@pytest.mark.parametrize("fails_after", [0, 1, 2])
@covers("PUB-1", "PUB-6")
def test_an_interrupt_discards_the_upload(committing: Committing, fails_after: int) -> None:
    committing.objects[PATH] = b"before"
    committing.fails_after = fails_after  # 2 is the last block, which closing sends
    with pytest.raises(KeyboardInterrupt):
        publish(URL, put(DATA), overwrite=True)
    assert committing.objects == {PATH: b"before"}
    assert committing.discarded == 1


@covers("PUB-1")
def test_a_store_that_keeps_less_is_noticed(committing: Committing) -> None:
    committing.keeps_bytes = 100
    assert code(lambda: publish(URL, put(DATA))) == "io.write"
    assert committing.objects == {}


def test_a_store_that_only_reads_is_refused(committing: Committing) -> None:
    committing.knows = set()
    with pytest.raises(UsageError, match="can be read but not written"):
        publish(URL, put(DATA))
    assert committing.objects == {}


def test_all_bytes_reach_the_spool_before_the_upload(committing: Committing) -> None:
    """What is written is read back from the start, wherever ``write`` left the file."""

    def write(file: IO[bytes]) -> None:
        file.write(DATA)
        file.seek(5, io.SEEK_SET)

    publish(URL, write)
    assert committing.objects == {PATH: DATA}
