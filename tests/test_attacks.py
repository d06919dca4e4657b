"""What an attack on the package found, each with its whole kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import kvformat
from kvformat import UsageError
from kvformat.errors import KvformatError
from kvformat.verification import verify
from tests.requirements import covers

RNG = np.random.default_rng(3)
UNBOUND = kvformat.Identity(kvformat.Model("m"), 8, "float16", kind="unbound")


def noise(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


@covers("SEC-2", "VER-4")
@pytest.mark.parametrize("module", ["json", "struct", "av", "numpy", "kvformat"])
def test_verification_imports_nothing_from_the_working_directory(
    tmp_path: Path, module: str
) -> None:
    path, trap = tmp_path / "a.kvf", tmp_path / f"{module}.py"
    kvformat.write(path, noise(2, 1, 20, 1, 8), identity=UNBOUND, tracks=["hevc"])
    trap.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    program = (
        "import sys; sys.path = [p for p in sys.path if p];"
        "from kvformat.verification import verify; print(verify('a.kvf').checked['segments'])"
    )
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("2\n", 0)
    assert not (tmp_path / "ran").exists()


@covers("HEV-7", "LAY-2")
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"),
    [(300, 40, 128), (1100, 12, 128), (300, 33, 128), (80, 5, 4096)],
)
def test_head_runs_of_unequal_size_have_one_layout(tokens: int, heads: int, head_dim: int) -> None:
    kv = noise(2, 1, tokens, heads, head_dim)
    with fsspec.open("memory://heads.kvf", "wb"):
        pass
    kvformat.write(
        "memory://heads.kvf",
        {"layers.0.key": kv[0, 0]},
        identity=UNBOUND,
        tracks=["hevc", "zstd"],
        overwrite=True,
    )
    with kvformat.open("memory://heads.kvf") as artifact:
        hevc, zstd = (artifact.read(track=name)["key"] for name in ("hevc", "zstd"))
    np.testing.assert_array_equal(hevc.view(np.uint16), zstd.view(np.uint16))


@covers("LIM-1")
def test_a_writer_publishes_nothing_that_its_reader_refuses(tmp_path: Path) -> None:
    tensors = {f"layers.{n}.key": np.zeros((23_000, 1, 1024), np.float32) for n in range(3)}
    with pytest.raises(UsageError) as caught:
        kvformat.write(
            tmp_path / "big.kvf",
            tensors,
            identity=UNBOUND,
            tracks=["exact/stored"],
            segment_tokens=65_536,
        )
    assert caught.value.code == "usage.argument"
    assert not list(tmp_path.iterdir())


@covers("PUB-1", "ERR-4")
def test_an_interrupted_upload_leaves_the_remote_name_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kvformat.write("memory://up.kvf", noise(2, 1, 9, 1, 8), identity=UNBOUND, tracks="zstd")
    assert not fsspec.filesystem("memory").exists("/up.kvf")
    kvformat.write("memory://up.kvf", noise(2, 1, 9, 1, 8), identity=UNBOUND, tracks="zstd")
    assert verify("memory://up.kvf").checked["segments"] == 2


@covers("ARI-5")
def test_small_layers_and_small_heads_keep_their_values() -> None:
    tiny = (noise(40, 2, 8, dtype=np.float32) * np.float32(1e-14)).astype(ml_dtypes.bfloat16)
    loud = noise(400, 4, 64, dtype=np.float32)
    loud[:, 0] *= 1e4
    for tensors, bound in (({"layers.0.value": tiny}, 0.0), ({"layers.0.value": loud}, 0.6)):
        kvformat.write("memory://s.kvf", tensors, identity=UNBOUND, tracks="zstd", overwrite=True)
        with kvformat.open("memory://s.kvf") as artifact:
            restored = artifact.read()["value"][0].astype(np.float64)
        source = tensors["layers.0.value"].astype(np.float64)
        error = np.sqrt(((restored - source) ** 2).mean(axis=(0, 2)))
        assert (error <= bound * np.sqrt((source**2).mean(axis=(0, 2)))).all()


DEEP: list[Any] = [1]
for _ in range(16):
    DEEP = [DEEP]

BAD_WRITES: dict[str, dict[str, Any]] = {
    "identity is text": {"identity": "acme/m"},
    "surrogate in the model": {"identity": kvformat.Identity(kvformat.Model("\ud800"), 8, "half")},
    "bytes as model": {"identity": kvformat.Identity(kvformat.Model(b"m"), 8, "half")},  # type: ignore[arg-type]
    "extension with a float": {"extensions": {"x": kvformat.Extension(0.5)}},
    "extension with a set": {"extensions": {"x": kvformat.Extension({1})}},
    "extension that is deep": {"extensions": {"x": kvformat.Extension(DEEP)}},
    "salt is text": {"salt": "secret"},
    "salt without a chain": {"salt": b"secret"},
    "no tracks": {"tracks": None},
    "track is a number": {"tracks": [5]},
    "quality is a list": {"quality": []},
    "negative position": {"first_position": -1},
    "workers is text": {"workers": "2"},
    "segment tokens is text": {"segment_tokens": "9"},
    "valid length is text": {"valid_lengths": ["a"]},
}


@covers("ERR-3")
@pytest.mark.parametrize("name", BAD_WRITES)
def test_odd_arguments_of_write_are_usage_errors(name: str, tmp_path: Path) -> None:
    options = {"identity": UNBOUND, **BAD_WRITES[name]}
    with pytest.raises(UsageError):
        kvformat.write(tmp_path / "x.kvf", noise(2, 1, 9, 1, 8), **options)
    assert not list(tmp_path.iterdir())


@covers("ERR-3")
@pytest.mark.parametrize(
    "cache",
    [
        kvformat.Cache(40, ()),
        {5: noise(3, 1, 8)},
        {"layers.99999999999999999999.key": noise(3, 1, 8)},
        {"layers.0.key": np.ma.masked_array(noise(3, 1, 8))},
        {"layers.0.key": noise(3, 1, 8), "layers.0.value": noise(4, 1, 8)},
        [[1.0]],
        None,
    ],
    ids=str,
)
def test_odd_caches_are_usage_errors(cache: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        kvformat.write(tmp_path / "x.kvf", cache, identity=UNBOUND)
    assert not list(tmp_path.iterdir())


def test_numpy_integers_are_integers(tmp_path: Path) -> None:
    one = np.int64(1)
    identity = kvformat.Identity(kvformat.Model("m"), np.int64(8), "half", kind="unbound")  # type: ignore[arg-type]
    options: dict[str, Any] = {"segment_tokens": np.int64(4), "alignment": one}
    kvformat.write(tmp_path / "x.kvf", noise(2, 1, 9, 1, 8), identity=identity, **options)
    with kvformat.open(tmp_path / "x.kvf") as artifact:
        assert artifact.manifest.identity.layers_total == 8
        assert artifact.read(tokens=(one, np.int32(3))).kv.shape == (2, 1, 2, 1, 8)


@pytest.fixture(scope="module")
def small() -> bytes:
    kvformat.write("memory://q.kvf", noise(2, 3, 9, 2, 8), identity=UNBOUND, tracks="zstd")
    return bytes(fsspec.filesystem("memory").cat_file("/q.kvf"))


@covers("PAR-4")
@pytest.mark.parametrize(
    "selection",
    [
        {"tokens": (0, 3.9)},
        {"tokens": "05"},
        {"tokens": {5, 0}},
        {"tokens": (0, True)},
        {"tokens": (0, float("inf"))},
        {"heads": b"\x00\x01"},
        {"layers": "13"},
        {"layers": [1.7]},
        {"layers": [True]},
        {"layers": 5},
        {"layers": [None]},
        {"roles": 5},
        {"roles": ["key", 5]},
        {"roles": [["key"]]},
        {"workers": 2.5},
        {"track": 5},
    ],
    ids=str,
)
def test_odd_selections_are_refused_and_never_rounded(small: bytes, selection: Any) -> None:
    with kvformat.open(small) as artifact, pytest.raises(UsageError):
        artifact.read(**selection)


def test_layers_as_a_list_are_members_and_as_a_pair_an_interval(small: bytes) -> None:
    with kvformat.open(small) as artifact:
        assert artifact.read(layers=[2, 0]).groups["key"].layers == (0, 2)
        assert artifact.read(layers=(0, 2)).groups["key"].layers == (0, 1)


def test_a_closed_artifact_says_so(small: bytes) -> None:
    artifact = kvformat.open(small)
    artifact.close()
    with pytest.raises(UsageError, match="closed"):
        artifact.read()


def test_errors_of_the_callback_are_the_callers(tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        raise RuntimeError(f"{done} of {total}")

    with pytest.raises(RuntimeError, match="1 of 2"):
        kvformat.write(
            tmp_path / "x.kvf",
            noise(2, 1, 9, 1, 8),
            identity=UNBOUND,
            tracks="zstd",
            progress=progress,
        )
    assert not list(tmp_path.iterdir())


@covers("PUB-2", "PUB-3")
def test_odd_targets(tmp_path: Path) -> None:
    kv = noise(2, 1, 9, 1, 8)
    kvformat.write(f"file://{tmp_path}/q?x.kvf", kv, identity=UNBOUND, tracks="zstd")
    assert [path.name for path in tmp_path.iterdir()] == ["q?x.kvf"]
    link, target = tmp_path / "link.kvf", tmp_path / "q?x.kvf"
    link.symlink_to(target)
    kvformat.write(link, kv * 2, identity=UNBOUND, tracks="exact", overwrite=True)
    assert link.is_symlink()
    with kvformat.open(target) as artifact:
        assert artifact.tracks == ("exact/zstd",)
    for bad in ("x" * 300, os.devnull, tmp_path, "a\0b", "", None, 5):
        with pytest.raises(KvformatError):
            kvformat.write(bad, kv, identity=UNBOUND, overwrite=True)  # type: ignore[arg-type]


@covers("LIN-1")
def test_lineage_follows_what_was_read(small: bytes, tmp_path: Path) -> None:
    with kvformat.open(small) as artifact:
        first = artifact.read()
    kvformat.write(tmp_path / "2.kvf", first, identity=UNBOUND, tracks=["zstd", "exact"])
    with kvformat.open(tmp_path / "2.kvf") as artifact:
        assert artifact.manifest.lineage == kvformat.Lineage("lossy", 1, "near-lossless")
        exact, lossy = (artifact.read(track=name) for name in ("exact", "near-lossless"))
    assert (exact.lineage.generations, lossy.lineage.generations) == (1, 2)
    np.testing.assert_array_equal(exact.kv.view(np.uint16), first.kv.view(np.uint16))
