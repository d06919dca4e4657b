"""Bulk work over many machines with Dask distributed (extra ``cluster``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from itertools import islice
from typing import Any, Final

from kvformat.errors import StorageError, UsageError
from kvformat.store.bulk import IN_FLIGHT, Outcome, Task, run_task

CONNECT_S: Final = 10


def over_cluster(tasks: list[Task], cluster: Any, stack: ExitStack) -> Iterator[Outcome]:
    """Outcomes as they come. A worker that dies has its tasks done again by another."""
    client = _client(cluster, stack)
    most = max(1, len(client.scheduler_info()["workers"])) * IN_FLIGHT
    rest = iter(tasks)
    first = [client.submit(run_task, task, pure=False) for task in islice(rest, most)]
    running = _distributed().as_completed(first)
    for future in running:
        outcome: Outcome = future.result()
        task = next(rest, None)
        if task is not None:
            running.add(client.submit(run_task, task, pure=False))
        yield outcome


def _distributed() -> Any:
    try:
        return import_module("distributed")
    except ImportError as error:
        raise UsageError(
            "usage.argument",
            "a cluster needs the package distributed, which is not installed",
            next_step="pip install 'kvformat[cluster]'",
        ) from error


def _client(cluster: Any, stack: ExitStack) -> Any:
    if not isinstance(cluster, str):
        return cluster
    library = _distributed()
    try:
        client = library.Client(cluster, timeout=CONNECT_S, set_as_default=False)
        return stack.enter_context(client)
    except (OSError, TimeoutError, ValueError) as error:
        raise StorageError(
            "io.read",
            "the scheduler of the cluster does not answer",
            where=cluster,
            next_step="Start one with: dask scheduler",
        ) from error
