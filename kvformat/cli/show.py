"""Tables and progress for people, through rich; everything shown is escaped."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvformat.cli.text import clean, output_errors

PIPE_WIDTH: Final = 100
WIDEST_NAME: Final = 32


def make_console(stream: TextIO) -> Console:
    """A console without markup; as wide as the terminal, or 100 columns in a pipe."""
    fixed = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(file=stream, width=fixed, highlight=False, markup=False, emoji=False)


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
    """Label and value, one fact a line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(Text(label), Text(clean(value, limit=2000), overflow="fold"))
    return Padding(grid, (0, 0, 0, 2))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Padding:
    """A table; columns whose title starts with ``>`` are numbers, to the right.

    Where it is too wide, words are folded; numbers and short names stay whole.
    """
    cells = [[clean(item) for item in row] for row in rows]
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
    return Padding(result, (0, 0, 0, 2))


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
