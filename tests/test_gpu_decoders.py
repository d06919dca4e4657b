"""Both hardware wrappers, the real PyAV and PyNvVideoCodec, over the pretend driver."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat
import kvformat.gpu as on_device
from kvformat.codecs.bitstream import encode_pictures
from kvformat.errors import InvalidError, KvformatError, UnsupportedError
from kvformat.gpu import driver, probing
from kvformat.gpu.engine import Engine
from kvformat.gpu.levels import LEVEL_6_2, with_level
from kvformat.gpu.nvdec import NvdecDecoder
from kvformat.gpu.pynv import PynvDecoder
from kvformat.gpu.software import SoftwareDecoder
from tests.fake_driver import FakeDriver, compiler, shared_driver
from tests.gpu_samples import bits, torch
from tests.strategies import canonical_kv, write_bytes

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")
CPU = torch.device("cpu")
FRAMES, HEIGHT, WIDTH = 6, 144, 160
WITH_PYNV = pytest.mark.skipif(
    find_spec("PyNvVideoCodec") is None, reason="PyNvVideoCodec is not installed"
)
PYNV = pytest.param(PynvDecoder, marks=WITH_PYNV)
BOTH = pytest.mark.parametrize("kind", [NvdecDecoder, PYNV])


@pytest.fixture(scope="session")
def loaded() -> FakeDriver:
    return shared_driver()


@pytest.fixture
def fake(loaded: FakeDriver) -> Iterator[FakeDriver]:
    loaded.reset()
    probing.probe.cache_clear()
    yield loaded
    loaded.reset()
    probing.probe.cache_clear()


@pytest.fixture(scope="session")
def clip(loaded: FakeDriver) -> tuple[bytes, np.ndarray]:
    planes = np.random.default_rng(0).integers(0, 256, (FRAMES, 3, HEIGHT, WIDTH), np.uint8)
    payload = encode_pictures(planes)
    loaded.learn(payload, FRAMES, WIDTH, HEIGHT)
    return payload, planes


def decoded(session: Any, payload: bytes, frames: int = FRAMES) -> np.ndarray:
    """Copies of all pictures, made while each is valid."""
    found = [
        torch.stack([plane.clone() for plane in picture.planes])
        for picture in session.decode(payload, frames, "here")
    ]
    return torch.stack(found).numpy() if found else np.zeros(0)


@BOTH
def test_pictures_stay_on_the_device_and_the_decoder_is_kept(
    fake: FakeDriver, clip: tuple[bytes, np.ndarray], kind: Any
) -> None:
    payload, planes = clip
    before = {
        name: fake.counter(*name)
        for name in (("nvcuvid", "decoders"), ("cuda", "to_host"), ("cuda", "bad_free"))
    }
    decoder = kind(CPU)
    assert decoder.sessions == 7
    session = decoder.open(WIDTH, HEIGHT)
    for _ in range(3):
        np.testing.assert_array_equal(decoded(session, payload), planes)
    after = {name: fake.counter(*name) - count for name, count in before.items()}
    assert after == {("nvcuvid", "decoders"): 1, ("cuda", "to_host"): 0, ("cuda", "bad_free"): 0}
    assert fake.counter("nvcuvid", "mapped") == 0
    session.close()


@BOTH
def test_late_frames_come_all_the_same(
    fake: FakeDriver, clip: tuple[bytes, np.ndarray], kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del fake
    monkeypatch.setenv("KVF_FAKE_DELAY", "2")
    payload, planes = clip
    session = kind(CPU).open(WIDTH, HEIGHT)
    np.testing.assert_array_equal(decoded(session, payload), planes)


@BOTH
@pytest.mark.parametrize("fault", ["create", "decode:1", "decode:4", "map:3", "reset:1"])
def test_a_device_that_fails_is_an_error_and_the_next_session_works(
    fake: FakeDriver,
    clip: tuple[bytes, np.ndarray],
    kind: Any,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    payload, planes = clip
    decoder = kind(CPU)
    session = decoder.open(WIDTH, HEIGHT)
    monkeypatch.setenv("KVF_FAKE_FAIL", fault)
    with pytest.raises(KvformatError) as caught:
        decoded(session, payload)
    assert caught.value.code in ("codec.unavailable", "segment.bitstream")
    assert caught.value.where == "here"
    monkeypatch.delenv("KVF_FAKE_FAIL")
    np.testing.assert_array_equal(decoded(session, payload), planes)
    session.close()
    del fake


@BOTH
def test_a_missing_picture_is_counted(
    fake: FakeDriver, clip: tuple[bytes, np.ndarray], kind: Any
) -> None:
    del fake
    session = kind(CPU).open(WIDTH, HEIGHT)
    with pytest.raises(InvalidError) as caught:
        decoded(session, clip[0], FRAMES + 1)
    assert (caught.value.expected, caught.value.found) == (str(FRAMES + 1), str(FRAMES))


@BOTH
def test_a_changed_level_decodes_to_the_same(
    fake: FakeDriver, clip: tuple[bytes, np.ndarray], kind: Any
) -> None:
    del fake
    session = kind(CPU, level_idc=LEVEL_6_2).open(WIDTH, HEIGHT)
    np.testing.assert_array_equal(decoded(session, clip[0]), clip[1])


def test_the_level_is_the_only_change(clip: tuple[bytes, np.ndarray]) -> None:
    payload, planes = clip
    patched = with_level(payload, LEVEL_6_2, "here")
    assert patched != payload
    assert with_level(patched, 255, "here") == payload
    session = SoftwareDecoder(CPU).open(WIDTH, HEIGHT)
    np.testing.assert_array_equal(decoded(session, patched), planes)


@BOTH
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"OFF": "1"}, "cuInit failed with 100"),
        ({"FORMATS": "2"}, "HEVC 4:4:4 of 8 bits is not decoded"),
        ({"MASK": "1"}, "not put out as planes"),
        ({"ENGINES": "0"}, "has no video decoder"),
    ],
)
def test_what_the_device_lacks_is_said_before_anything_is_decoded(
    fake: FakeDriver,
    kind: Any,
    settings: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del fake
    for name, value in settings.items():
        monkeypatch.setenv(f"KVF_FAKE_{name}", value)
    with pytest.raises(UnsupportedError) as caught:
        kind(CPU)
    assert caught.value.code == "codec.unavailable"
    assert words in str(caught.value)
    assert caught.value.next_step


@BOTH
@pytest.mark.parametrize("size", [(128, 144), (8208, 144)])
def test_a_size_that_the_device_refuses(fake: FakeDriver, kind: Any, size: Any) -> None:
    del fake
    with pytest.raises(UnsupportedError) as caught:
        kind(CPU).open(*size)
    assert f"{size[0]} x {size[1]}" in str(caught.value)


def test_frames_in_host_memory_are_refused(
    fake: FakeDriver, clip: tuple[bytes, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a fall-back would look like: the same context without the device."""
    import av

    del fake
    session = NvdecDecoder(CPU).open(WIDTH, HEIGHT)
    monkeypatch.setattr(session, "_open", lambda: av.CodecContext.create("hevc", "r"))
    with pytest.raises(UnsupportedError) as caught:
        decoded(session, clip[0])
    assert caught.value.found == "yuv444p of nothing"


