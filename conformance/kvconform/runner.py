"""Running the cases: workers, their folders and batch processes, and one result per case."""

from __future__ import annotations

import contextlib
import platform
import queue
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kvconform import judge as judging
from kvconform import needs, protocol, writing
from kvconform.cases import (
    Case,
    CaseError,
    Ceiling,
    Operation,
    Variant,
    evenly,
    read_input,
    suite_digest,
)
from kvconform.judge import Output, Problem, judge
from kvconform.process import BatchProcess, Ended, call
from kvconform.results import MOST_PROBLEMS, CaseResult, Found, Results
from kvconform.server import Resource, Server
from kvconform.traffic import Traffic, advice, with_requests

MOST_VARIANTS: Final = 64
CHUNK: Final = 128
ORDER: Final = ("passed", "failed", "crashed")
Progress = Callable[[int, int], None]


class WiringError(Exception):
    """The entry does not answer ``info`` as the protocol says."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to run. ``all_variants`` matters only without batch."""

    jobs: int = 1
    timeout_factor: float = 1.0
    fail_fast: bool = False
    batch: bool = True
    all_variants: bool = False
    name: str = ""
    xfails: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """Some runs of one operation of one case."""

    case: int
    operation: int
    variants: tuple[Variant, ...]


def read_xfails(path: Path, known: set[str]) -> dict[str, str]:
    """``id  # reason, link`` per line; raises ``CaseError`` for an id that is no case."""
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        name, _, reason = (part.strip() for part in line.partition("#"))
        if not name:
            continue
        if name not in known:
            raise CaseError(f"{path}, line {number}: no case has the id {name}")
        if not reason:
            raise CaseError(f"{path}, line {number}: {name} has no reason behind a #")
        found[name] = reason
    return found


def ask_info(command: list[str], factor: float = 1.0) -> dict[str, Any]:
    """The answer to ``info``; raises ``WiringError``."""
    ended = call([*command, "info"], Ceiling(Ceiling().seconds * factor))
    try:
        answer = judging.answer_of(ended, batch=False)
    except protocol.AnswerError as error:
        lines = [f"`{shlex.join([*command, 'info'])}`: {error}", ended.errors]
        raise WiringError("\n".join(line for line in lines if line)) from None
    wrong = protocol.check_info(answer)
    if wrong:
        raise WiringError("; ".join(wrong))
    return answer


