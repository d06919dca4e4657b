"""Measure kvformat on a cache: bits per value, speed, memory, and the bare codecs beside it.

``python tools/bench.py [CACHE.npy | CACHE.safetensors] [--quick] [--json]``

Every track is measured in a process of its own. Speeds are medians, in million values per second
on all cores. fsync waits for the disk, so its time is taken out of the writing speed and shown
beside it. Peak memory counts what writing takes above the input array and reading above the
output array. The bare codecs run alternately with kvformat in one process, on the same data with
the same settings, so the ratios hold on a busy machine, too: "of bare" is kvformat's speed over
theirs. A writer of hevc has to decode what it encoded (HEV-7), so there bare writing is encoding
plus decoding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from bench_bare import Bare, bare_hevc, bare_zstd, general, plan, sample_cells
from bench_front import FrontResult, measure_front
from bench_machine import jiffies, machine
from rich.console import Console
from rich.table import Table

import kvformat
from kvformat.cache import Cache, GroupTensors
from kvformat.cli.inputs import read_input
from kvformat.encoder import quantise_cell, raw_bytes
from kvformat.errors import KvformatError
from kvformat.planning import parse_tracks
from kvformat.workers import cores

SAMPLE: Final = Path(kvformat.__file__).parent / "data" / "smollm2-135m-sample.safetensors"
TRACKS: Final = (
    "near-lossless/hevc",
    "near-lossless/zstd",
    "near-lossless/stored",
    "balanced/hevc",
    "balanced/zstd",
    "exact/zstd",
    "exact/stored",
)
QUICK_TOKENS: Final = 2048
BARE_VALUES: Final = 16 * 2**20
GENERAL_BYTES: Final = {3: 64 * 2**20, 19: 4 * 2**20}
IDENTITY: Final = kvformat.Identity(kvformat.Model("bench"), 65_536, "float16", kind="unbound")
_SYNC: Final = os.fsync


@dataclass(frozen=True, slots=True)
class TrackResult:
    """One track: speeds in million values per second, memory in MiB, bare speeds or None."""

    track: str
    bits: float
    write: float
    fsync_ms: float
    read: float
    write_mib: float
    read_mib: float
    bare_encode: float | None = None
    bare_write: float | None = None
    bare_decode: float | None = None


@dataclass(frozen=True, slots=True)
class GeneralResult:
    """A general compressor on a sample of ``sample_mib``: million values/s and bits per value."""

    name: str
    bits: float
    speed: float
    sample_mib: float


# ---------------------------------------------------------------------------------------------
# In the child processes


def load(file: str, tokens: int | None) -> Cache:
    """The cache in memory, or its first tokens."""
    cache = read_input(file).cache
    count = min(cache.token_count, tokens or cache.token_count)
    groups = tuple(
        GroupTensors(item.group, tuple(np.array(layer[:count]) for layer in item.layers))
        for item in cache.groups
    )
    return Cache(count, groups)


def count_values(cache: Cache) -> int:
    """Values of all tensors."""
    return sum(layer.size for item in cache.groups for layer in item.layers)


class FsyncClock:
    """Counts the time that goes into fsync."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sync(self, descriptor: int) -> None:
        """``os.fsync``, timed."""
        start = time.perf_counter()
        _SYNC(descriptor)
        self.seconds += time.perf_counter() - start


