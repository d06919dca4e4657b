"""Builds and loads the pretend NVIDIA driver of ``driver.c``, and gives it its pictures."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kvformat.codecs.bitstream import iter_pictures, parse_nal_units

SOURCE = Path(__file__).with_name("driver.c")
LIBRARIES = {
    "CUDA": "libcuda.so.1",
    "CUVID": "libnvcuvid.so.1",
    "ENCODE": "libnvidia-encode.so.1",
}
SETTINGS = ("OFF", "LOST", "ENGINES", "FORMATS", "MASK", "MIN", "MAX", "DELAY", "FAIL")


def compiler() -> str | None:
    """A C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@lru_cache(maxsize=1)
def build() -> Path:
    """The folder with the three libraries."""
    folder = Path(tempfile.mkdtemp(prefix="kvf-fake-driver-"))
    for part, name in LIBRARIES.items():
        subprocess.run(
            [str(compiler()), "-std=gnu11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden",
             "-Wl,-Bsymbolic",
             f"-DFAKE_{part}", f"-Wl,-soname,{name}", str(SOURCE), "-o", str(folder / name)],
            check=True,
        )  # fmt: skip
    return folder


class FakeDriver:
    """The libraries in this process, under the names by which others ask for them.

    A library that is loaded with a name is what ``dlopen`` of that name returns, so PyAV and
    PyNvVideoCodec find these; child processes find them through ``LD_LIBRARY_PATH``.
    """

    def __init__(self) -> None:
        self.folder = build()
        self.pictures = Path(tempfile.mkdtemp(prefix="kvf-fake-pictures-"))
        self.libraries = {
            name: ctypes.CDLL(str(self.folder / name), mode=ctypes.RTLD_LOCAL)
            for name in LIBRARIES.values()
        }
        path = os.environ.get("LD_LIBRARY_PATH", "")
        if str(self.folder) not in path:
            os.environ["LD_LIBRARY_PATH"] = f"{self.folder}:{path}".rstrip(":")
        os.environ["KVF_FAKE_PICTURES"] = str(self.pictures)

    def learn(self, payload: bytes, frames: int, width: int, height: int) -> None:
        """Have the pictures of a payload ready, decoded in software."""
        names = picture_names(payload, self.hash)
        assert len(names) == frames
        for index, planes in iter_pictures(payload, frames, width, height, "fake"):
            (self.pictures / f"{names[index]:016x}").write_bytes(np.stack(planes).tobytes())

    def hash(self, data: bytes) -> int:
        """As ``driver.c`` computes it."""
        function: Any = self.libraries["libnvcuvid.so.1"].kvf_fake_hash
        function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_uint64
        return int(function(data, len(data)))

    def counter(self, library: str, name: str) -> int:
        """A counter of ``driver.c``; ``library`` is cuda or nvcuvid."""
        function: Any = self.libraries[f"lib{library}.so.1"].kvf_fake_counter
        function.restype = ctypes.POINTER(ctypes.c_long)
        return int(function(name.encode())[0])

    def reset(self) -> None:
        """Back to the usual behaviour."""
        for name in SETTINGS:
            os.environ.pop(f"KVF_FAKE_{name}", None)


@lru_cache(maxsize=1)
def shared_driver() -> FakeDriver:
    """The one of this process."""
    return FakeDriver()


def picture_names(payload: bytes, hash_of: Callable[[bytes], int]) -> list[int]:
    """The hash of the slices of each picture."""
    names: list[int] = []
    slices = b""
    for unit in parse_nal_units(payload, "fake"):
        if unit.kind <= 20:
            slices += b"\0\0\1" + payload[unit.start : unit.stop]
        elif unit.kind == 40:
            names.append(hash_of(slices))
            slices = b""
    return names
