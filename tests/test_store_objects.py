"""A store in an object store: the same answers, no listing on the way, grace in place of leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import fsspec
import numpy as np
import pytest

import kvformat
from kvformat.store import Miss, Store, StoreOptions
from kvformat.store.eviction import collect
from kvformat.store.lookup import probe_limit
from kvformat.store.publishing import convert_object
from tests.object_store import (
    Call,
    ObjectStore,
    Reply,
    object_store_fixture,  # noqa: F401 - a fixture, used by name
)
from tests.stores import BLOCK, DIM, HEADS, IDENTITY, LAYERS, inline_store, kv_of, load, tokens

IDS = tokens(1, 2, 3, 4, 5, 6, extra=9)
OPTIONS = StoreOptions(
    quality="exact",
    extent_tokens=1024,
    transport=kvformat.Transport(connect_timeout_s=2, stall_timeout_s=2, retries=0),
)


@pytest.fixture(name="bucket")
def bucket_fixture(object_store: ObjectStore) -> str:
    return f"s3://{object_store.new_bucket()}/kv"


def s3_store(object_store: ObjectStore, url: str, **changes: Any) -> Store:
    options = replace(OPTIONS, storage_options=object_store.storage_options, **changes)
    return inline_store(url, options)


@pytest.fixture(name="memory")
def memory_fixture() -> Iterator[Store]:
    fsspec.filesystem("memory").store.clear()
    with inline_store("memory://kv", OPTIONS) as store:
        yield store
    fsspec.filesystem("memory").store.clear()


def test_what_was_put_comes_back_from_s3(object_store: ObjectStore, bucket: str) -> None:
    with s3_store(object_store, bucket) as store:
        view = store.view(IDENTITY, salt=b"x")
        assert view.lookup(IDS).miss is Miss.ABSENT
        receipt = view.put(kv_of(IDS), IDS)
        assert [item.tokens for item in receipt.queued] == [(0, 1024), (1024, 1536)]
        report, found = load(view, IDS)
        assert (report.tokens, found) == (1536, 1536)


def test_a_lookup_is_small_gets_and_no_listing(object_store: ObjectStore, bucket: str) -> None:
    ids = tokens(*range(40))
    with s3_store(object_store, bucket, extent_tokens=256) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(ids), ids)
        with object_store.record() as calls:
            assert view.lookup(ids).tokens == 40 * BLOCK
        assert 0 < len(calls) <= probe_limit(40)
        assert {call.operation for call in calls} == {"GetObject"}
        assert {call.headers["range"] for call in calls} == {"bytes=0-0"}


def test_tails_are_found_at_their_ends_only(memory: Store) -> None:
    view = memory.view(IDENTITY)
    ids = tokens(1, 2, 3, 4, 5, 6, 7)
    receipt = view.put(kv_of(ids), ids)
    ends = [item.tokens for item in receipt.queued]
    assert ends == [(0, 1024), (1024, 1536)]
    assert load(view, ids)[0].tokens == 1536
    assert load(view, ids[:1300])[0].tokens == 1024
    longer = tokens(1, 2, 3, 4, 5, 6, 7, 8)
    receipt = view.put(kv_of(longer)[:, :, 1536:], longer, first_position=1536)
    assert [item.tokens for item in receipt.queued] == [(1536, 2048)]
    assert load(view, longer)[0].tokens == 2048


def test_a_use_is_written_beside_the_object_and_not_often(
    object_store: ObjectStore, bucket: str
) -> None:
    with s3_store(object_store, bucket) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        with object_store.record() as calls:
            load(view, IDS)
            load(view, IDS)
        written = Counter(call.path for call in calls if call.operation == "PutObject")
        assert not written  # they were marked when they were put
    with s3_store(object_store, bucket) as store:
        view = store.view(IDENTITY)
        with object_store.record() as calls:
            load(view, IDS)
            load(view, IDS)
        written = Counter(call.path for call in calls if call.operation == "PutObject")
        assert sorted(written.values()) == [1, 1]
        assert all(path.endswith(".use") for path in written)


def test_grace_protects_what_was_just_used(object_store: ObjectStore, bucket: str) -> None:
    with s3_store(object_store, bucket) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        found = collect(store.backend, None, goal_bytes=0)
        assert (found.objects, found.removed, found.spared) == (2, 0, 2)
    with s3_store(object_store, bucket, grace_s=0.0) as store:
        view = store.view(IDENTITY)
        with view.lookup(IDS[:1024]):
            found = collect(store.backend, None, goal_bytes=0)
            assert (found.removed, found.spared) == (1, 1)
        assert load(view, IDS)[0].tokens == 1024
        collect(store.backend, None, goal_bytes=0)
        assert view.lookup(IDS).tokens == 0
        assert list(store.backend.entries()) == []


def test_evicted_between_lookup_and_load(memory: Store) -> None:
    view = memory.view(IDENTITY)
    view.put(kv_of(IDS), IDS)
    hit = view.probe(IDS)
    fsspec.filesystem("memory").rm(memory.backend.locate(hit.extents[1].name))
    out = np.zeros((2, LAYERS, 1536, HEADS, DIM), np.float16)
    report = view.load_into(hit, out)
    assert (report.tokens, report.faults[0].miss) == (1024, Miss.EVICTED)
    assert np.array_equal(out[:, :, :1024], kv_of(IDS)[:, :, :1024])


@pytest.mark.parametrize("status", [501, 403])
def test_a_failing_store_is_left_alone(object_store: ObjectStore, bucket: str, status: int) -> None:
    def fail(call: Call) -> Reply | None:
        return Reply(status, "InternalError") if call.operation == "GetObject" else None

    with s3_store(object_store, bucket, breaker_failures=2, breaker_s=1000.0) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        hit = view.probe(IDS)
        with object_store.rule(fail), object_store.record() as calls:
            wanted = Miss.DENIED if status == 403 else Miss.STORAGE
            out = np.zeros((2, LAYERS, 1536, HEADS, DIM), np.float16)
            assert view.load_into(hit, out).faults[0].miss is wanted
            assert view.lookup(IDS).miss is wanted
            asked = len(calls)
            assert view.lookup(IDS).miss is Miss.BREAKER
            assert view.load_into(hit, out).tokens == 0
            assert len(calls) == asked


@pytest.mark.usefixtures("memory")
def test_a_converted_object_is_copied_over_the_old_one() -> None:
    with inline_store("memory://kv", replace(OPTIONS, quality="near-lossless")) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        before = view.load(view.probe(IDS)).groups["value"].array
        cell = view.probe(IDS).extents[0]
        with view.lookup(IDS):
            assert convert_object(store.backend, store.options, cell.name, "hevc") > 0
            assert store.backend.present(cell.name.as_variant("hevc"))
        assert convert_object(store.backend, store.options, cell.name, "hevc") == 0
        assert not store.backend.present(cell.name.as_variant("hevc"))
        after = view.load(view.probe(IDS))
        assert "near-lossless/hevc" in after.report.tracks
        assert np.array_equal(after.groups["value"].array, before)


def test_a_windowed_model_and_keys(memory: Store) -> None:
    from tests.stores import windowed_cache

    view = memory.view(IDENTITY, windowed=True, window_tokens=300)
    view.put(windowed_cache(1024, 300), IDS[:1024])
    assert view.load(view.probe(IDS)).groups["key-2"].token_start == 724
    key = kvformat.EngineKey("lmcache", "builtin", "a")
    keyed = memory.view(replace(IDENTITY, kind="engine_key", engine_key=key))
    kv = kv_of(tokens(1))
    keyed.put_key(key, kv)
    out = np.zeros_like(kv)
    assert keyed.load_key(key, out).tokens == BLOCK
    assert np.array_equal(out, kv)
    assert keyed.remove_key(key)
    assert not keyed.contains_key(key)
