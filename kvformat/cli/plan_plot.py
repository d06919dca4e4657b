"""The plot of ``kvformat plan``: who is the fastest, over bandwidth and decoding cores."""

from __future__ import annotations

import io
from importlib.util import find_spec
from itertools import cycle
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.cli.plan_show import bandwidth, size
from kvformat.costs import Link, seconds
from kvformat.errors import UsageError
from kvformat.plans import Option, Plan, bandwidths, winner
from kvformat.storage import publish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRACK_COLOURS: Final = ("#8EC7EE", "#F4C067", "#93D3B4", "#F0EA8A", "#B9A9E0", "#C7E59B")
OTHER_COLOURS: Final = {"raw fp16": "#C4C4C4", "raw fp8": "#EDEDED", "recompute": "#EFB3CD"}
"""Light tones that differ for colour-blind readers, too; black text is readable on all of them."""
LOWEST, HIGHEST = 1e7 / 8, 1e12 / 8
COLUMNS: Final = 160
LARGEST_CORES: Final = 64
LINE_CHARACTERS: Final = 95
"""That a line over the whole width has room for."""


def require_matplotlib(option: str = "--plot") -> None:
    """Raise ``UsageError`` where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            "usage.argument",
            f"{option} needs matplotlib, which is not installed",
            next_step="pip install 'kvformat[plot]'",
        )


def draw(target: str, plan: Plan, *, overwrite: bool) -> None:
    """Write the plot to ``target``, a PNG file."""
    picture = render(plan)

    def write(file: IO[bytes]) -> None:
        file.write(picture)

    publish(target, write, overwrite=overwrite)


def render(plan: Plan) -> bytes:
    """The plot as PNG bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    columns, rows, index = areas(plan)
    used = [plan.compared[number] for number in np.unique(index)]
    colours = _colours(plan.compared)
    picture = np.array([_rgb(colours[item.name]) for item in plan.compared])[index]
    axes.pcolormesh(8 * columns, rows, picture, shading="nearest", rasterized=True)
    for number in np.unique(index):
        option = plan.compared[number]
        _label(axes, option.name, 8 * columns, rows, index == number)
    _axes(axes, plan, rows)
    _legend(figure, used, colours)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def areas(plan: Plan) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.intp]]:
    """Bytes per second ``[x]``, cores ``[y]`` and the number of the fastest option ``[y, x]``."""
    columns = np.array(bandwidths(LOWEST, HIGHEST, COLUMNS))
    most = max(LARGEST_CORES, 2 * plan.workers)
    rows = np.unique(np.geomspace(1, most, 60).round())
    trip = plan.link.round_trip_s
    names = [item.name for item in plan.compared]
    index = [
        [
            names.index(winner(plan.compared, Link(x, trip), plan.rates, int(y)).name)
            for x in columns
        ]
        for y in rows
    ]
    return columns, rows, np.array(index, np.intp)


def _colours(options: list[Option]) -> dict[str, str]:
    free = cycle(TRACK_COLOURS)
    return {item.name: OTHER_COLOURS.get(item.name) or next(free) for item in options}


def _rgb(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def _label(
    axes: Axes, name: str, x: NDArray[np.float64], y: NDArray[np.float64], area: NDArray[np.bool_]
) -> None:
    """The name inside its area, where that is wide enough to hold it."""
    height = np.log(y) / np.log(y[-1])
    widths = np.where((height > 0.06) & (height < 0.94), area.sum(axis=1), 0)
    text = name.replace(" on ", "\non ")
    longest = max(len(line) for line in text.splitlines())
    if widths.max() / COLUMNS < longest / LINE_CHARACTERS or np.count_nonzero(widths) < 4:
        return  # the legend names it
    enough = np.flatnonzero(widths >= 0.9 * widths.max())
    row = int(enough[len(enough) // 2])
    middle = int(np.median(np.flatnonzero(area[row])))
    axes.text(x[middle], y[row], text, ha="center", va="center", fontsize=9)


def _axes(axes: Axes, plan: Plan, rows: NDArray[np.float64]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_xlim(8 * LOWEST, 8 * HIGHEST)
    axes.set_ylim(rows[0], rows[-1])
    ticks = [10.0**power for power in range(7, 13)]
    axes.set_xticks(ticks, [bandwidth(item / 8).removesuffix("/s") for item in ticks])
    powers = [2**power for power in range(int(np.log2(rows[-1])) + 1)]
    axes.set_yticks(powers, [str(item) for item in powers])
    axes.set_xlabel(f"link, bits per second\n{_note(plan)}", fontsize=9)
    axes.set_ylabel("decoding cores")
    if 8 * LOWEST <= 8 * plan.link.bytes_per_s <= 8 * HIGHEST:
        point: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 6}
        axes.plot([8 * plan.link.bytes_per_s], [plan.workers], **point, clip_on=False, zorder=5)
    axes.set_title(f"Fastest way to {plan.cache.tokens:,} tokens of {plan.name}", fontsize=11)


def _note(plan: Plan) -> str:
    trip = seconds(plan.link.round_trip_s)
    raw = size(2 * plan.cache.values)
    return f"modelled; {raw} as fp16, round trip {trip}; dot: the link and workers asked about"


def _legend(figure: Figure, used: list[Option], colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colours[item.name], edgecolor="black", linewidth=0.5, label=item.name)
        for item in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
