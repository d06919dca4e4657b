"""One self-contained page for one or more results: no script, no external resource."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Final

from kvconform.protocol import LEVELS
from kvconform.results import (
    BAD,
    STATUSES,
    CaseResult,
    Results,
    by_level,
    by_requirement,
    requirement_order,
    summary,
)

USUAL: Final = ("passed", "failed", "crashed", "skipped")
"""Columns that the table of levels always has."""
MOST_LISTED: Final = 2
WORST_FIRST: Final = ("crashed", "failed", "xpassed", "xfailed", "passed", "skipped")
MARKS: Final = {
    "passed": "✓",
    "failed": "✗",
    "crashed": "crash",
    "skipped": "skipped",
    "xfailed": "known",
    "xpassed": "xpass",
}
STYLE: Final = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59636e;--paper:#fff;--line:#d6dbe1;
--band:#f4f6f8;--good:#1a6e34;--bad:#b3261e;--known:#8a5a00}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa4ae;--paper:#14171a;
--line:#343b42;--band:#1d2226;--good:#6bcf86;--bad:#ff8a80;--known:#e5b454}}
*{box-sizing:border-box}body{margin:0 auto;max-width:72rem;padding:2rem 1rem 4rem;
font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.7rem;margin:0 0 .3rem}h2{font-size:1.2rem;margin:2.5rem 0 .6rem}
p{margin:.3rem 0;max-width:65ch}.soft{color:var(--soft)}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .8rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
thead th{background:var(--band);font-weight:600;position:sticky;top:0}
td.n,th.n{text-align:right}tbody th{font-weight:600;white-space:nowrap}
tr.group>*{border-top:2px solid var(--line)}.verdict{font-size:1.15rem;margin-top:1rem}
code{font:.88em ui-monospace,monospace;overflow-wrap:anywhere}
.passed{color:var(--good)}.failed,.crashed,.xpassed{color:var(--bad);font-weight:600}
.xfailed{color:var(--known)}.skipped{color:var(--soft)}
details{border:1px solid var(--line);border-radius:6px;margin:.5rem 0;padding:.5rem .8rem}
td details{border:0;margin:0;padding:0}td details[open] summary{margin-bottom:.3rem}
td details code{display:inline-block;margin-right:1.2rem}
summary{cursor:pointer}
dl{display:grid;grid-template-columns:6rem 1fr;gap:.2rem .8rem;margin:.6rem 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere;white-space:pre-wrap}
"""


def write(all_results: list[Results], path: Path) -> None:
    """Write the page."""
    path.write_text(page(all_results), encoding="utf-8")


def page(all_results: list[Results]) -> str:
    """The page as text."""
    names = _names(all_results)
    failures = _failures(names, all_results)
    advice, left_out = _advice(names, all_results), _left_out(names, all_results)
    title = "kvformat conformance: " + (names[0] if len(names) == 1 else f"{len(names)} readers")
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(_about(name, item) for name, item in zip(names, all_results, strict=True)),
        _suites(all_results),
        f"<h2>{_heading('Failures', failures)}</h2>",
        "\n".join(failures) or '<p class="passed">None.</p>',
        "<h2>Levels</h2>",
        _levels(names, all_results),
        *([f"<h2>{_heading('Advice', advice)}</h2>", _advice_table(advice)] if advice else []),
        f"<h2>{_heading('Known failures and skipped cases', left_out)}</h2>",
        _left_out_table(left_out),
        "<h2>Requirements</h2>",
        '<p class="soft">The worst status of its cases, and how many passed of those that ran.</p>',
        _requirements(names, all_results),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _heading(text: str, items: list[str]) -> str:
    return f"{text} ({len(items):,})" if items else text


def _names(all_results: list[Results]) -> list[str]:
    """Name and version, numbered where two are alike."""
    names: list[str] = []
    for item in all_results:
        name = f"{item.name} {item.info['version']}"
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    return names


def _about(name: str, item: Results) -> str:
    state = "passed" if item.good else "failed"
    verdict = "good" if item.good else "not good"
    runs = sum(case.runs for case in item.cases)
    codecs = ", ".join(item.info["codecs"])
    counts = summary(item.cases)
    told = ", ".join(f"{counts[status]:,} {status}" for status in STATUSES if counts[status])
    notes = "".join(f'<p class="failed">{escape(note)}</p>' for note in item.notes)
    return (
        f'<p class="verdict"><strong>{escape(name)}</strong>: <strong class="{state}">{verdict}'
        f"</strong>, {told or 'no case ran'}</p>"
        f'<p class="soft">codecs {escape(codecs)}; {runs:,} calls in {item.seconds:.0f} s on '
        f"{escape(item.platform)}; {escape(item.started)}; <code>{escape(' '.join(item.entry))}"
        f"</code></p>{notes}"
    )


def _suites(all_results: list[Results]) -> str:
    digests = {item.suite["digest"] for item in all_results}
    if len(digests) == 1:
        return f'<p class="soft">Suite <code>{digests.pop()[:16]}</code></p>'
    return '<p class="failed">These results come from different versions of the suite.</p>'


