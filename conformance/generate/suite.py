"""Cases in memory: what they are, how they are checked against the reference, how they are written.

A module of cases adds to a ``Suite``. Before anything is written, every operation of every case is
run in this process with the reference reader, and its verdict and code must be those of the case.
"""

# ruff: noqa: E501 - long sentences and tables

from __future__ import annotations

import gzip
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.generate.answers import Answer, ask
from conformance.generate.written import problem_of

HERE = Path(__file__).resolve().parent
CONFORMANCE = HERE.parent
CASES = CONFORMANCE / "cases"
SHARED = CASES / "shared"
COVERAGE = CONFORMANCE / "coverage.md"
UNTESTABLE = CONFORMANCE / "untestable.toml"
NUMBERS = HERE / "numbers.json"
STREAMS = HERE / "streams"
SPEC = CONFORMANCE.parent / "spec"
MOST_INPUT_BYTES = 65_536
MOST_INFLATED_BYTES = 2**20
MOST_BYTES = 7 * 2**20
HOSTILE = {"seconds": 20, "memory_mib": 600}


@dataclass(frozen=True)
class Frozen:
    """An input that depends on versions of libraries: made with ``--new``, then kept."""

    make: Callable[[], bytes]


@dataclass(frozen=True)
class Shared:
    """An input that several cases use; ``name`` is a file of ``cases/shared``.

    ``data`` is what the file holds, inflated if the name ends in ``.gz``.
    """

    name: str
    data: bytes


@dataclass
class Operation:
    """One call of a case. For ``ok`` the digests are filled in from the reference."""

    call: str
    arguments: tuple[str, ...] = ()
    code: str | tuple[str, ...] = "ok"
    flips: tuple[tuple[int, ...], ...] = ()
    cuts: tuple[Any, ...] = ()
    reference: bool = True
    """Whether the reference is asked now; not where its command line is what matters."""
    existing: bool = False
    encoded: dict[str, Any] | None = None
    without: str = ""
    """A codec that the reference does without in this operation."""
    http: str = ""
    """How the server behaves that the input is read from; ``reference`` is asked for the bytes."""
    accept: tuple[str, ...] = ()
    requests: dict[str, Any] = field(default_factory=dict)


@dataclass
class Case:
    """A case; ``slug`` and ``family`` make its id. ``requires`` without a colon are codecs."""

    family: str
    slug: str
    level: str
    requirements: tuple[str, ...]
    input: bytes | Frozen | Shared | None
    operations: list[Operation]
    what: str
    why: str
    how: str
    requires: tuple[str, ...] = ()
    files: dict[str, bytes] = field(default_factory=dict)
    limits: tuple[str, ...] = ()
    ceiling: dict[str, int] | None = None


def verdict_of(code: str) -> str:
    """The verdict that a code belongs to, read from the registry."""
    return "ok" if code == "ok" else CODES[code]


def _codes() -> dict[str, str]:
    text = (SPEC / "registry.md").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    verdict = ""
    for line in text.split("## Error codes")[1].splitlines():
        if line.startswith("### "):
            verdict = line[4:].strip()
        match = re.match(r"\| `([a-z.-]+)` \|", line)
        if match:
            found[match[1]] = verdict
    return found


CODES = _codes()
SPEC_TEXT = (SPEC / "kvformat.md").read_text(encoding="utf-8")
REQUIREMENTS = tuple(re.findall(r"^- \[([A-Z]{3}-[1-9][0-9]*)\] ", SPEC_TEXT, re.MULTILINE))
LIMITS = tuple(
    re.findall(
        r"^\| `([a-z_]+)` \|", SPEC_TEXT.split("## 12. Limits")[1].split("## 13.")[0], re.MULTILINE
    )
)


def verify(code: str | tuple[str, ...] = "ok", *arguments: str) -> Operation:
    """A call of verify."""
    return Operation("verify", arguments, code)


