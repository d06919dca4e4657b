"""The report of ``kvformat evaluate`` for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kvformat.cli.show import emit, facts, heading, say, table

QUALITY_COLUMNS: Final = (
    "track",
    ">bits/value",
    ">KL mean",
    ">KL p99",
    ">KL max",
    ">top-1",
    ">cross-entropy",
    ">greedy",
)


def show(report: dict[str, Any]) -> None:
    """Facts, then one table per question."""
    found = report["result"]
    heading(f"evaluated {report['artifact']['url']}")
    emit(facts(_facts(report)), "")
    heading("Next token, against the original cache")
    emit(table(QUALITY_COLUMNS, [_quality_row(item, found) for item in found["methods"]]), "")
    say("KL in nats per token; top-1: share of tokens with the same likeliest successor;")
    say("cross-entropy: its change in nats; greedy: tokens generated before the first other one.")
    emit("")
    _show_turns(found)
    _show_needle(found)
    _show_layers(found)
    say("Figures of one model and one text. They say nothing about other models.", "dim")


def _facts(report: dict[str, Any]) -> Iterator[tuple[str, object]]:
    found, artifact, model = report["result"], report["artifact"], report["model"]
    yield "model", f"{model['id']}, in {model['dtype']} on {model['device']}"
    yield "cache", f"{found['cached_tokens']:,} tokens, {artifact['values']:,} values"
    yield "compared", f"{found['compared_tokens']:,} tokens behind it"
    origin = report["original"]["origin"]
    if origin == "computed":
        same = "bit for bit the source" if report["original"]["is_source"] else "not the same bits"
        origin = f"computed by the model, {same}"
    yield "original", f"{origin}; cross-entropy {found['cross_entropy']:.4f} nats per token"
    if artifact["profile"] is not None:
        size = artifact["profile"]["bytes"]
        yield "profile", f"{artifact['profile']['digest'][:12]}..., {size:,} bytes beside the file"


def _quality_row(item: dict[str, Any], found: dict[str, Any]) -> tuple[object, ...]:
    one, generated = item["divergence"], found["greedy_tokens"]
    same = item["greedy_same"]
    return (
        item["name"],
        f"{item['bits_per_value']:.2f}",
        nats(one["kl_mean"]),
        nats(one["kl_p99"]),
        nats(one["kl_max"]),
        f"{one['top1']:.3f}",
        f"{one['cross_entropy_change']:+.5f}",
        f"all {generated}" if same == generated else f"{same} of {generated}",
    )


def nats(value: float) -> str:
    """Three significant digits; what rounding alone makes is 0."""
    return "0" if abs(value) < 1e-7 else f"{value:.3g}" if value >= 1e-4 else f"{value:.1e}"


def _show_turns(found: dict[str, Any]) -> None:
    rows = [item for item in found["methods"] if item["turns"]]
    if not rows:
        return
    count = len(rows[0]["turns"])
    heading(f"{count} lossy turns in a row: mean KL, and (stored once only)")
    columns = ("track", *(f">turn {number + 1}" for number in range(count)))
    emit(
        table(
            columns,
            [
                (
                    item["name"],
                    *(f"{nats(t['kl_mean'])} ({nats(t['kl_once'])})" for t in item["turns"]),
                )
                for item in rows
            ],
        ),
        "",
    )


def _show_needle(found: dict[str, Any]) -> None:
    if not found["needle"]:
        return
    asked = [item for item in found["methods"] if item["needle"]]
    heading(f"Needles in a context of {found['context_tokens']:,} tokens")
    columns = (">depth", ">original", *(f">{item['name']}" for item in asked))
    rows = []
    for number, original in enumerate(found["needle"]):
        mine = [item["needle"][number] for item in asked]
        rows.append((f"{original['depth']:.0%}", *(_answer(item) for item in (original, *mine))))
    emit(table(columns, rows), "")
    say("found or not, and the surprise of the right answer in nats per token.")
    if not any(item["retrieved"] for item in found["needle"]):
        say("The original finds none: this test says nothing for this model.")
    emit("")


def _answer(item: dict[str, Any]) -> str:
    return f"{'found' if item['retrieved'] else 'no'} {item['answer_nats']:.2f}"


def _show_layers(found: dict[str, Any]) -> None:
    heading("Error of each layer's attention output, keys and values, in per cent")
    rows = []
    for numbers in zip(*(item["layers"] for item in found["methods"]), strict=True):
        cells = [
            f"{100 * one['attention']:.2f} ({100 * one['key']:.1f}, {100 * one['value']:.1f})"
            for one in numbers
        ]
        rows.append((numbers[0]["layer"], *cells))
    emit(table((">layer", *(f">{item['name']}" for item in found["methods"])), rows), "")
    say("attention output (keys, values): root mean square of the error over that of the original.")
    emit("")
