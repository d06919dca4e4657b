"""The matrix of producers and consumers, in a terminal and as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from rich.console import Console
from rich.markup import escape as plain
from rich.table import Table

from kvconform.html import STYLE
from kvconform.matrix import VERIFY, Cell, Matrix, Sum, rows
from kvconform.terminal import COLOURS

MOST_SHOWN = 20
WHAT = {VERIFY: "verify (whole file)"}


def show(console: Console, matrix: Matrix) -> None:
    """Problems first, then the table and the verdict, which stays on the screen."""
    for cell in matrix.problems[:MOST_SHOWN]:
        _show_problem(console, cell)
    more = len(matrix.problems) - MOST_SHOWN
    if more > 0:
        console.print(f"and {more:,} more, see --json")
    for note in (*matrix.notes, *matrix.silent):
        console.print(f"[red]note[/red] {plain(note)}")
    table = Table(title="files that each consumer restores as it must")
    for name in ("producer", "track"):
        table.add_column(name)
    table.add_column("written", justify="right")
    for consumer in matrix.consumers:
        table.add_column(plain(consumer.name), justify="right")
    last = ""
    for producer, what, files, sums in rows(matrix):
        if last and producer != last:
            table.add_section()
        cells = (_coloured(item) for item in (files, *sums))
        table.add_row("" if producer == last else plain(producer), WHAT.get(what, what), *cells)
        last = producer
    console.print(table)
    console.print(f"{_conclusion(matrix)} in {matrix.seconds:.1f} s")


def _coloured(item: Sum) -> str:
    return f"[{COLOURS.get(item.status, 'dim')}]{item}[/]"


def _conclusion(matrix: Matrix) -> str:
    counted = sum(cell.status != "skipped" for cell in matrix.cells)
    if matrix.good:
        return f"[green]good[/green]: {counted:,} calls agree"
    return f"[red]not good[/red]: {len(matrix.problems):,} of {counted:,} calls do not agree"


def _title(cell: Cell) -> str:
    if not cell.consumer:
        return f"{cell.producer} writes {cell.case}"
    what = "verify" if cell.what == VERIFY else f"decode {cell.what}"
    return f"{cell.consumer} reads {cell.case} of {cell.producer}: {what}"


def _show_problem(console: Console, cell: Cell) -> None:
    console.print(f"[{COLOURS[cell.status]}]{cell.status}[/] {plain(_title(cell))}")
    console.print(f"  expected  {plain(cell.expected)}", overflow="fold")
    console.print(f"  found     {plain(cell.found)}", overflow="fold")
    if cell.detail:
        console.print(f"  it says   {plain(cell.detail.strip().splitlines()[-1][:300])}")


def write_html(matrix: Matrix, path: Path) -> None:
    """Write ``--html``."""
    path.write_text(page(matrix), encoding="utf-8")


def page(matrix: Matrix) -> str:
    """The page: verdict, what does not agree, the matrix, who took part."""
    verdict = "good" if matrix.good else "not good"
    counted = sum(cell.status != "skipped" for cell in matrix.cells)
    state = "passed" if matrix.good else "failed"
    told = f"{len(matrix.problems):,} of {counted:,} calls do not agree"
    if not matrix.problems:
        told = f"all {counted:,} calls agree"
    notes = "".join(f'<p class="failed">{escape(n)}</p>' for n in (*matrix.notes, *matrix.silent))
    parts = [
        "<h1>kvformat: writers and readers</h1>",
        f'<p class="verdict"><strong class="{state}">{verdict}</strong>: {told}</p>{notes}',
        *(["<h2>What does not agree</h2>"] if matrix.problems else []),
        *map(_problem, matrix.problems),
        "<h2>Matrix</h2>",
        '<p class="soft">Files of each producer that each consumer restores as it must, of those '
        "that it has the codecs for.</p>",
        _table(matrix),
        "<h2>Who took part</h2>",
        *_parties(matrix),
        f'<p class="soft">{matrix.seconds:.0f} s on {escape(matrix.platform)}; '
        f"{escape(matrix.started)}; suite <code>{matrix.suite[:16]}</code></p>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>kvformat: writers and readers, {verdict}</title><style>{STYLE}</style></head>\n"
        "<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _problem(cell: Cell) -> str:
    said = f"<dt>it says</dt><dd><code>{escape(cell.detail)}</code></dd>" if cell.detail else ""
    return (
        f'<details open><summary><span class="{cell.status}">{cell.status}</span> '
        f"{escape(_title(cell))}</summary><dl><dt>expected</dt><dd>{escape(cell.expected)}</dd>"
        f"<dt>found</dt><dd>{escape(cell.found)}</dd>{said}</dl></details>"
    )


def _table(matrix: Matrix) -> str:
    head = ("producer", "track", "written", *(item.name for item in matrix.consumers))
    cells = "".join(
        f'<th scope="col"{" class=n" if place > 1 else ""}>{escape(item)}</th>'
        for place, item in enumerate(head)
    )
    lines: list[str] = []
    last = ""
    for producer, what, files, sums in rows(matrix):
        numbers = "".join(
            f'<td class="n {item.status or "skipped"}">{item}</td>' for item in (files, *sums)
        )
        name = escape(WHAT.get(what, what))
        start = f'<tr class="group"><th scope="row">{escape(producer)}</th>'
        start = "<tr><th></th>" if producer == last else start
        lines.append(f"{start}<td>{name}</td>{numbers}</tr>")
        last = producer
    body = "\n".join(lines)
    return (
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>\n{body}\n</tbody>'
        "</table></div>"
    )


def _parties(matrix: Matrix) -> Iterator[str]:
    for kind, members in (("producer", matrix.producers), ("consumer", matrix.consumers)):
        for party in members:
            yield (
                f"<p><strong>{escape(party.name)}</strong>, {kind}: {escape(party.info['name'])} "
                f"{escape(party.info['version'])}, codecs {escape(', '.join(party.info['codecs']))}"
                f"<br><code>{escape(' '.join(party.entry))}</code></p>"
            )
