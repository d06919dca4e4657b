"""A store in a directory: what is put comes back, and every fault is a miss with a reason."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import kvformat
from kvformat.errors import StorageError, UsageError
from kvformat.store import Hit, LoadReport, Miss, Refusal, StoreOptions, View
from kvformat.store.breaker import Breaker
from kvformat.store.eviction import collect, group_entries
from kvformat.store.local import LocalBackend
from kvformat.store.lookup import probe_limit
from kvformat.store.names import ObjectName
from tests.builder import seal_header
from tests.stores import (
    BLOCK,
    DIM,
    EXACT,
    HEADS,
    IDENTITY,
    LAYERS,
    FaultyBackend,
    faulty_store,
    inline_store,
    kv_of,
    load,
    tokens,
    windowed_cache,
)

IDS = tokens(1, 2, 3, 4, 5, 6, extra=9)


def objects(root: Path) -> list[Path]:
    """All names in the store."""
    return sorted(root.glob("*/*/*/*/*/*.kvf"))


def the_file(root: Path, end: int) -> Path:
    """The one object of that end."""
    (found,) = root.glob(f"*/*/*/*/*/*-{end}.kvf")
    return found


def test_whole_blocks_come_back_bit_for_bit(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY, salt=b"tenant")
        assert view.lookup(IDS).miss is Miss.ABSENT
        receipt = view.put(kv_of(IDS), IDS)
        assert [item.tokens for item in receipt.queued] == [(0, 1024), (1024, 1536)]
        report, found = load(view, IDS)
        assert (report.tokens, found, report.complete) == (1536, 1536, True)
        again = view.put(kv_of(IDS), IDS)
        assert again.queued == () and [why for _, why in again.refused] == [Refusal.PRESENT]
        for path in objects(tmp_path):
            kvformat.verify(path)


def test_the_front_of_an_extent_serves_a_request_that_leaves_it(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        for blocks in range(1, 6):
            other = tokens(*range(1, blocks + 1), 77, 78)
            assert load(view, other)[0].tokens == blocks * BLOCK


def test_an_extent_names_its_parent(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        hashes = view.hashes(IDS)
    with kvformat.open(the_file(tmp_path, 6)) as artifact:
        chain = artifact.manifest.tokens.chain
        assert chain is not None
        assert artifact.manifest.tokens.first_position == 1024
        assert chain.parent == hashes[3]
        assert chain.hashes == hashes[4:6]


def test_a_prompt_that_grows_is_stored_once(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        for end in (300, 800, 1100, 1536):
            with view.lookup(IDS[:end]) as hit:
                first = hit.tokens
            view.put(kv_of(IDS[:end])[:, :, first:], IDS[:end], first_position=first)
            assert load(view, IDS[:end])[0].tokens == end // BLOCK * BLOCK
        assert store.metrics.write_amplification == 1
        assert store.metrics.value("source_bytes") == kv_of(IDS)[:, :, :1536].nbytes
        found = {}
        for path in objects(tmp_path):
            with kvformat.open(path) as artifact:
                tokens_held = artifact.manifest.tokens
                found[path.stat().st_ino] = (tokens_held.first_position, tokens_held.count)
        assert sorted(found.values()) == [(0, 256), (256, 512), (768, 256), (1024, 512)]


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


def test_racing_writers_leave_one_whole_chain(tmp_path: Path) -> None:
    """One wrote [0, 4) while the other had written [0, 1) and was at [1, 4)."""
    with inline_store(tmp_path) as store, inline_store(tmp_path) as other:
        view, late = store.view(IDENTITY), other.view(IDENTITY)
        backend = cast("LocalBackend", store.backend)
        jobs: list[Any] = []
        submit = store.queue.submit
        store.queue.submit = lambda *job: bool(jobs.append(job)) or True  # type: ignore[method-assign]
        view.put(kv_of(IDS[:1024]), IDS[:1024])
        late.put(kv_of(IDS[:256]), IDS[:256])
        submit(*jobs[0])
        late.put(kv_of(IDS[:1024]), IDS[:1024])
        assert len({path.stat().st_ino for path in objects(tmp_path)}) == 1
        assert load(late, IDS)[0].tokens == 1024
        assert backend.sweep(0) == 0


def test_a_branch_leaves_the_other_one_whole(tmp_path: Path) -> None:
    one, other = tokens(1, 2, 3, 4), tokens(1, 2, 8, 9)
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(one), one)
        view.put(kv_of(other), other)
        assert load(view, one)[0].tokens == load(view, other)[0].tokens == 1024


def test_parts_of_a_hit_can_be_loaded(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        hit = pickle.loads(pickle.dumps(view.probe(IDS)))
        out = np.zeros((2, 1, 600, HEADS, DIM), np.float16)
        report = view.load_into(hit, out, tokens=(900, 1500), layers=[1])
        assert report.tokens == 1500
        assert np.array_equal(out, kv_of(IDS)[:, 1:2, 900:1500])
        groups = {
            name: np.zeros((LAYERS, 1536, HEADS, DIM), np.float16) for name in ("key", "value")
        }
        assert view.load_into(hit, groups).complete
        assert np.array_equal(groups["value"], kv_of(IDS)[1][:, :1536])
        with pytest.raises(UsageError):
            view.load_into(hit, out, tokens=(0, 2000))
        with pytest.raises(UsageError):
            view.load_into(hit, out)


@pytest.mark.parametrize("order", ["token-major", "layer-major"])
def test_blocks_come_layer_by_layer(tmp_path: Path, order: Any) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        out = np.zeros((2, LAYERS, 1536, HEADS, DIM), np.float16)
        with view.blocks(view.probe(IDS), order=order) as stream:
            for placed in stream:
                block = placed.block
                side = ["key", "value"].index(block.group.role)
                rows = slice(placed.position, placed.position + block.array.shape[1])
                out[side, list(block.layers), rows] = block.array
        assert stream.report.tokens == 1536
        assert np.array_equal(out, kv_of(IDS)[:, :, :1536])


def test_a_put_behind_a_hit_needs_only_the_rest(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS)[:, :, :1024], IDS[:1024])
        receipt = view.put(kv_of(IDS)[:, :, 1024:], IDS, first_position=1024)
        assert [item.tokens for item in receipt.queued] == [(1024, 1536)]
        assert load(view, IDS)[0].tokens == 1536
        late = tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
        receipt = view.put(kv_of(late)[:, :, 2048:], late, first_position=2048)
        assert receipt.refused == ((None, Refusal.NO_PARENT),)


def test_quality_and_lineage_keep_apart(tmp_path: Path) -> None:
    lossy = replace(EXACT, quality="near-lossless")
    with inline_store(tmp_path) as exact, inline_store(tmp_path, lossy) as store:
        exact.view(IDENTITY).put(kv_of(IDS), IDS)
        view = store.view(IDENTITY)
        assert view.lookup(IDS).tokens == 0
        view.put(kv_of(IDS), IDS)
        loaded = view.load(view.probe(IDS))
        lineage = loaded.report.lineage
        assert (lineage.kind, lineage.generations) == ("lossy", 1)
        longer = tokens(1, 2, 3, 4, 5, 6, 7, 8)
        refused = view.put(kv_of(longer), longer, lineage=lineage).refused
        assert refused == ((None, Refusal.LINEAGE),)
        assert exact.view(IDENTITY).put(kv_of(longer), longer, lineage=lineage).queued == ()
    with inline_store(tmp_path, replace(lossy, mixed=True)) as mixed:
        view = mixed.view(IDENTITY)
        assert view.lookup(IDS).tokens == 0
        assert view.put(kv_of(longer), longer, lineage=lineage).tokens == 2048
        assert view.load(view.probe(longer)).report.lineage.generations == 2


@pytest.mark.parametrize(
    "change",
    [
        {"salt": b"other"},
        {"part": "l0-1-h0-1"},
        {"identity": replace(IDENTITY, cache_dtype="bfloat16")},
        {"identity": replace(IDENTITY, model=kvformat.Model("acme/small", "2"))},
    ],
    ids=["tenant", "part", "dtype", "revision"],
)
def test_other_tenants_models_and_parts_see_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    with inline_store(tmp_path) as store:
        store.view(IDENTITY, salt=b"mine").put(kv_of(IDS), IDS)
        given = {"identity": IDENTITY, "salt": b"mine", **change}
        assert store.view(given.pop("identity"), **given).lookup(IDS).tokens == 0
        assert store.view(IDENTITY, salt=b"mine").lookup(IDS).tokens == 1536


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def newer(path: Path) -> None:
    data = path.read_bytes()
    fields = (
        *(int.from_bytes(data[at : at + 8], "little") for at in (48, 56, 64)),
        data[72:104],
        bytes(24),
    )
    fixed = data[:10] + (10).to_bytes(2, "little") + data[12:16]
    path.write_bytes(seal_header(fixed, fields) + data[128:])


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


def load_by(way: str, view: View, hit: Hit) -> LoadReport:
    """Load a hit in one of three ways."""
    if way == "load_into":
        return view.load_into(hit, np.zeros((2, LAYERS, hit.tokens, HEADS, DIM), np.float16))
    if way == "load":
        return view.load(hit).report
    with view.blocks(hit) as stream:
        for placed in stream:
            assert placed.block.array.size
    return stream.report


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


def test_no_lookup_lists(tmp_path: Path) -> None:
    store, backend = faulty_store(tmp_path)
    with store:
        view = store.view(IDENTITY)
        long = tokens(*range(100))
        view.put(kv_of(long), long)
        for blocks in (1, 2, 7, 31, 100):
            backend.probes = 0
            hit = view.lookup(long[: blocks * BLOCK])
            assert hit.tokens == blocks * BLOCK
            assert backend.probes == hit.hit.probes <= probe_limit(blocks)
        assert backend.listings == 0


def test_eviction_takes_tails_first_and_spares_what_is_held(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        ids = tokens(*range(16))
        view.put(kv_of(ids), ids)
        stored, _ = group_entries(store.backend.entries())
        size = stored[0].size_bytes
        with view.lookup(ids[:2048]) as held:
            assert held.tokens == 2048
            found = collect(store.backend, None, goal_bytes=size)
            assert (found.removed, found.spared) == (2, 2)
            assert load(view, ids)[0].tokens == 2048
        found = collect(store.backend, None, goal_bytes=int(1.5 * size))
        assert found.removed == 1
        assert load(view, ids)[0].tokens == 1024


def test_what_was_used_stays_longer(tmp_path: Path) -> None:
    prompts = [tokens(*range(start, start + 4)) for start in (10, 20, 30)]
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        for ids in prompts:
            view.put(kv_of(ids), ids)
        load(view, prompts[0])
        total = sum(item.size_bytes for item in group_entries(store.backend.entries())[0])
        collect(store.backend, None, goal_bytes=total // 2)
        assert [view.lookup(ids).tokens for ids in prompts] == [1024, 0, 0]


def test_the_limit_holds_while_writing(tmp_path: Path) -> None:
    one = kv_of(tokens(1, 2, 3, 4)).nbytes
    options = replace(EXACT, limit_bytes=4 * one)
    with inline_store(tmp_path, options) as store:
        view = store.view(IDENTITY)
        for start in range(0, 80, 4):
            ids = tokens(*range(start, start + 4))
            view.put(kv_of(ids), ids)
            total = sum(item.size_bytes for item in group_entries(store.backend.entries())[0])
            assert total <= 4 * one + one
            assert view.lookup(ids).tokens == 1024
        assert store.metrics.value("evicted") > 10
        assert store.metrics.value("store_bytes") <= 4 * one


def test_evicted_between_lookup_and_load(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        hit = view.probe(IDS)
        collect(store.backend, None, goal_bytes=0)
        report = view.load_into(hit, np.zeros((2, LAYERS, 1536, HEADS, DIM), np.float16))
        assert (report.tokens, report.faults[0].miss) == (0, Miss.EVICTED)
        assert view.hold(hit).tokens == 0


def test_a_held_file_stays_whole_even_if_its_names_go(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        with view.lookup(IDS) as hit, view.opened(hit, hit.extents[0]) as pieces:
            ((extent, artifact),) = pieces
            assert extent.tokens == (0, 1024)
            for path in objects(tmp_path):
                path.unlink()
            assert np.array_equal(artifact.read().kv, kv_of(IDS)[:, :, :1024])


def test_leftovers_of_dead_writers_are_swept(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    (tmp_path / ".staging" / "dead.kvf").write_bytes(b"half")
    assert collect(backend, None).leftovers == 0
    assert collect(backend, None, leftover_s=0).leftovers == 1
    with backend.exclusive() as mine, backend.exclusive() as other:
        assert (mine, other) == (True, False)


def test_windows_and_states_are_served_at_ends_that_were_put(tmp_path: Path) -> None:
    window, ids = 300, tokens(1, 2, 3, 4, 5, 6, 7, 8)
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY, windowed=True, window_tokens=window)
        first = view.put(windowed_cache(1024, window), ids[:1024])
        assert [item.tokens for item in first.queued] == [(0, 1024)]
        second = view.put(windowed_cache(1536, window), ids[:1536])
        assert [item.tokens for item in second.queued] == [(1024, 1536)]
        assert view.lookup(ids[:1300]).tokens == 1024
        assert view.lookup(ids[:700]).tokens == 0
        loaded = view.load(view.probe(ids))
        assert loaded.report.complete and loaded.report.tokens == 1536
        full = np.arange(1536, dtype=np.float32).astype(np.float16)
        assert np.array_equal(loaded.groups["key"].array[0, :, 0, 0], full)
        held = loaded.groups["key-2"]
        assert held.token_start == 1536 - window
        assert np.array_equal(held.array[0, :, 0, 0], full[-window:] + 1)
        assert (loaded.groups["state"].array == np.float16(1536)).all()
        the_file(tmp_path, 6).unlink()
        shorter = view.load(view.hold(view.probe(ids)))
        assert shorter.report.tokens == 1024
        assert (shorter.groups["state"].array == np.float16(1024)).all()


def test_a_window_wider_than_an_extent_is_put_together(tmp_path: Path) -> None:
    options = replace(EXACT, extent_tokens=256)
    window, ids = 700, tokens(1, 2, 3, 4, 5)
    with inline_store(tmp_path, options) as store:
        view = store.view(IDENTITY, windowed=True, window_tokens=window)
        for end in range(256, 1281, 256):
            view.put(windowed_cache(end, window), ids[:end])
        loaded = view.load(view.probe(ids))
        held = loaded.groups["key-2"]
        assert held.token_start == 1280 - window
        full = np.arange(1280, dtype=np.float32).astype(np.float16)
        assert np.array_equal(held.array[0, :, 0, 0], full[-window:] + 1)


def test_a_window_that_is_not_known_is_not_stored(tmp_path: Path) -> None:
    ids = tokens(1, 2, 3, 4, 5, 6)
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY, windowed=True, window_tokens=300)
        receipt = view.put(windowed_cache(1536, 300), ids)
        assert [why for _, why in receipt.refused] == [Refusal.WINDOW]


def test_keys_of_an_engine(tmp_path: Path) -> None:
    key = kvformat.EngineKey("lmcache", "builtin", "model@1@0@-168c@half")
    other = replace(key, key="another")
    identity = replace(IDENTITY, kind="engine_key", engine_key=key)
    kv = kv_of(tokens(1))[:, :, :100]
    with inline_store(tmp_path) as store:
        view = store.view(identity)
        assert not view.contains_key(key)
        assert view.put_key(key, kv).queued
        assert view.put_key(key, kv).refused[0][1] is Refusal.PRESENT
        assert view.contains_key(key) and not view.contains_key(other)
        out = np.zeros_like(kv)
        assert view.load_key(key, out).tokens == 100
        assert np.array_equal(out, kv)
        assert view.load_key(other, out).faults[0].miss is Miss.EVICTED
        wrong = np.zeros((2, LAYERS, 50, HEADS, DIM), np.float16)
        assert view.load_key(key, wrong).faults[0].miss is Miss.OTHER_SHAPE
        wrong_place = Path(store.backend.locate(view.key_name(other)))
        wrong_place.parent.mkdir(exist_ok=True)
        the_file(tmp_path, 0).rename(wrong_place)
        assert view.load_key(other, out).faults[0].miss is Miss.OTHER_TOKENS
        hold = view.hold_key(other)
        assert not view.remove_key(other)
        assert hold is not None
        hold.release()
        assert view.remove_key(other) and not view.contains_key(other)
        with pytest.raises(UsageError):
            store.view(IDENTITY).put_key(key, kv)


def test_a_closed_store_misses(tmp_path: Path) -> None:
    store = inline_store(tmp_path)
    view = store.view(IDENTITY)
    view.put(kv_of(IDS), IDS)
    hit = view.probe(IDS)
    store.close()
    assert view.lookup(IDS).miss is Miss.CLOSED
    assert view.put(kv_of(IDS), IDS).refused == ((None, Refusal.CLOSED),)
    assert view.load_into(hit, np.zeros((2, LAYERS, 1536, HEADS, DIM), np.float16)).tokens == 0


def test_wrong_arguments_are_told(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        with pytest.raises(UsageError):
            view.put(kv_of(IDS), IDS[:100])
        with pytest.raises(UsageError):
            view.lookup([-1])
        with pytest.raises(UsageError):
            store.view(IDENTITY, part="../..")
    for wrong in ({"extent_tokens": 300}, {"queue_bytes": 0}, {"codec": "zip"}, {"idle_s": -1.0}):
        with pytest.raises(UsageError):
            StoreOptions(**wrong)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        kvformat.store.open(str(tmp_path / "file" / "store"))


def test_a_converted_object_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    from kvformat.store.publishing import convert_object

    with inline_store(tmp_path, replace(EXACT, quality="near-lossless")) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        before = view.load(view.probe(IDS)).groups["key"].array
        name = view.scope.name(view.hashes(IDS), 4)
        with view.lookup(IDS):
            assert convert_object(store.backend, store.options, name, "hevc") > 0
            assert store.backend.present(name.as_variant("hevc"))
            with kvformat.open(the_file(tmp_path, 4)) as artifact:
                assert artifact.tracks == ("near-lossless/zstd",)
        assert convert_object(store.backend, store.options, name, "hevc") == 0
        assert not store.backend.present(name.as_variant("hevc"))
        for end in range(1, 5):
            with kvformat.open(the_file(tmp_path, end)) as artifact:
                assert artifact.tracks == ("near-lossless/hevc",)
        kvformat.verify(the_file(tmp_path, 4))
        loaded = view.load(view.probe(IDS))
        assert loaded.report.tracks == ("near-lossless/hevc", "near-lossless/zstd")
        assert np.array_equal(loaded.groups["key"].array, before)


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
