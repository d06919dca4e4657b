"""Every fault of a store is a miss or a refusal with a reason, never an exception."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat
from kvformat.errors import StorageError, UsageError
from kvformat.store import Miss, Refusal, StoreOptions
from kvformat.store.breaker import Breaker
from kvformat.store.eviction import collect
from kvformat.store.names import ObjectName
from tests.stores import (
    DIM,
    EXACT,
    HEADS,
    IDENTITY,
    LAYERS,
    FaultyBackend,
    faulty_store,
    flip,
    inline_store,
    kv_of,
    load,
    load_by,
    newer,
    objects,
    the_file,
    tokens,
)

IDS = tokens(1, 2, 3, 4, 5, 6, extra=9)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def rewrite(**changes: Any) -> Callable[[Path], None]:
    """Another artifact under the same name."""

    def act(path: Path) -> None:
        given = {"kv": kv_of(IDS[:1024]), "identity": IDENTITY, "ids": IDS[:1024], **changes}
        path.unlink()
        kvformat.write(
            path,
            given.pop("kv"),
            identity=given.pop("identity"),
            token_ids=given.pop("ids"),
            tracks=given.pop("tracks", ["exact/zstd"]),
            **given,
        )

    return act


FAULTS: list[tuple[str, Callable[[Path], None], Miss]] = [
    ("missing", Path.unlink, Miss.EVICTED),
    ("truncated", truncate, Miss.TRUNCATED),
    ("empty", empty, Miss.CORRUPT),
    ("corrupt", flip, Miss.CORRUPT),
    ("newer version", newer, Miss.UNKNOWN_VERSION),
    ("stale", rewrite(ids=tokens(1, 2, 3, 9)), Miss.OTHER_TOKENS),
    ("salted", rewrite(salt=b"x"), Miss.OTHER_TOKENS),
    (
        "other model",
        rewrite(identity=replace(IDENTITY, model=kvformat.Model("acme/small", "9"))),
        Miss.OTHER_MODEL,
    ),
    ("other cache dtype", rewrite(identity=replace(IDENTITY, cache_dtype="bfloat16")),
     Miss.OTHER_DTYPE),
    ("other component", rewrite(identity=replace(IDENTITY, component="draft")),
     Miss.OTHER_IDENTITY),
    ("other dtype", rewrite(kv=kv_of(IDS[:1024]).astype(np.float32)), Miss.OTHER_DTYPE),
    ("other shape", rewrite(kv=np.zeros((2, LAYERS, 1024, HEADS, 2 * DIM), np.float16)),
     Miss.OTHER_SHAPE),
    ("lossy", rewrite(tracks=["near-lossless/zstd"]), Miss.QUALITY),
    ("lossy lineage", rewrite(lineage=kvformat.Lineage("lossy", 1, "small")), Miss.LINEAGE),
]  # fmt: skip


@pytest.mark.parametrize(("break_it", "miss"), [x[1:] for x in FAULTS], ids=[x[0] for x in FAULTS])
@pytest.mark.parametrize("way", ["load_into", "load", "blocks"])
def test_a_bad_extent_ends_the_prefix(
    tmp_path: Path,
    break_it: Callable[[Path], None],
    miss: Miss,
    way: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with inline_store(tmp_path) as store:
        groups = kvformat.Cache.from_kv(kv_of(IDS)).groups
        view = store.view(IDENTITY, groups=[item.group for item in groups])
        view.put(kv_of(IDS), IDS)
        hit = view.probe(IDS)
        break_it(the_file(tmp_path, 4))
        report = load_by(way, view, hit)
        assert [fault.miss for fault in report.faults] == [miss]
        assert report.tokens < 1024
        assert not report.complete
        assert store.metrics.value("misses", miss.value) == 1
        assert f"({miss.value})" in caplog.text
        assert store.breaker.state == "closed"


@pytest.mark.parametrize("way", ["load_into", "load", "blocks"])
def test_the_extents_before_a_bad_one_are_served(tmp_path: Path, way: str) -> None:
    ids = tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(ids), ids)
        hit = view.probe(ids)
        newer(the_file(tmp_path, 8))
        assert load_by(way, view, hit).tokens == 1024


def test_the_part_before_a_damaged_segment_is_served(tmp_path: Path) -> None:
    ids = tokens(1, 2, 3, 4, 5, 6, 7, 8)
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(ids), ids)
        flip(the_file(tmp_path, 8))
        report, found = load(view, ids)
        assert found == 2048
        assert 1024 <= report.tokens < 2048
        assert report.tokens == 1024 + 768


def test_a_damaged_object_is_replaced_by_the_next_put(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        flip(the_file(tmp_path, 4))
        assert load(view, IDS)[0].tokens < 1024
        receipt = view.put(kv_of(IDS), IDS)
        assert [item.tokens for item in receipt.queued] == [(0, 1024)]
        assert load(view, IDS)[0].tokens == 1536
        for path in objects(tmp_path):
            kvformat.verify(path)


def test_an_object_that_is_good_again_is_not_replaced(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        path = the_file(tmp_path, 4)
        good = path.read_bytes()
        flip(path)
        load(view, IDS)
        path.write_bytes(good)
        inode = path.stat().st_ino
        view.put(kv_of(IDS), IDS)
        assert path.stat().st_ino == inode
        assert store.metrics.value("refusals", "present") == 1


def test_an_unknown_version_is_neither_replaced_nor_deleted(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        path = the_file(tmp_path, 4)
        newer(path)
        content = path.read_bytes()
        assert load(view, IDS)[0].tokens == 0
        view.put(kv_of(IDS), IDS)
        strange = tmp_path / "shared/m-1/v9.9/exact.g4/00/x.kvf"
        strange.parent.mkdir(parents=True)
        strange.write_bytes(b"from the future")
        found = collect(store.backend, None, goal_bytes=0)
        assert path.read_bytes() == content
        assert strange.exists()
        assert (found.spared, found.unknown) == (1, 1)
        assert view.remove_key is not None
        assert store.backend.remove_name(view.scope.name(view.hashes(IDS), 4)) is False


def test_versions_can_be_pinned_only_to_known_ones() -> None:
    assert StoreOptions(write_version="0.9").write_version == "0.9"
    with pytest.raises(UsageError):
        StoreOptions(write_version="1.0")


@pytest.mark.parametrize(
    ("code", "miss"),
    [("io.read", Miss.STORAGE), ("io.timeout", Miss.SLOW), ("io.denied", Miss.DENIED)],
)
def test_a_failing_store_is_taken_out_of_the_path(tmp_path: Path, code: str, miss: Miss) -> None:
    store, backend = faulty_store(tmp_path, replace(EXACT, breaker_failures=3))
    with store:
        now = 0.0
        store.breaker = Breaker(3, 5.0, lambda: now)
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        backend.fail = StorageError(code, "injected")
        for _ in range(3):
            assert view.lookup(IDS).miss is miss
        probes = backend.probes
        assert view.lookup(IDS).miss is Miss.BREAKER
        assert view.put(kv_of(IDS), IDS).refused == ((None, Refusal.BREAKER),)
        assert backend.probes == probes
        assert store.metrics.value("breaker_opened") == 1
        now = 6.0
        assert view.lookup(IDS).miss is miss
        assert view.lookup(IDS).miss is Miss.BREAKER
        now, backend.fail = 17.0, None
        assert view.lookup(IDS).tokens == 1536
        assert store.breaker.state == "closed"


def test_a_slow_store_ends_a_lookup_and_a_load(tmp_path: Path) -> None:
    store, _ = faulty_store(tmp_path, replace(EXACT, lookup_deadline_s=0.0))
    with store:
        assert store.view(IDENTITY).lookup(IDS).miss is Miss.SLOW
    with inline_store(tmp_path, replace(EXACT, load_deadline_s=1e-9)) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        hit = view.probe(IDS)
        gate = threading.Event()
        original = store.backend.locate

        def slow(name: ObjectName) -> str:
            gate.wait(10)
            return original(name)

        store.backend.locate = slow  # type: ignore[method-assign]
        threading.Timer(0.05, gate.set).start()
        report = view.load_into(hit, np.zeros((2, LAYERS, 1536, HEADS, DIM), np.float16))
        assert (report.tokens, [item.miss for item in report.faults]) == (0, [Miss.SLOW])


def test_a_full_disk_is_a_refusal_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            view.put(kv_of(IDS), IDS)
        assert store.metrics.value("refusals", "full-disk") == 1
        assert store.metrics.value("refusals", "no-parent") == 1
        assert objects(tmp_path) == []
        assert list((tmp_path / ".staging").iterdir()) == []
        assert view.put(kv_of(IDS), IDS).tokens == 1536
        assert load(view, IDS)[0].tokens == 1536


def test_input_that_cannot_be_stored_is_refused_by_itself(tmp_path: Path) -> None:
    kv = kv_of(IDS)
    kv[0, 0, 1200] = np.nan
    with inline_store(tmp_path, replace(EXACT, quality="near-lossless")) as store:
        view = store.view(IDENTITY)
        view.put(kv, IDS)
        assert view.lookup(IDS).tokens == 1024
        assert store.metrics.value("refusals", "input") == 1


def test_a_bug_in_the_store_is_no_exception_in_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        hit = view.probe(IDS)

        def broken(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(type(view.scope), "check", broken)
        with caplog.at_level(logging.ERROR):
            report = view.load_into(hit, np.zeros((2, LAYERS, 1536, HEADS, DIM), np.float16))
        assert [item.miss for item in report.faults] == [Miss.INTERNAL]
        assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("way", ["load_into", "load", "blocks"])
def test_a_bad_piece_of_a_cell_leaves_the_ones_before(tmp_path: Path, way: str) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        for end in (256, 768, 1024):
            view.put(kv_of(IDS[:end]), IDS[:end])
        hit = view.probe(IDS)
        newer(the_file(tmp_path, 4))
        report = load_by(way, view, hit)
        assert (report.tokens, [item.miss for item in report.faults]) == (
            768,
            [Miss.UNKNOWN_VERSION],
        )


def test_faults_of_the_backend_do_not_reach_the_engine(tmp_path: Path) -> None:
    class Broken(FaultyBackend):
        def hold(self, names: Sequence[ObjectName]) -> Any:
            raise StorageError("io.read", "injected", where=names[0].path)

    from kvformat.store import Store

    with inline_store(tmp_path) as good:
        good.view(IDENTITY).put(kv_of(IDS), IDS)
    with Store(Broken(tmp_path), EXACT) as store:
        hit = store.view(IDENTITY).lookup(IDS)
        assert (hit.tokens, hit.miss) == (0, Miss.EVICTED)


def test_evicted_between_lookup_and_load(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        hit = view.probe(IDS)
        collect(store.backend, None, goal_bytes=0)
        report = view.load_into(hit, np.zeros((2, LAYERS, 1536, HEADS, DIM), np.float16))
        assert (report.tokens, report.faults[0].miss) == (0, Miss.EVICTED)
        assert view.hold(hit).tokens == 0
