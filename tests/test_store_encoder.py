"""The encoder process: bounded queue, crashes, shutdown, several processes on one store."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import kvformat
import kvformat.store
from kvformat.store import Miss, Refusal, Store, StoreOptions, queueing
from kvformat.store import encoder as encoder_module
from kvformat.store.handover import SharedMemory, copy_cache, plan, receive, send
from tests.stores import EXACT, IDENTITY, kv_of, load, tokens, windowed_cache

IDS = tokens(1, 2, 3, 4, 5, 6)
PATIENCE_S = 120.0


@pytest.fixture(name="store")
def store_fixture(tmp_path: Path) -> Iterator[Store]:
    with kvformat.store.open(str(tmp_path / "store"), EXACT) as store:
        yield store


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process does; fails when it never happens."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def child(store: Store) -> psutil.Process:
    """The encoder of a store."""
    until(lambda: store.queue._process.pid is not None)
    pid = store.queue._process.pid
    assert pid is not None
    return psutil.Process(pid)


def test_what_was_put_is_there_after_drain(store: Store) -> None:
    view = store.view(IDENTITY, salt=b"x")
    assert view.put(kv_of(IDS), IDS).tokens == 1536
    assert store.drain(PATIENCE_S)
    assert load(view, IDS)[0].tokens == 1536
    assert store.metrics.value("queue_bytes") == store.metrics.value("queue_extents") == 0
    assert store.metrics.value("published", "zstd") == 2
    process = child(store)
    store.close()
    assert not process.is_running()


def test_windows_and_content_travel_to_the_encoder(store: Store) -> None:
    view = store.view(IDENTITY, windowed=True, window_tokens=300)
    span = kvformat.ContentSpan(10, 5, "image", "sha256:" + "a" * 64)
    view.put(windowed_cache(1024, 300), IDS[:1024], content=(span,))
    assert store.drain(PATIENCE_S)
    assert view.lookup(IDS).tokens == 0
    loaded = view.load(view.probe(IDS, content=(span,)))
    assert loaded.groups["key-2"].token_start == 724


def stall(store: Store) -> threading.Event:
    """Hold the feeder in front of its next job until the event is set."""
    gate = threading.Event()
    original = store.queue._process.ask

    def ask(job: object, memory: Any) -> Any:
        gate.wait(PATIENCE_S)
        return original(job, memory)

    store.queue._process.ask = ask  # type: ignore[method-assign]
    return gate


@pytest.mark.parametrize("policy", ["refuse", "drop-oldest"])
def test_a_full_queue_refuses_or_drops_the_oldest(tmp_path: Path, policy: Any) -> None:
    prompts = [tokens(start, start + 1) for start in (10, 20, 30)]
    size = plan(kvformat.Cache.from_kv(kv_of(prompts[0]))).size_bytes
    options = replace(EXACT, queue_bytes=2 * size, when_full=policy)
    with kvformat.store.open(str(tmp_path), options) as store:
        gate = stall(store)
        view = store.view(IDENTITY)
        receipts = []
        for number, ids in enumerate(prompts):
            receipts.append(view.put(kv_of(ids), ids))
            if number == 0:
                until(lambda: store.queue._running is not None)
        assert store.metrics.value("queue_bytes") == 2 * size
        gate.set()
        assert store.drain(PATIENCE_S)
        found = [view.lookup(ids).tokens for ids in prompts]
        if policy == "refuse":
            assert receipts[2].refused[0][1] is Refusal.QUEUE_FULL
            assert found == [512, 512, 0]
            assert store.metrics.value("refusals", "queue-full") == 1
        else:
            assert receipts[2].queued
            assert found == [512, 0, 512]
            assert store.metrics.value("refusals", "dropped") == 1


def test_what_is_on_its_way_is_not_queued_twice(store: Store) -> None:
    gate = stall(store)
    view = store.view(IDENTITY)
    view.put(kv_of(IDS), IDS)
    again = view.put(kv_of(IDS), IDS)
    assert [why for _, why in again.refused] == [Refusal.PRESENT]
    gate.set()
    assert store.drain(PATIENCE_S)
    assert store.metrics.value("published") == 2


def test_an_encoder_that_is_killed_is_started_again(store: Store) -> None:
    view = store.view(IDENTITY)
    view.put(kv_of(IDS), IDS)
    assert store.drain(PATIENCE_S)
    first = child(store)
    first.kill()
    first.wait()
    other = tokens(7, 8)
    view.put(kv_of(other), other)
    assert store.drain(PATIENCE_S)
    assert store.metrics.value("refusals", "encoder") == 1
    assert store.metrics.value("encoder_restarts") == 1
    view.put(kv_of(other), other)
    assert store.drain(PATIENCE_S)
    assert view.lookup(other).tokens == 512
    assert child(store).pid != first.pid


def test_a_job_that_kills_the_encoder_is_not_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(queueing, "RESTART_S", (0.0,))
    monkeypatch.setattr(queueing, "PROGRAM", deadly)
    view = store.view(IDENTITY)
    view.put(kv_of(IDS), IDS)
    assert store.drain(PATIENCE_S)
    assert store.metrics.value("refusals", "encoder") == 2
    monkeypatch.setattr(queueing, "PROGRAM", encoder_module.PROGRAM)
    view.put(kv_of(IDS), IDS)
    assert store.drain(PATIENCE_S)
    assert view.lookup(IDS).tokens == 1536


def test_closing_does_not_wait_for_a_stuck_job(store: Store) -> None:
    view = store.view(IDENTITY)
    view.put(kv_of(IDS), IDS)
    assert store.drain(PATIENCE_S)
    process = child(store)
    process.suspend()
    other = tokens(7, 8)
    view.put(kv_of(other), other)
    store.close(timeout_s=0.1)
    assert not process.is_running()
    assert store.metrics.value("refusals", "closed") == 1
    assert view.put(kv_of(IDS), IDS).refused == ((None, Refusal.CLOSED),)


def test_the_encoder_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time, kvformat.store\n"
        "from tests.stores import *\n"
        "store = kvformat.store.open(sys.argv[1], EXACT)\n"
        "ids = tokens(1, 2)\n"
        "store.view(IDENTITY).put(kv_of(ids), ids)\n"
        "store.drain()\n"
        "print(store.queue._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    ) as parent:
        assert parent.stdout is not None
        encoder = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            encoder.wait(PATIENCE_S)
        assert not encoder.is_running()


def put_some(root: str, start: int, results: Any) -> None:
    """One of several processes that put prompts with a common start."""
    with kvformat.store.open(root, EXACT) as store:
        view = store.view(IDENTITY)
        for number in range(start, start + 3):
            ids = tokens(1, 2, 3, number)
            view.put(kv_of(ids), ids)
        results.put(store.drain(PATIENCE_S))


def test_two_processes_write_one_store(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    writers = [
        context.Process(target=put_some, args=(str(tmp_path), start, results))
        for start in (100, 102)
    ]
    for writer in writers:
        writer.start()
    assert [results.get(timeout=PATIENCE_S) for _ in writers] == [True, True]
    for writer in writers:
        writer.join(PATIENCE_S)
        assert writer.exitcode == 0
    with kvformat.store.open(str(tmp_path), EXACT) as store:
        view = store.view(IDENTITY)
        for number in range(100, 105):
            assert load(view, tokens(1, 2, 3, number))[0].tokens == 1024
    assert list((tmp_path / ".staging").iterdir()) == []


def test_a_popular_extent_becomes_video_when_the_encoder_is_idle(tmp_path: Path) -> None:
    options = replace(EXACT, quality="near-lossless", popular_loads=2, idle_s=0.05)
    with kvformat.store.open(str(tmp_path), options) as store:
        view = store.view(IDENTITY)
        view.put(kv_of(IDS), IDS)
        assert store.drain(PATIENCE_S)
        before = [view.load(view.probe(IDS)) for _ in range(2)][-1]
        until(lambda: store.metrics.value("published", "hevc") == 2)
        after = view.load(view.probe(IDS))
        assert after.report.tracks == ("near-lossless/hevc",)
        for name, group in after.groups.items():
            assert np.array_equal(group.array, before.groups[name].array)
        assert (store.metrics.write_amplification or 0) > 1.5


def test_the_encoder_makes_room(tmp_path: Path) -> None:
    limit = kv_of(tokens(1, 2, 3, 4)).nbytes * 2
    options = StoreOptions(quality="exact", limit_bytes=limit)
    with kvformat.store.open(str(tmp_path), options) as store:
        view = store.view(IDENTITY)
        for start in range(0, 40, 4):
            ids = tokens(*range(start, start + 4))
            view.put(kv_of(ids), ids)
        assert store.drain(PATIENCE_S)
        assert store.metrics.value("evicted") > 0
        assert store.metrics.value("store_bytes") <= limit
        assert view.lookup(tokens(0, 1, 2, 3)).miss is Miss.ABSENT


def test_shared_memory_carries_any_cache() -> None:
    import socket

    cache = windowed_cache(1024, 300)
    spec = plan(cache)
    memory = SharedMemory.make(spec.size_bytes)
    copy_cache(cache, spec, memory)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        send(mine, spec, (memory.descriptor,))
        found, (descriptor,) = receive(theirs)
        other = SharedMemory(descriptor, found.size_bytes)
        copy = other.cache(found)
        assert copy.token_count == cache.token_count
        for here, there in zip(cache.groups, copy.groups, strict=True):
            assert here.group == there.group
            assert [x.tobytes() for x in here.layers] == [x.tobytes() for x in there.layers]
        del copy
        other.close()
        mine.close()
        with pytest.raises(EOFError):
            receive(theirs)
    memory.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)
