"""``kvconform matrix``: what each writer writes, each reader reads (section 9 of the protocol)."""

from __future__ import annotations

import json
import platform
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kvconform import __version__, needs, writing
from kvconform.cases import Case, CaseError, Ceiling, suite_digest
from kvconform.judge import Problem
from kvconform.protocol import PROTOCOL
from kvconform.runner import Options, Worker, ask_info
from kvconform.writing import Ask, Reading, Written

WRITE: Final = "encode"
VERIFY: Final = "verify"
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Party:
    """A producer or a consumer: its name, how it is started, what it declares."""

    name: str
    entry: list[str]
    info: dict[str, Any]


@dataclass(slots=True)
class Cell:
    """One call on one file. ``what`` is a track's name, ``encode`` or ``verify``.

    ``consumer`` is empty for ``encode``. ``status`` is passed, failed, crashed or skipped.
    """

    producer: str
    consumer: str
    case: str
    what: str
    status: str
    expected: str = ""
    found: str = ""
    detail: str = ""


@dataclass(slots=True)
class Matrix:
    """All cells, in the order of producers, cases, consumers."""

    producers: list[Party]
    consumers: list[Party]
    suite: str
    platform: str
    started: str
    seconds: float = 0.0
    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[Cell]:
        """Cells that are neither passed nor skipped."""
        return [cell for cell in self.cells if cell.status in ("failed", "crashed")]

    @property
    def silent(self) -> list[str]:
        """Pairs of producer and consumer that exchanged nothing."""
        heard = {(c.producer, c.consumer) for c in self.cells if c.status != "skipped"}
        return [
            f"{consumer.name} read nothing of {producer.name}"
            for producer in self.producers
            for consumer in self.consumers
            if (producer.name, consumer.name) not in heard
        ]

    @property
    def good(self) -> bool:
        """Nothing failed, and every consumer read something of every producer."""
        return bool(self.cells) and not (self.problems or self.notes or self.silent)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "kvconform": __version__,
            "protocol": PROTOCOL,
            "good": self.good,
            **asdict(self),
            "silent": self.silent,
        }


def parse_party(text: str) -> tuple[str, list[str]]:
    """``NAME=COMMAND``, the command as a shell has it; raises ``CaseError``."""
    name, equals, command = text.partition("=")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CaseError(f"{text!r}: {error}") from None
    if not (name and equals and words):
        raise CaseError(f"{text!r} is not NAME=COMMAND")
    return name, words


def parties(given: Iterable[str], kind: str, factor: float) -> list[Party]:
    """Ask each for its ``info``; raises ``CaseError`` and ``WiringError``."""
    found = [Party(name, entry, ask_info(entry, factor)) for name, entry in map(parse_party, given)]
    names = [party.name for party in found]
    if len(names) != len(set(names)):
        raise CaseError(f"two {kind}s have one name: {', '.join(sorted(names))}")
    for party in found:
        if kind == "producer" and not party.info.get("encode"):
            raise CaseError(f"{party.name} is no producer: its info declares no encode")
    return found


@dataclass(frozen=True, slots=True)
class _Running:
    party: Party
    worker: Worker

    @property
    def batch(self) -> bool:
        """Whether its answers come from a batch process."""
        found: bool = self.party.info["batch"]
        return found

    def asked(self, ceiling: Ceiling) -> Ask:
        """How ``writing`` calls it."""
        return lambda arguments: self.worker.ask(arguments, ceiling)


def run(
    producers: list[Party],
    consumers: list[Party],
    cases: Iterable[Case],
    root: Path,
    *,
    timeout_factor: float = 1.0,
    progress: Progress | None = None,
) -> Matrix:
    """Write and read everything, one file after the other."""
    clock = time.monotonic()
    matrix = Matrix(
        producers,
        consumers,
        suite_digest(root),
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        datetime.now(UTC).isoformat(timespec="seconds"),
    )
    plan = [
        (producer, case)
        for producer in producers
        for case in cases
        if writing.is_positive(case) and _writes(producer, case)
    ]
    with ExitStack() as stack:

        def started(party: Party) -> _Running:
            options = Options(timeout_factor=timeout_factor)
            return _Running(party, stack.enter_context(_worker(party, options, matrix.notes)))

        readers = [started(party) for party in consumers]
        writers = {party.name: started(party) for party in producers}
        for done, (producer, case) in enumerate(plan, 1):
            matrix.cells += _exchange(writers[producer.name], readers, case)
            if progress is not None:
                progress(done, len(plan))
    matrix.seconds = time.monotonic() - clock
    return matrix


def _writes(producer: Party, case: Case) -> bool:
    """Whether a producer declares the tracks of a case; codecs to read them are no matter here."""
    wanted = {item for item in case.requires if item.startswith("encode:")}
    return wanted <= needs.declared(producer.info)


