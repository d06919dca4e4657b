"""``kvconform smoke``: is the entry wired correctly? One call of each kind, step by step."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.markup import escape

from kvconform.cases import Case, read_input
from kvconform.runner import Options, WiringError, Worker, ask_info


def smoke(console: Console, command: list[str], cases: list[Case]) -> bool:
    """``info``, then one core case in its own processes, then in batch if that is offered."""
    try:
        info = ask_info(command)
    except WiringError as error:
        console.print(f"[red]info[/]    {escape(str(error))}")
        return False
    codecs = ", ".join(info["codecs"])
    console.print(f"[green]info[/]    {escape(info['name'])} {escape(info['version'])}: {codecs}")
    case = next((item for item in cases if item.level == "core" and item.entry_level), None)
    if case is None:
        console.print("[red]no core case of the entry level to try[/]")
        return False
    console.print(f"case    {case.id}")
    ways = [False, True] if info["batch"] else [False]
    good = [_try(console, command, case, batch=batch) for batch in ways]
    return all(good)


def _try(console: Console, command: list[str], case: Case, *, batch: bool) -> bool:
    worker = Worker(command, Options(), batch=batch)
    source = read_input(case.input)
    good = True
    try:
        for operation in case.operations:
            once = replace(operation, own_ceiling=not batch)
            ended, problem = worker.run(case, once, source, operation.variants[0])
            name = f"{operation.call}{' in batch' if batch else ''}"
            if problem is None:
                console.print(f"[green]good[/]    {name}, {ended.seconds:.2f} s")
                continue
            good = False
            console.print(f"[red]{problem.kind}[/]  {name}")
            console.print(f"  expected  {escape(problem.expected)}")
            console.print(f"  found     {escape(problem.found)}")
            if problem.detail:
                console.print(f"  it says   {escape(problem.detail)}")
    finally:
        worker.close()
    for note in worker.notes:
        console.print(f"[red]note[/]    {escape(note)}")
    return good and not worker.notes
