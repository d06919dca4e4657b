"""``kvformat verify``: strict verification with a verdict."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import click

from kvformat.cli.options import expectation_options, make_expectation, profile_option
from kvformat.cli.show import emit, facts, heading, progress
from kvformat.cli.text import warn, write_json
from kvformat.verification import VerifyReport, verify

_RULE: Final = re.compile(r" \([A-Z]{2,4}-\d+\)")
_FOR_PEOPLE: Final = (
    (
        "tokens: not verified",
        "tokens are not verified: the file does not say which prompt it is the cache of",
    ),
    (
        "tokens:",
        "tokens: whether this is the cache of your prompt; give --expect-token-ids to check that",
    ),
    (
        "source_digest:",
        "original: whether the writer read the cache rightly; only a file that also has an exact "
        "track can show that",
    ),
    (
        "profile:",
        "profile: whether the calibration profile is at hand and fits, without which transformed "
        "groups cannot be restored; give --profile to check that",
    ),
    (
        "quality:",
        "quality: whether your model answers as with the original cache; this track is lossy",
    ),
    (
        "hevc:",
        "hevc: two encoder settings that a video decoder does not report; their effect, the "
        "restored values, is checked",
    ),
    ("identity:", "identity: whether what the file says of its model is true; nothing is signed"),
)


def for_people(not_checked: Iterable[str]) -> list[str]:
    """What was not checked, in words that need no specification."""
    return [
        next((words for start, words in _FOR_PEOPLE if item.startswith(start)), _RULE.sub("", item))
        for item in not_checked
    ]


@click.command(name="verify")
@click.argument("url", metavar="URL")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.option(
    "--in-process",
    is_flag=True,
    help="Decode video in this process: faster, but not for files from strangers.",
)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Threads.")
@profile_option
@expectation_options
def command(
    url: str,
    *,
    as_json: bool,
    in_process: bool,
    workers: int | None,
    profiles: tuple[str, ...],
    **expected: Any,
) -> None:
    """Check every byte of the artifact URL against the specification.

    Says what was checked and what was not. The exit code is the verdict.
    """
    expect = make_expectation(**expected)
    with progress("verifying") as step:
        report = verify(
            url,
            expect=expect,
            in_child=not in_process,
            workers=workers,
            progress=step,
            profiles=profiles,
        )
    partial = _unchecked(report)
    if as_json:
        write_json(_verdict(report, partial))
    else:
        _show(report)
    if partial:
        warn(partial)


def _verdict(report: VerifyReport, partial: str) -> dict[str, Any]:
    """As ``schema/verdict.schema.json`` has it."""
    return {
        "verdict": "ok",
        "code": None,
        "message": partial or "the artifact keeps every rule that was checked",
        "where": "",
        "expected": None,
        "found": None,
        "next_step": "",
        "report": report.to_json(),
    }


def _unchecked(report: VerifyReport) -> str:
    """What to say when too few token ids were given to check all tokens."""
    if report.verified_tokens in (None, report.tokens):
        return ""
    return (
        f"only the first {report.verified_tokens:,} of {report.tokens:,} tokens were checked "
        "and agree; too few ids were given for the rest"
    )


def _show(report: VerifyReport) -> None:
    heading(f"ok  {report.name}")
    rows: list[tuple[str, object]] = [
        ("manifest", report.manifest_digest),
        ("content id", report.content_id),
        ("tracks", ", ".join(report.tracks)),
        ("checked", ", ".join(f"{count:,} {what}" for what, count in report.checked.items())),
    ]
    if report.verified_tokens is not None:
        rows.append(("tokens", f"the first {report.verified_tokens:,} agree with the ids given"))
    rows += [
        ("not checked" if not index else "", sentence)
        for index, sentence in enumerate(for_people(report.not_checked))
    ]
    emit(facts(rows))