@WITH_PYNV
def test_a_changed_surface_format_of_the_wrapper_is_refused(
    fake: FakeDriver, clip: tuple[bytes, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    del fake
    session = PynvDecoder(CPU).open(WIDTH, HEIGHT)
    monkeypatch.setenv("KVF_FAKE_MASK", "1")  # the wrapper then takes NV12 and says nothing
    with pytest.raises(UnsupportedError) as caught:
        decoded(session, clip[0])
    assert caught.value.expected == "YUV444"


@WITH_PYNV
def test_use_of_a_frame_after_its_time_is_seen(
    fake: FakeDriver, clip: tuple[bytes, np.ndarray]
) -> None:
    """The pretend driver poisons what is given back: holding on to pictures shows."""
    del fake
    session = PynvDecoder(CPU).open(WIDTH, HEIGHT)
    kept = [picture.planes[0] for picture in session.decode(clip[0], FRAMES, "here")]
    assert not np.array_equal(torch.stack(kept[:-1]).numpy(), clip[1][:-1, 0])


class Artifacts:
    """An artifact with an hevc track whose pictures the pretend driver knows."""

    def __init__(self, fake: FakeDriver) -> None:
        self.data = write_bytes(
            canonical_kv(5, 80, 2, 64), tracks=["hevc", "zstd"], segment_tokens=32
        )
        with kvformat.open(self.data) as artifact:
            track = artifact.track("hevc")
            self.table = artifact.segment_table(track)
            for index in range(len(self.table)):
                context = artifact.context(track, self.table[index])
                layout = context.layout
                assert layout is not None
                stored = bytes(artifact.segment_bytes(self.table[index]))
                payload = stored[self.table[index].side_bytes :]
                fake.learn(payload, layout.frames, layout.width, layout.height)
            self.expected = artifact.read(track="hevc").kv


@pytest.fixture(scope="session")
def artifacts(loaded: FakeDriver) -> Artifacts:
    return Artifacts(loaded)


@BOTH
def test_an_artifact_through_the_engine(fake: FakeDriver, artifacts: Artifacts, kind: Any) -> None:
    before = fake.counter("cuda", "to_host")
    with Engine("cpu", kind(CPU)) as engine:
        for _ in range(2):
            found = on_device.read(artifacts.data, engine=engine, check=True)
            assert found.track == "near-lossless/hevc"
            assert bits(found.kv) == bits(artifacts.expected)
        counters = engine.counters
    assert fake.counter("cuda", "to_host") == before
    assert counters.segments == 2 * len(artifacts.table)
    assert counters.busy_peak <= 7 and counters.failures == 0
    assert counters.closed == counters.opened <= 7


@BOTH
def test_hidden_corruption_is_found_by_the_sum(
    fake: FakeDriver, artifacts: Artifacts, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del fake
    monkeypatch.setenv("KVF_FAKE_FAIL", "corrupt:1")
    with Engine("cpu", kind(CPU)) as engine, pytest.raises(InvalidError) as caught:
        on_device.read(artifacts.data, engine=engine, check=True)
    assert caught.value.code == "segment.integers"


def test_a_hardware_decoder_does_not_take_a_track_without_video(fake: FakeDriver) -> None:
    del fake
    data = write_bytes(canonical_kv(2, 20, 2, 64), tracks=["zstd"])
    with Engine("cpu", NvdecDecoder(CPU)) as engine:
        with pytest.raises(KvformatError) as caught:
            on_device.read(data, engine=engine)
        assert caught.value.code == "usage.selection"
        on_device.read(data, engine=engine, track="zstd")


def test_the_probe_survives_a_driver_that_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A child that exits like PyNvVideoCodec does, prints nothing, or prints anything else."""
    for code, words in (
        ("import sys; print('[FATAL] CUDA', file=sys.stderr); sys.exit(1)", "[FATAL] CUDA"),
        ("import os; os.abort()", "exit status -6"),
        ("print('[]')", "exit status 0"),
    ):
        script = tmp_path / "python"
        script.write_text('#!/bin/sh\nexec "' + sys.executable + '" -c "' + code + '"\n')
        script.chmod(0o755)
        monkeypatch.setattr(probing.sys, "executable", str(script))
        found = probing.probe_now()
        assert words in found.problem and not found.devices
        monkeypatch.undo()


def test_without_a_driver_there_is_one_clear_error() -> None:
    code = (
        "from kvformat.gpu import probe\n"
        "from kvformat.gpu.nvdec import NvdecDecoder\n"
        "import torch\n"
        "try:\n    NvdecDecoder(torch.device('cpu'))\n"
        "except Exception as error:\n    print(error)\n"
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "LD_LIBRARY_PATH" and not name.startswith("KVF_FAKE")
    }
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    if "nvidia" in ended.stdout.lower() and "libcuda.so.1 cannot be loaded" not in ended.stdout:
        pytest.skip("this machine has a driver")
    assert ended.stdout.startswith("[codec.unavailable] there is no usable NVIDIA video decoder")
    assert "kvformat doctor --gpu" in ended.stdout


def test_what_a_probe_found_survives_json() -> None:
    found = driver.Hardware(
        "CUDA 13.0",
        (driver.Device(0, "a", 5, (driver.Capability("4:4:4", 8, supported=True, engines=3),)),),
    )
    assert driver.Hardware.from_json(found.to_json()) == found


def test_sessions_are_bounded_and_sizes_share_them() -> None:
    """Eight threads, two sizes, two sessions: never more than two open."""
    lock = threading.Lock()
    together = threading.Barrier(2)  # the first two decode at the same time
    turns = iter([True, True])
    live: list[int] = []
    most: list[int] = []

    class Session:
        def decode(self, payload: bytes, frames: int, where: str) -> Iterator[Any]:
            del where
            if next(turns, False):
                together.wait(60)
            for index in range(frames):
                yield index, payload

        def close(self) -> None:
            with lock:
                live.pop()

    class Decoder:
        name, sessions, device = "counting", 2, CPU

        def open(self, *size: int) -> Session:
            with lock:
                live.append(size[0])
                most.append(len(live))
            return Session()

    pool = on_device.DecoderPool(Decoder())  # type: ignore[arg-type]

    def work(number: int) -> None:
        for _ in range(20):
            assert len(list(pool.pictures(b"abc", 3, (144 + number % 2, 144), ""))) == 3

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    counters = pool.counters
    assert max(most) <= 2 and not live
    assert (counters.segments, counters.frames, counters.stream_bytes) == (160, 480, 480)
    assert counters.opened == counters.closed == len(most)
    assert counters.busy_peak == 2 and counters.failures == 0
    with pytest.raises(KvformatError):
        list(pool.pictures(b"", 1, (144, 144), ""))


def test_a_waiting_thread_is_woken_when_the_pool_closes() -> None:
    class Decoder:
        name, sessions, device = "one", 1, CPU

        def open(self, *size: int) -> Any:
            assert size
            return SoftwareDecoder(CPU).open(*size)

    pool = on_device.DecoderPool(Decoder())  # type: ignore[arg-type]
    errors: list[KvformatError] = []

    def wait() -> None:
        try:
            with pool.session(144, 144):
                pass
        except KvformatError as error:
            errors.append(error)

    with pool.session(144, 144):
        thread = threading.Thread(target=wait)
        thread.start()
        while pool.counters.waiting_peak == 0:
            threading.Event().wait(0.001)
        pool.close()
        thread.join()
    assert [error.code for error in errors] == ["usage.argument"]
    assert pool.counters.stalls == 1
