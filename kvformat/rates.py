"""How fast this machine decodes: a short measurement, the file that keeps it, and defaults.

``measure`` writes a small random cache with the package's own writer, reads it back and returns
``Rates``. ``save_rates`` keeps them for this user and ``load_rates`` finds them again; without a
usable file it answers with ``BUILT_IN``, for the cores here, and says why in ``Rates.source``.

A rates file holds no name of a host or user, only what the rates depend on: processor, cores and
package versions. It is used as "measured" only where all of these are still the same.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.costs import CodecRate, Rates, rate_name
from kvformat.errors import StorageError, UsageError
from kvformat.workers import cores

if TYPE_CHECKING:
    from kvformat.artifact import Artifact

SCHEMA: Final = "kvformat-rates"
SCHEMA_VERSION: Final = 1
VARIABLE: Final = "KVFORMAT_RATES"
LARGEST_FILE: Final = 65_536
PACKAGES: Final = ("kvformat", "numpy", "av", "zstandard", "blake3")
RESTORE: Final = 78.5e6
COPY: Final = 1e9
BUILT_IN: Final = Rates(
    (
        CodecRate("hevc", 31.5e6, RESTORE, 3e-3),
        CodecRate("zstd", 1150e6, RESTORE, 5e-4),
        CodecRate("stored", 1150e6, RESTORE, 5e-4),
        CodecRate("exact/zstd", 165.5e6, COPY, 5e-4),
        CodecRate("exact/stored", 200.5e6, COPY, 5e-4),
    ),
    "built in: whole reads of SmolLM2-135M on two cores of an AMD EPYC (Zen 4), from the README",
)
"""Per worker, from the README's table of two cores: the lower value of each range, halved.

