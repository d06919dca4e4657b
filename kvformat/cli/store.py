"""``kvformat store``: look at a store of engines, tidy it, check it, convert it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvformat.cli.options import profile_option
from kvformat.cli.show import emit, facts, heading, progress, say, table
from kvformat.cli.text import clean, write_error, write_json
from kvformat.errors import (
    CODES,
    InvalidError,
    KvformatError,
    MismatchError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from kvformat.storage import local_path

if TYPE_CHECKING:
    from kvformat.store.bulk import Action, Outcome
    from kvformat.store.eviction import Stored
    from kvformat.store.options import StoreOptions

MOST_SHOWN: Final = 20
PAST: Final = {"verify": "checked", "convert": "looked at"}
GOOD: Final = ("ok", "converted", "done before", "not convertible", "deleted", "unknown-version")
KINDS: Final = (InvalidError, MismatchError, UnsupportedError, StorageError, UsageError)
UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
OPTIONS: Final = click.option(
    "--storage-options", metavar="JSON", help='For fsspec, for example {"endpoint_url": "..."}.'
)


@click.group(name="store")
def command() -> None:
    """Look at a store that serving engines share, tidy it, check it, convert it.

    URL is the directory or object-store prefix that was given to kvformat.store.open.
    """


@command.command(name="stats")
@click.argument("url", metavar="URL")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
@OPTIONS
def stats(url: str, *, as_json: bool, storage_options: str | None) -> None:
    """Count objects and bytes by namespace, with one listing."""
    from kvformat.store.eviction import group_entries
    from kvformat.store.publishing import open_backend

    backend = open_backend(_existing(url), _options(storage_options))
    stored, strange = group_entries(backend.entries())
    rows = _by_namespace(stored)
    total = {
        "objects": len(stored),
        "bytes": sum(item.size_bytes for item in stored),
        "names": sum(len(item.entries) for item in stored),
        "unknown_objects": len(strange),
        "unknown_bytes": sum(item.size_bytes for item in strange),
    }
    if as_json:
        write_json({"verdict": "ok", "code": None, "store": total, "namespaces": rows})
        return
    heading(f"{total['objects']:,} objects, {total['bytes']:,} bytes in {url}")
    columns = ("tenant", "model", "version", "quality", "codec", ">objects", ">bytes")
    if rows:
        emit(table(columns, [_row(item) for item in rows]))
    if strange:
        say(
            f"{total['unknown_objects']:,} objects ({total['unknown_bytes']:,} bytes) are of a "
            "version or a name that this release does not know; they are never deleted"
        )


def _by_namespace(stored: Iterable[Stored]) -> list[dict[str, Any]]:
    sums: dict[tuple[str, ...], list[int]] = {}
    for item in stored:
        name = item.entries[-1].name
        if name is None:
            continue
        space = name.namespace
        model = space.model if space.part == "all" else f"{space.model}.{space.part}"
        key = (space.tenant, model, space.version, f"{space.quality}.{space.grid}", name.variant)
        pair = sums.setdefault(key, [0, 0])
        pair[0] += 1
        pair[1] += item.size_bytes
    names = ("tenant", "model", "version", "quality", "codec")
    return [
        {**dict(zip(names, key, strict=True)), "objects": pair[0], "bytes": pair[1]}
        for key, pair in sorted(sums.items())
    ]


def _row(item: dict[str, Any]) -> tuple[object, ...]:
    return (
        item["tenant"], item["model"], item["version"], item["quality"], item["codec"] or "first",
        f"{item['objects']:,}", f"{item['bytes']:,}",
    )  # fmt: skip


@command.command(name="gc")
@click.argument("url", metavar="URL")
@click.option("--limit", metavar="SIZE", help="Evict the longest unused until this much is left.")
@click.option(
    "--leftovers-after",
    type=click.FloatRange(min=0),
    default=3600.0,
    metavar="SECONDS",
    help="Remove what a writer that died left behind, if untouched for so long. Default 3600.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=3600.0,
    metavar="SECONDS",
    help="In object stores: keep what was used within this time. Default 3600.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
@OPTIONS
def gc(
    url: str,
    *,
    limit: str | None,
    leftovers_after: float,
    grace: float,
    as_json: bool,
    storage_options: str | None,
) -> None:
    """Evict down to a size, and remove leftovers; what a reader holds stays."""
    from kvformat.store.eviction import collect
    from kvformat.store.publishing import open_backend

    goal = None if limit is None else _size(limit)
    options = _options(storage_options, grace_s=grace)
    backend = open_backend(_existing(url), options)
    found = collect(backend, None, goal_bytes=goal, leftover_s=leftovers_after)
    if not found.ran:
        raise StorageError(
            "io.read", "another process is evicting there at this moment", where=url,
            next_step="Try again in a moment",
        )  # fmt: skip
    if as_json:
        from dataclasses import asdict

        write_json({"verdict": "ok", "code": None, "report": asdict(found)})
        return
    heading(f"{found.removed:,} objects evicted, {found.freed_bytes:,} bytes freed")
    rows: list[tuple[str, object]] = [
        ("left", f"{found.objects - found.removed:,} objects, {found.size_bytes:,} bytes"),
        ("spared", f"{found.spared:,} that a reader holds or just used"),
        ("left alone", f"{found.unknown:,} of a version or name not known here"),
        ("leftovers", f"{found.leftovers:,} removed"),
    ]
    emit(facts(rows))


def bulk_options(function: Any) -> Any:
    """What verify and convert have in common."""
    for option in (
        OPTIONS,
        click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON."),
        click.option(
            "--journal",
            metavar="FILE",
            help="Note what is done there, and go on from it.",
        ),
        click.option(
            "--cluster", metavar="ADDRESS", help="A Dask scheduler, for example tcp://host:8786."
        ),
        click.option(
            "--workers", type=click.IntRange(min=1), default=1, metavar="N", help="Processes."
        ),
    ):
        function = option(function)
    return function


@command.command(name="verify")
@click.argument("url", metavar="URL")
@click.option("--delete-damaged", is_flag=True, help="Delete what is damaged.")
@profile_option
@bulk_options
def verify(url: str, *, delete_damaged: bool, profiles: tuple[str, ...], **given: Any) -> None:
    """Check every byte of every object, and that each name is that of its content."""
    _bulk(url, "verify", {"delete_damaged": delete_damaged}, profiles=profiles, **given)


@command.command(name="convert")
@click.argument("url", metavar="URL")
@click.option("--codec", type=click.Choice(["hevc", "zstd"]), default="hevc", show_default=True)
@bulk_options
def convert(url: str, *, codec: str, **given: Any) -> None:
    """Encode every object anew in another codec, with the same restored bits.

    The new object takes the place of the old one when no reader holds that; otherwise both stay,
    and the next run finishes it.
    """
    _bulk(url, "convert", {"codec": codec}, **given)


def _bulk(
    url: str,
    action: Action,
    special: dict[str, Any],
    *,
    workers: int,
    cluster: str | None,
    journal: str | None,
    as_json: bool,
    storage_options: str | None,
    profiles: tuple[str, ...] = (),
) -> None:
    from kvformat.store.bulk import plan, run

    options = _options(storage_options, profiles=profiles)
    tasks = plan(_existing(url), options, action, **special)
    counts: Counter[str] = Counter()
    bad: list[Outcome] = []
    written = 0
    with progress(action) as step:
        path = None if journal is None else Path(journal)
        for outcome in run(tasks, workers=workers, cluster=cluster, journal=path):
            counts[outcome.result] += 1
            written += outcome.written_bytes
            if outcome.result not in GOOD:
                bad.append(outcome)
            if step is not None:
                step(sum(counts.values()), len(tasks))
    if as_json and not bad:
        report = {"outcomes": dict(counts), "written_bytes": written}
        write_json({"verdict": "ok", "code": None, "report": report})
    elif not as_json:
        heading(f"{len(tasks):,} objects {PAST[action]} in {url}")
        emit(facts([(result, f"{count:,}") for result, count in sorted(counts.items())]))
        for outcome in bad[:MOST_SHOWN]:
            write_error(clean(f"{outcome.result}: {outcome.path}"))
    if bad:
        raise _failure(bad, len(tasks), counts, action)


def _failure(bad: list[Outcome], total: int, counts: Counter[str], action: str) -> KvformatError:
    """The error of the first bad one, for all of them."""
    code = bad[0].code
    kind = next((item for item in KINDS if code in CODES[item.verdict]), StorageError)
    step = "kvformat store verify --delete-damaged" if action == "verify" else ""
    return kind(
        code if code in CODES[kind.verdict] else "io.read",
        f"{len(bad):,} of {total:,} objects are not good",
        where=bad[0].path,
        found=", ".join(f"{count:,} {result}" for result, count in sorted(counts.items())),
        next_step=step,
    )


def _size(text: str) -> int:
    """``500G``, ``20GiB``: bytes."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([kmgt]?)(ib|b)?", text.strip().lower())
    if match is None:
        raise UsageError(
            "usage.argument", "--limit is no size", expected="500G, 20GiB or a number of bytes",
            found=ascii(text[:40]),
        )  # fmt: skip
    unit = UNITS[match[2]]
    if match[3] == "ib":
        unit = 1024 ** ["", "k", "m", "g", "t"].index(match[2])
    return int(float(match[1]) * unit)


def _existing(url: str) -> str:
    """A local store must be there: looking at one must not make it."""
    path = local_path(url)
    if path is not None and not path.is_dir():
        raise StorageError(
            "io.not-found", "there is no such directory", where=url, next_step="Check the path"
        )
    return url


def _options(
    storage_options: str | None, *, grace_s: float = 3600.0, profiles: tuple[str, ...] = ()
) -> StoreOptions:
    from kvformat.store.options import StoreOptions

    given: object = {}
    if storage_options is not None:
        try:
            given = json.loads(storage_options)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise UsageError(
                "usage.argument", "--storage-options is not a JSON object",
                found=ascii(storage_options)[:80],
            )  # fmt: skip
    return StoreOptions(
        storage_options=given if isinstance(given, dict) else {},
        grace_s=grace_s,
        profiles=profiles,
    )