def status_bytes(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process; 0 where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_mib(work: Callable[[], object], expected_bytes: int = 0) -> float:
    """How far resident memory rises during ``work``, less ``expected_bytes``."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    except OSError:
        return float("nan")
    before = status_bytes("VmRSS")
    work()
    return (status_bytes("VmHWM") - before - expected_bytes) / 2**20


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_track(file: str, tokens: int | None, track: str, repeats: int) -> TrackResult:
    """Write and read one track ``repeats`` times, in turn with the bare codec."""
    cache = load(file, tokens)
    values = count_values(cache)
    raw = sum(layer.nbytes for item in cache.groups for layer in item.layers)
    clock = FsyncClock()
    setattr(os, "fsync", clock.sync)  # noqa: B010 - mypy refuses the plain assignment
    runs: dict[str, list[float]] = {"write": [], "fsync": [], "read": [], "enc": [], "dec": []}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "bench.kvf"

        def write() -> None:
            kvformat.write(path, cache, identity=IDENTITY, tracks=[track], overwrite=True)

        def read() -> None:
            with kvformat.open(path) as artifact:
                artifact.read()

        write_mib = peak_mib(write)
        bits = 8 * path.stat().st_size / values
        read_mib = peak_mib(read, raw)
        bare = make_bare(cache, track)
        for _ in range(repeats):
            clock.seconds = 0.0
            runs["write"].append(timed(write) - clock.seconds)
            runs["fsync"].append(clock.seconds)
            if bare is not None:
                runs["enc"].append(bare.encode() * values)
                runs["dec"].append(bare.decode() * values)
            runs["read"].append(timed(read))
    speed = {name: values / 1e6 / median(found) for name, found in runs.items() if found}
    bare_write = None
    if bare is not None:
        pairs = zip(runs["enc"], runs["dec"], strict=True)
        verified = [a + b if track.endswith("hevc") else a for a, b in pairs]
        bare_write = values / 1e6 / median(verified)
    return TrackResult(
        track,
        bits,
        speed["write"],
        1e3 * median(runs["fsync"]),
        speed["read"],
        write_mib,
        read_mib,
        speed.get("enc"),
        bare_write,
        speed.get("dec"),
    )


def make_bare(cache: Cache, track: str) -> Bare | None:
    """The bare codec of a quantised track."""
    quality, codec = track.split("/")
    make = {"hevc": bare_hevc, "zstd": bare_zstd}.get(codec)
    if make is None or quality == "exact":
        return None
    return make(cache, track, cores(), BARE_VALUES)


def measure_general(file: str, tokens: int | None) -> list[GeneralResult]:
    """zstd on the raw bytes and on the integers, samples spread over the cache."""
    cache = load(file, tokens)
    layers = [layer for item in cache.groups for layer in item.layers]
    results = []
    for level in (3, 19):
        step = -(-sum(layer.nbytes for layer in layers) // GENERAL_BYTES[level]) | 1
        raw = b"".join(bytes(raw_bytes(layer)) for layer in layers[step // 2 :: step])
        results.append(_general("raw bytes", raw, level, layers[0].itemsize))
    job, what = plan(cache, "near-lossless/stored")
    cells = sample_cells(job, GENERAL_BYTES[19])
    integers = b"".join(quantise_cell(job, what.quality, c).integers.tobytes() for c in cells)
    return [*results, _general("near-lossless integers", integers, 19, 1)]


def _general(name: str, data: bytes, level: int, item_bytes: int) -> GeneralResult:
    size, seconds = general(data, level)
    bits = 8 * size * item_bytes / len(data)
    speed = len(data) / item_bytes / 1e6 / seconds
    return GeneralResult(f"zstd -{level} on {name}", bits, speed, len(data) / 2**20)


# ---------------------------------------------------------------------------------------------
# In the parent process


def in_child(task: str, *arguments: object) -> Any:
    """Run a task of this file in a fresh process."""
    command = [sys.executable, __file__, "--task", json.dumps([task, *arguments])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def run_task(task: str) -> None:
    """The child's side of ``in_child``."""
    name, *arguments = json.loads(task)
    tasks: dict[str, Callable[..., Any]] = {
        "track": measure_track,
        "general": measure_general,
        "front": measure_front,
    }
    found = tasks[name](*arguments)
    value = [asdict(item) for item in found] if isinstance(found, list) else asdict(found)
    print(json.dumps(value))


def track_table(tracks: list[TrackResult]) -> Table:
    """The tracks beside the bare codecs."""
    table = Table(title="Tracks: whole file, million values per second")
    table.add_column("track", no_wrap=True)
    for name in ("bits", "write", "of bare", "fsync ms", "read", "of bare", "MiB w", "MiB r"):
        table.add_column(name, justify="right")
    for item in tracks:
        table.add_row(
            item.track,
            f"{item.bits:.3f}",
            f"{item.write:.1f}",
            _share(item.write, item.bare_write),
            f"{item.fsync_ms:.0f}",
            f"{item.read:.1f}",
            _share(item.read, item.bare_decode),
            f"{item.write_mib:.0f}",
            f"{item.read_mib:.0f}",
        )
    return table


def _share(speed: float, bare: float | None) -> str:
    return "" if bare is None else f"{speed / bare:.0%}"


def other_table(tracks: list[TrackResult], rest: list[GeneralResult], raw_bits: float) -> Table:
    """General compressors and bare codecs."""
    table = Table(title="Beside it: million values per second (general compressors on one thread)")
    table.add_column("what", no_wrap=True)
    for name in ("bits", "encode", "both", "decode", "MiB"):
        table.add_column(name, justify="right")
    table.add_row("raw", f"{raw_bits:.0f}", "", "", "", "")
    for item in rest:
        table.add_row(
            item.name, f"{item.bits:.3f}", f"{item.speed:.1f}", "", "", f"{item.sample_mib:.0f}"
        )
    for found in tracks:
        if found.bare_encode is not None:
            both = f"{found.bare_write:.1f}" if found.track.endswith("hevc") else ""
            table.add_row(
                f"bare {found.track}",
                "",
                f"{found.bare_encode:.1f}",
                both,
                f"{found.bare_decode:.1f}",
                "",
            )
    return table


def show(report: dict[str, Any], tracks: list[TrackResult], rest: list[GeneralResult]) -> None:
    """The report for people."""
    console = Console()
    console.width = max(110, console.width) if sys.stdout.isatty() else 110  # no number is cut
    print = partial(console.print, highlight=False)  # noqa: A001
    print("  ".join(f"{name} {value}" for name, value in report["machine"].items()))
    print(f"{report['file']}: {report['values']:,} values, {report['tokens']} tokens")
    if report["is_sample"]:
        print("[bold]This is the committed sample, too small for speeds: give a larger cache.[/]")
    print(track_table(tracks))
    print(other_table(tracks, rest, report["raw_bits"]))
    front = FrontResult(**report["front"])
    print(
        f"Front of 100,000 tokens x 80 layers: {front.front_bytes:,} bytes, {front.segments:,} "
        f"segments; opened in {front.open_ms:.1f} ms, grid and table in {front.table_ms:.1f} ms"
    )
    print(
        f"Took {report['seconds']:.0f} s; other processes used {report['others']:.1f} of "
        f"{report['machine']['cores']} cores meanwhile"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cache", nargs="?", default=str(SAMPLE))
    parser.add_argument("--quick", action="store_true", help="fewer runs, at most 2,048 tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--tracks",
        default=",".join(TRACKS),
        help="tracks, with commas; short forms as in kvformat encode",
    )
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        run_task(options.task)
        return
    try:
        names = [plan.name for plan in parse_tracks(options.tracks)]
        source = read_input(options.cache).cache
    except KvformatError as error:
        parser.error(str(error))
    start, before = time.monotonic(), jiffies()
    tokens = min(source.token_count, QUICK_TOKENS) if options.quick else source.token_count
    groups = [item.group for item in source.groups]
    values = sum(prod(group.shape(tokens)) for group in groups)
    tracks = []
    for track in names:
        repeats = (2 if options.quick else 3) if track.endswith("hevc") else 5
        tracks.append(TrackResult(**in_child("track", options.cache, tokens, track, repeats)))
    rest = [GeneralResult(**item) for item in in_child("general", options.cache, tokens)]
    after = jiffies()
    seconds = time.monotonic() - start
    report = {
        "machine": machine(),
        "file": options.cache,
        "is_sample": Path(options.cache) == SAMPLE,
        "values": values,
        "tokens": tokens,
        "raw_bits": 8
        * sum(prod(g.shape(tokens)) * g.numpy_dtype.itemsize for g in groups)
        / values,
        "tracks": [asdict(item) for item in tracks],
        "general": [asdict(item) for item in rest],
        "front": in_child("front", 5 if options.quick else 15),
        "seconds": seconds,
        "others": max(0.0, after[0] - before[0] - (after[1] - before[1])) / seconds,
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, tracks, rest)


if __name__ == "__main__":
    main()
