"""Eviction, holds, leftovers of dead processes, conversion in place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvformat
from kvformat.store.eviction import collect, group_entries
from kvformat.store.local import LocalBackend
from tests.stores import (
    BLOCK,
    EXACT,
    IDENTITY,
    inline_store,
    kv_of,
    load,
    objects,
    the_file,
    tokens,
)

IDS = tokens(1, 2, 3, 4, 5, 6, extra=9)


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


def test_all_objects_of_a_held_cell_stay(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        for end in (256, 512, 1024):
            view.put(kv_of(IDS[:end]), IDS[:end])
        with view.lookup(IDS) as held:
            assert held.tokens == 1024
            found = collect(store.backend, None, goal_bytes=0)
            assert (found.removed, found.spared) == (0, 3)
            assert load(view, IDS)[0].tokens == 1024
        assert collect(store.backend, None, goal_bytes=0).removed == 3


@pytest.mark.parametrize("done", range(4))
def test_an_eviction_that_is_killed_leaves_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    with inline_store(tmp_path) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS[:1024]), IDS[:1024])
        left, unlink = [done], Path.unlink

        def dying(path: Path, *, missing_ok: bool = False) -> None:
            if path.suffix == ".kvf":
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            unlink(path, missing_ok=missing_ok)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "unlink", dying)
            collect(store.backend, None, goal_bytes=0)
        assert load(view, IDS)[0].tokens == (4 - done) * BLOCK


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
