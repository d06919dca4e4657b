"""Case folders: where they are, what they say, which of them a run wants."""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvconform import needs
from kvconform.protocol import LEVELS

SECONDS: Final = 30
MEMORY_MIB: Final = 1024
SHARED: Final = "shared"
LARGEST_INFLATED: Final = 2**20


class CaseError(Exception):
    """The cases cannot be used: a fault of the suite or of where it was looked for."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Wall-clock seconds and resident MiB that one call may take."""

    seconds: float = SECONDS
    memory_mib: int = MEMORY_MIB


@dataclass(frozen=True, slots=True)
class Variant:
    """The input as it is, with one byte changed, or cut to a length."""

    kind: str = "intact"
    place: int = 0
    mask: int = 0

    def __str__(self) -> str:
        if self.kind == "flip":
            return f"byte {self.place} xor {self.mask:#04x}"
        return f"cut to {self.place} bytes" if self.kind == "cut" else ""

    def apply(self, data: bytes) -> bytes:
        """The changed input."""
        if self.kind == "cut":
            return data[: self.place]
        if self.kind == "intact":
            return data
        changed = bytearray(data)
        changed[self.place] ^= self.mask
        return bytes(changed)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call and what it must answer."""

    call: str
    arguments: tuple[str, ...]
    expect: dict[str, Any]
    variants: tuple[Variant, ...]
    ceiling: Ceiling
    own_ceiling: bool
    existing: bool = False
    http: str = ""
    """The behaviour of the server that the input is read from; empty for a local path."""

    @property
    def changes_input(self) -> bool:
        """Whether this is a run over flips or cuts."""
        return self.variants[0].kind != "intact"


@dataclass(frozen=True, slots=True)
class Case:
    """A case folder."""

    id: str
    level: str
    requirements: tuple[str, ...]
    requires: tuple[str, ...]
    input: Path
    files: tuple[str, ...]
    operations: tuple[Operation, ...]
    folder: Path = field(repr=False)

    @property
    def entry_level(self) -> bool:
        """Whether a reader with the codec ``stored`` alone must pass it."""
        return needs.entry_level(self.requires)

    def arguments(self, operation: Operation) -> list[str]:
        """The arguments, names of the case's files made into paths."""
        return [
            str((self.folder / item).resolve()) if item in self.files else item
            for item in operation.arguments
        ]


def find(name: str) -> Path:
    """The folder ``cases`` or ``schema``: in the installed package or beside it."""
    here = Path(__file__).resolve().parent
    places = (here / name, here.parent / name)
    found = next((path for path in places if path.is_dir()), None)
    if found is None:
        raise CaseError(f"no folder {name}; looked in {places[0]} and {places[1]}")
    return found


def schema(name: str) -> dict[str, Any]:
    """A JSON Schema of the suite: ``case`` or ``results``."""
    value: dict[str, Any] = json.loads((find("schema") / f"{name}.schema.json").read_bytes())
    return value


def read_input(path: Path) -> bytes | None:
    """The bytes of an input, inflated if its name ends in ``.gz``; None if there is no file."""
    if not path.exists():
        return None
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            data = file.read(LARGEST_INFLATED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise CaseError(f"{path} is no gzip file: {error}") from error
    if len(data) > LARGEST_INFLATED:
        raise CaseError(f"{path} inflates to more than {LARGEST_INFLATED:,} bytes")
    return data


def case_files(root: Path) -> Iterator[Path]:
    """All ``case.json`` below ``root``, sorted."""
    if not root.is_dir():
        raise CaseError(f"no such folder of cases: {root}")
    return iter(sorted(root.glob("*/*/case.json")))


def load(root: Path) -> list[Case]:
    """All cases, by level and id; raises ``CaseError`` for one that cannot be understood."""
    cases = []
    for path in case_files(root):
        try:
            cases.append(parse(json.loads(path.read_bytes()), path.parent))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise CaseError(f"{path}: {type(error).__name__}: {error}; try check-cases") from error
    return sorted(cases, key=lambda case: (LEVELS.index(case.level), case.id))


def parse(value: dict[str, Any], folder: Path) -> Case:
    """A case from its JSON, which is taken to match the schema."""
    return Case(
        value["id"],
        value["level"],
        tuple(value["requirements"]),
        tuple(value["requires"]),
        folder / value["input"],
        tuple(value.get("files", ())),
        tuple(_operation(item) for item in value["operations"]),
        folder,
    )


def _operation(value: dict[str, Any]) -> Operation:
    return Operation(
        value["call"],
        tuple(value.get("arguments", ())),
        value["expect"],
        tuple(_variants(value)) or (Variant(),),
        Ceiling(**value.get("ceiling", {})),
        "ceiling" in value,
        value.get("existing", False),
        value.get("http", {}).get("behaviour", ""),
    )


def _variants(value: dict[str, Any]) -> Iterator[Variant]:
    for item in value.get("flips", ()):
        start, stop, mask = item if len(item) == 3 else (item[0], item[0] + 1, item[1])
        yield from (Variant("flip", place, mask) for place in range(start, stop))
    for item in value.get("cuts", ()):
        start, stop = item if isinstance(item, list) else (item, item + 1)
        yield from (Variant("cut", place) for place in range(start, stop))


def select(
    cases: Iterable[Case],
    levels: Iterable[str] = (),
    globs: Iterable[str] = (),
    requirements: Iterable[str] = (),
) -> list[Case]:
    """The cases of these levels, ids and requirements; no filter means all.

    The level ``entry`` stands for the cases that need no codec but ``stored``.
    """
    wanted, patterns, ids = set(levels), tuple(globs), set(requirements)
    entry = "entry" in wanted
    wanted.discard("entry")
    return [
        case
        for case in cases
        if (not wanted or case.level in wanted)
        and (not entry or case.entry_level)
        and (not patterns or any(fnmatch.fnmatchcase(case.id, item) for item in patterns))
        and (not ids or ids & set(case.requirements))
    ]


def evenly(variants: tuple[Variant, ...], most: int) -> tuple[Variant, ...]:
    """At most ``most`` members, evenly spaced, the first and the last among them."""
    if len(variants) <= most:
        return variants
    last = len(variants) - 1
    return tuple(variants[place * last // (most - 1)] for place in range(most))


def suite_digest(root: Path) -> str:
    """SHA-256 over the names and bytes of all files of the cases: which suite was run."""
    total = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = path.relative_to(root).as_posix()
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