Whole reads there make 45 (hevc), 147 (zstd), 284 (exact/zstd) and 334 (exact/stored) million
values per second and bare zstd frames 2,300: 1/147 - 1/2,300 is left for restoring, which gives
157, or 78.5 per worker, and each decoder has what then remains of its own read. Restoring exact
bytes is a copy, taken as 1,000. Quantised ``stored`` is not in that table and taken as zstd. The
fixed costs of a segment are rounded up from a measurement on two cores of the same kind.
"""


# The measurement


@dataclass(frozen=True, slots=True)
class Sample:
    """A read of one track by one worker: values, segments, seconds."""

    values: int
    segments: int
    read_s: float


SHAPE: Final = (2, 6, 2048, 4, 64)
COARSE_TOKENS: Final = 512
FINE_TOKENS: Final = 64
TRACKS: Final = (
    "near-lossless/zstd",
    "near-lossless/hevc",
    "near-lossless/stored",
    "exact/zstd",
    "exact/stored",
)
BUDGET_S: Final = 8.0
REPEATS: Final = 5

Clock = Callable[[], float]
Progress = Callable[[int, int], None]


def correlated_cache(shape: tuple[int, int, int, int, int] = SHAPE) -> NDArray[np.float16]:
    """A cache ``[2, L, T, H, D]`` of noise that is like keys and values for a codec.

    Channels have offsets and scales of their own, and each value resembles the one of the token
    before it, as in real caches.
    """
    random = np.random.default_rng(20240517)
    sides, layers, _, heads, dim = shape
    noise = random.standard_normal(shape, np.float32)
    for token in range(1, shape[2]):
        noise[:, :, token] = 0.5 * noise[:, :, token - 1] + 0.866 * noise[:, :, token]
    channel = (sides, layers, 1, heads, dim)
    scale = np.exp(random.normal(0, 0.5, channel)).astype(np.float32)
    offset = 2 * random.standard_normal(channel, np.float32)
    return (noise * scale + offset).astype(np.float16)


def measure(
    *,
    shape: tuple[int, int, int, int, int] = SHAPE,
    budget_s: float = BUDGET_S,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> Rates:
    """Measure decoding and restoring of every codec on this machine, in about ten seconds.

    Each track is read in long segments and in short ones, by one worker and by one per core. The
    fastest of a few times counts, because other load only slows. Raises ``KvformatError`` where
    a codec does not work (``kvformat doctor`` says which).
    """
    import kvformat

    cache = correlated_cache(shape)
    entries = []
    with (
        kvformat.open(_artifact(cache, COARSE_TOKENS)) as coarse,
        kvformat.open(_artifact(cache, FINE_TOKENS)) as fine,
    ):
        for done, track in enumerate(TRACKS):
            if progress is not None:
                progress(done, len(TRACKS))
            entries.append(_measure_track(coarse, fine, track, budget_s / len(TRACKS), clock))
    if progress is not None:
        progress(len(TRACKS), len(TRACKS))
    return Rates(tuple(entries), "measured on this machine now")


def _measure_track(
    coarse: Artifact, fine: Artifact, track: str, budget_s: float, clock: Clock
) -> CodecRate:
    def read(artifact: Artifact, workers: int) -> Callable[[], object]:
        return lambda: artifact.read(track=track, workers=workers)

    workers = cores()
    values = sum(math.prod(item.shape(coarse.manifest.tokens.count)) for item in coarse.groups)
    jobs = (read(coarse, 1), read(coarse, workers), read(fine, 1), _restoring(coarse, track))
    coarse_s, together_s, fine_s, restore_s = _fastest(jobs, budget_s, clock)
    return fit(
        track,
        Sample(values, coarse.track(track).segments, coarse_s),
        Sample(values, fine.track(track).segments, fine_s),
        restore_s=restore_s,
        workers=workers,
        speedup=coarse_s / together_s,
    )


def fit(
    track: str,
    coarse: Sample,
    fine: Sample,
    *,
    restore_s: float,
    workers: int = 1,
    speedup: float = 1.0,
) -> CodecRate:
    """The rate that explains both samples: ``read_s = segments * a + values * b``.

    ``restore_s`` is the part of ``coarse.read_s`` that restores. Where noise hides the fixed cost
    ``a``, it is 0 and the coarse sample gives ``b``.
    """
    times = fine.values / coarse.values
    grown = fine.segments - coarse.segments * times
    fixed_s = (fine.read_s - coarse.read_s * times) / grown if grown > 0 else 0.0
    fixed_s = min(max(0.0, fixed_s), 0.9 * coarse.read_s / coarse.segments)
    value_s = (coarse.read_s - coarse.segments * fixed_s) / coarse.values
    restore_s = min(restore_s / coarse.values, 0.9 * value_s)
    quality, _, codec = track.partition("/")
    return CodecRate(
        rate_name(codec, exact=quality == "exact"),
        1 / (value_s - restore_s),
        1 / restore_s,
        fixed_s,
        workers,
        max(speedup, 1.0),
        "measured",
    )


def _artifact(cache: NDArray[np.float16], segment_tokens: int) -> bytes:
    """The bytes of an artifact with every track."""
    import tempfile

    import kvformat

    model = kvformat.Model("measurement")
    identity = kvformat.Identity(model, cache.shape[1], "float16", kind="unbound")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measurement.kvf"
        kvformat.write(path, cache, identity=identity, tracks=TRACKS, segment_tokens=segment_tokens)
        return path.read_bytes()


def _restoring(artifact: Artifact, track: str) -> Callable[[], object]:
    """What restores all segments of a track, which are decoded before."""
    from kvformat.segments import PartOfSegment, decode_segment, restore_into

    chosen = artifact.track(track)
    table = artifact.segment_table(chosen)
    jobs = []
    for record in (table[index] for index in range(chosen.segments)):
        cell, group = record.cell, artifact.groups[record.cell.group]
        segment = decode_segment(artifact.context(chosen, record), artifact.segment_bytes(record))
        shape = (cell.layer_count, cell.token_count, cell.head_count, group.head_dim)
        part = PartOfSegment(*(slice(0, size) for size in shape[:3]))
        jobs.append((segment, np.empty(shape, group.numpy_dtype), part))

    def restore() -> None:
        for segment, out, part in jobs:
            restore_into(segment, out, slice(0, out.shape[1]), part)

    return restore


def _fastest(
    jobs: Sequence[Callable[[], object]], budget_s: float, clock: Clock
) -> tuple[float, ...]:
    """The fastest of some times of each job, in turn so that other load meets all alike.

    All run twice, then again until ``budget_s`` is spent or they ran ``REPEATS`` times. Results
    are kept to the end, or the next one would get memory that the system need not hand out anew.
    """
    best = [math.inf] * len(jobs)
    kept: list[object] = []
    begin = clock()
    for number in range(REPEATS):
        if number >= 2 and clock() - begin >= budget_s:
            break
        for index, job in enumerate(jobs):
            start = clock()
            kept.append(job())
            best[index] = min(best[index], clock() - start)
    return tuple(best)


# The file


def rates_path(environment: Mapping[str, str] | None = None) -> Path | None:
    """Where the rates of this user are kept: ``$KVFORMAT_RATES``, or in the cache directory.

    None where neither is known.
    """
    env = os.environ if environment is None else environment
    if env.get(VARIABLE):
        return Path(env[VARIABLE])
    cache = Path(env.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # as its specification wants
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return cache / "kvformat" / "rates.json"


def host_facts() -> dict[str, Any]:
    """What rates depend on: no name, no serial number."""
    return {
        "cores": cores(),
        "cpu": _processor(),
        "machine": platform.machine(),
        "packages": {name: _version(name) for name in PACKAGES},
        "system": platform.system(),
    }


@cache
def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


@cache
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def to_bytes(rates: Rates, host: Mapping[str, Any]) -> bytes:
    """The file's content; ``parse_rates`` reads it."""
    entries = [
        {key: value for key, value in asdict(item).items() if key != "origin"}
        for item in rates.entries
    ]
    content = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "host": dict(host),
        "rates": entries,
    }
    return (json.dumps(content, indent=2, ensure_ascii=True, sort_keys=True) + "\n").encode()