def inspect(code: str | tuple[str, ...] = "ok") -> Operation:
    """A call of inspect."""
    return Operation("inspect", (), code)


def decode(track: str, *arguments: str, code: str | tuple[str, ...] = "ok") -> Operation:
    """A call of decode."""
    return Operation("decode", ("--track", track, *arguments), code)


class Suite:
    """All cases and their files."""

    def __init__(self, *, new: bool = False) -> None:
        self.new = new
        self.cases: list[Case] = []
        self.disagreements: list[str] = []
        self.streams: set[Path] = set()
        self.numbers: dict[str, int] = (
            json.loads(NUMBERS.read_text(encoding="utf-8")) if NUMBERS.is_file() else {}
        )

    def add(self, case: Case) -> None:
        """Take a case; its name must be new."""
        key = f"{case.family}-{case.slug}"
        if any(f"{item.family}-{item.slug}" == key for item in self.cases):
            raise ValueError(f"two cases are called {key}")
        unknown = set(case.requirements) - set(REQUIREMENTS) or set(case.limits) - set(LIMITS)
        if unknown or not case.requirements:
            raise ValueError(f"{key}: no such requirement or limit: {unknown}")
        self.cases.append(case)

    def stream(self, name: str, make: Callable[[], bytes]) -> bytes:
        """A bitstream of a video encoder: made with ``--new``, then kept."""
        path = STREAMS / f"{name}.hevc"
        self.streams.add(path)
        if self.new or not path.is_file():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(make())
        return path.read_bytes()

    def identify(self, case: Case) -> str:
        """The id: a number once given is kept, a new case takes the next of its family."""
        key = f"{case.family}-{case.slug}"
        if key not in self.numbers:
            used = [n for name, n in self.numbers.items() if name.startswith(f"{case.family}-")]
            self.numbers[key] = max(used, default=0) + 1
        return f"{case.family}-{self.numbers[key]:04}-{case.slug}"

    def files(self) -> dict[str, bytes]:
        """Every file below ``conformance`` that this program makes."""
        result: dict[str, bytes] = {}
        for case in self.cases:
            name = self.identify(case)
            folder = f"cases/{case.level}/{name}"
            data = self._input(case, CONFORMANCE / folder / "input.kvf")
            if isinstance(case.input, Shared):
                shared = SHARED / case.input.name
                result[f"cases/shared/{shared.name}"] = stored(shared, case.input.data)
                where = f"../../shared/{case.input.name}"
            elif data is None:
                where = "absent.kvf"
            elif case.operations[0].call == "encode":
                where = "spec.json"
                result[f"{folder}/{where}"] = data
            else:
                where = "input.kvf"
                result[f"{folder}/input.kvf"] = data
            most = MOST_INFLATED_BYTES if where.endswith(".gz") else MOST_INPUT_BYTES
            if data is not None and len(data) > most:
                raise ValueError(f"{name}: {len(data):,} bytes")
            for extra, content in case.files.items():
                result[f"{folder}/{extra}"] = content
            operations = [
                item for one in case.operations for item in self._run(name, case, one, data)
            ]
            text: dict[str, Any] = {
                "id": name,
                "requirements": sorted(set(case.requirements), key=REQUIREMENTS.index),
                "level": case.level,
                "requires": [
                    item if ":" in item or item == "http" else f"codec:{item}"
                    for item in case.requires
                ],
                "input": where,
                "operations": operations,
            }
            if case.files:
                text["files"] = sorted(case.files)
            result[f"{folder}/case.json"] = render_json(text).encode()
            result[f"{folder}/README.md"] = readme(name, case).encode()
        numbers = {f"{c.family}-{c.slug}": self.numbers[f"{c.family}-{c.slug}"] for c in self.cases}
        result["generate/numbers.json"] = (json.dumps(numbers, indent=0) + "\n").encode()
        result["coverage.md"] = self.coverage().encode()
        return result

    def _input(self, case: Case, path: Path) -> bytes | None:
        if isinstance(case.input, Shared):
            return case.input.data
        if isinstance(case.input, Frozen):
            if self.new or not path.is_file():
                return case.input.make()
            return path.read_bytes()
        return case.input

    def _run(
        self, name: str, case: Case, operation: Operation, data: bytes | None
    ) -> Iterable[dict[str, Any]]:
        """The operation as JSON, after the reference has answered as it says."""
        codes = (operation.code,) if isinstance(operation.code, str) else operation.code
        verdicts = {verdict_of(code) for code in codes}
        if len(verdicts) != 1:
            raise ValueError(f"{name}: codes of several verdicts")
        expect: dict[str, Any] = {"verdict": verdicts.pop()}
        if codes != ("ok",):
            expect["codes"] = list(codes)
        if operation.call == "encode":
            expect |= {"encoded": operation.encoded} if operation.encoded else {}
            call: dict[str, Any] = {"call": "encode", "expect": expect}
            if operation.existing:
                call["existing"] = True
            problem = problem_of(call, data or b"", case.files)
            if problem:
                self.disagreements.append(f"{name}: {problem}")
            yield call
            return
        if operation.reference:
            for label, changed in runs(data, operation):
                answer = ask(
                    operation.call,
                    operation.arguments,
                    changed,
                    case.files,
                    without=operation.without,
                )
                if answer.code not in codes:
                    self.disagreements.append(
                        f"{name}: {operation.call} {' '.join(operation.arguments)} {label}: "
                        f"expected {codes}, reference says {answer.code} ({answer.detail})"
                    )
                elif answer.code == "ok":
                    expect |= expectation(operation.call, answer)
        result: dict[str, Any] = {"call": operation.call}
        if operation.arguments:
            result["arguments"] = list(operation.arguments)
        if operation.flips:
            result["flips"] = [list(item) for item in operation.flips]
        if operation.cuts:
            result["cuts"] = [list(i) if isinstance(i, tuple) else i for i in operation.cuts]
        if case.ceiling:
            result["ceiling"] = case.ceiling
        if operation.http:
            result["http"] = {"behaviour": operation.http}
        if operation.accept:
            expect["accept"] = list(operation.accept)
        if operation.requests:
            expect["requests"] = operation.requests
        result["expect"] = expect
        yield result

    # --- the page --------------------------------------------------------------------------

    def coverage(self) -> str:
        """The text of coverage.md."""
        listed = tomllib.loads(UNTESTABLE.read_text(encoding="utf-8"))
        ids: dict[str, list[str]] = {}
        codes: dict[str, list[str]] = {}
        limits: dict[str, list[str]] = {}
        for case in self.cases:
            name = self.identify(case)
            for item in case.requirements:
                ids.setdefault(item, []).append(name)
            for item in case.limits:
                limits.setdefault(item, []).append(name)
            for operation in case.operations:
                found = (operation.code,) if isinstance(operation.code, str) else operation.code
                for item in found:
                    if item != "ok" and name not in codes.setdefault(item, []):
                        codes[item].append(name)
        levels = {level: sum(c.level == level for c in self.cases) for level in LEVELS}
        shown = sum(item in ids for item in REQUIREMENTS)
        lines = [
            "# Coverage of the conformance cases",
            "",
            "Made by `python -m conformance.generate`; do not edit. What no case can show is in",
            "[untestable.toml](untestable.toml).",
            "",
            f"{len(self.cases)} cases: "
            + ", ".join(f"{number} {level}" for level, number in levels.items())
            + f". {sum(not c.requires for c in self.cases)} are of the entry level (codec `stored`).",
            "",
            f"{len(REQUIREMENTS)} requirements: {shown} shown by cases, "
            f"{len(REQUIREMENTS) - shown} listed with a reason.",
        ]
        for title, names, found, reasons in (
            ("Requirement", REQUIREMENTS, ids, listed["requirements"]),
            ("Code", tuple(CODES), codes, listed["codes"]),
            ("Limit", LIMITS, limits, listed["limits"]),
        ):
            lines += ["", f"| {title} | Cases, or why there is none |", "|---|---|"]
            for item in names:
                cells = found.get(item, [])
                text = ", ".join(f"`{name}`" for name in cells[:6])
                if len(cells) > 6:
                    text += f" and {len(cells) - 6} more"
                if not cells:
                    text = f"none: {reasons[item]}" if item in reasons else "**open**"
                lines.append(f"| {item} | {text} |")
        return "\n".join(lines) + "\n"


