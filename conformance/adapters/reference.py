"""The entry of the reference implementation: ``python conformance/adapters/reference.py CALL ...``.

Speaks conformance/PROTOCOL.md through the API of ``kvformat``. An uncaught exception ends with
exit code 70, which the suite counts as a crash.

``verify`` decodes video in a child process (VER-4), in batch in this process, which is faster but
not for files from strangers. Verification recomputes the digest of every segment's integers and
refuses a difference from the record, so the records of a verified file are the recomputed digests.

With the environment variable KVCONFORM_CODECS, for example ``stored,zstd``, the other codecs are
neither declared nor there: what a reader without their libraries answers.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import IO, Any, Final, NoReturn, TypeVar

import numpy as np
from blake3 import blake3

if sys.path[0] and Path(sys.path[0]).name == "adapters":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, if it is not installed

import kvformat
from kvformat.cli.options import read_salt, read_token_ids
from kvformat.codecs.registry import CODECS
from kvformat.drafting import checked
from kvformat.dtypes import DTYPES
from kvformat.encoder import raw_bytes
from kvformat.errors import KvformatError, UnsupportedError, UsageError
from kvformat.fields import Node
from kvformat.manifest import KNOWN_FEATURES
from kvformat.planning import RELATIVE_STEPS
from kvformat.storage import publish, storage_errors

T = TypeVar("T")
INTERNAL: Final = 70
EXPECTATIONS: Final = (
    "--expect-model",
    "--expect-token-ids",
    "--expect-content",
    "--salt-file",
)
OPTIONS: Final = {
    "info": (),
    "inspect": ("--timeout",),
    "verify": ("--timeout", *EXPECTATIONS),
    "decode": (
        "--track",
        "--tokens",
        "--layers",
        "--heads",
        "--output",
        "--profile",
        "--timeout",
        *EXPECTATIONS,
    ),
    "encode": ("--output",),
}
CODECS_VARIABLE: Final = "KVCONFORM_CODECS"
INTERVAL: Final = re.compile(r"([0-9]{1,16}):([0-9]{1,16})")
SECONDS: Final = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?")


def parse(arguments: list[str]) -> tuple[str, str, dict[str, str]]:
    """Call, URL and options; raises ``usage.argument``."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name not in OPTIONS:
        raise UsageError("usage.argument", "no such call", found=ascii(name[:80]))
    url = ""
    if name != "info":
        if not rest or rest[0].startswith("--"):
            what = "SPEC" if name == "encode" else "a URL"
            raise UsageError("usage.argument", f"{name} needs {what}")
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


def waiting(options: Mapping[str, str], function: Callable[..., Any]) -> dict[str, Any]:
    """``--timeout`` as an argument of ``function``, where it takes one; always checked."""
    text = options.get("--timeout")
    if text is None:
        return {}
    if SECONDS.fullmatch(text) is None or float(text) <= 0:
        found = ascii(text[:80])
        raise UsageError("usage.argument", "--timeout is no number of seconds", found=found)
    if "transport" not in signature(function).parameters:
        return {}
    seconds = float(text)
    return {"transport": kvformat.Transport(connect_timeout_s=seconds, stall_timeout_s=seconds)}


def expectation(options: Mapping[str, str]) -> kvformat.Expectation | None:
    """What the caller says that the artifact must be."""
    ids, salt = options.get("--expect-token-ids"), options.get("--salt-file")
    content = options.get("--expect-content")
    if ids is None and (salt is not None or content is not None):
        name = "--salt-file" if content is None else "--expect-content"
        raise UsageError("usage.argument", f"{name} needs --expect-token-ids")
    if ids is None and "--expect-model" not in options:
        return None
    return kvformat.Expectation(
        model=options.get("--expect-model"),
        token_ids=None if ids is None else read_token_ids(ids),
        content=() if content is None else spans(read_json(content)),
        salt=b"" if salt is None else read_salt(salt),
    )


def read_json(file: str) -> Any:
    """A JSON file of the caller; raises ``usage.argument``."""
    with storage_errors(file, "io.read", "reading"):
        data = Path(file).read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError("usage.argument", f"this is not JSON: {error}", where=file) from None


def spans(value: Any) -> tuple[kvformat.ContentSpan, ...]:
    """Content spans as in ``tokens.content``."""
    return parsed(lambda node: node.each(kvformat.ContentSpan.parse), value, "/content")


def parsed(parse: Callable[[Node], T], value: Any, pointer: str) -> T:
    """A part of SPEC as a manifest has it; raises ``input.identity``."""
    return checked(parse, lambda: value, pointer)


def info() -> dict[str, Any]:
    """What this implementation is and can do."""
    here = declared_codecs()
    return {
        "name": "kvformat-python",
        "version": kvformat.__version__,
        "formats": [kvformat.FORMAT_VERSION],
        "codecs": sorted(here),
        "features": sorted(KNOWN_FEATURES),
        "levels": ["core", "uncommon", "faulty", "hostile", "future", "gold"],
        "batch": True,
        "http": True,
        "encode": [
            f"{quality}/{codec}"
            for quality in (*RELATIVE_STEPS, "exact")
            for codec in sorted(CODECS)
            if codec in here and (quality, codec) != ("exact", "hevc")
        ],
    }


