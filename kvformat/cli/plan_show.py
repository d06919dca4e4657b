"""The answer of ``kvformat plan``, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from kvformat.cli.show import emit, facts, heading, table
from kvformat.costs import CPU, seconds
from kvformat.plans import BITS_SOURCE, Interval, Option, Plan

COLUMNS: Final = (
    "option",
    ">bytes",
    ">transfer",
    ">decode",
    ">restore",
    ">total",
    ">1st block",
    "to keep up",
)


def show(plan: Plan) -> None:
    """The tables."""
    cache, link = plan.cache, plan.link
    heading(f"{plan.name}: {cache.tokens:,} tokens, {cache.values:,} values")
    rows: list[tuple[str, object]] = [
        ("link", f"{bandwidth(link.bytes_per_s)}, round trip {seconds(link.round_trip_s)}"),
        ("decoded by", _count(plan.workers, "worker")),
        ("rates", plan.rates.source),
    ]
    rows += [
        ("", f"{item.name}: {item.decode_values_per_s:,.0f} values/s by one {worker}, entered")
        for item in plan.rates.entries
        if item.origin == "entered"
        for worker in ["worker" if item.device == CPU else item.device]
    ]
    emit(facts([*rows, ("bits per value", _bits(plan))]), "")
    emit(table(COLUMNS, [_row(item, plan) for item in plan.options]), "")
    emit(facts(_legend(plan)), "")
    heading(f"Bandwidth at which a track is faster, with {_count(plan.workers, 'worker')}")
    emit(table(*_break_even(plan)), "")
    heading(f"Fastest of {plan.quality} tracks, raw tensors and recompute")
    emit(facts([(f"~{within(where)}", item.name) for item, where in plan.areas()]))


def _bits(plan: Plan) -> str:
    if plan.artifact:
        longer = any(item.bits_modelled and not item.engines for item in plan.tracks)
        return f"those of the artifact{', which has another length' if longer else ''}"
    return f"{BITS_SOURCE}: yours will differ. fp16 caches hardly shrink as exact/zstd"


def _legend(plan: Plan) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        (
            "~",
            "modelled, not measured here: the link as given, bits of another cache, rates that "
            "were assumed, entered or measured in another quality, more workers than were measured",
        ),
        ("1st block", "until the first token block is restored"),
        (
            "to keep up",
            "what decodes as fast as the link delivers, by the straight line through the speeds of "
            "one worker and of all that were measured; none: no number does",
        ),
    ]
    if any(item.engines for item in plan.options):
        rows.append(("engines", "at the rate given; kvformat 0.9 itself does not decode on them"))
    if any(item.fixed_s is not None for item in plan.options):
        rows.append(("recompute", "at the prefill rate given, whatever the length"))
    return rows


def _row(option: Option, plan: Plan) -> tuple[str, ...]:
    cost = plan.cost(option)
    if option.fixed_s is not None:
        total = f"~{seconds(cost.total_s)}"
        return (option.name, "-", "-", "-", "-", total, total, "-")
    mark = "~" if plan.decoding_modelled(option) else ""
    short = option.name.partition(" on ")[2]
    return (
        f"  on {short}" if option.engines else option.name,
        ("~" if option.bits_modelled else "") + size(option.candidate.stored_bytes),
        f"~{seconds(cost.transfer_s)}",
        f"{mark}{seconds(cost.decode_s)}" if cost.decode_s else "-",
        f"{mark}{seconds(cost.restore_s)}" if cost.restore_s else "-",
        f"~{seconds(cost.total_s)}",
        f"~{seconds(cost.first_block_s)}",
        _keeping_up(option, plan),
    )


def _keeping_up(option: Option, plan: Plan) -> str:
    count = plan.needed(option)
    if count == 0:
        return "-"
    what = "engine" if option.engines else "core"
    return "~none" if count is None else f"~{_count(count, what)}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _break_even(plan: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows = [
        (track.name, *(_intervals(plan.faster(track, rival)) for rival in plan.rivals))
        for track in plan.tracks
    ]
    return ("track", *(f"than {item.name}" for item in plan.rivals)), rows


def _intervals(found: Sequence[Interval]) -> str:
    if not found:
        return "~never"
    return "~" + ", ".join(within(item) for item in found)


def within(interval: Interval) -> str:
    """``below 3.2 Gbit/s`` and the like."""
    low, high = interval
    if low is None:
        return "always" if high is None else f"below {bandwidth(high)}"
    if high is None:
        return f"above {bandwidth(low)}"
    return f"{bandwidth(low)} to {bandwidth(high)}"


def bandwidth(bytes_per_s: float) -> str:
    """Bits per second with three digits."""
    bits = 8 * bytes_per_s
    for unit, factor in (("kbit", 1e3), ("Mbit", 1e6), ("Gbit", 1e9)):
        if bits < 999.5 * factor:
            return f"{bits / factor:.3g} {unit}/s"
    return f"{bits / 1e12:,.3g} Tbit/s"


def size(size_bytes: float) -> str:
    """Bytes with three digits, in powers of ten."""
    for unit, factor in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if size_bytes < 999.5 * factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes / 1e12:,.3g} TB"


def as_json(plan: Plan) -> dict[str, Any]:
    """The same, unrounded; an open end of a range of bandwidths is null."""
    return {
        "name": plan.name,
        "artifact": plan.artifact or None,
        "tokens": plan.cache.tokens,
        "values": plan.cache.values,
        "link": asdict(plan.link),
        "workers": plan.workers,
        "quality": plan.quality,
        "rates": {
            "source": plan.rates.source,
            "entries": [_finite(asdict(item)) for item in plan.rates.entries],
        },
        "options": [_option(item, plan) for item in plan.options],
        "break_even": [
            {
                "track": track.name,
                "against": rival.name,
                "faster_bytes_per_s": [list(item) for item in plan.faster(track, rival)],
            }
            for track in plan.tracks
            for rival in plan.rivals
        ],
        "fastest": [
            {"option": item.name, "bytes_per_s": list(where)} for item, where in plan.areas()
        ],
    }


def _option(option: Option, plan: Plan) -> dict[str, Any]:
    cost = asdict(plan.cost(option))
    del cost["track"], cost["workers"]
    modelled = ["total_s", "first_block_s"]
    if option.fixed_s is None:
        modelled.append("transfer_s")
        if option.candidate.work:
            modelled.append("needed")
        if option.bits_modelled:
            modelled += ["stored_bytes", "bits_per_value"]
        if plan.decoding_modelled(option):
            modelled += ["decode_s", "restore_s"]
    return {
        "name": option.name,
        "quality": option.quality,
        "bits_per_value": option.bits,
        **cost,
        "engines": option.engines,
        "needed": plan.needed(option),
        "modelled": sorted(modelled),
    }


def _finite(entry: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity."""
    return {key: None if value == math.inf else value for key, value in entry.items()}
