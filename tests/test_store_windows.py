"""Windows, states and keys of an engine in a store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvformat
from kvformat.errors import UsageError
from kvformat.store import Miss, Refusal
from tests.stores import (
    DIM,
    EXACT,
    HEADS,
    IDENTITY,
    LAYERS,
    inline_store,
    kv_of,
    the_file,
    tokens,
    windowed_cache,
)

IDS = tokens(1, 2, 3, 4, 5, 6, extra=9)


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
