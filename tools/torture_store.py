"""A store shared by writers and readers that are killed at random points: is anything wrong served?

    python tools/torture_store.py --seconds 120

Starts writers and readers as processes of their own on one directory with a size limit, so that
eviction runs all the time. Every moment one of them, or the encoder of a writer, gets SIGKILL and
is replaced. Now and then a stored file is damaged. The KV of a block is a function of all tokens
up to its end, so a reader knows what it must get. Exit code 1 if a reader ever got anything else,
if a worker ended by itself, or if what is left in the store cannot be read or cleaned up.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from blake3 import blake3
from numpy.typing import NDArray

import kvformat
from kvformat.errors import KvformatError
from kvformat.store import Store, StoreOptions, View, open  # noqa: A004 - as its users write
from kvformat.store.eviction import collect, group_entries
from kvformat.tokens import BLOCK_TOKENS

LAYERS, HEADS, DIM = 2, 1, 16
IDENTITY = kvformat.Identity(kvformat.Model("torture/model", "1"), LAYERS, "float16")
LIMIT_BYTES = 3 * 2**20
TREES, BRANCHES, MOST_BLOCKS = 6, 3, 12


def options() -> StoreOptions:
    """Exact, so that every bit can be compared; a small limit, so that eviction never rests."""
    return StoreOptions(
        quality="exact",
        extent_tokens=1024,
        limit_bytes=LIMIT_BYTES,
        low_water=0.7,
        encoder_nice=0,
        encoder_workers=1,
    )


def prompt(rng: random.Random) -> NDArray[np.uint32]:
    """One of many prompts that share starts of several lengths."""
    tree, parts = rng.randrange(TREES), []
    for level in range(MOST_BLOCKS):
        branch = rng.randrange(BRANCHES) if level in (2, 5, 6, 9) else 0
        parts.append(np.random.default_rng([tree, level, branch]).integers(0, 50_000, BLOCK_TOKENS))
    length = rng.randrange(1, MOST_BLOCKS + 1) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS)
    return np.concatenate(parts).astype(np.uint32)[:length]


def true_kv(ids: NDArray[np.uint32]) -> NDArray[np.float16]:
    """``[2, L, T, H, D]``: random numbers that depend on every token up to the end of the block."""
    result = np.zeros((2, LAYERS, len(ids), HEADS, DIM), np.float16)
    hasher = blake3()
    for start in range(0, len(ids), BLOCK_TOKENS):
        part = ids[start : start + BLOCK_TOKENS]
        hasher.update(part.tobytes())
        seed = int.from_bytes(hasher.digest()[:8], "little")
        shape = (2, LAYERS, len(part), HEADS, DIM)
        result[:, :, start : start + len(part)] = np.random.default_rng(seed).standard_normal(shape)
    return result


def read_once(view: View, rng: random.Random, counts: Counter[str]) -> None:
    """Look a prompt up, load it, and compare every bit."""
    ids = prompt(rng)
    with view.lookup(ids) as hit:
        out = np.zeros((2, LAYERS, hit.tokens, HEADS, DIM), np.float16)
        if rng.random() < 0.2:
            hit.release()  # then it may be evicted under our hands
        report = view.load_into(hit, out)
    counts["lookups"] += 1
    counts["tokens asked"] += len(ids)
    counts["tokens served"] += report.tokens
    for fault in report.faults:
        counts[f"miss {fault.miss.value}"] += 1
    good = true_kv(ids)[:, :, : report.tokens]
    if not np.array_equal(out[:, :, : report.tokens].view(np.uint16), good.view(np.uint16)):
        counts["WRONG"] += 1


def write_once(store: Store, view: View, rng: random.Random, counts: Counter[str]) -> None:
    """What an engine does: load what is there, put the rest."""
    ids = prompt(rng)
    read_once(view, rng, counts)
    with view.lookup(ids) as hit:
        first = hit.tokens // 1024 * 1024
    receipt = view.put(true_kv(ids)[:, :, first:], ids, first_position=first)
    counts["extents queued"] += len(receipt.queued)
    if rng.random() < 0.1:
        store.drain(5)


def work(role: str, root: str, log: Path, seed: int) -> None:
    """A worker; tells its counts after each step, for it may be killed at any time."""
    logging.disable(logging.WARNING)
    rng, counts = random.Random(seed), Counter[str]()
    with open(root, options()) as store, log.open("a") as file:
        view = store.view(IDENTITY, salt=b"torture")
        while True:
            if role == "writer":
                write_once(store, view, rng, counts)
            else:
                read_once(view, rng, counts)
            for name in ("published", "evicted", "encoder_restarts"):
                counts[name] = int(store.metrics.value(name))
            file.write(json.dumps(counts) + "\n")
            file.flush()


class Crew:
    """The workers, and the one who kills them."""

    def __init__(self, root: Path, logs: Path, seed: int) -> None:
        self.root, self.logs, self.rng = root, logs, random.Random(seed)
        self.workers: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self.started = 0
        self.told: Counter[str] = Counter()
        self.orphans: list[psutil.Process] = []

    def start(self, role: str) -> None:
        """One more."""
        self.started += 1
        log = self.logs / f"{self.started}.log"
        command = [sys.executable, __file__, "--role", role, "--root", str(self.root)]
        command += ["--log", str(log), "--seed", str(self.rng.randrange(2**31))]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.workers.append((role, child, log))

    def strike(self) -> None:
        """Kill one worker, or the encoder of one, and put another in its place.

        Mostly one that has done something already, or a slow machine would only see starts.
        """
        busy = [item for item in self.workers if item[2].exists() and item[2].stat().st_size]
        if not busy and self.rng.random() < 0.9:
            return
        chosen = self.rng.choice(busy or self.workers)
        role, victim, _ = chosen
        if victim.poll() is not None:
            self.told["worker ended by itself"] += 1
        elif role == "writer" and self.rng.random() < 0.5:
            for child in psutil.Process(victim.pid).children():
                child.kill()
                self.told["encoders killed"] += 1
            return
        else:
            self.kill(victim)
            self.told[f"{role}s killed"] += 1
        self.workers.remove(chosen)
        self.start(role)

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        """With SIGKILL; its encoder is left to itself."""
        self.orphans += psutil.Process(worker.pid).children()
        worker.send_signal(signal.SIGKILL)
        worker.wait()

    def damage(self) -> None:
        """Change bytes in a stored file, as a bad disk does; or cut it."""
        files = list(self.root.glob("*/*/*/*/*/*.kvf"))
        if not files:
            return
        path = self.rng.choice(files)
        try:
            with path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(self.rng.randrange(size))
                file.write(b"\xa5\x5a") if self.rng.random() < 0.7 else file.truncate(size // 2)
        except FileNotFoundError:
            return
        self.told["files damaged"] += 1

    def end(self) -> None:
        """Kill all; encoders whose parents are dead finish the job at hand."""
        for _, worker, _ in self.workers:
            if worker.poll() is not None:
                self.told["worker ended by itself"] += 1
            else:
                self.kill(worker)
        _, left = psutil.wait_procs(self.orphans, timeout=60)
        self.told["encoders that outlived their parents"] += len(left)

    def counts(self) -> Counter[str]:
        """Of all workers together: the last whole line of each log."""
        total = Counter(self.told)
        for log in self.logs.iterdir():
            lines = log.read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            total.update(json.loads(whole[-1]) if whole else {})
        return total


def inspect(root: Path, counts: Counter[str], damaged: bool) -> None:
    """What is left: everything readable but what was damaged, nothing staged, and no holes."""
    with open(str(root), options()) as store:
        collect(store.backend, None, leftover_s=0)
        stored, strange = group_entries(store.backend.entries())
        counts["names that are not ours"] = len(strange)
        counts["objects left"] = len(stored)
        for item in stored:
            try:
                kvformat.verify(root / item.entries[-1].path, in_child=False)
            except KvformatError:
                counts["objects left damaged"] += 1
        staged = list((root / ".staging").iterdir())
        counts["staged files left"] = len(staged)
    if not damaged and counts["objects left damaged"]:
        counts["WRONG"] += 1


def torture(root: Path, logs: Path, seconds: float, seed: int, damage: bool) -> Counter[str]:
    """Run it; what was counted."""
    crew = Crew(root, logs, seed)
    for role in ("writer", "reader") * 4:
        crew.start(role)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            time.sleep(crew.rng.uniform(0.1, 3.0))
            crew.strike()
            if damage and crew.rng.random() < 0.3:
                crew.damage()
    finally:
        crew.end()
    counts = crew.counts()
    inspect(root, counts, damage)
    return counts


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-damage", action="store_true")
    parser.add_argument("--json", action="store_true")
    for name in ("--role", "--root", "--log"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given: Any = parser.parse_args()
    if given.role:
        work(given.role, given.root, Path(given.log), given.seed)
    with tempfile.TemporaryDirectory() as folder:
        root, logs = Path(folder, "store"), Path(folder, "logs")
        logs.mkdir()
        root.mkdir()
        counts = torture(root, logs, given.seconds, given.seed, not given.no_damage)
    if given.json:
        sys.stdout.write(json.dumps(counts) + "\n")
    else:
        for name, count in sorted(counts.items()):
            sys.stdout.write(f"{name:28} {count:>12,}\n")
    faults = (
        "WRONG",
        "worker ended by itself",
        "names that are not ours",
        "staged files left",
        "encoders that outlived their parents",
    )
    return int(any(counts[name] for name in faults) or not counts["tokens served"])


if __name__ == "__main__":
    raise SystemExit(main())
