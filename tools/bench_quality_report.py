"""Tables and a picture of what ``bench_quality.py`` measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

TARGETS: Final = (0.0012, 0.0135, 0.05)
"""Divergences at which methods are compared, in nats per token."""


@dataclass(frozen=True, slots=True)
class Row:
    """One method at one setting on one text; speeds in million values per second.

    ``decode`` is None for methods whose coder is a calculation.
    """

    model: str
    method: str
    setting: str
    text: str
    bits: float
    payload_bits: float | None
    counted: str
    kl_mean: float
    kl_p99: float
    top1: float
    encode: float
    decode: float | None


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


def summary(rows: Sequence[Row]) -> list[Row]:
    """Rows of a model as one per method and setting: means of the texts, speeds as medians."""
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.method, row.setting), []).append(row)
    result = []
    for (method, setting), same in grouped.items():
        payload = [row.payload_bits for row in same if row.payload_bits is not None]
        decode = [row.decode for row in same if row.decode is not None]
        result.append(Row(
            same[0].model, method, setting, f"{len(same)} texts", mean([row.bits for row in same]),
            mean(payload) if payload else None, same[0].counted,
            mean([row.kl_mean for row in same]), mean([row.kl_p99 for row in same]),
            mean([row.top1 for row in same]),
            float(np.median([row.encode for row in same])),
            float(np.median(decode)) if decode else None,
        ))  # fmt: skip
    return result


def bits_at(rows: Sequence[Row], target: float) -> tuple[float, float] | None:
    """Bits and KL of a method at a divergence: between its settings, else its best below it.

    Bits are interpolated along the logarithm of KL, never beyond what was measured.
    """
    points = sorted((row.kl_mean, row.bits) for row in rows)
    below = [point for point in points if point[0] <= target]
    above = [point for point in points if point[0] > target]
    if not below:
        return None
    if above and below[-1][0] > 0:
        (k0, b0), (k1, b1) = below[-1], above[0]
        part = math.log(target / k0) / math.log(k1 / k0)
        inside = b0 + part * (b1 - b0)
        if inside <= min(bits for _, bits in below):
            return inside, target
    kl, bits = min(below, key=lambda point: point[1])
    return bits, kl


def by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each method in the order of their first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.method, []).append(row)
    return found


def target_table(rows: Sequence[Row]) -> str:
    """Markdown: bits of every method at the three divergences."""
    lines = ["| method | " + " | ".join(f"KL {target}" for target in TARGETS) + " |",
             "|---|" + "---|" * len(TARGETS)]  # fmt: skip
    for method, same in by_method(rows).items():
        cells = []
        for target in TARGETS:
            found = bits_at(same, target)
            if found is None:
                cells.append("-")
            elif found[1] == target:
                cells.append(f"{found[0]:.2f}")
            else:
                cells.append(f"{found[0]:.2f} at {found[1]:.2g}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def row_table(rows: Sequence[Row]) -> str:
    """Markdown: every row."""
    head = ("method", "setting", "bits", "payload", "counted", "KL", "KL p99", "top-1", "encode",
            "decode")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        payload = "" if row.payload_bits is None else f"{row.payload_bits:.2f}"
        speeds = ["" if s is None else f"{s:.3g}" for s in (row.encode, row.decode)]
        cells = [row.method, row.setting, f"{row.bits:.2f}", payload, row.counted,
                 f"{row.kl_mean:.2g}", f"{row.kl_p99:.2g}", f"{row.top1:.3f}", *speeds]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """Markdown: what was measured, and for each model both tables and sizes of its side data."""
    parts = [
        f"{facts['cached_tokens']:,} tokens cached, {facts['compared_tokens']:,} compared, mean of "
        f"texts: {', '.join(facts['texts'])}. Calibrated on {facts['calibration']}. No evidence "
        "for larger models. Speeds: million values/s, one thread, rough."
    ]
    for model, known in facts["models"].items():
        means = summary([row for row in rows if row.model == model])
        absent = [f"| {method} | not measured: {reason} | | |"
                  for method, reason in facts["missing"].items()]  # fmt: skip
        parts += [
            f"## {known['id']}",
            "Fewest bits measured or interpolated up to a divergence:",
            "\n".join([target_table(means), *absent]),
            row_table(means),
        ]
        values = known["values"]
        if "profile_bytes" in known:
            parts.append(f"Profile: {_size(known['profile_bytes'], values)} of one such cache.")
        for name, size in known["kvtc_basis_bytes"].items():
            parts.append(f"KVTC's basis, {name}: {_size(size, values)}.")
    return "\n\n".join(parts) + "\n"


def _size(size_bytes: int, values: int) -> str:
    return f"{size_bytes:,} bytes, {8 * size_bytes / values:.1f} bits per value"


def plot(rows: Sequence[Row], path: Path) -> None:
    """KL against bits, a panel per model and a line per method that has several rates."""
    figures = import_module("matplotlib.figure")
    names = list(dict.fromkeys(row.model for row in rows))
    figure = figures.Figure(figsize=(9 * len(names), 6), layout="constrained")
    figure.suptitle("1,024 cached tokens; no evidence for larger models")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        known = by_method(summary([row for row in rows if row.model == name]))
        for number, (method, same) in enumerate(known.items()):
            points = sorted((row.bits, row.kl_mean) for row in same if row.kl_mean > 0)
            if points:
                style = "-" if method.startswith("kvformat") else "--"
                axes.plot(*zip(*points, strict=True), style, marker="os^vDPX*"[number % 8],
                          color=f"C{number % 10}", label=method)  # fmt: skip
        axes.set(yscale="log", xlabel="bits per value", ylabel="KL, nats per token", title=name)
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
