"""Bulk work on a store and its command: verify, convert, gc, stats; on a cluster; resumed."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kvformat
from kvformat.cli.program import cli
from kvformat.errors import StorageError
from kvformat.store import Store, StoreOptions
from kvformat.store.bulk import Outcome, plan, run, run_task
from kvformat.store.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics
from kvformat.store.prometheus import prometheus_text
from tests.stores import EXACT, IDENTITY, flip, inline_store, kv_of, load, tokens

LOSSY = replace(EXACT, quality="near-lossless")
PROMPTS = [tokens(number, number + 1) for number in (10, 20, 30, 40)]


@pytest.fixture(name="root")
def root_fixture(tmp_path: Path) -> Path:
    """Four prompts of two blocks: four objects, eight names."""
    fill(tmp_path / "store", LOSSY)
    return tmp_path / "store"


def fill(root: Path, options: StoreOptions) -> None:
    with inline_store(root, options) as store:
        view = store.view(IDENTITY)
        for ids in PROMPTS:
            view.put(kv_of(ids), ids)


def ends(root: Path) -> list[Path]:
    return sorted(root.glob("*/*/*/*/*/*-2.kvf"))


def results(outcomes: Iterator[Outcome]) -> Counter[str]:
    return Counter(item.result for item in outcomes)


def test_verify_looks_at_every_object_and_every_name(root: Path) -> None:
    flip(ends(root)[0])
    good, wrong = ends(root)[1:3]
    wrong.unlink()
    os.link(good, wrong)  # the other name of what was there is still good: an object of its own
    assert results(run(plan(str(root), LOSSY, "verify"))) == {
        "corrupt": 1,
        "other-tokens": 1,
        "ok": 2,
    }


def test_verifying_is_no_use(root: Path) -> None:
    before = [path.stat().st_atime_ns for path in ends(root)]
    assert results(run(plan(str(root), LOSSY, "verify"))) == {"ok": 4}
    assert [path.stat().st_atime_ns for path in ends(root)] == before


def test_damage_is_deleted_on_request(root: Path) -> None:
    flip(ends(root)[0])
    tasks = plan(str(root), LOSSY, "verify", delete_damaged=True)
    assert results(run(tasks)) == {"deleted": 1, "ok": 3}
    assert len(list(root.glob("*/*/*/*/*/*.kvf"))) == 6


def test_convert_over_processes_keeps_every_bit(root: Path) -> None:
    with inline_store(root, LOSSY) as store:
        view = store.view(IDENTITY)
        before = [view.load(view.probe(ids)).groups["key"].array for ids in PROMPTS]
        assert results(run(plan(str(root), LOSSY, "convert"), workers=2)) == {"converted": 4}
        for ids, array in zip(PROMPTS, before, strict=True):
            loaded = view.load(view.probe(ids))
            assert loaded.report.tracks == ("near-lossless/hevc",)
            assert loaded.groups["key"].array.tobytes() == array.tobytes()
    assert results(run(plan(str(root), LOSSY, "convert"))) == {"done before": 4}


def test_a_run_goes_on_where_its_journal_ends(root: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    tasks = plan(str(root), LOSSY, "convert")
    first = run(tasks, journal=journal)
    done = [next(first).path, next(first).path]
    first.close()  # type: ignore[attr-defined]
    with journal.open("a") as file:
        file.write('{"action": "conv')  # killed in the middle of a line
    inodes = {path: (root / path).stat().st_ino for path in done}
    again = list(run(tasks, journal=journal))
    assert Counter(item.result for item in again) == {"converted": 4}
    assert [item.path for item in again[:2]] == done
    assert {path: (root / path).stat().st_ino for path in done} == inodes
    assert len(list(run(tasks, journal=journal))) == 4
    assert results(run(plan(str(root), LOSSY, "verify"), journal=journal)) == {"ok": 4}
    lines = [line for line in journal.read_text().splitlines() if line.endswith("}")]
    assert Counter(json.loads(line)["action"] for line in lines) == {"convert": 4, "verify": 4}


@pytest.fixture(name="cluster", scope="module")
def cluster_fixture() -> Iterator[Any]:
    """Dask with two worker processes."""
    distributed = pytest.importorskip("distributed")
    logging.getLogger("distributed").setLevel(logging.ERROR)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=logging.ERROR
        ) as workers,
        distributed.Client(workers) as client,
    ):
        yield client


@pytest.mark.filterwarnings("default")
def test_two_workers_of_a_cluster_share_the_work(root: Path, tmp_path: Path, cluster: Any) -> None:
    flip(ends(root)[0])
    tasks = plan(str(root), LOSSY, "verify")
    assert results(run(tasks, cluster=cluster)) == {"corrupt": 1, "ok": 3}
    journal = tmp_path / "journal"
    first = run(plan(str(root), LOSSY, "convert"), cluster=cluster, journal=journal)
    next(first)
    first.close()  # type: ignore[attr-defined]
    address = cluster.scheduler.address
    found = results(run(plan(str(root), LOSSY, "convert"), cluster=address, journal=journal))
    assert found["corrupt"] == 1
    assert found["converted"] + found["done before"] == 3
    assert len(cluster.scheduler_info()["workers"]) == 2


def test_a_scheduler_that_is_not_there(root: Path) -> None:
    tasks = plan(str(root), LOSSY, "verify")
    with pytest.raises(StorageError, match="scheduler"):
        list(run(tasks, cluster="tcp://127.0.0.1:1"))


def test_a_task_never_raises(root: Path) -> None:
    (task, *_) = plan(str(root), LOSSY, "verify")
    assert run_task(replace(task, path="nonsense")).result == "unknown-version"
    (root / task.path).unlink()
    outcome = run_task(task)
    assert (outcome.result, outcome.code) == ("evicted", "io.not-found")


def command(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["store", *map(str, arguments)])


def test_stats_count_by_namespace(root: Path) -> None:
    fill(root, EXACT)
    strange = root / "shared/m/v9.0/exact.g4/00/what.kvf"
    strange.parent.mkdir(parents=True)
    strange.write_bytes(b"12345")
    found = command("stats", root, "--json")
    said = json.loads(found.stdout)
    assert found.exit_code == 0
    assert said["store"]["objects"] == 8
    assert said["store"]["names"] == 16
    assert (said["store"]["unknown_objects"], said["store"]["unknown_bytes"]) == (1, 5)
    assert [(row["quality"], row["objects"]) for row in said["namespaces"]] == [
        ("exact.g4", 4),
        ("near-lossless.g4", 4),
    ]
    shown = command("stats", root).stdout
    assert "8 objects" in shown and "never deleted" in shown


def test_gc_evicts_to_a_size_and_says_so(root: Path) -> None:
    with inline_store(root, LOSSY) as store, store.view(IDENTITY).lookup(PROMPTS[0]):
        found = command("gc", root, "--limit", "0", "--json")
    said = json.loads(found.stdout)["report"]
    assert (said["removed"], said["spared"]) == (3, 1)
    assert len(ends(root)) == 1
    assert "1 objects evicted" in command("gc", root, "--limit", "0").stdout


@pytest.mark.parametrize(
    ("size", "code"), [("1k", 0), ("1.5GiB", 0), ("7", 0), ("1X", 64), ("-1", 64), ("", 64)]
)
def test_sizes_on_the_command_line(tmp_path: Path, size: str, code: int) -> None:
    (tmp_path / "store").mkdir()
    assert command("gc", tmp_path / "store", "--limit", size).exit_code == code


def test_the_command_tells_of_damage_by_its_exit_code(root: Path) -> None:
    assert command("verify", root).exit_code == 0
    flip(ends(root)[0])
    found = command("verify", root)
    assert found.exit_code == 65
    assert "1 of 4 objects are not good" in found.stderr
    assert re.search(r"corrupt +1", found.stdout)
    assert json.loads(command("verify", root, "--json").stdout)["code"] == "segment.digest"
    assert command("verify", root, "--delete-damaged").exit_code == 0
    assert command("convert", root, "--json").exit_code == 0
    with inline_store(root, LOSSY) as store:
        view = store.view(IDENTITY)
        tracks = [view.load(view.probe(ids)).report.tracks for ids in PROMPTS]
    assert sorted(tracks) == [(), *[("near-lossless/hevc",)] * 3]


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    for name in ("stats", "gc", "verify", "convert"):
        assert command(name, tmp_path / "none").exit_code == 74
    assert list(tmp_path.iterdir()) == []
    assert command("stats", tmp_path, "--storage-options", "[]").exit_code == 64


def test_metrics_of_a_session_as_prometheus_text(tmp_path: Path) -> None:
    with inline_store(tmp_path) as store:
        use(store)
        text = prometheus_text(store.metrics).decode()
    wanted = {
        'kvformat_store_lookups_total{result="hit"}': 1,
        'kvformat_store_lookups_total{result="absent"}': 1,
        'kvformat_store_loads_total{codec="zstd",quality="exact",verdict="ok"}': 1,
        'kvformat_store_loads_total{codec="none",quality="exact",verdict="corrupt"}': 1,
        'kvformat_store_misses_total{reason="corrupt"}': 1,
        'kvformat_store_published_total{codec="zstd"}': 2,
        'kvformat_store_load_seconds_count{codec="zstd",quality="exact"}': 1,
        'kvformat_store_load_actual_over_predicted_count{codec="zstd",quality="exact"}': 1,
        "kvformat_store_lookup_seconds_count": 2,
        "kvformat_store_write_amplification": 1,
        "kvformat_store_encoder_restarts_total": 0,
    }
    for line, value in wanted.items():
        assert f"{line} {float(value)}\n" in text
    for name in (*COUNTERS, *HISTOGRAMS, *GAUGES):
        assert f"# HELP kvformat_store_{name}" in text


def use(store: Store) -> None:
    """A miss, a put, a hit, a good and a damaged extent."""
    view = store.view(IDENTITY)
    ids = tokens(1, 2, 3, 4, 5)
    assert view.lookup(ids).tokens == 0
    view.put(kv_of(ids), ids)
    flip(Path(store.backend.locate(view.scope.name(view.hashes(ids), 5))))
    assert load(view, ids)[0].tokens == 1024


def test_metrics_refuse_what_they_do_not_know() -> None:
    metrics = Metrics()
    for act in (
        lambda: metrics.count("nothing"),
        lambda: metrics.count("misses"),
        lambda: metrics.observe("load_seconds", 1.0),
        lambda: metrics.set("lookups", 1),
    ):
        with pytest.raises(KeyError):
            act()
    assert metrics.write_amplification is None
    assert kvformat.store.Miss.ABSENT == "absent"
