"""The command ``kvconform``. Exit codes: 0 good, 1 not good, 2 wrong call, 3 not wired."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvconform import (
    __version__,
    cases,
    check,
    html,
    junit,
    matrix,
    matrix_page,
    results,
    terminal,
)
from kvconform.cases import Case, CaseError
from kvconform.protocol import LEVELS, PROTOCOL
from kvconform.runner import Options, Run, WiringError, read_xfails
from kvconform.smoke import smoke as run_smoke

NOT_GOOD = 1
NOT_WIRED = 3
Function = TypeVar("Function", bound=Callable[..., Any])
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
ENTRY_SETTINGS = {**SETTINGS, "ignore_unknown_options": True}
PATH = click.Path(path_type=Path, dir_okay=False)


def cases_option(function: Function) -> Function:
    """``--cases``, hidden from nobody but needed by few."""
    return click.option(
        "--cases",
        "root",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="A folder of cases instead of those of this package.",
    )(function)


def filter_options(function: Function) -> Function:
    """``--level``, ``--case`` and ``--requirement``."""
    options = (
        click.option(
            "--level",
            "levels",
            multiple=True,
            type=click.Choice([*LEVELS, "entry"]),
            help="Only this level; 'entry' means cases that need no codec but stored.",
        ),
        click.option("--case", "globs", multiple=True, metavar="GLOB", help="Only these ids."),
        click.option(
            "--requirement", "requirements", multiple=True, metavar="ID", help="Only this rule."
        ),
    )
    for option in options:
        function = option(function)
    return function


@click.group(context_settings=SETTINGS)
@click.version_option(__version__, message=f"kvconform %(version)s, protocol {PROTOCOL}")
def cli() -> None:
    """Check that a program reads kvformat as the specification says."""


@cli.command(name="run", context_settings=ENTRY_SETTINGS)
@filter_options
@cases_option
@click.option(
    "--jobs", type=click.IntRange(1, 256), default=os.cpu_count() or 1, help="Workers at a time."
)
@click.option("--xfails", type=PATH, help="Cases that are known to fail, one per line.")
@click.option("--json", "json_file", type=PATH, help="Write results.json.")
@click.option("--junit", "junit_file", type=PATH, help="Write JUnit XML.")
@click.option("--html", "html_file", type=PATH, help="Write one self-contained page.")
@click.option(
    "--timeout-factor", type=click.FloatRange(0.01, 1000), default=1.0, help="Times the seconds."
)
@click.option("--fail-fast", is_flag=True, help="Stop at the first failure.")
@click.option("--no-batch", is_flag=True, help="One process per call, whatever info says.")
@click.option("--all", "all_variants", is_flag=True, help="All flips and cuts without batch.")
@click.option("--name", default="", help="Name in the reports instead of that of info.")
@click.argument("entry", nargs=-1, required=True, type=click.UNPROCESSED)
def run_command(
    *,
    entry: tuple[str, ...],
    root: Path | None,
    levels: tuple[str, ...],
    globs: tuple[str, ...],
    requirements: tuple[str, ...],
    xfails: Path | None,
    json_file: Path | None,
    junit_file: Path | None,
    html_file: Path | None,
    no_batch: bool,
    **given: Any,
) -> None:
    """Run cases against an implementation: kvconform run [OPTIONS] -- ENTRY [ARGS...]."""
    root = root or cases.find("cases")
    known = cases.load(root)
    wanted = cases.select(known, levels, globs, requirements)
    expected = read_xfails(xfails, {case.id for case in known}) if xfails else {}
    options = Options(batch=not no_batch, xfails=expected, **given)
    with progress() as step:
        found = Run(list(entry), wanted, options, step).run(root)
    terminal.show_results(Console(), found)
    if json_file:
        results.write(found, json_file)
    if junit_file:
        junit.write(found, junit_file)
    if html_file:
        html.write([found], html_file)
    sys.exit(0 if found.good else NOT_GOOD)


class progress:  # noqa: N801 - reads as a function
    """A bar on standard error, if that is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("calls"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("calls", total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.start()
        return lambda done, total: self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


@cli.command(name="list")
@filter_options
@cases_option
def list_command(
    root: Path | None,
    levels: tuple[str, ...],
    globs: tuple[str, ...],
    requirements: tuple[str, ...],
) -> None:
    """List cases."""
    known = cases.load(root or cases.find("cases"))
    terminal.show_cases(Console(), cases.select(known, levels, globs, requirements))


@cli.command(name="show")
@cases_option
@click.argument("name", metavar="ID")
def show_command(name: str, root: Path | None) -> None:
    """Show one case: why it is there, its input and what it wants."""
    known = cases.load(root or cases.find("cases"))
    case: Case | None = next((case for case in known if case.id == name), None)
    if case is None:
        raise CaseError(f"no case has the id {name}")
    terminal.show_case(Console(), case)


@cli.command(name="check-cases")
@cases_option
def check_command(root: Path | None) -> None:
    """Check the case folders themselves: schema, ids, files, sizes."""
    root = root or cases.find("cases")
    problems = check.check_cases(root)
    for line in problems:
        click.echo(line)
    count = len(list(cases.case_files(root)))
    click.echo(f"{count} cases, {len(problems)} problems")
    sys.exit(NOT_GOOD if problems or not count else 0)


@cli.command(name="smoke", context_settings=ENTRY_SETTINGS)
@cases_option
@click.argument("entry", nargs=-1, required=True, type=click.UNPROCESSED)
def smoke_command(entry: tuple[str, ...], root: Path | None) -> None:
    """Answer whether an entry is wired correctly: info and one core case."""
    known = cases.load(root or cases.find("cases"))
    sys.exit(0 if run_smoke(Console(), list(entry), known) else NOT_WIRED)


@cli.command(name="fuzz", context_settings=ENTRY_SETTINGS)
@click.option(
    "--seconds", type=click.FloatRange(0), help="How long to look [default: 60, or no limit]."
)
@click.option("--examples", type=click.IntRange(1), help="How many artifacts to try at most.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Draw the same artifacts again.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("fuzz-cases"),
    show_default=True,
    help="Where a failure is written as a case.",
)
@click.argument("entry", nargs=-1, required=True, type=click.UNPROCESSED)
def fuzz_command(
    entry: tuple[str, ...],
    seconds: float | None,
    examples: int | None,
    seed: int | None,
    out: Path,
) -> None:
    """Look for artifacts that an implementation gets wrong; the first is shrunk to a case."""
    try:
        from kvconform.fuzz.hunt import hunt, write_case
    except ImportError as error:
        raise CaseError(f"{error}; install kvconform[fuzz]") from error
    if seconds is None:
        seconds = 60.0 if examples is None else float("inf")
    found = hunt(list(entry), seconds=seconds, examples=examples, start=seed)
    console = Console()
    kinds = ", ".join(f"{count:,} {name}" for name, count in sorted(found.laws.items()))
    console.print(f"seed {found.seed}: {found.calls:,} calls in {found.seconds:.1f} s; {kinds}")
    for note in found.notes:
        console.print(f"[red]note[/] {escape(note)}")
    if found.failure is None:
        sys.exit(NOT_GOOD if found.notes else 0)
    problem = found.failure.problem
    folder = write_case(found.failure, out, found.seed)
    console.print(f"[red]{problem.kind}[/] {escape(found.failure.probe.what)}")
    console.print(f"  expected  {escape(problem.expected)}")
    console.print(f"  found     {escape(problem.found)}")
    console.print(f"  written   {escape(str(folder))}", soft_wrap=True)
    sys.exit(NOT_GOOD)


@cli.command(name="matrix")
@click.option(
    "--producer",
    "producers",
    multiple=True,
    required=True,
    metavar="NAME=COMMAND",
    help="A writer; give it once for each.",
)
@click.option(
    "--consumer",
    "consumers",
    multiple=True,
    required=True,
    metavar="NAME=COMMAND",
    help="A reader; give it once for each.",
)
@click.option("--case", "globs", multiple=True, metavar="GLOB", help="Only these ids.")
@cases_option
@click.option("--json", "json_file", type=PATH, help="Write all cells as JSON.")
@click.option("--html", "html_file", type=PATH, help="Write one self-contained page.")
@click.option(
    "--timeout-factor", type=click.FloatRange(0.01, 1000), default=1.0, help="Times the seconds."
)
def matrix_command(
    *,
    producers: tuple[str, ...],
    consumers: tuple[str, ...],
    globs: tuple[str, ...],
    root: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    timeout_factor: float,
) -> None:
    """Let every producer write and every consumer read what they wrote."""
    root = root or cases.find("cases")
    wanted = cases.select(cases.load(root), globs=globs)
    writers = matrix.parties(producers, "producer", timeout_factor)
    readers = matrix.parties(consumers, "consumer", timeout_factor)
    with progress() as step:
        found = matrix.run(
            writers, readers, wanted, root, timeout_factor=timeout_factor, progress=step
        )
    matrix_page.show(Console(), found)
    if json_file:
        matrix.write_json(found, json_file)
    if html_file:
        matrix_page.write_html(found, html_file)
    sys.exit(0 if found.good else NOT_GOOD)


@cli.command(name="report")
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="RESULTS.JSON...")
@click.option("--html", "html_file", type=PATH, required=True, help="The page to write.")
def report_command(files: tuple[Path, ...], html_file: Path) -> None:
    """Merge results into one page: implementation x level x requirement."""
    html.write([results.read(path) for path in files], html_file)
    click.echo(f"wrote {html_file}")


def main() -> None:
    """The entry point of the script."""
    try:
        cli(prog_name="kvconform")
    except WiringError as error:
        Console(stderr=True).print(f"[red]the entry does not answer info[/]: {escape(str(error))}")
        sys.exit(NOT_WIRED)
    except (CaseError, OSError) as error:
        Console(stderr=True).print(f"[red]error[/]: {escape(str(error))}")
        sys.exit(2)
