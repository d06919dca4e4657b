"""``encode``: how the suite calls a writer and judges the file that it makes (section 8).

``write`` makes the call and looks at the file itself: front, manifest, what the case knows of it.
``read_back`` asks a reader, the writer itself or another one, to verify and decode it.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from kvconform.cases import Case, Ceiling, Operation, Variant
from kvconform.judge import Output, Problem, answer_of, canonical, judge
from kvconform.process import Ended
from kvconform.protocol import shown

MAGIC: Final = b"\x89KVF\r\n\x1a\n"
HEADER_BYTES: Final = 128
KEPT: Final = b"This file was here before and must stay as it is.\n"
FOLLOW: Final = ("source_digest", "content_id")
"""Members that follow from others, which are compared first."""
LEAST_SALT_BYTES: Final = 8
"""A shorter salt may stand in a file by chance."""

Ask = Callable[[list[str]], Ended]
"""Makes one call of the protocol."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that a writer made, and what the case says that it holds.

    ``exact`` has the names of the groups that each track holds exactly.
    """

    file: Path
    data: bytes = field(repr=False)
    manifest: dict[str, Any] = field(repr=False)
    encoded: dict[str, Any] = field(repr=False)
    exact: dict[str, set[str]]

    @property
    def tracks(self) -> list[dict[str, Any]]:
        """The tracks of the manifest."""
        found: list[dict[str, Any]] = self.manifest["tracks"]
        return found


@dataclass(slots=True)
class Reading:
    """What a reader made of a file. ``digests`` are by track and group, of tracks it decoded."""

    problems: dict[str, Problem] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)


def is_positive(case: Case) -> bool:
    """Whether a case wants a file to be written."""
    first = case.operations[0]
    return first.call == "encode" and first.expect["verdict"] == "ok"


def run(
    ask: Ask, case: Case, operation: Operation, folder: Path, *, batch: bool
) -> tuple[Ended, Problem | None]:
    """An encode operation of a case: write, then let the same implementation read."""
    ended, problem, written = write(ask, case, operation, folder, batch=batch)
    if problem is not None or written is None:
        return ended, problem
    reading = read_back(ask, written, folder, batch=batch)
    seconds = ended.seconds + sum(item.seconds for item in reading.ended)
    memory = max(item.memory_mib for item in (ended, *reading.ended))
    first = next(iter(reading.problems.values()), None)
    return replace(ended, seconds=seconds, memory_mib=memory), first


def write(
    ask: Ask, case: Case, operation: Operation, folder: Path, *, batch: bool
) -> tuple[Ended, Problem | None, Written | None]:
    """The call itself. ``folder`` must be empty; the file, if there is one, is below it."""
    source, target = folder / "source", folder / "target"
    for path in (source, target):
        path.mkdir()
    for name in (case.input.name, *case.files):
        (source / name).write_bytes((case.folder / name).read_bytes())
    output = Output(target / "written.kvf", b"", KEPT if operation.existing else None)
    if operation.existing:
        output.file.write_bytes(KEPT)
    spec = source / case.input.name
    arguments = ["encode", str(spec), *case.arguments(operation), "--output", str(output.file)]
    ended = ask(arguments)
    problem = judge(operation, ended, output, batch=batch)
    if problem is not None or operation.expect["verdict"] != "ok":
        return ended, problem, None
    answer = answer_of(ended, batch=batch)
    try:
        written = _open(output.file, answer["manifest_digest"], operation.expect["encoded"])
        _compare(written, json.loads(spec.read_bytes()))
    except _WrongFileError as error:
        return ended, error.problem, None
    return ended, None, written


class _WrongFileError(Exception):
    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.problem = Problem("failed", expected, found)


def _open(file: Path, manifest_digest: str, encoded: dict[str, Any]) -> Written:
    """Header and manifest, checked by hand; the rest is for readers."""
    left = sorted(path.name for path in file.parent.iterdir())
    if left != [file.name]:
        raise _WrongFileError("FILE and nothing else in its folder", ", ".join(left) or "no file")
    data = file.read_bytes()
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise _WrongFileError("an artifact in FILE", f"{len(data):,} bytes that are none")
    file_bytes, manifest_bytes = struct.unpack("<QQ", data[48:64])
    if file_bytes != len(data):
        raise _WrongFileError(f"a FILE of {file_bytes:,} bytes", f"{len(data):,} bytes")
    text = data[HEADER_BYTES : HEADER_BYTES + manifest_bytes]
    digest = blake3(text).hexdigest()
    if not digest == manifest_digest == data[72:104].hex():
        raise _WrongFileError(f"a manifest in FILE with digest {manifest_digest}", digest)
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise _WrongFileError("a manifest in FILE that is JSON", str(error)[:160]) from None
    if not isinstance(manifest, dict) or canonical(manifest) != text:
        raise _WrongFileError("a manifest in canonical form", shown(manifest))
    try:
        exact = {track["name"]: _exact_groups(manifest, track) for track in manifest["tracks"]}
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise _WrongFileError(
            "groups, qualities and tracks as section 5 has them", f"{type(error).__name__}: {error}"
        ) from None
    return Written(file, data, manifest, encoded, exact)


def _exact_groups(manifest: dict[str, Any], track: dict[str, Any]) -> set[str]:
    quality = next(item for item in manifest["qualities"] if item["name"] == track["quality"])
    groups, encodings = manifest["groups"], quality["encodings"]
    if len(track["codecs"]) != len(groups):
        raise ValueError(f"codecs of {track['name']}")
    return {
        group["name"]
        for group, encoding in zip(groups, encodings, strict=True)
        if encoding == "exact"
    }


def _compare(written: Written, spec: dict[str, Any]) -> None:
    """What the suite knows of the manifest without having written it."""
    expected = written.encoded["manifest"]
    last = [name for name in FOLLOW if name in expected]
    known = {name: expected[name] for name in (*sorted(expected.keys() - last), *last)}
    members = {name: written.manifest.get(name) for name in known}
    for place, wanted, found in _differences(known, members):
        raise _WrongFileError(f"manifest {place} {shown(wanted)}", shown(found))
    names = sorted(map(str, written.exact))
    if names != sorted(written.encoded["tracks"]):
        raise _WrongFileError(f"tracks {shown(written.encoded['tracks'])}", shown(names))
    salt = bytes.fromhex(spec["salt"] or "")
    if len(salt) >= LEAST_SALT_BYTES and any(
        form in written.data for form in (salt, salt.hex().encode())
    ):
        raise _WrongFileError("no salt in FILE (TOK-9)", "the salt")


def _differences(wanted: Any, found: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The innermost places where two JSON values differ."""
    if isinstance(wanted, dict) and isinstance(found, dict) and wanted.keys() == found.keys():
        for key in wanted:
            yield from _differences(wanted[key], found[key], f"{place}/{key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for index, pair in enumerate(zip(wanted, found, strict=True)):
            yield from _differences(*pair, f"{place}/{index}")
    elif type(wanted) is not type(found) or wanted != found:
        yield place, wanted, found


def read_back(
    ask: Ask,
    written: Written,
    folder: Path,
    *,
    batch: bool,
    codecs: Iterable[str] | None = None,
) -> Reading:
    """Verify and decode every track; with ``codecs`` only what these suffice for.

    ``problems`` are by track name, with ``""`` for verify.
    """
    reader = _Reader(ask, written, folder, batch=batch)
    chosen = [
        track for track in written.tracks if codecs is None or set(track["codecs"]) <= set(codecs)
    ]
    if len(chosen) == len(written.tracks):
        reader.verify()
    for track in chosen:
        reader.decode(track)
    return reader.reading


class _Reader:
    """One reader and one file."""

    def __init__(self, ask: Ask, written: Written, folder: Path, *, batch: bool) -> None:
        self._ask, self._written, self._batch = ask, written, batch
        self._folder = Path(tempfile.mkdtemp(prefix="read-", dir=folder))
        self._first: dict[str, tuple[str, dict[str, str]]] = {}
        self.reading = Reading()

    def verify(self) -> None:
        """The whole file."""
        size = int.from_bytes(self._written.data[56:64], "little")
        text = self._written.data[HEADER_BYTES : HEADER_BYTES + size]
        expect = {"manifest_digest": blake3(text).hexdigest()}
        self._call("verify", (), expect, "")

    def decode(self, track: dict[str, Any]) -> None:
        """A whole track: exact groups equal the source, tracks of one quality each other."""
        name, quality = track["name"], track["quality"]
        answer = self._call("decode", ("--track", name), {}, name)
        if answer is None:
            return
        digests: dict[str, str] = answer["digests"]
        self.reading.digests[name] = digests
        other, same = self._first.setdefault(quality, (name, digests))
        exact = self._written.exact[name]
        for group, found in digests.items():
            wanted = self._written.encoded["digests"][group] if group in exact else same[group]
            if found != wanted:
                whose = "of the source" if group in exact else f"as in {other}"
                self.reading.problems[name] = Problem(
                    "failed", f"decode of {name}: {group} with digest {wanted}, {whose}", found
                )

    def _call(
        self, call: str, arguments: tuple[str, ...], expect: dict[str, Any], track: str
    ) -> dict[str, Any] | None:
        operation = Operation(
            call, arguments, {"verdict": "ok", **expect}, (Variant(),), Ceiling(), own_ceiling=False
        )
        target = Path(tempfile.mkdtemp(dir=self._folder))
        output = Output(target / "part.bin", self._written.data)
        more = ["--output", str(output.file)] if call == "decode" else []
        ended = self._ask([call, str(self._written.file), *arguments, *more])
        self.reading.ended.append(ended)
        problem = judge(operation, ended, output, batch=self._batch)
        if problem is not None:
            wanted = f"{call} of the new file: {problem.expected}"
            self.reading.problems[track] = replace(problem, expected=wanted)
            return None
        return answer_of(ended, batch=self._batch)
