"""``kvformat plan``: what moving and restoring a cache costs, against raw tensors and recompute."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from kvformat.cli.options import UTF8
from kvformat.cli.outputs import check_target, require_suffix
from kvformat.cli.plan_show import as_json as plan_json
from kvformat.cli.plan_show import show
from kvformat.cli.show import say
from kvformat.cli.text import write_json
from kvformat.costs import CodecRate, Link, Rates
from kvformat.errors import UsageError
from kvformat.plans import (
    PRESETS,
    Cache,
    Geometry,
    Option,
    Plan,
    attention,
    engine_rate,
    on_engines,
    others,
    planned_cache,
    stored_cache,
    tracks_from_table,
    tracks_of,
)
from kvformat.rates import host_facts, load_rates, read_rates_file
from kvformat.workers import cores

AMOUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?) ?([A-Za-z]*?)(?:/s|ps)?")
LINK_UNITS: Final = {
    **{f"{prefix}bit": 10**power / 8 for prefix, power in zip("kMGT", (3, 6, 9, 12), strict=True)},
    **{f"{prefix}B": 10.0**power for prefix, power in zip("kMGT", (3, 6, 9, 12), strict=True)},
    **{f"{prefix}iB": 2.0 ** (10 * (index + 1)) for index, prefix in enumerate("KMGT")},
}
TIME_UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
DEFAULT_QUALITY: Final = "near-lossless"


@dataclass(frozen=True, slots=True)
class Question:
    """The options of ``plan``, as click hands them over."""

    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    preset: str | None
    artifact: str | None
    tokens: int | None
    link: Link
    device: str | None
    entered: tuple[CodecRate, ...]
    workers: int
    prefill: float | None
    engines: int | None
    engine_values_per_s: float | None
    quality: str


def amount(
    units: dict[str, float], example: str, *, zero: bool = False
) -> Callable[[click.Context, click.Parameter, str], float]:
    """A click callback for a number with one of these units."""

    def parse(context: click.Context, parameter: click.Parameter, value: str) -> float:
        found = AMOUNT.fullmatch(value)
        bare = zero and found is not None and found[2] == "" and float(found[1]) == 0
        if found is None or (found[2] not in units and not bare):
            raise click.BadParameter(
                f"{value[:80]!a} is not understood; write a number and one of "
                f"{', '.join(units)}, for example {example}",
                context,
                parameter,
            )
        result = float(found[1]) * units.get(found[2], 1.0)
        if not (0 <= result < math.inf) or (result == 0 and not zero):
            raise click.BadParameter(f"{value[:80]!a} is out of range", context, parameter)
        return result

    return parse


def finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """A click callback: a rate above 0, or none."""
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value} is out of range", context, parameter)
    return value


def entered_rates(
    context: click.Context, parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[CodecRate, ...]:
    """A click callback: ``hevc=25e6``, values that one worker decodes per second."""
    known = {item.name: item for item in load_rates().entries}
    found = []
    for text in value:
        name, _, number = text.partition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = 0.0
        if name not in known or not 0 < rate < math.inf:
            raise click.BadParameter(
                f"{text[:80]!a} is not understood; write CODEC=VALUES_PER_S, for example "
                f"hevc=25e6, with one of {', '.join(known)}",
                context,
                parameter,
            )
        rate_entered = CodecRate(name, rate, known[name].restore_values_per_s, origin="entered")
        found.append(rate_entered)
    return tuple(found)


@click.command(name="plan")
@click.option("--layers", type=click.IntRange(1, 10_000), metavar="N", help="Layers of the model.")
@click.option("--kv-heads", type=click.IntRange(1, 65_535), metavar="N", help="KV heads.")
@click.option("--head-dim", type=click.IntRange(1, 65_535), metavar="N", help="Values per head.")
@click.option(
    "--preset",
    type=click.Choice(tuple(PRESETS)),
    help="The geometry of a known model, in place of the three above.",
)
@click.option(
    "--from",
    "artifact",
    metavar="URL",
    help="Geometry, tracks and bits per value of an artifact; reads only its front.",
)
@click.option("--tokens", type=click.IntRange(1, 2**31), metavar="N", help="Context length.")
@click.option(
    "--link",
    "bytes_per_s",
    required=True,
    callback=amount(LINK_UNITS, "10Gbit or 1.25GB"),
    metavar="RATE",
    help="Bandwidth that a read gets: 10Gbit, 1.25GB, 800Mbit.",
)
@click.option(
    "--rtt",
    "round_trip_s",
    default="1ms",
    show_default=True,
    callback=amount(TIME_UNITS, "1ms", zero=True),
    metavar="TIME",
    help="Round trip.",
)
@click.option(
    "--device", metavar="FILE", help="Rates that kvformat doctor --measure wrote elsewhere."
)
@click.option(
    "--rate",
    "entered",
    multiple=True,
    callback=entered_rates,
    metavar="CODEC=N",
    help="Values per second that one worker decodes, for example hevc=25e6. May be repeated.",
)
@click.option(
    "--workers", type=click.IntRange(1, 4096), metavar="N", help="Threads. Default: the cores here."
)
@click.option(
    "--prefill",
    type=float,
    callback=finite,
    metavar="N",
    help="Tokens per second of computing the cache again.",
)
@click.option(
    "--video-engines",
    "engines",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Also plan with N video engines; needs --engine-rate.",
)
@click.option(
    "--engine-rate",
    "engine_values_per_s",
    type=float,
    callback=finite,
    metavar="N",
    help="Values per second that one engine decodes, restoring included.",
)
@click.option(
    "--quality",
    default=DEFAULT_QUALITY,
    show_default=True,
    type=UTF8,
    metavar="Q",
    help="Whose tracks are compared with raw and recompute for break-even and the plot.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", metavar="FILE.png", help="Draw who is fastest over bandwidth and cores.")
@click.option("--overwrite", is_flag=True, help="Replace the plot if it exists.")
def command(
    *,
    bytes_per_s: float,
    round_trip_s: float,
    workers: int | None,
    as_json: bool,
    plot: str | None,
    overwrite: bool,
    **given: Any,
) -> None:
    """Compare ways to get a KV cache: kvformat tracks, raw tensors, computing it again.

    Nothing is moved: bytes, times and break-even bandwidths come from a model, with the decoding
    rates that kvformat doctor --measure found here. What is not measured here is marked with ~.

    \b
    kvformat plan --preset llama-3.1-8b --tokens 32768 --link 10Gbit --prefill 8000
    kvformat plan --from s3://bucket/prefix.kvf --link 25Gbit --rtt 20ms
    """
    question = Question(link=Link(bytes_per_s, round_trip_s), workers=workers or cores(), **given)
    if plot is not None:
        from kvformat.cli.plan_plot import require_matplotlib

        require_matplotlib()
        require_suffix(plot, ".png")
        check_target(plot, "", overwrite=overwrite)
    answer = make_plan(question)
    if plot is not None:
        from kvformat.cli.plan_plot import draw

        draw(plot, answer, overwrite=overwrite)
    if as_json:
        write_json(plan_json(answer))
    else:
        show(answer)
        if plot is not None:
            say(f"The plot is in {plot}")


def make_plan(question: Question) -> Plan:
    """Everything but printing; raises ``UsageError``, and what opening an artifact raises."""
    rates = _rates(question)
    if question.artifact is not None:
        name, cache, options = _from_artifact(question.artifact, question)
    else:
        geometry = _geometry(question)
        if question.tokens is None:
            raise UsageError("usage.argument", "--tokens is missing", expected="a context length")
        name, cache = geometry.name, planned_cache(geometry, question.tokens)
        options = tracks_from_table(cache)
    if (question.engines is None) != (question.engine_values_per_s is None):
        raise UsageError("usage.argument", "--video-engines and --engine-rate go together")
    if question.engines is not None and question.engine_values_per_s is not None:
        rates = rates.replaced(engine_rate(question.engine_values_per_s))
        pairs = [(item, on_engines(item, question.engines)) for item in options]
        options = [item for pair in pairs for item in pair if item is not None]
    options += others(cache, question.prefill)
    qualities = [item.quality for item in options if item.quality != item.name]
    if question.quality not in qualities:
        raise UsageError(
            "usage.argument",
            "no track has this quality",
            where="--quality",
            expected=", ".join(dict.fromkeys(qualities)),
            found=ascii(question.quality),
        )
    return Plan(
        name,
        cache,
        options,
        question.link,
        rates,
        question.workers,
        question.quality,
        question.artifact or "",
    )


def _rates(question: Question) -> Rates:
    rates = load_rates()
    if question.device is not None:
        found = read_rates_file(Path(question.device))
        foreign = found.foreign(host_facts())
        entries = found.entries
        if foreign is not None:
            entries = tuple(replace(item, origin="entered") for item in entries)
        where = "this machine" if foreign is None else "another machine"
        rates = replace(rates.replaced(*entries), source=f"measured on {where} ({question.device})")
    return rates.replaced(*question.entered)


def _geometry(question: Question) -> Geometry:
    sizes = (question.layers, question.kv_heads, question.head_dim)
    if question.preset is not None and sizes == (None, None, None):
        return PRESETS[question.preset]
    layers, kv_heads, head_dim = sizes
    if question.preset is not None or layers is None or kv_heads is None or head_dim is None:
        raise UsageError(
            "usage.argument",
            "the geometry is not said, or said twice",
            expected="--preset, or --from, or all of --layers, --kv-heads and --head-dim",
        )
    return attention(
        f"{layers} layers, {kv_heads} KV heads of {head_dim}", layers, kv_heads, head_dim
    )


def _from_artifact(url: str, question: Question) -> tuple[str, Cache, list[Option]]:
    from kvformat.artifact import open_artifact

    if any((question.preset, question.layers, question.kv_heads, question.head_dim)):
        raise UsageError("usage.argument", "--from says the geometry already")
    with open_artifact(url) as artifact:
        manifest = artifact.manifest
    cache = stored_cache(manifest, question.tokens)
    name = f"{manifest.identity.model.id}, as in {url}"
    return name, cache, tracks_of(manifest, cache)
