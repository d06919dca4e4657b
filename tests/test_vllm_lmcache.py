"""The whole chain: vLLM on a CPU, its connector for LMCache, LMCache's server, and our L2 adapter.

The server is started with what ``kvformat integration vllm-lmcache`` prints.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import kvformat
from kvformat.cache import Cache, GroupTensors
from kvformat.cli.integration import lmcache_adapter, lmcache_transfer

pytest.importorskip("vllm", reason="vllm is not installed")
pytest.importorskip("lmcache", reason="lmcache is not installed")

from tests.vllm_engine import VOCABULARY, Engine, make_model

pytestmark = pytest.mark.filterwarnings("ignore")  # the engines' own, raised in this process
COUNT, CHUNK, WHOLE = 700, 256, 512
READY_S, STORED_S = 90.0, 60.0
SERVER = "import sys; from lmcache.cli.main import main; sys.exit(main())"


def prompt(seed: int) -> list[int]:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, COUNT)
    return [int(item) for item in ids]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Chain:
    """A server of LMCache with an empty first level, and an engine before it."""

    def __init__(self, model: Path, store: Path, log: Path) -> None:
        port = free_port()
        adapter = lmcache_adapter(str(store), "exact", 2, 32)
        self._log = log.open("ab")
        self._server = subprocess.Popen(
            [
                sys.executable, "-c", SERVER, "server", "--host", "127.0.0.1", "--port", str(port),
                "--http-port", str(free_port()), "--disable-metrics", "--l1-size-gb", "1",
                "--hash-algorithm", adapter["adapter_params"]["hash_algorithm"],
                "--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven",
                "--l2-adapter", json.dumps(adapter),
            ],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            self._await(port, log)
            transfer = lmcache_transfer()
            transfer["kv_connector_extra_config"]["lmcache.mp.port"] = port
            self.engine = Engine(
                model, kv_transfer_config=dict(transfer), enable_prefix_caching=False
            )
        except BaseException:
            self._stop()
            raise

    def _await(self, port: int, log: Path) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self._server.poll() is None:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.1)
        raise AssertionError(log.read_text()[-4000:])

    def run(self, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
        return self.engine.run(prompts, forget=False)

    def close(self) -> None:
        self.engine.close()
        self._stop()

    def _stop(self) -> None:
        self._server.terminate()
        self._server.wait(30)
        self._log.close()


def stored(store: Path, count: int) -> list[Path]:
    """The objects, once there are so many."""
    end = time.monotonic() + STORED_S
    while len(found := sorted(store.rglob("*.kvf"))) < count and time.monotonic() < end:
        time.sleep(0.1)
    assert len(found) == count
    return found


def other_values(file: Path) -> None:
    """Another artifact under the same name, key and identity: bytes of other tokens."""
    with kvformat.open(file) as artifact:
        manifest = artifact.manifest
        (group,) = manifest.groups
        array = np.array(next(iter(artifact.read().values())))
    changed = [np.roll(layer, 7, axis=0) for layer in array]
    file.unlink()
    kvformat.write(
        file, Cache(manifest.tokens.count, (GroupTensors(group, tuple(changed)),)),
        identity=manifest.identity, tracks=list(artifact.tracks),
    )  # fmt: skip


def test_the_chain(tmp_path: Path) -> None:
    """What one server and engine stored, others load; damage is computed anew; the control is
    that other values in the same place make other tokens.
    """
    model, store, log = make_model(tmp_path / "model"), tmp_path / "store", tmp_path / "log"
    prompts = [prompt(1), prompt(2)]
    files: list[list[Path]] = []
    with closing(Chain(model, store, log)) as chain:
        expected = []
        for ids in prompts:
            expected += chain.run([ids])
            known = {path for item in files for path in item}
            now = stored(store, len(known) + WHOLE // CHUNK)
            files.append([path for path in now if path not in known])
    assert [cached for _, cached in expected] == [0, 0]
    for file in (path for item in files for path in item):
        kvformat.verify(file)
    with closing(Chain(model, store, log)) as chain:
        assert chain.run(prompts) == [(tokens, WHOLE) for tokens, _ in expected]
    with files[0][0].open("r+b") as torn:
        torn.truncate(files[0][0].stat().st_size // 2)
    for file in files[1]:
        other_values(file)
    with closing(Chain(model, store, log)) as chain:
        (damaged, wrong) = chain.run(prompts)
    assert damaged[0] == expected[0][0]
    assert damaged[1] in (0, CHUNK)  # which of the two chunks the torn file is
    assert wrong[0] != expected[1][0]
    assert wrong[1] == WHOLE
