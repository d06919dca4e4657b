"""Tables and progress for people, through rich; everything shown is escaped."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvformat.cli.text import clean, output_errors

PIPE_WIDTH: Final = 100
SIZES: Final = ("COLUMNS", "LINES")
SIDE: Final = re.compile(r"[1-9][0-9]{0,3}")
"""What they may say; the library takes 5,000 digits or none for a number and fails."""
WIDEST_NAME: Final = 32
NARROWEST_WORDS: Final = 12
"""A column of words is folded to this width before a table becomes a list."""
NARROWEST_FACT: Final = 24
GAP: Final = 2
INDENT: Final = (0, 0, 0, 2)


def make_console(stream: TextIO) -> Console:
    """A console without markup; as wide as the terminal, or 100 columns in a pipe."""
    environment = {key: os.environ[key] for key in os.environ if key not in SIZES}
    environment |= {
        key: os.environ[key] for key in SIZES if SIDE.fullmatch(os.environ.get(key, ""))
    }
    fixed = None if stream.isatty() or "COLUMNS" in environment else PIPE_WIDTH
    return Console(
        file=stream, width=fixed, highlight=False, markup=False, emoji=False, _environ=environment
    )


def emit(*parts: RenderableType) -> None:
    """Print to standard output."""
    console = make_console(sys.stdout)
    with output_errors():
        with console.capture() as captured:
            for part in parts:
                console.print(part)
        text = captured.get()
        if not console.is_terminal:
            text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        sys.stdout.write(text)
        sys.stdout.flush()


def say(text: object, style: str = "") -> None:
    """Print one paragraph, wrapped; words too long for a line are cut, never lost."""
    emit(Text(clean(text, limit=2000), style=style, overflow="fold"))


def whole_line(text: object) -> None:
    """Print one line without wrapping, to be copied."""
    with output_errors():
        sys.stdout.write(f"{clean(text, limit=4000)}\n")
        sys.stdout.flush()


def heading(text: object) -> None:
    """Print a title."""
    say(text, "bold")


def facts(rows: Iterable[tuple[str, object]]) -> Padding:
    """Label and value, one fact a line; where that is narrow, the value is below its label."""
    rows = list(rows)
    widest = max((len(label) for label, _ in rows), default=0)
    if make_console(sys.stdout).width - 2 * GAP - widest < NARROWEST_FACT:
        return _stacked((label, clean(value, limit=2000)) for label, value in rows)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(Text(label), Text(clean(value, limit=2000), overflow="fold"))
    return Padding(grid, INDENT)


def _stacked(rows: Iterable[tuple[str, str]]) -> Padding:
    """Each label on a line of its own, its value below."""
    parts: list[RenderableType] = []
    for label, value in rows:
        if label:
            parts.append(Text(label, style="dim", overflow="fold"))
        parts.append(Padding(Text(value, overflow="fold"), INDENT))
    return Padding(Group(*parts), INDENT)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Padding:
    """A table; columns whose title starts with ``>`` are numbers, to the right.

    Where it is too wide, words are folded; numbers and short names stay whole. Where even that
    is too wide, each row becomes a list.
    """
    cells = [[clean(item) for item in row] for row in rows]
    if _narrowest(columns, cells) > make_console(sys.stdout).width:
        return _listed([title.lstrip(">") for title in columns], cells)
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, title in enumerate(columns):
        number = title.startswith(">")
        widest = max((len(row[index]) for row in cells), default=0)
        result.add_column(
            Text(title.lstrip(">")),
            justify="right" if number else "left",
            overflow="fold",
            no_wrap=number or (index == 0 and widest <= WIDEST_NAME),
        )
    for row in cells:
        result.add_row(*(Text(item, overflow="fold") for item in row))
    return Padding(result, INDENT)


def _narrowest(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """The width that a table needs."""
    total = GAP
    for index, title in enumerate(columns):
        widest = max([len(title.lstrip(">")), *(len(row[index]) for row in cells)])
        whole = title.startswith(">") or (index == 0 and widest <= WIDEST_NAME)
        total += (widest if whole else min(widest, NARROWEST_WORDS)) + GAP
    return total


def _listed(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> Padding:
    """Rows as lists: the first cell, then title and cell of the others."""
    parts: list[RenderableType] = []
    for row in cells:
        parts.append(Text(row[0], overflow="fold"))
        parts.append(facts(zip(titles[1:], row[1:], strict=True)))
    return Padding(Group(*parts), INDENT)


Step = Callable[[int, int], None]


@contextlib.contextmanager
def progress(label: str) -> Iterator[Step | None]:
    """A progress bar on standard error if that is a terminal; yields what to call with counts."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress

    with Progress(console=make_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
