"""A store in a directory: what is put comes back, bit for bit, and to nobody else."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import kvformat
from kvformat.errors import StorageError, UsageError
from kvformat.store import Miss, Refusal, StoreOptions
from kvformat.store.local import LocalBackend
from kvformat.store.lookup import probe_limit
from tests.stores import (
    BLOCK,
    DIM,
    EXACT,
    HEADS,
    IDENTITY,
    LAYERS,
    faulty_store,
    inline_store,
    kv_of,
    load,
    objects,
    the_file,
    tokens,
)

IDS = tokens(1, 2, 3, 4, 5, 6, extra=9)


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