def _table(head: Iterable[str], rows: Iterable[str], numbers: Iterable[str] = ()) -> str:
    """``numbers`` are columns whose heads stand to the right, above their numbers."""
    right = set(numbers)
    cells = "".join(
        f'<th scope="col"{" class=n" if item in right else ""}>{escape(item)}</th>' for item in head
    )
    body = "\n".join(rows)
    return (
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _levels(names: list[str], all_results: list[Results]) -> str:
    rows = []
    shown = [s for s in STATUSES if s in USUAL or any(summary(i.cases)[s] for i in all_results)]
    for level in ("all", *LEVELS):
        first = True
        for name, item in zip(names, all_results, strict=True):
            cases = item.cases if level == "all" else by_level(item.cases)[level]
            if cases:
                counts = summary(cases)
                cells = "".join(_number(status, counts[status]) for status in shown)
                head = f'<tr class="group"><th>{level}</th>' if first else "<tr><th></th>"
                rows.append(f"{head}<td>{escape(name)}</td>{cells}</tr>")
                first = False
    return _table(("level", "implementation", *shown), rows, shown)


def _number(status: str, count: int) -> str:
    return f'<td class="n {status if count else "skipped"}">{f"{count:,}" if count else "-"}</td>'


def _requirements(names: list[str], all_results: list[Results]) -> str:
    tables = [by_requirement(item.cases) for item in all_results]
    ids = sorted({name for table in tables for name in table}, key=requirement_order)
    rows = []
    for name in ids:
        cases = sorted({case.id for table in tables for case in table.get(name, ())})
        cells = "".join(_cell(table.get(name, [])) for table in tables)
        rows.append(f"<tr><th>{name}</th>{cells}<td>{_listed(cases)}</td></tr>")
    return _table(("requirement", *names, "cases"), rows)


def _listed(cases: list[str]) -> str:
    """Ids of cases, folded away if there are many."""
    ids = " ".join(f"<code>{item}</code>" for item in cases)
    if len(cases) <= MOST_LISTED:
        return ids
    return f"<details><summary>{len(cases):,} cases</summary>{ids}</details>"


def _cell(cases: list[CaseResult]) -> str:
    """The worst status of the cases, and how many passed of those that ran."""
    ran = [case for case in cases if case.status != "skipped"]
    if not ran:
        return f'<td class="skipped">{"skipped" if cases else "-"}</td>'
    worst = min((case.status for case in ran), key=WORST_FIRST.index)
    passed = sum(case.status == "passed" for case in ran)
    return f'<td class="{worst}">{MARKS[worst]} {passed}/{len(ran)}</td>'


def _failures(names: list[str], all_results: list[Results]) -> list[str]:
    return [
        _failure(name, case)
        for name, item in zip(names, all_results, strict=True)
        for case in item.cases
        if case.status in BAD
    ]


def _failure(name: str, case: CaseResult) -> str:
    ids = ", ".join(case.requirements)
    head = (
        f'<summary><span class="{case.status}">{case.status}</span> <code>{case.id}</code> '
        f'<span class="soft">{escape(name)}, {case.level}, {ids}</span></summary>'
    )
    if case.status == "xpassed":
        return f"<details>{head}<p>Listed as a known failure: {escape(case.reason)}</p></details>"
    items = []
    for item in case.problems:
        what = f"operation {item.operation}, {item.call} {item.variant}".strip()
        said = f"<dt>it says</dt><dd><code>{escape(item.detail)}</code></dd>" if item.detail else ""
        items.append(
            f"<dl><dt>call</dt><dd>{escape(what)}</dd><dt>expected</dt><dd>{escape(item.expected)}"
            f"</dd><dt>found</dt><dd>{escape(item.found)}</dd>{said}{_requests(item.requests)}</dl>"
        )
    more = case.problem_count - len(case.problems)
    ending = f'<p class="soft">and {more:,} more</p>' if more > 0 else ""
    return f"<details open>{head}{''.join(items)}{ending}</details>"


def _requests(lines: list[str]) -> str:
    """The log of a call over HTTP."""
    if not lines:
        return ""
    return f"<dt>requests</dt><dd><code>{escape(chr(10).join(lines))}</code></dd>"


def _advice(names: list[str], all_results: list[Results]) -> list[str]:
    return [
        f"<tr><td><code>{case.id}</code></td><td>{escape(name)}</td><td>{escape(text)}</td></tr>"
        for name, item in zip(names, all_results, strict=True)
        for case in item.cases
        for text in case.advice
    ]


def _advice_table(rows: list[str]) -> str:
    return _table(("case", "implementation", "advice"), rows)


def _left_out(names: list[str], all_results: list[Results]) -> list[str]:
    return [
        f"<tr><td><code>{case.id}</code></td><td>{escape(name)}</td>"
        f'<td class="{case.status}">{MARKS[case.status]}</td><td>{escape(case.reason)}</td></tr>'
        for name, item in zip(names, all_results, strict=True)
        for case in item.cases
        if case.status in ("skipped", "xfailed")
    ]


def _left_out_table(rows: list[str]) -> str:
    if not rows:
        return '<p class="passed">None.</p>'
    return _table(("case", "implementation", "status", "reason"), rows)
