"""The entry of the reference implementation: ``python conformance/adapters/reference.py CALL ...``.

Speaks conformance/PROTOCOL.md through the API of ``kvformat``. An uncaught exception ends with
exit code 70, which the suite counts as a crash.

``verify`` decodes video in a child process (VER-4), in batch in this process, which is faster but
not for files from strangers. Verification recomputes the digest of every segment's integers and
refuses a difference from the record, so the records of a verified file are the recomputed digests.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from blake3 import blake3

if sys.path[0] and Path(sys.path[0]).name == "adapters":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, if it is not installed

import kvformat
from kvformat.cli.options import read_salt, read_token_ids
from kvformat.codecs.registry import CODECS
from kvformat.encoder import raw_bytes
from kvformat.errors import KvformatError, UsageError
from kvformat.storage import publish

INTERNAL: Final = 70
EXPECTATIONS: Final = ("--expect-model", "--expect-token-ids", "--salt-file")
OPTIONS: Final = {
    "info": (),
    "inspect": (),
    "verify": EXPECTATIONS,
    "decode": ("--track", "--tokens", "--layers", "--heads", "--output", *EXPECTATIONS),
}
INTERVAL: Final = re.compile(r"([0-9]{1,16}):([0-9]{1,16})")


def parse(arguments: list[str]) -> tuple[str, str, dict[str, str]]:
    """Call, URL and options; raises ``usage.argument``."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name not in OPTIONS:
        raise UsageError("usage.argument", "no such call", found=ascii(name[:80]))
    url = ""
    if name != "info":
        if not rest or rest[0].startswith("--"):
            raise UsageError("usage.argument", f"{name} needs a URL")
        url, rest = rest[0], rest[1:]
    options = dict(zip(rest[::2], rest[1::2], strict=False))
    if len(rest) != 2 * len(options) or not set(options) <= set(OPTIONS[name]):
        raise UsageError("usage.argument", f"options of {name} are not understood")
    return name, url, options


def interval(options: Mapping[str, str], name: str) -> tuple[int, int] | None:
    """``A:B`` as a pair, None if the option is not given."""
    text = options.get(name)
    if text is None:
        return None
    match = INTERVAL.fullmatch(text)
    if match is None:
        raise UsageError("usage.argument", f"{name} is no interval A:B", found=ascii(text[:80]))
    return int(match[1]), int(match[2])


def expectation(options: Mapping[str, str]) -> kvformat.Expectation | None:
    """What the caller says that the artifact must be."""
    ids, salt = options.get("--expect-token-ids"), options.get("--salt-file")
    if salt is not None and ids is None:
        raise UsageError("usage.argument", "--salt-file needs --expect-token-ids")
    if ids is None and "--expect-model" not in options:
        return None
    return kvformat.Expectation(
        model=options.get("--expect-model"),
        token_ids=None if ids is None else read_token_ids(ids),
        salt=b"" if salt is None else read_salt(salt),
    )


def info() -> dict[str, Any]:
    """What this implementation is and can do."""
    return {
        "name": "kvformat-python",
        "version": kvformat.__version__,
        "formats": [kvformat.FORMAT_VERSION],
        "codecs": sorted(CODECS),
        "features": [],
        "levels": ["core", "uncommon", "faulty", "hostile", "future", "gold"],
        "batch": True,
    }


def inspect(url: str) -> dict[str, Any]:
    """The manifest."""
    with kvformat.open(url) as artifact:
        return {
            "manifest": artifact.manifest.to_json(),
            "manifest_digest": artifact.manifest_digest,
        }


def verify(url: str, options: Mapping[str, str], *, batch: bool) -> dict[str, Any]:
    """Check everything, then tell the integer digests, which the check has recomputed."""
    expect = expectation(options)
    report = kvformat.verify(url, expect=expect, in_child=not batch, workers=1 if batch else None)
    with kvformat.open(url) as artifact:
        integers = {
            track.name: [
                bytes(item).hex()
                for item in artifact.segment_table(track).records["integer_digest"]
            ]
            for track in artifact.manifest.tracks
        }
    return {"manifest_digest": report.manifest_digest, "integers": integers}


def decode(url: str, options: Mapping[str, str], *, batch: bool) -> dict[str, Any]:
    """Restore a part to a file that appears in one step or not at all."""
    for name in ("--track", "--output"):
        if name not in options:
            raise UsageError("usage.argument", f"decode needs {name}")
    with kvformat.open(url, expect=expectation(options)) as artifact:
        restored = artifact.read(
            track=options["--track"],
            tokens=interval(options, "--tokens"),
            layers=interval(options, "--layers"),
            heads=interval(options, "--heads"),
            check=True,
            workers=1 if batch else None,
        )
    parts = {name: raw_bytes(array) for name, array in restored.items()}

    def write(file: IO[bytes]) -> None:
        for part in parts.values():
            file.write(part)

    publish(options["--output"], write)
    return {"digests": {name: blake3(part).hexdigest() for name, part in parts.items()}}


def act(arguments: list[str], *, batch: bool) -> dict[str, Any]:
    """The further members of the answer; raises ``KvformatError``."""
    name, url, options = parse(arguments)
    if name == "info":
        return info()
    if name == "inspect":
        return inspect(url)
    if name == "verify":
        return verify(url, options, batch=batch)
    return decode(url, options, batch=batch)


def answer(arguments: list[str], *, batch: bool = False) -> tuple[dict[str, Any], int]:
    """The answer of section 2 and its exit code."""
    head: dict[str, Any] = {"protocol": 1, "verdict": "ok", "code": None}
    try:
        return {**head, **act(arguments, batch=batch)}, 0
    except KvformatError as error:
        head |= {"verdict": error.verdict, "code": error.code, "where": error.where}
        return {**head, "detail": str(error)}, error.exit_code


def serve() -> None:
    """``batch``: a line in, a line out, until the input ends."""
    for line in sys.stdin:
        found, code = answer(json.loads(line), batch=True)
        sys.stdout.write(json.dumps({**found, "exit": code}) + "\n")
        sys.stdout.flush()


def main() -> int:
    """Answer one call, or many."""
    arguments = sys.argv[1:]
    if arguments == ["batch"]:
        serve()
        return 0
    found, code = answer(arguments)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = INTERNAL
    sys.stdout.flush()
    sys.exit(status)