LEVELS = ("core", "uncommon", "faulty", "hostile", "future")


def expectation(call: str, answer: Answer) -> dict[str, Any]:
    """What an answer ``ok`` must say besides."""
    if call == "inspect":
        return {"manifest_digest": answer.manifest_digest}
    if call == "verify":
        return {"manifest_digest": answer.manifest_digest, "integers": answer.integers}
    return {"digests": answer.digests}


def runs(data: bytes | None, operation: Operation) -> Iterable[tuple[str, bytes | None]]:
    """The inputs that an operation is run with."""
    if data is None or not (operation.flips or operation.cuts):
        yield "", data
        return
    for item in operation.flips:
        for place in [item[0]] if len(item) == 2 else range(item[0], item[1]):
            changed = bytearray(data)
            changed[place] ^= item[-1]
            yield f"flip {place}", bytes(changed)
    for item in operation.cuts:
        for size in range(*item) if isinstance(item, tuple) else [item]:
            yield f"cut {size}", data[:size]


def stored(path: Path, data: bytes) -> bytes:
    """What ``path`` must hold: ``data``, compressed if its name says so.

    A committed file that inflates to ``data`` stays: versions of zlib compress differently.
    """
    if path.suffix != ".gz":
        return data
    if path.is_file() and gzip.decompress(path.read_bytes()) == data:
        return path.read_bytes()
    return gzip.compress(data, 9, mtime=0)


