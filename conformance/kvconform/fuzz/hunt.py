"""Ask an implementation for as long as wanted; shrink what it gets wrong to a case folder."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hypothesis import HealthCheck, Phase, Verbosity, assume, given, seed, settings
from hypothesis import errors as hypothesis_errors
from hypothesis import strategies as st

from kvconform import cases
from kvconform.check import LARGEST_INPUT, check_cases
from kvconform.fuzz.laws import Probe, probes
from kvconform.fuzz.strategies import supported_codecs
from kvconform.judge import Problem
from kvconform.runner import Options, Worker, ask_info

ROUND: Final = 40
SHRINK_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The smallest probe that was answered wrongly, and how."""

    probe: Probe
    operation: int
    problem: Problem


@dataclass(slots=True)
class Hunt:
    """What a run did."""

    seed: int
    probes: int = 0
    calls: int = 0
    seconds: float = 0.0
    laws: dict[str, int] = field(default_factory=dict)
    failure: Failure | None = None
    notes: list[str] = field(default_factory=list)


class LawBrokenError(Exception):
    """Tells Hypothesis that an example fails."""


class _Asker:
    """Runs probes, keeps the smallest failure, and stops when the time is over."""

    def __init__(
        self,
        command: list[str],
        found: Hunt,
        *,
        seconds: float,
        examples: int,
        shrink_seconds: float,
    ) -> None:
        info = ask_info(command)
        self.codecs = supported_codecs() & set(info["codecs"])
        self._levels = set(info["levels"])
        self._worker = Worker(command, Options(), batch=info["batch"])
        self._found = found
        self._examples = examples
        self._shrink_seconds = shrink_seconds
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether to ask no more; after a failure there is time to shrink it."""
        if self._found.failure is not None:
            return time.monotonic() > self._end + self._shrink_seconds
        return time.monotonic() > self._end or self._found.probes >= self._examples

    def ask(self, probe: Probe) -> None:
        """All operations of a probe; raises ``LawBrokenError`` for the first wrong answer."""
        assume(len(probe.data) <= LARGEST_INPUT)
        if probe.level not in self._levels:
            return
        found = self._found
        found.probes += 1
        kind = probe.law.split("-")[0]
        found.laws[kind] = found.laws.get(kind, 0) + 1
        with tempfile.TemporaryDirectory(prefix="kvconform-") as folder:
            for name, data in probe.files.items():
                (Path(folder) / name).write_bytes(data)
            case = cases.parse(_case_json("fuz-0000-probe", probe), Path(folder))
            for number, operation in enumerate(case.operations):
                for variant in operation.variants:
                    found.calls += 1
                    problem = self._worker.run(case, operation, probe.data, variant)[1]
                    if problem is not None:
                        self._keep(Failure(probe, number, problem))
                        raise LawBrokenError(problem.found)

    def _keep(self, new: Failure) -> None:
        old = self._found.failure
        if old is None or _size(new) <= _size(old):
            if old is None:
                self._end = time.monotonic()
            self._found.failure = new

    def close(self) -> None:
        """End the implementation's batch process."""
        self._worker.close()
        self._found.notes += self._worker.notes


def _size(failure: Failure) -> tuple[int, int]:
    return len(failure.probe.data), len(json.dumps(failure.probe.operations))


def hunt(
    command: list[str],
    *,
    seconds: float = 60.0,
    examples: int | None = None,
    start: int | None = None,
    shrink_seconds: float = SHRINK_SECONDS,
) -> Hunt:
    """Draw probes until one is answered wrongly, the time is over, or enough were asked.

    The same ``start`` (a seed) draws the same probes. Raises ``WiringError``.
    """
    found = Hunt(random.SystemRandom().randrange(2**32) if start is None else start)
    clock = time.monotonic()
    most = 2**62 if examples is None else examples
    asker = _Asker(command, found, seconds=seconds, examples=most, shrink_seconds=shrink_seconds)
    try:
        number = 0
        while found.failure is None and not asker.over:
            # The seed of a round is that of the run and its number, so one seed tells all.
            _round(asker, found.seed * 1_000_003 + number)
            number += 1
    finally:
        asker.close()
        found.seconds = time.monotonic() - clock
    return found


def _round(asker: _Asker, number: int) -> None:
    wanted = probes(asker.codecs)

    @seed(number)
    @settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def law(data: st.DataObject) -> None:
        if not asker.over:
            asker.ask(data.draw(wanted))

    # An implementation whose answers vary, and a shrink that is cut short, are flaky for
    # Hypothesis; the failure is kept all the same.
    with contextlib.suppress(LawBrokenError, hypothesis_errors.Flaky):
        law()


def _operations(failure: Failure) -> list[dict[str, Any]]:
    """Only the operation that failed: a case shows one thing."""
    return [failure.probe.operations[failure.operation]]


def _case_json(
    name: str, probe: Probe, operations: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    value: dict[str, Any] = {
        "id": name,
        "requirements": list(probe.requirements),
        "level": probe.level,
        "requires": probe.requires,
        "input": "input.kvf",
        "operations": list(probe.operations) if operations is None else operations,
    }
    if probe.files:
        value["files"] = sorted(probe.files)
    return value


def write_case(failure: Failure, out: Path, start: int) -> Path:
    """A folder ``out/<level>/<id>`` that follows section 5 of the protocol; returns it."""
    probe = failure.probe
    level = out / probe.level
    used = [int(path.name[4:8]) for path in out.glob("*/fuz-[0-9][0-9][0-9][0-9]-*")]
    name = f"fuz-{max(used, default=0) + 1:04}-{probe.law}"
    folder = level / name
    folder.mkdir(parents=True)
    operations = _operations(failure)
    given_files = {item for item in operations[0].get("arguments", ()) if item in probe.files}
    files = {key: data for key, data in probe.files.items() if key in given_files}
    value = _case_json(name, probe, operations)
    value.pop("files", None)
    if files:
        value["files"] = sorted(files)
    (folder / "case.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    (folder / "input.kvf").write_bytes(probe.data)
    for key, data in files.items():
        (folder / key).write_bytes(data)
    (folder / "README.md").write_text(_readme(name, failure, start), encoding="utf-8")
    wrong = [line for line in check_cases(out) if name in line]
    if wrong:
        raise cases.CaseError(f"the fuzzer wrote a case that is none: {wrong[0]}")
    return folder


def _readme(name: str, failure: Failure, start: int) -> str:
    problem = failure.problem
    call = failure.probe.operations[failure.operation]["call"]
    return (
        f"# {name}\n\n{failure.probe.what}\n\n"
        f"Found by `kvconform fuzz --seed {start}` and shrunk. An implementation answered `{call}` "
        f"with `{_quoted(problem.found)}`, expected was `{_quoted(problem.expected)}`.\n"
    )


def _quoted(text: str) -> str:
    return " ".join(text.replace("`", "'").split())[:300]