@contextmanager
def _worker(party: Party, options: Options, notes: list[str]) -> Iterator[Worker]:
    worker = Worker(party.entry, options, batch=party.info["batch"])
    try:
        yield worker
    finally:
        worker.close()
        notes += [f"{party.name}: {note}" for note in worker.notes]


def _exchange(writer: _Running, readers: list[_Running], case: Case) -> Iterator[Cell]:
    """One file: its writing, then what each consumer makes of it."""
    operation = case.operations[0]
    producer = writer.party.name
    with tempfile.TemporaryDirectory(prefix="kvconform-") as name:
        folder = Path(name)
        work = folder / "writer"
        work.mkdir()
        _, problem, written = writing.write(
            writer.asked(operation.ceiling), case, operation, work, batch=writer.batch
        )
        yield _cell(producer, "", case, WRITE, problem)
        if written is None:
            return
        first: dict[tuple[str, str], tuple[str, str]] = {}
        for number, reader in enumerate(readers):
            mine = folder / f"reader-{number}"
            mine.mkdir()
            reading = writing.read_back(
                reader.asked(operation.ceiling),
                written,
                mine,
                batch=reader.batch,
                codecs=reader.party.info["codecs"],
            )
            _compare(reader.party.name, written, reading, first)
            yield from _cells(producer, reader.party, case, written, reading)


def _compare(
    consumer: str, written: Written, reading: Reading, first: dict[tuple[str, str], tuple[str, str]]
) -> None:
    """Groups that are not exact: what the first consumer found is what all must find."""
    quality = {track["name"]: track["quality"] for track in written.tracks}
    for track, digests in reading.digests.items():
        for group, found in digests.items():
            if group in written.exact[track]:
                continue
            other, wanted = first.setdefault((quality[track], group), (consumer, found))
            if found != wanted and track not in reading.problems:
                reading.problems[track] = Problem(
                    "failed", f"{group} with digest {wanted}, as {other} restores it", found
                )


def _cells(
    producer: str, consumer: Party, case: Case, written: Written, reading: Reading
) -> Iterator[Cell]:
    known = set(consumer.info["codecs"])
    whole = True
    for track in written.tracks:
        missing = sorted(set(track["codecs"]) - known)
        whole = whole and not missing
        if missing:
            reason = f"codecs not declared: {', '.join(missing)}"
            yield Cell(producer, consumer.name, case.id, track["name"], "skipped", reason)
        else:
            problem = reading.problems.get(track["name"])
            yield _cell(producer, consumer.name, case, track["name"], problem)
    if whole:
        yield _cell(producer, consumer.name, case, VERIFY, reading.problems.get(""))


def _cell(producer: str, consumer: str, case: Case, what: str, problem: Problem | None) -> Cell:
    if problem is None:
        return Cell(producer, consumer, case.id, what, "passed")
    return Cell(
        producer,
        consumer,
        case.id,
        what,
        problem.kind,
        problem.expected,
        problem.found,
        problem.detail,
    )


@dataclass(frozen=True, slots=True)
class Sum:
    """Cells of one producer, one track (or verify) and one consumer, counted."""

    status: str
    passed: int
    ran: int

    def __str__(self) -> str:
        if not self.ran:
            return "skipped" if self.status == "skipped" else "-"
        return f"{self.passed}/{self.ran}"


def rows(matrix: Matrix) -> Iterator[tuple[str, str, Sum, list[Sum]]]:
    """Producer, track or verify, how many files were written, and a sum for each consumer."""
    for producer in matrix.producers:
        mine = [cell for cell in matrix.cells if cell.producer == producer.name]
        written = {cell.case: cell for cell in mine if cell.what == WRITE}
        tracks = dict.fromkeys(cell.what for cell in mine if cell.what not in (WRITE, VERIFY))
        for what in (*tracks, VERIFY):
            cases = {cell.case for cell in mine if cell.what == what}
            files = [cell for name, cell in written.items() if what == VERIFY or name in cases]
            sums = [
                _sum(cell for cell in mine if (cell.what, cell.consumer) == (what, consumer.name))
                for consumer in matrix.consumers
            ]
            yield producer.name, what, _sum(files), sums


def _sum(cells: Iterable[Cell]) -> Sum:
    found = list(cells)
    order = ("crashed", "failed", "passed", "skipped")
    ran = [cell for cell in found if cell.status != "skipped"]
    worst = min((cell.status for cell in found), key=order.index, default="")
    return Sum(worst, sum(cell.status == "passed" for cell in ran), len(ran))


def write_json(matrix: Matrix, path: Path) -> None:
    """Write ``--json``."""
    text = json.dumps(matrix.to_json(), indent=1, ensure_ascii=True)
    path.write_text(text + "\n", encoding="utf-8")