def inspect(url: str, options: Mapping[str, str]) -> dict[str, Any]:
    """The manifest."""
    with kvformat.open(url, **waiting(options, kvformat.open)) as artifact:
        return {
            "manifest": artifact.manifest.to_json(),
            "manifest_digest": artifact.manifest_digest,
        }


def verify(url: str, options: Mapping[str, str], *, batch: bool) -> dict[str, Any]:
    """Check everything, then tell the integer digests, which the check has recomputed."""
    expect = expectation(options)
    in_child = not batch and CODECS_VARIABLE not in os.environ
    report = kvformat.verify(
        url,
        expect=expect,
        in_child=in_child,
        workers=1 if batch else None,
        **waiting(options, kvformat.verify),
    )
    with kvformat.open(url, **waiting(options, kvformat.open)) as artifact:
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
    limits = waiting(options, kvformat.open)
    profiles = [options["--profile"]] if "--profile" in options else []
    with kvformat.open(url, expect=expectation(options), profiles=profiles, **limits) as artifact:
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


def group_tensors(value: dict[str, Any], count: int, folder: Path) -> kvformat.GroupTensors:
    """A group of SPEC with the tensors of its file."""
    members = {key: item for key, item in value.items() if key != "file"}
    if members.get("dtype") not in DTYPES:
        found = ascii(members.get("dtype"))
        raise UsageError("input.dtype", "this dtype cannot be stored", found=found)
    group = parsed(kvformat.Group.parse, members, "/groups")
    path = folder / str(value.get("file"))
    with storage_errors(str(path), "io.read", "reading"):
        data = path.read_bytes()
    shape = group.shape(count)
    if len(data) != np.prod(shape, dtype=object) * group.numpy_dtype.itemsize:
        raise UsageError(
            "input.shape",
            "the file does not hold these tensors",
            where=f"group {group.name}",
            expected=f"{group.dtype} {list(shape)}",
            found=f"{len(data):,} bytes",
        )
    array = np.frombuffer(data, group.numpy_dtype).reshape(shape)
    return kvformat.GroupTensors(group, tuple(array))


def lineage_of(source: Mapping[str, Any] | None) -> kvformat.Lineage:
    """LIN-1 for tensors that were restored from a track, ``restored_from`` of SPEC."""
    if source is None:
        return kvformat.Lineage()
    found = parsed(kvformat.Lineage.parse, source["lineage"], "/restored_from/lineage")
    if source["quality"] == "exact":
        return found
    return kvformat.Lineage("lossy", found.generations + 1, source["quality"], found.profile)


def encode(file: str, options: Mapping[str, str], *, batch: bool) -> dict[str, Any]:
    """Write what SPEC says."""
    if "--output" not in options:
        raise UsageError("usage.argument", "encode needs --output")
    spec = read_json(file)
    try:
        count, folder = spec["token_count"], Path(file).parent
        groups = tuple(group_tensors(item, count, folder) for item in spec["groups"])
        wishes = spec["segmentation"] or {}
        arguments = {
            "identity": parsed(kvformat.Identity.parse, spec["identity"], "/identity"),
            "token_ids": spec["token_ids"],
            "salt": bytes.fromhex(spec["salt"] or ""),
            "tracks": spec["tracks"],
            "first_position": spec["first_position"],
            "content": spans(spec["content"]),
            "lineage": lineage_of(spec["restored_from"]),
            "valid_lengths": spec["valid_lengths"],
            "segment_tokens": wishes.get("tokens"),
            "order": wishes.get("order", "token-major"),
            "alignment": wishes.get("alignment", 1),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError("usage.argument", f"SPEC is not understood: {error!r}") from None
    cache = kvformat.Cache(count, groups)
    report = kvformat.write(options["--output"], cache, workers=1 if batch else None, **arguments)
    return {"manifest_digest": report.manifest_digest}


class MissingCodec:
    """Stands for a codec whose library is not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, _: str) -> NoReturn:
        raise UnsupportedError("codec.unavailable", f"codec {self.name} is switched off here")


def declared_codecs() -> set[str]:
    """Names of the codecs that this process has."""
    listed = os.environ.get(CODECS_VARIABLE)
    return set(CODECS) if listed is None else set(CODECS) & set(listed.split(","))


def switch_off(lacking: set[str]) -> None:
    """From now on these codecs are not there."""
    for name in lacking:
        CODECS[name] = MissingCodec(name)


def act(arguments: list[str], *, batch: bool) -> dict[str, Any]:
    """The further members of the answer; raises ``KvformatError``."""
    name, url, options = parse(arguments)
    if name == "info":
        return info()
    if name == "inspect":
        return inspect(url, options)
    if name == "verify":
        return verify(url, options, batch=batch)
    if name == "encode":
        return encode(url, options, batch=batch)
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
    switch_off(set(CODECS) - declared_codecs())
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