def target_path(path: Path | None = None) -> Path:
    """The file to write, in a directory that is there now; ``StorageError`` if that cannot be."""
    from kvformat.storage import storage_errors

    target = path or rates_path()
    next_step = f"Set {VARIABLE} to the path of a file"
    if target is None:
        raise StorageError(
            "io.not-found", "this user has no home directory to keep rates in", next_step=next_step
        )
    try:
        with storage_errors(str(target), "io.write", "making the directory of the rates"):
            target.parent.mkdir(parents=True, exist_ok=True)
    except StorageError as error:
        if error.code != "io.exists":
            raise
        raise StorageError(
            "io.write",
            "a file is where the directory of the rates should be",
            where=str(target),
            next_step=next_step,
        ) from error
    return target.absolute()


def save_rates(rates: Rates, path: Path | None = None) -> Path:
    """Write the file in one step, in place of an older one; returns where. ``StorageError``."""
    from kvformat.storage import publish

    target = target_path(path)
    content = to_bytes(rates, host_facts())

    def write(file: IO[bytes]) -> None:
        file.write(content)

    publish(target, write, overwrite=True)
    return target


@dataclass(frozen=True, slots=True)
class RatesFile:
    """A file that was understood: its entries, all "measured", and the facts of its host."""

    entries: tuple[CodecRate, ...]
    host: Mapping[str, Any]

    def foreign(self, host: Mapping[str, Any]) -> str | None:
        """The first fact that differs from those of ``host``, in words."""
        for key in sorted({*self.host, *host}):
            mine, theirs = host.get(key), self.host.get(key)
            if mine != theirs:
                return f"{key}: {_short(theirs)} there, {_short(mine)} here"
        return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, sort_keys=True)
    return text if len(text) <= 200 else f"{text[:200]}..."


def parse_rates(data: bytes) -> RatesFile:
    """The rates in a file; ``UsageError`` with a reason for anything else."""
    if len(data) > LARGEST_FILE:
        raise _damaged("it is too large")
    try:
        content = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _damaged("it is no JSON") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise _damaged(f"it has no schema {SCHEMA}")
    if content.get("version") != SCHEMA_VERSION:
        raise _damaged(f"it has version {_short(content.get('version'))}, not {SCHEMA_VERSION}")
    host, entries = content.get("host"), content.get("rates")
    if not isinstance(host, dict) or not isinstance(entries, list) or not entries:
        raise _damaged("host or rates are missing")
    rates = tuple(_parse_entry(item) for item in entries)
    Rates(rates)
    return RatesFile(rates, host)


def _parse_entry(item: Any) -> CodecRate:
    keys = {"name", "device"}
    numbers = {"decode_values_per_s", "restore_values_per_s", "segment_s", "speedup"}
    if not isinstance(item, dict) or set(item) != keys | numbers | {"workers"}:
        raise _damaged("a rate has other members than expected")
    texts = [item[key] for key in keys]
    amounts = [item[key] for key in numbers]
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise _damaged("a name is no text")
    if (
        not all(type(value) in (int, float) for value in amounts)
        or type(item["workers"]) is not int
    ):
        raise _damaged("a rate is no number")
    if not all(0 <= value <= 1e18 for value in amounts):
        raise _damaged("a rate is out of range")
    return CodecRate(**item, origin="measured")


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _damaged(reason: str) -> UsageError:
    return UsageError(
        "usage.argument",
        f"the rates file cannot be used: {reason}",
        next_step="Measure again with kvformat doctor --measure",
    )


def read_rates_file(path: Path) -> RatesFile:
    """The file at ``path``; ``StorageError`` or ``UsageError``."""
    from kvformat.storage import storage_errors

    with storage_errors(str(path), "io.read", "reading the rates"), path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
    return parse_rates(data)


def load_rates(path: Path | None = None) -> Rates:
    """The rates measured on this machine, or ``BUILT_IN``; ``source`` says which, and why.

    A missing, damaged, old or foreign file is ignored. A codec that the file lacks
    keeps its built-in rate, marked "assumed".
    """
    path = path or rates_path()
    if path is None:
        return _built_in("there is no directory to keep others in")
    try:
        found = read_rates_file(path)
    except StorageError as error:
        if error.code == "io.not-found":
            return _built_in("nothing is measured here yet, kvformat doctor --measure does that")
        return _built_in(f"{path}: {error.message}")
    except UsageError as error:
        return _built_in(f"{path}: {error.message}")
    foreign = found.foreign(host_facts())
    if foreign is not None:
        return _built_in(f"{path} is from another machine or version, {foreign}")
    rates = _built_in("").replaced(*found.entries)
    return replace(rates, source=f"measured on this machine ({path})")


def _built_in(reason: str) -> Rates:
    """``BUILT_IN`` for as many workers as there are cores here, each as fast as the first."""
    count = cores()
    entries = (replace(item, workers=count, speedup=count) for item in BUILT_IN.entries)
    return Rates(tuple(entries), f"{BUILT_IN.source}; {reason}")
