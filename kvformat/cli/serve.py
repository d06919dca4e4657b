"""``kvformat serve``: a read-only HTTP server for the artifacts below a directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvformat.cli.show import whole_line
from kvformat.cli.text import clean, require_output, warn, write_error
from kvformat.errors import StorageError, UsageError
from kvformat.storage import as_text, storage_errors

if TYPE_CHECKING:
    from kvformat.shelf import Shelf

DEFAULT_PORT: Final = 8470
TOKEN: Final = re.compile(rb"[A-Za-z0-9._~+/=-]{16,512}")


@click.command(name="serve")
@click.argument("directory", metavar="DIR")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="HOST",
    help="Address to listen on. Any other than loopback lets other machines in.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=DEFAULT_PORT,
    show_default=True,
    metavar="N",
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--token-file",
    metavar="FILE",
    help="Answer only requests with 'Authorization: Bearer TOKEN'. The file holds the token, 16 to "
    "512 letters, digits and ._~+/=- characters.",
)
@click.option("--log", is_flag=True, help="One line of JSON on standard error for each request.")
def command(directory: str, host: str, port: int, token_file: str | None, *, log: bool) -> None:
    """Serve the .kvf files below DIR over HTTP, read-only, to move them between machines.

    Prints its URL. /index.json lists what is served. Only complete artifacts are; nothing outside
    DIR is, and no name that starts with a dot. There is no TLS: for other machines use a tunnel, or
    a network that you trust. Ctrl-C ends it with exit code 130, SIGTERM with 0.
    """
    require_output()
    shelf = _open_shelf(directory)
    token = None if token_file is None else _read_token(token_file)
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(item) for item in _listen(host, port)]
        _announce(shelf, sockets, with_token=token is not None)
        interrupted = _run(shelf, sockets, token, log=log)
    if interrupted:
        raise KeyboardInterrupt


def _open_shelf(directory: str) -> Shelf:
    try:
        import kvformat.server  # noqa: F401 - whether it can be imported
    except ImportError as error:
        if (error.name or "").split(".")[0] == "kvformat":
            raise
        raise UsageError(
            "usage.argument",
            "serving needs the package aiohttp, which is not installed",
            next_step="pip install 'kvformat[http]', or pip install aiohttp",
        ) from error
    from kvformat.shelf import Shelf

    path = Path(as_text(directory))
    with storage_errors(directory, "io.read", "opening the directory"):
        if not path.exists():
            raise StorageError(
                "io.not-found",
                "there is no such directory",
                where=directory,
                next_step="Check the path",
            )
        shelf = Shelf(path, warn)
        if not shelf.root.is_dir():
            raise UsageError(
                "usage.argument",
                "this is not a directory",
                where=directory,
                next_step="Give the directory that holds the file",
            )
        os.listdir(shelf.root)  # noqa: PTH208 - whether it may be read
    return shelf


def _read_token(file: str) -> bytes:
    with storage_errors(file, "io.read", "reading the token"), Path(file).open("rb") as handle:
        token = handle.read(1024).strip()
    if not TOKEN.fullmatch(token):
        raise UsageError(
            "usage.argument",
            "the file holds no token",
            where=file,
            expected="16 to 512 letters, digits and ._~+/=- characters",
            next_step="openssl rand -hex 32 makes one",
        )
    return token


def _listen(host: str, port: int) -> list[socket.socket]:
    from kvformat.server import listen

    try:
        return listen(host, port)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            "usage.argument",
            f"cannot listen there: {reason}",
            where=f"{host}, port {port}",
            next_step="Choose another --port, or 0 for a free one, or another --host",
        ) from error


def _announce(shelf: Shelf, sockets: list[socket.socket], *, with_token: bool) -> None:
    from kvformat.server import addresses, only_loopback

    if not only_loopback(sockets):
        if with_token:
            warn("other machines reach this, and the token and all bytes travel unencrypted")
        else:
            warn(
                "other machines reach this, there is no authentication, and a KV cache gives away "
                "its prompt. Use --token-file, or --host 127.0.0.1"
            )
    write_error(f"serving {clean(shelf.root)} read-only; Ctrl-C ends it")
    for address, port in addresses(sockets):
        whole_line(f"http://{f'[{address}]' if ':' in address else address}:{port}/")


def _log(entry: dict[str, Any]) -> None:
    sys.stderr.write(json.dumps(entry, ensure_ascii=True) + "\n")
    sys.stderr.flush()


def _run(shelf: Shelf, sockets: list[socket.socket], token: bytes | None, *, log: bool) -> bool:
    """Serve until a signal; whether it was an interruption."""
    from kvformat.server import serve

    interrupted = False

    async def main() -> None:
        stop = asyncio.Event()
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_tell)

        def end(number: int) -> None:
            nonlocal interrupted
            if stop.is_set() and task is not None:
                task.cancel()  # the second signal does not wait for requests under way
            interrupted = interrupted or number == signal.SIGINT
            stop.set()

        with contextlib.suppress(NotImplementedError):  # on Windows, where Ctrl-C still raises
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, end, number)
        await serve(shelf, sockets, stop, token=token, log=_log if log else None)

    with _handlers_kept(), contextlib.suppress(asyncio.CancelledError):
        asyncio.run(main())
    return interrupted


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What went wrong outside of any request, for example that no connection can be accepted."""
    del loop
    warn(f"{context.get('message')}: {context.get('exception') or 'no details'}")


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """The loop takes the process's handlers away when it closes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
