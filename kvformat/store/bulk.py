"""Work on all objects of a store: over processes of this machine, or over a Dask cluster.

A run writes a journal, one line of JSON for each object that is done, and goes on where a journal
ends. Tasks are independent and may run twice: publication is create-only, and deleting checks
again. Only the process that gives out the tasks writes the journal.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

from kvformat.artifact import open_artifact
from kvformat.errors import KvformatError, UsageError
from kvformat.storage import storage_errors
from kvformat.store.eviction import group_entries
from kvformat.store.faults import DAMAGED, miss_of
from kvformat.store.names import KEYED, ObjectName, parse_path
from kvformat.store.options import StoreOptions
from kvformat.store.publishing import convert_object, open_backend
from kvformat.store.results import Miss
from kvformat.tokens import BLOCK_TOKENS
from kvformat.verification import verify

Action = Literal["verify", "convert"]
IN_FLIGHT: Final = 4
"""Tasks per worker that are given out ahead."""


@dataclass(frozen=True, slots=True)
class Task:
    """One object and what to do with it. Plain data, for any kind of worker.

    ``path`` is the name of its end, ``others`` are the names before that.
    """

    url: str
    options: StoreOptions
    action: Action
    path: str
    others: tuple[str, ...] = ()
    codec: str = "hevc"
    delete_damaged: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it: ``result`` is ``ok``, ``converted``, ``done before``, ``not convertible``,
    ``deleted`` or the reason of a miss, then with the code of the error.
    """

    path: str
    result: str
    detail: str = ""
    written_bytes: int = 0
    code: str = ""


def run_task(task: Task) -> Outcome:
    """Do it; never raises, so that one bad object does not end a run over a million."""
    name = parse_path(task.path)
    if name is None:
        return Outcome(task.path, Miss.UNKNOWN_VERSION.value, "not a name of this store")
    try:
        if task.action == "convert":
            return _convert(task, name)
        with open_backend(task.url, task.options).undisturbed(name):
            return _verify(task, name)
    except (KvformatError, OSError) as error:
        return _failed(task, name, error)


def _verify(task: Task, name: ObjectName) -> Outcome:
    """The whole artifact, and that its names are those of what it holds."""
    backend = open_backend(task.url, task.options)
    url = backend.locate(name)
    storage = task.options.storage_options or None
    verify(
        url,
        in_child=name.variant == "hevc",
        workers=1,
        storage_options=storage,
        profiles=task.options.profiles or None,
    )
    with open_artifact(url, storage_options=storage, transport=task.options.transport) as artifact:
        chain = artifact.manifest.tokens.chain
        first = artifact.manifest.tokens.first_position // BLOCK_TOKENS
    for path in (*task.others, task.path):
        found = parse_path(path)
        number = -1 if found is None else found.end - first - 1
        if chain is None or found is None or name.namespace.grid == KEYED:
            continue
        if not 0 <= number < len(chain.hashes) or chain.hashes[number] != found.digest:
            text = "the name is of other tokens"
            return Outcome(path, Miss.OTHER_TOKENS.value, text, code="identity.tokens")
    return Outcome(task.path, "ok")


def _convert(task: Task, name: ObjectName) -> Outcome:
    backend = open_backend(task.url, task.options)
    try:
        size = convert_object(backend, task.options, name, task.codec)
    except UsageError as error:
        return Outcome(task.path, "not convertible", error.message)
    return Outcome(task.path, "converted" if size else "done before", "", size)


def _failed(task: Task, name: ObjectName, error: BaseException) -> Outcome:
    miss = miss_of(error)
    if miss in DAMAGED and task.delete_damaged:
        backend = open_backend(task.url, task.options)
        names = [name, *(found for path in task.others[::-1] if (found := parse_path(path)))]
        if all(backend.remove_name(item) for item in names):
            return Outcome(task.path, "deleted", f"{miss.value}: {error}")
    code = error.code if isinstance(error, KvformatError) else "io.read"
    return Outcome(task.path, miss.value, str(error), code=code)


def plan(
    url: str,
    options: StoreOptions,
    action: Action,
    *,
    codec: str = "hevc",
    delete_damaged: bool = False,
) -> list[Task]:
    """A task for each object, by one listing."""
    stored, _ = group_entries(open_backend(url, options).entries())
    tasks = []
    for item in stored:
        *others, last = item.entries
        if _wanted(last.name, action, codec):
            before = tuple(entry.path for entry in others)
            tasks.append(Task(url, options, action, last.path, before, codec, delete_damaged))
    return sorted(tasks, key=lambda task: task.path)


def _wanted(name: ObjectName | None, action: Action, codec: str) -> bool:
    if name is None:
        return False
    exact = name.namespace.quality.startswith("exact")
    return action == "verify" or (not name.variant and not (exact and codec == "hevc"))


class Journal:
    """Which objects of a run are done."""

    def __init__(self, path: Path | None, action: Action) -> None:
        self.done: dict[str, Outcome] = {}
        self._file: IO[str] | None = None
        if path is None:
            return
        with storage_errors(str(path), "io.write", "opening the journal"):
            if path.exists():
                for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                    self._enter(line, action)
            self._file = path.open("a", encoding="utf-8")
            if self._file.tell():
                self._file.write("\n")  # a line that was cut by a crash ends here

    def _enter(self, line: str, action: Action) -> None:
        try:
            said = json.loads(line)
            if said.pop("action") == action:
                outcome = Outcome(**said)
                self.done[outcome.path] = outcome
        except (ValueError, TypeError, KeyError, AttributeError):
            return  # half a line: that object is done again

    def add(self, action: Action, outcome: Outcome) -> None:
        """Tell the disk before the next one is counted."""
        if self._file is not None:
            with storage_errors(self._file.name, "io.write", "writing the journal"):
                self._file.write(json.dumps({"action": action, **asdict(outcome)}) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def run(
    tasks: Iterable[Task],
    *,
    workers: int = 1,
    cluster: Any = None,
    journal: Path | None = None,
) -> Iterator[Outcome]:
    """Outcomes as they come, those of the journal first.

    ``workers`` are processes of this machine; ``cluster`` is a ``distributed.Client`` or the
    address of a scheduler, whose workers must reach the store under the same URL.
    """
    tasks = list(tasks)
    if not tasks:
        return
    with ExitStack() as stack:
        book = Journal(journal, tasks[0].action)
        stack.callback(book.close)
        yield from (book.done[task.path] for task in tasks if task.path in book.done)
        left = [task for task in tasks if task.path not in book.done]
        for outcome in _over(left, workers, cluster, stack):
            book.add(tasks[0].action, outcome)
            yield outcome


def _over(tasks: list[Task], workers: int, cluster: Any, stack: ExitStack) -> Iterator[Outcome]:
    if cluster is not None:
        from kvformat.store.cluster import over_cluster

        yield from over_cluster(tasks, cluster, stack)
    elif workers == 1:
        yield from map(run_task, tasks)
    else:
        context = multiprocessing.get_context("spawn")
        pool = stack.enter_context(ProcessPoolExecutor(workers, context))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        yield from bounded(lambda task: pool.submit(run_task, task), tasks, workers * IN_FLIGHT)


def bounded(
    submit: Callable[[Task], Future[Outcome]], tasks: list[Task], most: int
) -> Iterator[Outcome]:
    """Outcomes in the order in which they come, with a bounded number given out."""
    pending: set[Future[Outcome]] = set()
    rest = iter(tasks)
    while True:
        for task in rest:
            pending.add(submit(task))
            if len(pending) >= most:
                break
        if not pending:
            return
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()
