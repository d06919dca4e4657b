"""``kvformat.shelf``: the index of a directory that changes and holds anything."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvformat
from kvformat import shelf as shelf_module
from kvformat.digests import digest
from kvformat.server import Librarian
from kvformat.shelf import NotOnShelfError, Shelf
from tests.builder import fixed_part, resealed
from tests.serving import serving
from tests.test_server import write


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def shelf(files: Path, told: list[str]) -> Shelf:
    return Shelf(files, told.append)


def rows(shelf: Shelf) -> list[dict[str, Any]]:
    value = json.loads(shelf.index())
    assert set(value) == {"artifacts", "complete", "index_version"}
    assert (value["complete"], value["index_version"]) == (True, 1)
    artifacts: list[dict[str, Any]] = value["artifacts"]
    return artifacts


def names(shelf: Shelf) -> list[str]:
    return [row["name"] for row in rows(shelf)]


def test_a_row_says_what_the_artifact_is(files: Path, shelf: Shelf) -> None:
    (files / "sub").mkdir()
    data = write(files / "sub" / "a b\u00fc.kvf")
    with kvformat.open(data) as artifact:
        manifest = artifact.manifest
    assert rows(shelf) == [
        {
            "content_id": manifest.content_id,
            "file_bytes": len(data),
            "manifest_digest": data[72:104].hex(),
            "model": "example/model",
            "name": "sub/a b\u00fc.kvf",
            "tokens": 8,
            "tracks": ["near-lossless/zstd"],
            "url": f"sub/a%20b%C3%BC.kvf?manifest={data[72:104].hex()}",
        }
    ]


def test_every_url_of_the_index_leads_to_its_artifact(files: Path) -> None:
    odd = [b"a b.kvf", b"%41.kvf", b"\xff\xfe.kvf", b"a?b#c.kvf", b"a'\"<&>.kvf", b"a\nb\x1b.kvf"]
    for number, name in enumerate(odd):
        write(files / os.fsdecode(name), seed=number)
    with serving(files) as server:
        found = json.loads(server.ask("/index.json")[2])["artifacts"]
        for row in found:
            status, _, body = server.ask("/" + row["url"])
            assert (status, body[72:104].hex()) == (200, row["manifest_digest"]), row
            assert body == (files / os.fsdecode(odd[0])).read_bytes() or row["name"] != "a b.kvf"
    assert len({row["manifest_digest"] for row in found}) == len(odd)


Damage = Callable[[bytes], bytes]
DAMAGED: dict[str, tuple[Damage, str]] = {
    "empty": (lambda data: data[:0], "header.magic"),
    "text": (lambda data: b"hello" + data, "header.magic"),
    "short": (lambda data: data[:100], "file.size"),
    "cut": (lambda data: data[:-1], "file.size"),
    "longer": (lambda data: data + b"\0", "file.size"),
    "header": (lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:], "header.check"),
    "later version": (
        lambda data: resealed(data, fixed=fixed_part(minor=10)),
        "version.unknown",
    ),
    "sizes": (lambda data: resealed(data, tables_bytes=0), "header.field"),
    "manifest": (lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "manifest.digest"),
    "no json": (lambda data: with_manifest(data, lambda text: b"[" + text[1:]), "manifest.json"),
    "no schema": (
        lambda data: with_manifest(data, lambda text: text.replace(b'"tokens"', b'"tokenz"')),
        "manifest.",
    ),
    "large manifest": (
        lambda data: resealed(data, manifest_bytes=2**40),
        "limit.exceeded",
    ),
}


def with_manifest(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Another manifest of the same length, with a digest that fits."""
    end = 128 + int.from_bytes(data[56:64], "little")
    text = change(data[128:end])
    changed = data[:128] + text + data[end:]
    return resealed(changed, manifest_digest=digest(text))


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_left_out_and_told_once(
    files: Path, shelf: Shelf, told: list[str], kind: str
) -> None:
    damage, code = DAMAGED[kind]
    data = write(files / "good.kvf")
    (files / "bad.kvf").write_bytes(damage(data))
    for _ in range(3):
        assert names(shelf) == ["good.kvf"]
    (line,) = told
    assert line.startswith(f"bad.kvf is not served: [{code}")
    write(files / "new")
    (files / "new").replace(files / "bad.kvf")
    assert names(shelf) == ["bad.kvf", "good.kvf"]
    assert len(told) == 1


def test_what_is_told_cannot_steer_a_terminal(files: Path, shelf: Shelf, told: list[str]) -> None:
    (files / "a\x1b[2J\n.kvf").write_bytes(b"")
    assert names(shelf) == []
    with pytest.raises(NotOnShelfError):
        shelf.open("/a%1b[2J%0A.kvf")
    assert [line.split(" is not ")[0] for line in told] == ["a%1B%5B2J%0A.kvf"]


def test_the_index_follows_the_directory(files: Path, shelf: Shelf) -> None:
    assert rows(shelf) == []
    write(files / "a.kvf")
    write(files / "b.kvf")
    assert names(shelf) == ["a.kvf", "b.kvf"]
    before = rows(shelf)[0]["manifest_digest"]
    write(files / "a.kvf", seed=1)
    (files / "b.kvf").rename(files / "c.kvf")
    after = rows(shelf)
    assert [row["name"] for row in after] == ["a.kvf", "c.kvf"]
    assert after[0]["manifest_digest"] != before
    (files / "a.kvf").unlink()
    (files / "c.kvf").unlink()
    assert rows(shelf) == []


