"""What people see in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvconform.cases import Case
from kvconform.results import BAD, STATUSES, CaseResult, Results, by_level, summary

COLOURS = {
    "passed": "green",
    "failed": "red",
    "crashed": "bold red",
    "skipped": "dim",
    "xfailed": "yellow",
    "xpassed": "red",
}
MOST_SHOWN = 3
MOST_REQUESTS = 6


def show_results(console: Console, results: Results) -> None:
    """The table of levels, then every problem."""
    table = Table(title=f"{escape(results.name)} {escape(results.info['version'])}")
    table.add_column("level")
    for status in STATUSES:
        table.add_column(status, justify="right")
    for level, cases in by_level(results.cases).items():
        if cases:
            table.add_row(level, *_counts(cases))
    table.add_section()
    table.add_row("all", *_counts(results.cases))
    console.print(table)
    for case in results.cases:
        if case.status in BAD:
            _show_case(console, case)
    _show_advice(console, results)
    for note in results.notes:
        console.print(f"[red]note[/red] {escape(note)}")
    runs = sum(case.runs for case in results.cases)
    left = sum(case.of - case.runs for case in results.cases if case.status != "skipped")
    ending = f"; {left:,} flips and cuts left out, see --all" if left else ""
    how = "in batch" if results.batch else "one process per call"
    console.print(f"{runs:,} calls in {results.seconds:.1f} s, {how}{ending}")
    console.print(_conclusion(results))


def _counts(cases: list[CaseResult]) -> list[str]:
    return [
        f"[{COLOURS[status]}]{count}[/]" if count else "[dim]-[/]"
        for status, count in summary(cases).items()
    ]


def _conclusion(results: Results) -> str:
    total = summary(results.cases)
    if results.good:
        return f"[green]good[/green]: {total['passed']} passed, {total['xfailed']} xfailed"
    if not any(total[status] for status in STATUSES if status != "skipped"):
        return "[red]no case ran[/red]"
    return "[red]not good[/red]: " + ", ".join(
        f"{total[status]} {status}" for status in BAD if total[status]
    )


def _show_case(console: Console, case: CaseResult) -> None:
    colour = COLOURS[case.status]
    ids = ", ".join(case.requirements)
    console.print(f"\n[{colour}]{case.status}[/] [bold]{case.id}[/]  {case.level}, {ids}")
    if case.status == "xpassed":
        console.print(f"  it passes now; take it out of the xfails ({escape(case.reason)})")
    for item in case.problems[:MOST_SHOWN]:
        place = f" with {item.variant}" if item.variant else ""
        console.print(f"  operation {item.operation}, {item.call}{place}")
        console.print(f"    expected  {escape(item.expected)}")
        console.print(f"    found     {escape(item.found)}", overflow="fold")
        if item.detail:
            last = item.detail.strip().splitlines()[-1]
            console.print(f"    it says   {escape(last[:300])}", overflow="fold")
        for line in item.requests[:MOST_REQUESTS]:
            console.print(f"    request   {escape(line)}", soft_wrap=True, highlight=False)
    more = case.problem_count - min(MOST_SHOWN, len(case.problems))
    if more > 0:
        console.print(f"  and {more:,} more")


def _show_advice(console: Console, results: Results) -> None:
    """What the specification advises; it fails nothing."""
    for case in results.cases:
        for text in case.advice:
            console.print(f"[yellow]advice[/] {case.id}: {escape(text)}", soft_wrap=True)


def show_cases(console: Console, cases: list[Case]) -> None:
    """``kvconform list``: one line per case, also in a narrow terminal or a pipe."""
    width = max((len(case.id) for case in cases), default=0)
    for case in cases:
        calls = sum(len(item.variants) for item in case.operations)
        ids = " ".join((*case.requirements, *case.requires))
        line = f"{case.level:9} {case.id:{width}} {calls:6,}  {ids}"
        console.print(escape(line), soft_wrap=True, highlight=False)
    console.print(f"{len(cases):,} cases")


def show_case(console: Console, case: Case) -> None:
    """``kvconform show``: the README and what is asked."""
    readme = case.folder / "README.md"
    if readme.is_file():
        console.print(escape(readme.read_text(encoding="utf-8").strip()) + "\n")
    console.print(f"input   {case.input.resolve()}", soft_wrap=True)
    for index, operation in enumerate(case.operations):
        expect = operation.expect
        wanted = expect["verdict"] + "".join(f" {code}" for code in expect.get("codes", ()))
        wanted += "".join(f" or {code}" for code in expect.get("accept", ()))
        arguments = " ".join((operation.call, "URL", *case.arguments(operation)))
        server = f", server {operation.http}" if operation.http else ""
        console.print(f"call {index}  {escape(arguments)}{server}", soft_wrap=True)
        kinds = len(operation.variants)
        if operation.changes_input:
            first, last = operation.variants[0], operation.variants[-1]
            console.print(f"        {kinds:,} times: {first} ... {last}")
        ceiling = operation.ceiling
        console.print(f"  wants {wanted}; {ceiling.seconds:g} s, {ceiling.memory_mib:,} MiB")
