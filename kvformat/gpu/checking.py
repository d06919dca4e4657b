"""The proof on a GPU machine, in minutes: what is exact, what is refused, how fast it is.

``tools/gpu_check.sh`` runs it. Every part stands alone: one that fails is reported and the others
go on. Without a GPU nothing here claims a speed; the tests run it over a pretend driver.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

import kvformat
from kvformat.errors import KvformatError
from kvformat.gpu.clip import Clip, differs, make_clip
from kvformat.gpu.engine import Engine
from kvformat.gpu.frames import FrameDecoder
from kvformat.gpu.levels import LEVEL_6_2, LEVEL_8_5
from kvformat.gpu.libraries import load_torch
from kvformat.gpu.placements import Pages
from kvformat.gpu.pool import DecoderPool
from kvformat.gpu.probing import probe_now
from kvformat.gpu.reading import read_paged
from kvformat.gpu.software import SoftwareDecoder

SIZES: Final = ((144, 144), (160, 256), (1024, 1024), (4096, 512), (144, 8192), (8192, 144))
SMALL_SIZES: Final = ((144, 144), (160, 256))
HUGE: Final = (8192, 8192)
Learn = Callable[[bytes, int, int, int], None]
Make = Callable[[str, int], FrameDecoder]


@dataclass
class Check:
    """One run. ``make`` makes a decoder by name and level; ``learn`` sees every stream first.

    ``quick`` keeps to small pictures and a small cache, for the tests.
    """

    device: Any
    make: Make
    names: tuple[str, ...] = ("nvdec", "nvdec-pynv")
    quick: bool = False
    learn: Learn | None = None
    report: dict[str, Any] = field(default_factory=dict)
    level_idc: int = LEVEL_8_5
    usable: tuple[str, ...] = ()

    def run(self) -> dict[str, Any]:
        """All parts in order; ``ok`` tells whether each one is."""
        torch = load_torch()
        self.report["versions"] = {
            "kvformat": kvformat.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        self.part("hardware", lambda: probe_now().to_json())
        self.part("level", self.level)
        self.part("exact", self.exact)
        self.part("restore", self.restore)
        self.part("corrupt", self.corrupt)
        self.part("throughput", self.throughput)
        self.part("end_to_end", self.end_to_end)
        parts = [item for item in self.report.values() if isinstance(item, dict)]
        self.report["ok"] = bool(self.usable) and all(item.get("ok", True) for item in parts)
        return self.report

    def part(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """One part, with its time; what it raises is its result."""
        started = time.perf_counter()
        try:
            found = work()
        except KvformatError as error:
            found = {"ok": False, "error": error.as_dict()}
        except Exception as error:  # a report of a new machine must show whatever went wrong
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        self.report[name] = {**found, "seconds": round(time.perf_counter() - started, 3)}

    def clip(self, width: int, height: int, frames: int, **options: Any) -> Clip:
        """A clip that the pretend driver knows too."""
        made = make_clip(width, height, frames, **options)
        if self.learn is not None:
            self.learn(made.payload, frames, width, height)
        return made

    def level(self) -> dict[str, Any]:
        """Which decoders work at all, and whether level 8.5 must be rewritten."""
        clip = self.clip(*SMALL_SIZES[0], 4)
        found: dict[str, Any] = {}
        for name in self.names:
            tried: dict[str, str] = {}
            for level_idc in (LEVEL_8_5, LEVEL_6_2):
                try:
                    tried[str(level_idc)] = differs(self.make(name, level_idc), clip) or "exact"
                except KvformatError as error:
                    tried[str(level_idc)] = str(error)
                if tried[str(level_idc)] == "exact":
                    self.usable += (name,)
                    self.level_idc = level_idc
                    break
            found[name] = tried
        return {"ok": len(self.usable) == len(self.names), "decoders": found}

    def exact(self) -> dict[str, Any]:
        """Each size class, decoder by decoder, sample by sample."""
        sizes = SMALL_SIZES if self.quick else (*SIZES, HUGE)
        rows = []
        for width, height in sizes:
            frames = 1 if (width, height) == HUGE else 3
            clip = self.clip(width, height, frames, spread=40.0)
            for name in self.usable:
                wrong = differs(self.make(name, self.level_idc), clip)
                rows.append({"size": [width, height], "decoder": name, "wrong": wrong})
        return {"ok": all(not row["wrong"] for row in rows), "pictures": rows}

    def restore(self) -> dict[str, Any]:
        """Artifacts of 1 to 5 layers (3, 2 and 1 to a segment), against the reader of the core."""
        torch = load_torch()
        rows = []
        for layers, tokens, heads, dim in ((1, 90, 2, 64), (5, 200, 4, 128), (2, 33, 1, 80)):
            data = self.artifact(layers, tokens, heads, dim)
            with kvformat.open(data) as artifact:
                expected = torch.from_numpy(artifact.read(track="hevc").kv.view(np.int16))
                for name in self.usable:
                    for restorer in ("torch", "triton"):
                        same = self.restored(data, name, restorer, expected)
                        rows.append({"shape": [layers, tokens, heads, dim], "decoder": name,
                                     "restorer": restorer, "exact": same})  # fmt: skip
        return {"ok": all(row["exact"] is True for row in rows), "reads": rows}

    def restored(self, data: bytes, name: str, restorer: Any, expected: Any) -> Any:
        """Whether the bits are the same, or what went wrong."""
        torch = load_torch()
        try:
            with self.engine(name, restorer=restorer) as engine:
                found = kvformat.gpu.read(data, engine=engine, check=True).kv
                return bool(torch.equal(found.view(torch.int16).cpu(), expected))
        except KvformatError as error:
            return str(error)

    @contextmanager
    def engine(self, name: str, **options: Any) -> Iterator[Engine]:
        """An engine with a decoder of this run."""
        made = Engine(self.device, self.make(name, self.level_idc), **options)
        with closing(made):
            yield made

    def artifact(self, layers: int, tokens: int, heads: int, dim: int) -> bytes:
        """An artifact with an hevc track, of bfloat16 noise; its streams are learned."""
        import tempfile
        from pathlib import Path

        import ml_dtypes

        rng = np.random.default_rng(1)
        kv = rng.standard_normal((2, layers, tokens, heads, dim), np.float32)
        identity = kvformat.Identity(
            kvformat.Model("gpu-check"), layers, "bfloat16", kind="unbound"
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "check.kvf"
            kvformat.write(path, kv.astype(ml_dtypes.bfloat16), identity=identity, tracks=["hevc"])
            data = path.read_bytes()
        with kvformat.open(data) as artifact:
            track = artifact.track("hevc")
            table = artifact.segment_table(track)
            for record in (table[index] for index in range(len(table))):
                layout = track.layouts[record.layout]
                payload = bytes(artifact.segment_bytes(record))[record.side_bytes :]
                if self.learn is not None:
                    self.learn(payload, layout.frames, layout.width, layout.height)
        return data

    def corrupt(self) -> dict[str, Any]:
        """What a decoder says of a flipped bit that no digest has refused before."""
        clip = self.clip(*SMALL_SIZES[1], 4)
        damaged = bytearray(clip.payload)
        damaged[len(damaged) // 2] ^= 1
        rows = {}
        for name in (*self.usable, "software"):
            broken = Clip(bytes(damaged), clip.planes)
            wrong = differs(self.decoder(name), broken)
            rows[name] = wrong or "nothing, and the samples are right"
        survived = {name: differs(self.decoder(name), clip) for name in self.usable}
        return {"ok": not any(survived.values()), "said": rows, "afterwards": survived}

    def decoder(self, name: str) -> FrameDecoder:
        """By name; the software decoder brings pictures to the device too."""
        if name == "software":
            return SoftwareDecoder(self.device)
        return self.make(name, self.level_idc)

    def throughput(self) -> dict[str, Any]:
        """Pictures per second of 1, 2, ... sessions, bare and through the pool."""
        width, height, frames = (160, 256, 4) if self.quick else (2048, 1024, 24)
        clip = self.clip(width, height, frames)
        rows: list[dict[str, Any]] = []
        for name in self.usable:
            decoder = self.make(name, self.level_idc)
            engines = max(1, decoder.sessions)
            counts = {1, 2} if self.quick else {1, 2, engines, 2 * engines}
            rows.extend(
                {
                    "decoder": name,
                    "size": [width, height],
                    "sessions": sessions,
                    "engines": engines,
                    "bare_pictures_per_s": self.rate(decoder, clip, sessions, pooled=False),
                    "pool_pictures_per_s": self.rate(decoder, clip, sessions, pooled=True),
                    "stream_bytes_per_picture": len(clip.payload) // frames,
                }
                for sessions in sorted(counts)
            )
        return {"ok": bool(rows), "measured_on": str(self.device), "rates": rows}

    def rate(self, decoder: FrameDecoder, clip: Clip, sessions: int, *, pooled: bool) -> float:
        """Pictures per second over all sessions, each on its own thread, decoders made before."""
        rounds = 1 if self.quick else 8
        pool = DecoderPool(decoder, sessions)
        open_sessions = [decoder.open(*clip.size) for _ in range(sessions)]
        ready = threading.Barrier(sessions + 1)
        failures: list[KvformatError] = []

        def once(number: int) -> None:
            if pooled:
                pictures: Any = pool.pictures(clip.payload, clip.frames, clip.size, "clip")
            else:
                pictures = open_sessions[number].decode(clip.payload, clip.frames, "clip")
            for _ in pictures:
                pass

        def work(number: int) -> None:
            try:
                once(number)
            except KvformatError as error:
                failures.append(error)
            ready.wait()
            try:
                for _ in range(rounds):
                    once(number)
            except KvformatError as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(sessions)]
        for thread in threads:
            thread.start()
        ready.wait()
        started = time.perf_counter()
        for thread in threads:
            thread.join()
        self.synchronise()
        seconds = time.perf_counter() - started
        pool.close()
        for session in open_sessions:
            session.close()
        if failures:
            raise failures[0]
        return round(sessions * rounds * clip.frames / seconds, 1)

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            load_torch().cuda.synchronize(self.device)

    def end_to_end(self) -> dict[str, Any]:
        """From the file's bytes in memory to pages, beside plain copies of fp16 and fp8."""
        torch = load_torch()
        shape = (3, 60, 2, 64) if self.quick else (12, 8192, 8, 128)
        layers, tokens, heads, dim = shape
        data = self.artifact(*shape)
        blocks = -(-tokens // 16)
        caches = {
            layer: torch.zeros(
                (2, blocks, 16, heads, dim), dtype=torch.bfloat16, device=self.device
            )
            for layer in range(layers)
        }
        pages = Pages.from_vllm(caches)
        rows = []
        for name in self.usable:
            with self.engine(name) as engine:
                cold_s, _ = self.timed(data, pages, tokens, engine)
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self.device)
                    before = torch.cuda.memory_allocated(self.device)
                warm_s, report = self.timed(data, pages, tokens, engine)
                row = {"decoder": name, "cold_s": cold_s, "warm_s": warm_s,
                       "decode_s": report.decode_s, "restore_s": report.restore_s,
                       "counters": engine.counters.to_json()}  # fmt: skip
                if self.device.type == "cuda":
                    peak = torch.cuda.max_memory_allocated(self.device)
                    row["torch_peak_bytes_beyond_destination"] = peak - before
                    free, total = torch.cuda.mem_get_info(self.device)
                    row["device_used_bytes"] = total - free
                rows.append(row)
        values = 2 * layers * tokens * heads * dim
        return {"ok": bool(rows), "values": values, "file_bytes": len(data), "reads": rows,
                "copy_fp16_s": self.copy_s(2 * values), "copy_fp8_s": self.copy_s(values),
                "measured_on": str(self.device)}  # fmt: skip

    def timed(self, data: bytes, pages: Pages, tokens: int, engine: Engine) -> Any:
        """Seconds and report of one read."""
        started = time.perf_counter()
        report = read_paged(data, pages, list(range(tokens)), engine=engine)
        self.synchronise()
        return round(time.perf_counter() - started, 6), report

    def copy_s(self, size_bytes: int) -> float:
        """Seconds to copy so many bytes from pinned memory to the device, the best of three."""
        torch = load_torch()
        source = torch.zeros(size_bytes, dtype=torch.uint8)
        if self.device.type == "cuda":
            source = source.pin_memory()
        target = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self.synchronise()
            best = min(best, time.perf_counter() - started)
        return round(best, 6)