def test_a_manifest_is_read_once_for_each_state_of_a_file(
    files: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    parse = shelf_module.parse_manifest
    monkeypatch.setattr(
        shelf_module, "parse_manifest", lambda raw: (parsed.append(raw), parse(raw))[1]
    )
    write(files / "a.kvf")
    write(files / "b.kvf")
    for _ in range(3):
        assert names(shelf) == ["a.kvf", "b.kvf"]
    assert len(parsed) == 2
    write(files / "b.kvf", seed=1)
    assert names(shelf) == ["a.kvf", "b.kvf"]
    assert len(parsed) == 3


def test_the_index_is_bounded(files: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        write(files / f"{name}.kvf")
    for limit, most, listed in (("MOST_ARTIFACTS", 2, 2), ("MOST_ENTRIES", 1, 1)):
        with monkeypatch.context() as patch:
            patch.setattr(shelf_module, limit, most)
            value = json.loads(shelf.index())
        assert (value["complete"], len(value["artifacts"])) == (False, listed)
    assert names(shelf) == ["a.kvf", "b.kvf", "c.kvf"]


def test_an_index_ends_when_the_shelf_is_closed(
    files: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        write(files / f"{name}.kvf")
    describe = shelf_module._describe

    def close_too(*arguments: Any) -> Any:
        shelf.close()
        return describe(*arguments)

    monkeypatch.setattr(shelf_module, "_describe", close_too)
    value = json.loads(shelf.index())
    assert (value["complete"], len(value["artifacts"])) == (False, 1)


@pytest.mark.parametrize("step", ["stat", "_resolved", "_open", "_describe"])
def test_files_vanish_while_the_index_is_made(
    files: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    write(files / "a.kvf")
    write(files / "b.kvf")
    owner: Any = {"stat": Path, "_describe": shelf_module}.get(step, Shelf)
    done = getattr(owner, step)

    def vanish(*arguments: Any, **options: Any) -> Any:
        (files / "a.kvf").unlink(missing_ok=True)
        return done(*arguments, **options)

    monkeypatch.setattr(owner, step, vanish)
    first = names(shelf)
    assert first in (["b.kvf"], ["a.kvf", "b.kvf"])
    assert names(shelf) == ["b.kvf"]


def test_a_folder_that_vanishes_or_cannot_be_read(
    files: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "sub").mkdir()
    write(files / "a.kvf")
    write(files / "sub" / "b.kvf")
    scan = os.scandir

    def scandir(path: Path) -> Any:
        if path.name == "sub":
            raise PermissionError(13, "denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert names(shelf) == ["a.kvf"]


def test_a_file_that_may_not_be_read(
    files: Path, shelf: Shelf, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(files / "a.kvf")
    opened = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path) == "a.kvf":
            raise PermissionError(13, "denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    for _ in range(2):
        with pytest.raises(NotOnShelfError):
            shelf.open("/a.kvf")
    assert names(shelf) == []
    assert told == ["a.kvf is not served: [io.denied] no permission to read it"]


def test_no_descriptor_is_left_open(files: Path, shelf: Shelf) -> None:
    write(files / "a.kvf")
    (files / "bad.kvf").write_bytes(b"x")
    (files / "folder.kvf").mkdir()
    os.mkfifo(files / "pipe.kvf")
    (files / "link.kvf").symlink_to("a.kvf")
    own = Path("/proc/self/fd")
    before = len(list(own.iterdir()))
    for _ in range(3):
        rows(shelf)
        for target in ("/bad.kvf", "/folder.kvf", "/pipe.kvf", "/none.kvf", "/a.kvf/b.kvf"):
            with pytest.raises(NotOnShelfError):
                shelf.open(target)
        with shelf.opened("/link.kvf") as volume:
            assert volume.unchanged()
    assert len(list(own.iterdir())) == before


def test_too_many_open_files_is_no_missing_file(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(files / "a.kvf")

    def full(self: Shelf, target: str) -> Any:
        raise OSError(24, "Too many open files", target, None, str(self.root))

    with serving(files) as server:
        with monkeypatch.context() as patch:
            patch.setattr(Shelf, "open", full)
            status, headers, _ = server.ask("/a.kvf")
        assert (status, headers["retry-after"], headers["cache-control"]) == (503, "1", "no-store")
        assert server.ask("/a.kvf")[0] == 200


def test_requests_for_the_index_share_one(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight that come while one is being made share the next, which saw all that they saw."""
    begun, go_on = threading.Event(), threading.Event()
    made: list[bytes] = []

    def slow() -> bytes:
        made.append(b"%d" % len(made))
        begun.set()
        go_on.wait()
        return made[-1]

    monkeypatch.setattr(shelf, "index", slow)

    async def main() -> list[bytes]:
        librarian = Librarian(shelf, token=None, local_only=True, log=None)
        first = asyncio.create_task(librarian._fresh_index())
        await asyncio.to_thread(begun.wait)
        others = [asyncio.create_task(librarian._fresh_index()) for _ in range(8)]
        await asyncio.sleep(0)  # they run until they wait
        go_on.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(main()) == [b"0"] + 8 * [b"1"]


def test_the_index_has_a_tag(files: Path) -> None:
    write(files / "a.kvf")
    with serving(files) as server:
        status, headers, _ = server.ask("/index.json", Range="bytes=0-1")
        assert (status, "accept-ranges" in headers) == (200, False)
        assert headers["cache-control"] == "private, no-cache"
        assert server.ask("/index.json", If_None_Match=headers["etag"])[0] == 304
        write(files / "b.kvf")
        assert server.ask("/index.json", If_None_Match=headers["etag"])[0] == 200


def test_without_opening_by_directory(
    files: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf_module, "STEPWISE", False)
    write(files / "a.kvf")
    assert names(shelf) == ["a.kvf"]
    with pytest.raises(NotOnShelfError):
        shelf.open("/../a.kvf")
