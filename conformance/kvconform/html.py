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
td.n{text-align:right}code{font:.88em ui-monospace,monospace;overflow-wrap:anywhere}
.passed{color:var(--good)}.failed,.crashed,.xpassed{color:var(--bad);font-weight:600}
.xfailed{color:var(--known)}.skipped{color:var(--soft)}
details{border:1px solid var(--line);border-radius:6px;margin:.5rem 0;padding:.5rem .8rem}
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
    advice = _advice(names, all_results)
    title = "kvformat conformance: " + (names[0] if len(names) == 1 else f"{len(names)} readers")
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(_about(name, item) for name, item in zip(names, all_results, strict=True)),
        _suites(all_results),
        "<h2>Levels</h2>",
        _levels(names, all_results),
        "<h2>Requirements</h2>",
        _requirements(names, all_results),
        "<h2>Failures</h2>",
        _failures(names, all_results),
        *(["<h2>Advice</h2>", advice] if advice else []),
        "<h2>Known failures and skipped cases</h2>",
        _left_out(names, all_results),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


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
    notes = "".join(f'<p class="failed">{escape(note)}</p>' for note in item.notes)
    return (
        f'<p><strong>{escape(name)}</strong>: <span class="{state}">{verdict}</span></p>'
        f'<p class="soft">codecs {escape(codecs)}; {runs:,} calls in {item.seconds:.0f} s on '
        f"{escape(item.platform)}; {escape(item.started)}; <code>{escape(' '.join(item.entry))}"
        f"</code></p>{notes}"
    )


def _suites(all_results: list[Results]) -> str:
    digests = {item.suite["digest"] for item in all_results}
    if len(digests) == 1:
        return f'<p class="soft">Suite <code>{digests.pop()[:16]}</code></p>'
    return '<p class="failed">These results come from different versions of the suite.</p>'


def _table(head: Iterable[str], rows: Iterable[str]) -> str:
    cells = "".join(f'<th scope="col">{escape(item)}</th>' for item in head)
    body = "\n".join(rows)
    return (
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _levels(names: list[str], all_results: list[Results]) -> str:
    rows = []
    for level in (*LEVELS, "all"):
        for name, item in zip(names, all_results, strict=True):
            cases = item.cases if level == "all" else by_level(item.cases)[level]
            if cases:
                counts = summary(cases)
                cells = "".join(_number(status, counts[status]) for status in STATUSES)
                rows.append(f"<tr><th>{level}</th><td>{escape(name)}</td>{cells}</tr>")
    return _table(("level", "implementation", *STATUSES), rows)


def _number(status: str, count: int) -> str:
    return f'<td class="n {status if count else "skipped"}">{count if count else "-"}</td>'


def _requirements(names: list[str], all_results: list[Results]) -> str:
    tables = [by_requirement(item.cases) for item in all_results]
    ids = sorted({name for table in tables for name in table}, key=requirement_order)
    rows = []
    for name in ids:
        cases = {case.id for table in tables for case in table.get(name, ())}
        cells = "".join(_cell(table.get(name, [])) for table in tables)
        listed = "<br>".join(f"<code>{item}</code>" for item in sorted(cases))
        rows.append(f"<tr><th>{name}</th>{cells}<td>{listed}</td></tr>")
    return _table(("requirement", *names, "cases"), rows)


def _cell(cases: list[CaseResult]) -> str:
    """The worst status of the cases, and how many passed of those that ran."""
    ran = [case for case in cases if case.status != "skipped"]
    if not ran:
        return f'<td class="skipped">{"skipped" if cases else "-"}</td>'
    worst = min((case.status for case in ran), key=WORST_FIRST.index)
    passed = sum(case.status == "passed" for case in ran)
    return f'<td class="{worst}">{MARKS[worst]} {passed}/{len(ran)}</td>'


def _failures(names: list[str], all_results: list[Results]) -> str:
    parts = [
        _failure(name, case)
        for name, item in zip(names, all_results, strict=True)
        for case in item.cases
        if case.status in BAD
    ]
    return "\n".join(parts) or '<p class="passed">None.</p>'


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


def _advice(names: list[str], all_results: list[Results]) -> str:
    rows = [
        f"<tr><td><code>{case.id}</code></td><td>{escape(name)}</td><td>{escape(text)}</td></tr>"
        for name, item in zip(names, all_results, strict=True)
        for case in item.cases
        for text in case.advice
    ]
    return _table(("case", "implementation", "advice"), rows) if rows else ""


def _left_out(names: list[str], all_results: list[Results]) -> str:
    rows = [
        f"<tr><td><code>{case.id}</code></td><td>{escape(name)}</td>"
        f'<td class="{case.status}">{MARKS[case.status]}</td><td>{escape(case.reason)}</td></tr>'
        for name, item in zip(names, all_results, strict=True)
        for case in item.cases
        if case.status in ("skipped", "xfailed")
    ]
    if not rows:
        return '<p class="passed">None.</p>'
    return _table(("case", "implementation", "status", "reason"), rows)