def render_json(value: dict[str, Any]) -> str:
    """JSON with one operation a line or a few, for people and diffs."""
    operations = value.pop("operations")
    head = json.dumps(value, indent=2, ensure_ascii=False)[:-2]
    rows = ",\n".join("    " + json.dumps(item, ensure_ascii=False) for item in operations)
    return f'{head},\n  "operations": [\n{rows}\n  ]\n}}\n'


def readme(name: str, case: Case) -> str:
    """One paragraph."""
    text = " ".join(part.strip() for part in (case.what, case.why, case.how))
    return f"# {name}\n\n{text}\n"


def groups_of(runs_: Sequence[tuple[int, str]]) -> list[tuple[str, int, int]]:
    """Runs of adjacent places with one code: code, start, stop."""
    result: list[tuple[str, int, int]] = []
    for place, code in runs_:
        if result and result[-1][0] == code and result[-1][2] == place:
            result[-1] = (code, result[-1][1], place + 1)
        else:
            result.append((code, place, place + 1))
    return result


def compare(files: dict[str, bytes]) -> list[str]:
    """Differences between ``files`` and what is on disk."""
    wrong = []
    for name, data in sorted(files.items()):
        path = CONFORMANCE / name
        if not path.is_file():
            wrong.append(f"missing: {name}")
        elif path.read_bytes() != data:
            wrong.append(f"differs: {name}")
    for path in sorted(CASES.rglob("*")):
        name = path.relative_to(CONFORMANCE).as_posix()
        if path.is_file() and name not in files:
            wrong.append(f"not made by the generator: {name}")
    return wrong


def write(files: dict[str, bytes]) -> None:
    """Put the files on disk and remove cases that are no longer made."""
    for name, data in files.items():
        path = CONFORMANCE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
    for path in sorted(CASES.rglob("*"), reverse=True):
        if path.is_file() and path.relative_to(CONFORMANCE).as_posix() not in files:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def report(lines: Iterable[str]) -> None:
    """To standard error."""
    for line in lines:
        print(line, file=sys.stderr)
