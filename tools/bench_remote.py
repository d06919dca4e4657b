"""Measure reading over shaped links: total time, first block, choice of track, memory.

``python tools/bench_remote.py [CACHE.safetensors] [--quick] [--json FILE] [--plot FILE.png]``

nginx serves the artifacts, a proxy of its own process shapes bandwidth and delay on loopback.
Every row is a process of its own. Beside each total time stand, measured in that same process:
*pure transfer*, a plain HTTP client that fetches the same bytes over the same link with the same
requests on one connection and drops them, and *pure decode*, the same read from memory. The raw
rows are such plain transfers of float16 and float8 tensors. "of bound" is total over the
larger of the two. ``first`` is the time to the first restored block of the second half of the
tokens, its bound one round trip plus 1.5 times that block's transfer and decode. Link speeds that
the machine does not carry show as what the plain client reached.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from bench import load, peak_mib
from bench_machine import machine
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import kvformat
from kvformat.cache import Cache
from kvformat.choosing import Auto
from kvformat.storage import PREFETCH_BYTES

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.shaping import Link as Shape
from tests.shaping import Proxy
from tests.web_server import nginx

TRACKS: Final = ("near-lossless/zstd", "near-lossless/hevc", "exact/stored")
AUTO: Final = "auto"
IDENTITY: Final = kvformat.Identity(kvformat.Model("bench"), 65_536, "float16", kind="unbound")
GEOMETRIES: Final = {
    # layers, KV heads, head dim, tokens: Llama 3.1 8B and 70B (config.json), DeepSeek-V3 (MLA)
    "8B": (32, 8, 128, 1024),
    "70B": (80, 8, 128, 512),
    "MLA": (61, 1, 576, 2048),
}
GBIT: Final = 1e9
LINKS: Final = tuple(
    (bits, delay) for bits in (0.1 * GBIT, GBIT, 10 * GBIT, 25 * GBIT) for delay in (0.001, 0.04)
)
SLOW_BITS_PER_S: Final = 0.1 * GBIT
BLOCK: Final = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One read. Times in seconds, ``round_trip_s`` that of the link."""

    cache: str
    bits_per_s: float
    round_trip_s: float
    track: str
    chosen: str
    bytes: int
    requests: int
    total_s: float
    pure_transfer_s: float
    pure_decode_s: float
    first_block_s: float | None = None
    first_bound_s: float | None = None
    memory_mib: float | None = None
    overlap: float | None = None

    @property
    def ratio(self) -> float:
        """Total over the larger of pure transfer and pure decode."""
        return self.total_s / max(self.pure_transfer_s, self.pure_decode_s)


def generated(name: str) -> Cache:
    """A cache of a model's geometry, with the correlation along tokens that real ones have."""
    layers, heads, dim, tokens = GEOMETRIES[name]
    rng = np.random.default_rng(5)
    tensors: dict[str, NDArray[Any]] = {}
    for layer in range(layers):
        for role in ("latent",) if name == "MLA" else ("key", "value"):
            noise = rng.standard_normal((tokens, heads, dim), np.float32)
            scale = np.exp(rng.standard_normal((heads, dim), np.float32))
            walk = rng.standard_normal((heads, dim), np.float32)
            tensors[f"layers.{layer}.{role}"] = ((noise + walk) * scale).astype(np.float16)
    return Cache.from_tensors(tensors)


def write(cache: Cache, path: Path) -> int:
    """An artifact of all tracks; the number of values."""
    kvformat.write(path, cache, identity=IDENTITY, tracks=TRACKS)
    return sum(prod(item.group.shape(cache.token_count)) for item in cache.groups)


def plain(port: int, path: str, ranges: list[tuple[int, int]]) -> float:
    """Seconds that a plain client takes for these ranges on one connection."""
    buffer = bytearray(BLOCK)
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        for first, stop in ranges:
            connection.request("GET", path, headers={"Range": f"bytes={first}-{stop - 1}"})
            reply = connection.getresponse()
            while reply.readinto(buffer):
                pass
    finally:
        connection.close()
    return time.perf_counter() - started


