"""Torch tensors as numpy arrays of the same memory, for dtypes that numpy lacks too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.dtypes import DTYPES as NUMPY_DTYPES
from kvformat.errors import UsageError

try:
    import torch
except ImportError as error:
    raise UsageError(
        "usage.argument",
        "torch is not installed",
        next_step="Install it, for example with the extra of the integration that you use",
    ) from error

DTYPES: Final = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.uint8: "uint8",
}
TORCH_DTYPES: Final = {name: dtype for dtype, name in DTYPES.items()}
_BITS: Final = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def dtype_name(dtype: torch.dtype, where: str = "") -> str:
    """The format's name of a torch dtype; raises ``input.dtype``."""
    if dtype not in DTYPES:
        raise UsageError(
            "input.dtype",
            "the format has no such dtype",
            where=where,
            expected=", ".join(TORCH_DTYPES),
            found=str(dtype),
        )
    return DTYPES[dtype]


def as_array(tensor: torch.Tensor, where: str = "") -> NDArray[Any]:
    """The values of a tensor as an array of the format's dtype: a view of CPU memory, or a copy."""
    name = dtype_name(tensor.dtype, where)
    return as_bits(tensor.detach().cpu()).view(NUMPY_DTYPES[name])


def as_bits(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a CPU tensor as unsigned integers of its item size, strides kept."""
    bits: NDArray[Any] = tensor.view(_BITS[tensor.element_size()]).numpy()
    return bits


def as_tensor(array: NDArray[Any], name: str) -> torch.Tensor:
    """A tensor on the memory of an array of the format's dtype ``name``."""
    bits = np.ascontiguousarray(array).view(f"<u{array.dtype.itemsize}")
    return torch.from_numpy(bits).view(TORCH_DTYPES[name])


def empty(shape: Sequence[int], name: str) -> torch.Tensor:
    """An uninitialised CPU tensor of the format's dtype ``name``."""
    return torch.empty(tuple(shape), dtype=TORCH_DTYPES[name])
