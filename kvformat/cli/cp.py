"""``kvformat cp``: copy an artifact between any two places, verified on the way."""

from __future__ import annotations

from dataclasses import asdict

import click

from kvformat.cli.show import emit, facts, heading, progress
from kvformat.cli.text import write_json
from kvformat.copying import CopyReport, copy
from kvformat.costs import seconds


@click.command(name="cp")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(source: str, target: str, *, overwrite: bool, as_json: bool) -> None:
    """Copy the artifact SRC to DST; both are paths or URLs, DST may be a directory.

    Every digest is compared while the bytes pass. DST appears whole and good, or not at all.
    Values are not decoded: kvformat verify does that.
    """
    with progress("copying") as step:
        report = copy(source, target, overwrite=overwrite, progress=step)
    if as_json:
        write_json({"verdict": "ok", "code": None, "report": asdict(report)})
    else:
        _show(report)


def _show(report: CopyReport) -> None:
    heading(f"copied to {report.target}")
    rate = report.file_bytes / max(report.seconds, 1e-9) / 1e6
    time = f"in {seconds(report.seconds)}, {rate:,.0f} MB/s"
    requests = f"{report.requests} requests"
    requests += f", {report.retries} repeated" if report.retries else ""
    rows: list[tuple[str, object]] = [
        ("from", report.source),
        ("manifest", report.manifest_digest),
        ("bytes", f"{report.file_bytes:,} {time}"),
        ("checked", f"header, manifest, tables, {report.objects:,} objects, padding"),
        ("storage", requests),
    ]
    emit(facts(rows))