def buffers(artifact: kvformat.Artifact) -> dict[str, NDArray[Any]]:
    """Touched memory for the whole artifact."""
    count = artifact.manifest.tokens.count
    return {
        group.name: np.full(group.shape(count), 1, group.numpy_dtype) for group in artifact.groups
    }


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One row, in this process: remote, pure decode, pure transfer, first block, memory."""
    url, local, name = job["url"], Path(job["local"]), job["track"]
    track: str | Auto = Auto(quality="near-lossless") if name == AUTO else name
    data = local.read_bytes()
    with kvformat.open(data) as artifact:
        target = buffers(artifact)
        tokens = artifact.manifest.tokens.count

        def remote() -> kvformat.ReadReport:
            with kvformat.open(url) as opened:
                return opened.read_into(target, track=track)

        with kvformat.open(job["direct"]) as warm:  # imports are not part of a read
            warm.read(track=track, tokens=(0, 1))
        if job["memory"]:
            return {"memory_mib": peak_mib(remote)}
        started = time.perf_counter()
        report = remote()
        total_s = time.perf_counter() - started
        used = report.tracks[0]
        decode_s = min(artifact.read_into(target, track=used).total_s for _ in range(2))
        table = artifact.segment_table(artifact.track(used))
        start = artifact.front.data_start
        ends = [table[0].offset + start, table[len(table) - 1].offset + start]
        last = ends[1] + table[len(table) - 1].stored_bytes
        wanted = [(0, min(PREFETCH_BYTES, len(data))), (max(ends[0], 0), last)]
        found: dict[str, Any] = {
            "chosen": ", ".join(report.tracks),
            "bytes": report.traffic.received_bytes,
            "requests": report.traffic.requests + 1,
            "total_s": total_s,
            "pure_decode_s": decode_s,
            "pure_transfer_s": plain(job["port"], job["path"], wanted),
            "overlap": report.overlap,
        }
        if name != AUTO:
            found |= first_block(url, artifact, name, tokens, job)
    return found


def first_block(
    url: str, local: kvformat.Artifact, track: str, tokens: int, job: dict[str, Any]
) -> dict[str, Any]:
    """Time to the first block of the second half, and its bound."""
    half = (tokens // 2, tokens)
    with kvformat.open(url) as opened, opened.stream(tokens=half, track=track) as stream:
        next(stream)
        first_s = stream.report.first_block_s
    with local.stream(tokens=half, track=track, workers=1) as stream:
        block = next(stream)
        decode_s = stream.report.first_block_s or 0.0
    record = next(
        item
        for item in map(local.segment_table(local.track(track)).__getitem__, range(10**9))
        if item.cell.token_start + item.cell.token_count > half[0]
    )
    assert block.token_start == max(record.cell.token_start, half[0])
    wire_s = 8 * record.stored_bytes / job["bits_per_s"]
    bound_s = job["round_trip_s"] + 1.5 * (wire_s + decode_s)
    return {"first_block_s": first_s, "first_bound_s": bound_s}


def in_child(job: dict[str, Any]) -> dict[str, Any]:
    """The answer of a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(job)],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@contextlib.contextmanager
def shaped(port: int, bits: float, round_trip_s: float) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    shape = Shape(down_bits_per_s=bits, delay_s=round_trip_s / 2)
    with Proxy(("127.0.0.1", port), shape) as proxy:
        yield proxy


