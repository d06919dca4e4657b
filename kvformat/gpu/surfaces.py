"""Device memory that a decoder owns, seen as torch tensors without a copy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvformat.gpu.libraries import load_torch


class _Plane:
    """The CUDA array interface of one plane."""

    def __init__(self, address: int, height: int, width: int, pitch: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (height, width),
            "strides": (pitch, 1),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": None,
        }


def plane_at(address: int, height: int, width: int, pitch: int, device: Any) -> Any:
    """uint8 ``[height, width]`` at an address with rows of ``pitch`` bytes.

    On a CUDA device the address is the device's; on the CPU, with the pretend driver of the tests,
    it is the host's.
    """
    torch = load_torch()
    if device.type == "cuda":
        return torch.as_tensor(_Plane(address, height, width, pitch), device=device)
    size_bytes = (height - 1) * pitch + width
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    raw = np.frombuffer(memoryview(memory).cast("B"), np.uint8)
    return torch.as_strided(torch.from_numpy(raw), (height, width), (pitch, 1))
