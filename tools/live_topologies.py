"""The connector in the real vLLM on a CPU with ranks in processes of their own.

    python tools/live_topologies.py

Needs the environment of ``tools/ci_engines.sh vllm``, and four to five minutes on two cores, most
of which the engine's processes take to start. A random model of four layers and two KV heads is
run with two tensor-parallel ranks, with two pipeline stages, and whole; each topology loads what
another one stored. Prints a row per request, and ends with 1 if one is not as expected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
COUNT, WHOLE, CELL = 1400, 1280, 1024
ANSWER: Final = "RESULT "
SETTINGS: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two ranks on two cores
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Run:
    """A topology, those that it may load, whether it stores, and the cached tokens to expect."""

    tp: int
    pp: int
    topologies: tuple[str, ...]
    save: bool
    cached: tuple[int, ...]


RUNS: Final = (
    ("two ranks store their heads, and load them", Run(2, 1, (), True, (0, WHOLE))),
    ("two stages load the ranks' heads, and store their layers",
     Run(1, 2, ("tp2pp1",), True, (WHOLE, WHOLE))),
    ("control: nothing is loaded that is not named", Run(1, 1, (), False, (0,))),
    ("one process loads the ranks' heads", Run(1, 1, ("tp2pp1",), False, (WHOLE,))),
    ("one process loads the stages' layers", Run(1, 1, ("tp1pp2",), False, (WHOLE,))),
    ("control: one stage has lost its second extent",
     Run(1, 1, ("tp1pp2",), False, (CELL,))),
)  # fmt: skip


def main() -> int:
    """All runs; the exit status."""
    if len(sys.argv) == 4:
        serve(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3])
        return 0
    good, tokens = True, None
    with tempfile.TemporaryDirectory() as folder:
        model, store = f"{folder}/model", f"{folder}/store"
        print(f"{'':58}{'s':>5}  cached tokens, and whether the answer is the same")
        for title, run in RUNS:
            if "lost" in title:
                lose(Path(store))
            started = time.monotonic()
            answers = ask(run, model, store)
            cached = [item[1] for item in answers]
            tokens = tokens or (answers[0][0] if answers else None)
            same = bool(answers) and all(item[0] == tokens for item in answers)
            fine = same and cached == list(run.cached)
            good = good and fine
            seconds = f"{time.monotonic() - started:.0f}"
            words = f"{cached} {'same' if same else 'OTHER'}{'' if fine else '  NOT AS EXPECTED'}"
            print(f"{title:58}{seconds:>5}  {words}", flush=True)
    return 0 if good else 1


def lose(store: Path) -> None:
    """Delete what one stage stored behind the first cell."""
    for path in store.glob("shared/*.l2-4-h0-2/*/*/*/*-5.kvf"):
        path.unlink()


def ask(run: Run, model: str, store: str) -> list[tuple[list[int], int]]:
    """Tokens and cached tokens of one request after the other, by an engine of its own."""
    said = json.dumps([run.tp, run.pp, run.topologies, run.save, len(run.cached)])
    done = subprocess.run(
        [sys.executable, __file__, said, model, store],
        env={**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if not lines:
        print(done.stderr[-3000:], file=sys.stderr)
        return []
    return [tuple(item) for item in json.loads(lines[-1].removeprefix(ANSWER))]


def serve(said: list[Any], model: str, store: str) -> None:
    """One engine: the same prompt some times."""
    import numpy as np

    from tests.vllm_engine import VOCABULARY, Engine, make_model

    tp, pp, topologies, save, times = said
    if not Path(model).is_dir():
        make_model(Path(model))
    options: dict[str, Any] = {"enable_prefix_caching": False}
    if tp * pp > 1:
        options |= {"distributed_executor_backend": "mp", "tensor_parallel_size": tp}
    if pp > 1:  # stages get their buffers in a warm-up, which vLLM leaves out when it is eager
        options |= {
            "pipeline_parallel_size": pp, "enforce_eager": False,
            "compilation_config": {"mode": 1, "backend": "eager"},
        }  # fmt: skip
    extra = {"url": store, "quality": "exact", "topologies": topologies, "save": save}
    engine = Engine(Path(model), extra, **options)
    ids = [int(x) for x in np.random.default_rng(0).integers(0, VOCABULARY, COUNT)]
    answers = []
    for _ in range(times):
        answers += engine.run([ids], forget=False)
        wait_for_files(Path(store))
    engine.close()
    print(ANSWER + json.dumps(answers), flush=True)


def wait_for_files(store: Path) -> None:
    """Encoders run in processes of the ranks: until nothing new came for two seconds."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < 2:
        count = len(list(store.rglob("*.kvf")))
        if count != seen:
            seen, since = count, time.monotonic()
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