def measure(
    web: Any, caches: dict[str, int], links: tuple[tuple[float, float], ...], repeats: int
) -> list[Row]:
    """All rows; ``caches`` has values per name."""
    console = Console(stderr=True)
    rows: list[Row] = []
    for name, values in caches.items():
        for bits, delay in links:
            with shaped(web.port, bits, delay) as proxy:
                base = {
                    "url": f"http://127.0.0.1:{proxy.port}/{name}.kvf",
                    "direct": web.url(f"{name}.kvf"),
                    "path": f"/{name}.kvf",
                    "port": proxy.port,
                    "local": str(web.directory / f"{name}.kvf"),
                    "bits_per_s": bits,
                    "round_trip_s": delay,
                    "memory": False,
                }
                for item_bytes, label in ((2, "raw fp16"), (1, "raw fp8")):
                    size = values * item_bytes
                    seconds = plain(proxy.port, "/zeros", [(0, size)])
                    rows.append(
                        Row(name, bits, delay, label, label, size, 1, seconds, seconds, 0.0)
                    )
                # what takes seconds on the wire varies little
                count = repeats if bits > SLOW_BITS_PER_S else 1
                for track in (*TRACKS, AUTO):
                    tries = [in_child({**base, "track": track}) for _ in range(count)]
                    best = sorted(tries, key=lambda item: item["total_s"])[len(tries) // 2]
                    memory = None
                    if (bits, delay) == links[-1] and track != AUTO:
                        memory = in_child({**base, "track": track, "memory": True})["memory_mib"]
                    rows.append(Row(name, bits, delay, track, memory_mib=memory, **best))
                    console.print(f"{name} {bits / GBIT:g} Gbit/s {delay * 1e3:g} ms {rows[-1]}")
    return rows


def auto_loss(rows: list[Row]) -> dict[tuple[str, float, float], float]:
    """How much slower ``auto`` was than the best fixed track of its quality, per link."""
    result = {}
    for row in rows:
        if row.track == AUTO:
            key = (row.cache, row.bits_per_s, row.round_trip_s)
            fixed = [
                item.total_s
                for item in rows
                if (item.cache, item.bits_per_s, item.round_trip_s) == key
                and item.track.startswith("near-lossless")
            ]
            result[key] = row.total_s / min(fixed) - 1
    return result


def show(rows: list[Row]) -> None:
    """The table, and what was reached of each target."""
    console = Console(width=150)
    table = Table(title="Reading over shaped links")
    for column in ("cache", "link", "track", "MB", "GET", "total", "transfer", "decode",
                   "of bound", "first", "bound", "MiB"):  # fmt: skip
        table.add_column(
            column, justify="left" if column in {"cache", "link", "track"} else "right"
        )
    for row in rows:
        raw = row.track.startswith("raw")
        chosen = f"auto: {row.chosen}" if row.track == AUTO else row.track
        table.add_row(
            row.cache, f"{row.bits_per_s / GBIT:g} Gbit/s, {row.round_trip_s * 1e3:g} ms", chosen,
            f"{row.bytes / 1e6:.1f}", str(row.requests), f"{row.total_s:.3f}",
            f"{row.pure_transfer_s:.3f}", "" if raw else f"{row.pure_decode_s:.3f}",
            "" if raw else f"{row.ratio:.2f}", _text(row.first_block_s, 4),
            _text(row.first_bound_s, 4), _text(row.memory_mib, 0),
        )  # fmt: skip
    console.print(table)
    for line in targets(rows):
        console.print(line)


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def targets(rows: list[Row]) -> list[str]:
    """A line per target of the issue: what was reached, and how often."""
    real = [row for row in rows if not row.track.startswith("raw")]
    ratios = sorted(row.ratio for row in real if row.track != AUTO)
    firsts = sorted(
        row.first_block_s / row.first_bound_s
        for row in real
        if row.first_block_s is not None and row.first_bound_s
    )
    losses = sorted(auto_loss(rows).values())
    memory = [row.memory_mib for row in real if row.memory_mib is not None]

    def line(name: str, values: list[float], limit: float, unit: str = "") -> str:
        met = sum(value <= limit for value in values)
        return (
            f"{name}: target {limit:g}{unit}, median {median(values):.2f}{unit}, worst "
            f"{values[-1]:.2f}{unit}, met in {met} of {len(values)}"
        )

    return [
        line("total over max(pure transfer, pure decode)", ratios, 1.15),
        line("first block over its bound", firsts, 1.0),
        line("auto slower than the best fixed track by", losses, 0.10),
        line("peak memory above the output", sorted(memory), 128, " MiB"),
    ]


def plot(rows: list[Row], path: str) -> None:
    """Total times against link speed, one picture per cache and round trip."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    caches = list(dict.fromkeys(row.cache for row in rows))
    delays = sorted({row.round_trip_s for row in rows})
    figure, axes = pyplot.subplots(
        len(delays), len(caches), figsize=(4.2 * len(caches), 3.6 * len(delays)), squeeze=False
    )
    marks = dict(zip(("raw fp16", "raw fp8", *TRACKS, AUTO), "xX^vos", strict=True))
    for y, delay in enumerate(delays):
        for x, cache in enumerate(caches):
            axis = axes[y][x]
            for track, mark in marks.items():
                line = [
                    (row.bits_per_s / GBIT, row.total_s)
                    for row in rows
                    if (row.cache, row.round_trip_s, row.track) == (cache, delay, track)
                ]
                axis.plot(*zip(*line, strict=True), marker=mark, label=track, linewidth=1.3)
            axis.set(xscale="log", yscale="log", title=f"{cache}, {delay * 1e3:g} ms")
            axis.set_xlabel("link, Gbit/s")
            axis.set_ylabel("seconds until all is restored")
            axis.grid(visible=True, which="both", alpha=0.25)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(marks))
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Measure reading over shaped links.")
    parser.add_argument("cache", nargs="?", help="a real cache of 8,000 tokens or more")
    parser.add_argument("--quick", action="store_true", help="two links, one generated cache")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return
    links = LINKS[2:4] if options.quick else LINKS
    with tempfile.TemporaryDirectory() as folder, nginx(Path(folder)) as web:
        caches: dict[str, int] = {}
        if options.cache:
            caches["real"] = write(load(options.cache, None), web.directory / "real.kvf")
        for name in ("8B",) if options.quick else GEOMETRIES:
            caches[name] = write(generated(name), web.directory / f"{name}.kvf")
        with (web.directory / "zeros").open("wb") as file:
            file.truncate(2 * max(caches.values()))
        rows = measure(web, caches, links, options.repeats)
    show(rows)
    if options.json:
        report = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