class Worker:
    """One thread's folder and batch process."""

    def __init__(self, command: list[str], options: Options, *, batch: bool) -> None:
        self._command = command
        self._options = options
        self._batch = batch
        self._process: BatchProcess | None = None
        self._server: Server | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="kvconform-"))
        self._count = 0
        self.notes: list[str] = []
        self.advice: list[str] = []

    def run(
        self, case: Case, operation: Operation, source: bytes | None, variant: Variant
    ) -> tuple[Ended, Problem | None]:
        """One call on one input, judged. The input has a new, neutral name each time.

        ``advice`` then says what of the specification's SHOULDs the call did not do.
        """
        self._count += 1
        if operation.call == "encode":
            return self._encode(case, operation)
        path = self._folder / f"input-{self._count}.kvf"
        target = self._folder / f"output-{self._count}"
        data = b"" if source is None else variant.apply(source)
        if source is not None:
            path.write_bytes(data)
        target.mkdir()
        output = Output(target / "part.bin", data)
        arguments = case.arguments(operation)
        if operation.call == "decode":
            arguments += ["--output", str(output.file)]
        batch = self._batch and (operation.changes_input or not operation.own_ceiling)
        try:
            with self._resource(operation, data, path) as resource:
                url = resource.url if resource else str(path)
                call = [operation.call, url, *arguments]
                ended = self._call(call, operation.ceiling, batch=batch)
            problem = judge(operation, ended, output, batch=batch)
            return ended, self._with_requests(operation, resource, problem)
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            shutil.rmtree(target, ignore_errors=True)

    @contextlib.contextmanager
    def _resource(self, operation: Operation, data: bytes, path: Path) -> Iterator[Resource | None]:
        """The input behind a URL of its own, if the operation wants it there."""
        if not operation.http:
            yield None
            return
        if self._server is None:
            self._server = Server()
        with self._server.serve(data, operation.http, path) as resource:
            yield resource

    def _with_requests(
        self, operation: Operation, resource: Resource | None, problem: Problem | None
    ) -> Problem | None:
        """The problem of an answer, or that of the requests behind it."""
        self.advice = []
        if resource is None:
            return problem
        traffic = Traffic(resource.log, resource.data, operation.expect.get("requests", {}))
        problem = with_requests(problem, traffic)
        if problem is None:
            self.advice = advice(traffic)
        return problem

    def ask(self, arguments: list[str], ceiling: Ceiling) -> Ended:
        """One call that is not an operation of a case."""
        return self._call(arguments, ceiling, batch=self._batch)

    def _encode(self, case: Case, operation: Operation) -> tuple[Ended, Problem | None]:
        """A call that writes, and those that read what it wrote."""
        folder = self._folder / f"encode-{self._count}"
        folder.mkdir()
        batch = self._batch and not operation.own_ceiling
        try:
            return writing.run(
                lambda arguments: self._call(arguments, operation.ceiling, batch=batch),
                case,
                operation,
                folder,
                batch=batch,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _call(self, arguments: list[str], ceiling: Ceiling, *, batch: bool) -> Ended:
        ceiling = replace(ceiling, seconds=ceiling.seconds * self._options.timeout_factor)
        if not batch:
            return call([*self._command, *arguments], ceiling)
        if self._process is not None and not self._process.usable:
            self._end_batch()
        if self._process is None:
            self._process = BatchProcess(self._command)
        return self._process.call(arguments, ceiling)

    def _end_batch(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        wrong = process.close()
        if wrong:
            self.notes.append(wrong)

    def close(self) -> None:
        """End the batch process and the server, and remove the folder."""
        self._end_batch()
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Run:
    """All cases against one entry."""

    def __init__(
        self,
        command: list[str],
        cases: list[Case],
        options: Options,
        progress: Progress | None = None,
    ) -> None:
        self._command = command
        self._cases = cases
        self._options = options
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sources: dict[Path, bytes | None] = {}
        self._notes: list[str] = []
        self._errors: list[BaseException] = []
        self._results: list[CaseResult] = []
        self._open: list[int] = []
        self._done = 0
        self._total = 0

    def run(self, root: Path) -> Results:
        """Ask ``info``, run, and collect. Raises ``WiringError``."""
        started, clock = datetime.now(UTC), time.monotonic()
        info = ask_info(self._command, self._options.timeout_factor)
        batch = self._options.batch and info["batch"]
        tasks = self._plan(info, batch=batch)
        self._work(tasks, batch=batch)
        for index, case in enumerate(self._results):
            self._finish(case, complete=not self._open[index])
        return Results(
            self._options.name or info["name"],
            self._command,
            {key: value for key, value in info.items() if key not in ("protocol", "verdict")},
            {"digest": suite_digest(root), "selected": len(self._cases)},
            f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            started.isoformat(timespec="seconds"),
            time.monotonic() - clock,
            batch,
            {key: value for key, value in asdict(self._options).items() if key != "name"},
            self._results,
            sorted(set(self._notes)),
        )

    def _plan(self, info: dict[str, Any], *, batch: bool) -> list[Task]:
        tasks: list[Task] = []
        declared = needs.declared(info)
        for index, case in enumerate(self._cases):
            result = CaseResult(case.id, case.level, list(case.requirements), "passed")
            self._results.append(result)
            missing = sorted(set(case.requires) - declared)
            if case.level not in info["levels"]:
                missing.append(f"level:{case.level}")
            if missing:
                result.status, result.reason = "skipped", needs.reason(missing)
            mine = [] if missing else self._tasks(index, case, batch=batch)
            result.of = sum(len(item.variants) for item in case.operations)
            self._open.append(len(mine))
            tasks += mine
        self._total = sum(len(task.variants) for task in tasks)
        return tasks

    def _tasks(self, index: int, case: Case, *, batch: bool) -> list[Task]:
        tasks = []
        for number, operation in enumerate(case.operations):
            variants = operation.variants
            if not (batch or self._options.all_variants):
                variants = evenly(variants, MOST_VARIANTS)
            tasks += [
                Task(index, number, variants[start : start + CHUNK])
                for start in range(0, len(variants), CHUNK)
            ]
        return tasks

    def _work(self, tasks: list[Task], *, batch: bool) -> None:
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        threads = [
            threading.Thread(target=self._worker, args=(waiting, batch), daemon=True)
            for _ in range(min(self._options.jobs, max(1, len(tasks))))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._stop.set()
            for thread in threads:
                thread.join(5.0)
            raise
        if self._errors:
            raise self._errors[0]

    def _worker(self, waiting: queue.SimpleQueue[Task], batch: bool) -> None:
        worker = Worker(self._command, self._options, batch=batch)
        try:
            while not self._stop.is_set():
                try:
                    task = waiting.get_nowait()
                except queue.Empty:
                    break
                self._task(worker, task)
        except (
            BaseException
        ) as error:  # a bug of the runner or a full disk: told by the main thread
            self._errors.append(error)
            self._stop.set()
        finally:
            worker.close()
            with self._lock:
                self._notes += worker.notes

    def _task(self, worker: Worker, task: Task) -> None:
        case = self._cases[task.case]
        operation = case.operations[task.operation]
        source = self._source(case.input)
        for variant in task.variants:
            if self._stop.is_set():
                return
            ended, problem = worker.run(case, operation, source, variant)
            with self._lock:
                self._record(task, operation, variant, ended, problem)
                self._advise(task, operation, worker.advice)
        with self._lock:
            self._open[task.case] -= 1

    def _source(self, path: Path) -> bytes | None:
        """The bytes of an input, None if the case wants a path without a file."""
        with self._lock:
            if path not in self._sources:
                self._sources[path] = read_input(path)
            return self._sources[path]

    def _record(
        self,
        task: Task,
        operation: Operation,
        variant: Variant,
        ended: Ended,
        problem: Problem | None,
    ) -> None:
        result = self._results[task.case]
        result.runs += 1
        result.seconds += ended.seconds
        result.memory_mib = max(result.memory_mib, ended.memory_mib)
        self._done += 1
        if problem is not None:
            result.problem_count += 1
            result.status = max(result.status, problem.kind, key=ORDER.index)
            if len(result.problems) < MOST_PROBLEMS:
                found = Found(
                    task.operation,
                    operation.call,
                    str(variant),
                    problem.kind,
                    problem.expected,
                    problem.found,
                    problem.detail,
                    list(problem.requests),
                )
                result.problems.append(found)
            if self._options.fail_fast and result.id not in self._options.xfails:
                self._stop.set()
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _advise(self, task: Task, operation: Operation, found: list[str]) -> None:
        """Keep what a call should have done, for people: it fails nothing."""
        kept = self._results[task.case].advice
        for text in found[: MOST_PROBLEMS - len(kept)]:
            kept.append(f"operation {task.operation}, {operation.call}: {text}")

    def _finish(self, result: CaseResult, *, complete: bool) -> None:
        """Expected failures, and what --fail-fast left undone."""
        reason = self._options.xfails.get(result.id)
        if result.status == "skipped":
            return
        if result.status == "passed" and not complete:
            result.status, result.reason = "skipped", "not finished: --fail-fast"
        elif reason is not None:
            result.reason = reason
            result.status = "xpassed" if result.status == "passed" else "xfailed"
