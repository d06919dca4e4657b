"""The proxy and the web server that other tests rely on do what they say."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import web_server as web
from tests.shaping import Link, Proxy
from tests.web_server import Request, WebServer, nginx, web_server  # noqa: F401 - a fixture

DATA = bytes(range(256)) * 2000
Address = tuple[str, int]


@pytest.fixture
def address() -> Iterator[Address]:
    """A server that answers each connection's first byte with DATA, then echoes."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        thread = threading.Thread(target=accept, args=(listening,))
        thread.start()
        yield listening.getsockname()
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def accept(listening: socket.socket) -> None:
    threads = []
    with contextlib.suppress(OSError):
        while True:
            client, _ = listening.accept()
            threads.append(threading.Thread(target=serve, args=(client,)))
            threads[-1].start()
    for thread in threads:
        thread.join()


def serve(client: socket.socket) -> None:
    with client, contextlib.suppress(OSError):
        client.recv(1)
        client.sendall(DATA)
        while echo := client.recv(65536):
            client.sendall(echo)


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), timeout=30)


def receive(client: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes and (part := client.recv(size_bytes - len(data))):
        data += part
    return data


def fetch(proxy: Proxy) -> bytes:
    with connect(proxy) as client:
        client.sendall(b"x")
        client.shutdown(socket.SHUT_WR)
        return receive(client, len(DATA) + 1)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_bytes_pass_in_both_directions_and_are_counted(address: Address) -> None:
    echo = DATA[::-1] * 9
    with Proxy(address) as proxy:
        with connect(proxy) as client:
            client.sendall(b"x")
            assert receive(client, len(DATA)) == DATA
            sender = threading.Thread(target=client.sendall, args=(echo,))
            sender.start()
            assert receive(client, len(echo)) == echo
            sender.join()
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
        until(lambda: proxy.log().connections[0].end != "open")
        (entry,) = proxy.log().connections
    assert (entry.up_bytes, entry.down_bytes) == (1 + len(echo), len(DATA) + len(echo))
    assert (entry.number, entry.end, entry.stalled) == (0, "closed", False)


def test_delay_is_paid_for_the_connection_and_for_each_exchange(address: Address) -> None:
    delay_s = 0.05
    with Proxy(address, Link(delay_s=delay_s)) as proxy:
        begin = time.monotonic()
        with connect(proxy) as client:
            client.sendall(b"x")
            assert receive(client, len(DATA)) == DATA
            assert time.monotonic() - begin > 4 * delay_s
            begin = time.monotonic()
            client.sendall(b"y")
            assert client.recv(1) == b"y"
            assert time.monotonic() - begin > 2 * delay_s


@pytest.mark.parametrize("connections", [1, 4])
def test_connections_share_the_bandwidth(address: Address, connections: int) -> None:
    bits_per_s = 40e6
    found: list[bytes] = []
    with Proxy(address, Link(down_bits_per_s=bits_per_s)) as proxy:
        threads = [
            threading.Thread(target=lambda: found.append(fetch(proxy))) for _ in range(connections)
        ]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken_s = time.monotonic() - begin
    assert found == [DATA] * connections
    assert taken_s > connections * 8 * len(DATA) / bits_per_s - 0.01


def test_a_window_limits_a_connection_to_one_per_round_trip(address: Address) -> None:
    with Proxy(address, Link(delay_s=0.01, window_bytes=100_000)) as proxy:
        begin = time.monotonic()
        assert fetch(proxy) == DATA
        assert time.monotonic() - begin > (len(DATA) // 100_000) * 0.02


def test_jitter_keeps_the_order(address: Address) -> None:
    with Proxy(address, Link(jitter_s=0.005, down_bits_per_s=100e6)) as proxy:
        assert fetch(proxy) == DATA


def test_a_reset_comes_behind_exactly_so_many_bytes(address: Address) -> None:
    with Proxy(address, Link(reset_after_bytes=100_001, faulty_connections=1)) as proxy:
        with connect(proxy) as client:
            client.sendall(b"x")
            assert receive(client, 100_001) == DATA[:100_001]
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        assert fetch(proxy) == DATA
        until(lambda: proxy.log().connections[1].end != "open")
        log = proxy.log()
    assert [(item.down_bytes, item.end) for item in log.connections] == [
        (100_001, "cut"),
        (len(DATA), "closed"),
    ]
    assert (log.down_bytes, log.up_bytes) == (100_001 + len(DATA), 2)


def test_a_stall_sends_nothing_until_it_is_configured_away(address: Address) -> None:
    with Proxy(address, Link(stall_after_bytes=5)) as proxy, connect(proxy) as client:
        client.sendall(b"x")
        assert receive(client, 5) == DATA[:5]
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert proxy.log().connections[0].stalled
        client.settimeout(30)
        proxy.configure(stall_after_bytes=None)
        assert receive(client, len(DATA) - 5) == DATA[5:]


def test_a_stall_with_an_end(address: Address) -> None:
    with Proxy(address, Link(stall_after_bytes=5, stall_s=0.1)) as proxy:
        begin = time.monotonic()
        assert fetch(proxy) == DATA
        assert time.monotonic() - begin > 0.1


def test_refusal_and_back_on_the_same_port(address: Address) -> None:
    with Proxy(address, Link(refuse=True)) as proxy:
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                connect(proxy)
            proxy.configure(refuse=False)
            assert fetch(proxy) == DATA
            proxy.configure(refuse=True)


def test_cut_resets_what_is_open(address: Address) -> None:
    with Proxy(address) as proxy, connect(proxy) as client:
        client.sendall(b"x")
        assert receive(client, len(DATA)) == DATA
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert proxy.log().connections[0].end == "cut"


def test_a_client_that_leaves_and_a_server_that_is_not_there(address: Address) -> None:
    with Proxy(address, Link(down_bits_per_s=1e6)) as proxy:
        with connect(proxy) as client:
            client.sendall(b"x")
            assert receive(client, 10) == DATA[:10]
        until(lambda: proxy.log().connections[0].end == "reset")
        assert proxy.log().down_bytes < len(DATA)
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()
    with Proxy(nobody) as proxy:
        with pytest.raises(ConnectionResetError), connect(proxy) as client:
            client.recv(1)
        assert proxy.log().connections[0].end == "no server"


def test_nginx_serves_ranges_and_its_log_is_complete(web_server: WebServer) -> None:  # noqa: F811
    (web_server.directory / "a b.kvf").write_bytes(DATA)
    connection = http.client.HTTPConnection(web_server.host, web_server.port, timeout=30)
    with contextlib.closing(connection):
        for method, path, headers in (
            ("GET", "/a%20b.kvf", {"Range": "bytes=5-9"}),
            ("HEAD", "/a%20b.kvf", {}),
            ("GET", "/none", {}),
        ):
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            body = response.read()
            if response.status == 206:
                assert (body, response.getheader("ETag") is None) == (DATA[5:10], False)
    found = web_server.requests()
    number = found[0].connection
    assert found[:2] == [
        Request("GET", "/a%20b.kvf", "bytes=5-9", 206, 5, number, True),
        Request("HEAD", "/a%20b.kvf", "", 200, 0, number, True),
    ]
    assert [(item.path, item.status) for item in found[2:]] == [("/none", 404)]
    web_server.forget()
    assert web_server.requests() == []


def test_nginx_with_other_directives_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.kvf").write_bytes(DATA)
    with nginx(tmp_path, "max_ranges 0;") as server:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/a.kvf", headers={"Range": "bytes=5-9"})
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, DATA)
    with pytest.raises(RuntimeError, match="unknown directive"), nginx(tmp_path, "nonsense;"):
        pass
    monkeypatch.setattr(web, "PROGRAM", None)
    with pytest.raises(pytest.skip.Exception, match="nginx is not installed"), nginx(tmp_path):
        pass
