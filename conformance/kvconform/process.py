"""Processes under a ceiling: one call, or one process that answers many (section 4).

Memory is the resident size of the process and its children, sampled while it works. That works
everywhere and does not punish runtimes that reserve address space which they never use. Sizes of
children are added, so memory that they share counts more than once.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import IO, Any, Final

import psutil

from kvconform.cases import Ceiling

SAMPLE_SECONDS: Final = 0.02
CHILDREN_SECONDS: Final = 0.25
LARGEST_ANSWER: Final = 64 * 2**20
STDERR_BYTES: Final = 2_000
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended. ``stopped`` says why the runner ended it, else ``exit_code`` is set."""

    exit_code: int
    output: bytes
    errors: str
    seconds: float
    memory_mib: float
    stopped: str = ""


class _Tree:
    """The resident memory of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self._members: list[Any] = []
        self._listed = time.monotonic()
        self.peak_mib = 0.0
        with contextlib.suppress(psutil.Error):
            self._members = [psutil.Process(pid)]

    def sample(self) -> float:
        """Measure now; returns the highest size so far in MiB."""
        if self._members and time.monotonic() - self._listed > CHILDREN_SECONDS:
            with contextlib.suppress(psutil.Error):
                self._members[1:] = self._members[0].children(recursive=True)
            self._listed = time.monotonic()
        total = 0
        for member in self._members:
            with contextlib.suppress(psutil.Error):
                total += member.memory_info().rss
        self.peak_mib = max(self.peak_mib, total / MIB)
        return self.peak_mib

    def restart(self) -> None:
        """Forget the peak."""
        self.peak_mib = 0.0


def _start(command: list[str], source: Any, target: Any, errors: IO[bytes]) -> Any:
    return subprocess.Popen(
        command, stdin=source, stdout=target, stderr=errors, start_new_session=True
    )


def _kill(process: Any) -> None:
    """End the process and whatever it started."""
    children = []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
    if hasattr(os, "killpg"):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()


def _tail(file: IO[bytes], start: int = 0) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(start, size - STDERR_BYTES))
    text = file.read().decode("utf-8", "replace").strip()
    file.seek(0, os.SEEK_END)
    return text


def call(command: list[str], ceiling: Ceiling) -> Ended:
    """Run a process to its end or to its ceiling."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        started = time.monotonic()
        try:
            process = _start(command, subprocess.DEVNULL, output, errors)
        except OSError as error:
            return Ended(127, b"", "", 0.0, 0.0, f"cannot be started: {error.strerror or error}")
        tree = _Tree(process.pid)
        stopped = ""
        while not stopped:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SAMPLE_SECONDS)
                break
            tree.sample()
            stopped = _excess(started, tree, ceiling)
            if os.fstat(output.fileno()).st_size > LARGEST_ANSWER:
                stopped = f"an answer of more than {LARGEST_ANSWER // MIB} MiB"
        seconds = time.monotonic() - started
        _kill(process)
        output.seek(0)
        answer = output.read(LARGEST_ANSWER)
        return Ended(process.returncode, answer, _tail(errors), seconds, tree.peak_mib, stopped)


def _excess(started: float, tree: _Tree, ceiling: Ceiling) -> str:
    if tree.peak_mib > ceiling.memory_mib:
        return f"took {tree.peak_mib:,.0f} MiB, allowed are {ceiling.memory_mib:,}"
    if time.monotonic() - started > ceiling.seconds:
        return f"took more than {ceiling.seconds:g} seconds"
    return ""


class BatchProcess:
    """``ENTRY batch``: one line of arguments in, one line with an answer out."""

    def __init__(self, command: list[str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close
        self._reported = False
        pipe = subprocess.PIPE
        self._process = _start([*command, "batch"], pipe, pipe, self._errors)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._tree = _Tree(self._process.pid)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Hand over lines; an empty one means that the output has ended."""
        with contextlib.suppress(OSError, ValueError):
            while line := self._process.stdout.readline(LARGEST_ANSWER):
                self._lines.put(line)
        self._lines.put(b"")

    @property
    def usable(self) -> bool:
        """Whether it waits for a call: alive, and nothing said that nobody asked for."""
        return self._process.poll() is None and self._lines.empty()

    def call(self, arguments: list[str], ceiling: Ceiling) -> Ended:
        """One call. After a stop or a death the process is gone: ``usable`` is false."""
        started = time.monotonic()
        mark = self._errors.seek(0, os.SEEK_END)
        self._tree.restart()
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
            self._process.stdin.flush()
        line, stopped = self._answer(started, ceiling)
        seconds = time.monotonic() - started
        if stopped or not line:
            code = self._end()
            stopped = stopped or _death(code)
            memory = self._tree.peak_mib
            return Ended(code, line, _tail(self._errors, mark), seconds, memory, stopped)
        self._tree.sample()
        stopped = "more than one line for one call" if self._said_more() else ""
        stopped = stopped or _excess(time.monotonic(), self._tree, ceiling)
        if stopped:
            self.kill()
        memory = self._tree.peak_mib
        return Ended(0, line, _tail(self._errors, mark), seconds, memory, stopped)

    def _said_more(self) -> bool:
        """Whether a further line is there; the mark of the end is none."""
        if self._lines.empty():
            return False
        line = self._lines.get()
        self._lines.put(line)
        return line != b""

    def _answer(self, started: float, ceiling: Ceiling) -> tuple[bytes, str]:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._lines.get(timeout=SAMPLE_SECONDS), ""
            self._tree.sample()
            stopped = _excess(started, self._tree, ceiling)
            if stopped:
                return b"", stopped

    def _end(self) -> int:
        """Wait a moment for a natural death, then kill; returns the exit code."""
        self._reported = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2 if self._lines.empty() else 0)
        _kill(self._process)
        return int(self._process.returncode)

    def kill(self) -> None:
        """End it now."""
        self._reported = True
        _kill(self._process)

    def close(self, seconds: float = 10.0) -> str:
        """Close its input; returns what is wrong with how it ends, once all calls are answered."""
        if self._reported:
            self._release()
            return ""
        # The end of its output may show before the end of the process does.
        early = self._process.poll() is not None or not self._lines.empty()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(seconds)
        self._release()
        if self._lines.get() != b"":
            return "batch printed a line that no call asked for"
        if code is None:
            return "batch did not end when its input did"
        if early:
            return f"batch ended with exit code {code} before its input did"
        return f"batch ended with exit code {code}, expected 0" if code else ""

    def _release(self) -> None:
        _kill(self._process)
        self._reader.join(1.0)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._errors.close()


def _death(code: int) -> str:
    ending = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the batch process died with {ending}"
