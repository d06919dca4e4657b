"""The plots of ``kvformat evaluate``: rate against quality, error by layer, size by layer."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvformat.cli.outputs import write_bytes
from kvformat.storage import storage_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#5B4A9E")
"""Distinct for colour-blind readers."""
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
SMALLEST_KL: Final = 1e-6
"""Where a KL of zero is drawn."""


def draw_all(folder: Path, report: dict[str, Any], *, overwrite: bool) -> None:
    """Write the PNG files into ``folder``, which is made if need be."""
    pictures = {name: _png(draw(report)) for name, draw in PLOTS.items()}
    with storage_errors(str(folder), "io.write", "making the folder"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        write_bytes(str(folder / name), picture, overwrite=overwrite)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _figure(rows: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    found = figure.subplots(rows, 1, squeeze=False)
    return figure, list(found[:, 0])


def rate(report: dict[str, Any]) -> Figure:
    """Bits per value against the mean and the 99th percentile of KL."""
    figure, (axes,) = _figure(1, 7.5, 5)
    found = report["result"]
    for number, item in enumerate(found["methods"]):
        one = item["divergence"]
        mean, high = (max(one[name], SMALLEST_KL) for name in ("kl_mean", "kl_p99"))
        colour, bits = COLOURS[number % len(COLOURS)], item["bits_per_value"]
        marker: dict[str, Any] = {"color": colour, "marker": MARKERS[number % len(MARKERS)]}
        label = f"{item['name']}: {bits:.2f} bits, KL {one['kl_mean']:.2g}"
        axes.plot([bits, bits], [mean, high], color=colour, linewidth=1, alpha=0.6)
        axes.plot([bits], [mean], **marker, markersize=8, linestyle="none", label=label)
        axes.plot([bits], [high], **marker, markersize=8, linestyle="none", fillstyle="none")
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("bits per value")
    none = any(item["divergence"]["kl_mean"] < SMALLEST_KL for item in found["methods"])
    note = f" (at {SMALLEST_KL:g}: none)" if none else ""
    axes.set_ylabel(f"KL divergence, nats per token{note}")
    axes.grid(alpha=0.3, which="both", linewidth=0.4)
    axes.set_title(f"Rate against quality: {_what(report)}", fontsize=10)
    axes.legend(fontsize=8, title="filled: mean, open: 99th percentile", title_fontsize=8)
    return figure


def layers(report: dict[str, Any]) -> Figure:
    """The errors of attention output, keys and values, layer by layer."""
    figure, rows = _figure(3, 7.5, 8)
    titles = {"attention": "attention output", "key": "keys", "value": "values"}
    for axes, (part, title) in zip(rows, titles.items(), strict=True):
        for number, item in enumerate(report["result"]["methods"]):
            style: dict[str, Any] = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKERS[number % len(MARKERS)],
            }
            x = [one["layer"] for one in item["layers"]]
            y = [100 * one[part] for one in item["layers"]]
            axes.plot(x, y, **style, markersize=3, linewidth=1, label=item["name"])
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{title}, %", fontsize=9)
        axes.grid(alpha=0.3, linewidth=0.4)
    rows[0].set_title(f"Relative error by layer: {_what(report)}", fontsize=10)
    rows[0].legend(fontsize=8)
    rows[-1].set_xlabel("layer")
    return figure


def sizes(report: dict[str, Any]) -> Figure:
    """Stored bytes by layer and role, a panel for each track."""
    tracks = report["sizes"]
    figure, rows = _figure(len(tracks), 7.5, 1.2 + 2.2 * len(tracks))
    for axes, (name, runs) in zip(rows, tracks.items(), strict=True):
        roles = list(dict.fromkeys(run["role"] for run in runs))
        below: dict[int, float] = {}
        for number, role in enumerate(roles):
            mine = [run for run in runs if run["role"] == role]
            x = [layer for run in mine for layer in run["layers"]]
            y = [run["bytes"] / len(run["layers"]) / 1000 for run in mine for _ in run["layers"]]
            bottom = [below.get(layer, 0.0) for layer in x]
            axes.bar(x, y, bottom=bottom, color=COLOURS[number % len(COLOURS)], label=role)
            below |= {layer: b + h for layer, b, h in zip(x, bottom, y, strict=True)}
        axes.set_title(name, fontsize=9)
        axes.set_ylabel("kB")
        axes.set_ylim(0, 1.25 * max(below.values(), default=1.0))
    rows[0].legend(fontsize=8, ncols=4, loc="upper left")
    rows[-1].set_xlabel("layer (layers that are stored together share their bytes evenly)")
    figure.suptitle(f"Size by layer: {_what(report)}", fontsize=10)
    return figure


def _what(report: dict[str, Any]) -> str:
    tokens = report["result"]["cached_tokens"]
    return f"{ascii(report['model']['id'])[1:-1][-60:]}, {tokens:,} tokens"


PLOTS: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "rate.png": rate,
    "layers.png": layers,
    "sizes.png": sizes,
}
