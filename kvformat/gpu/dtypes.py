"""Element types in torch, and the constants that round binary32 to them (ARI-4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvformat.errors import UsageError
from kvformat.gpu.libraries import load_torch

MAX_FINITE: Final = {
    "float32": float.fromhex("0x1.fffffep+127"),
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep+127"),
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}
ITEM_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class Rounding:
    """How bits of a binary32 become bits of a smaller format (see ``kvformat.quant``)."""

    lowest: int
    magic: int
    shift: int
    offset: int
    sign_shift: int
    sign: int


def rounding(mantissa: int, bias: int, bits: int) -> Rounding:
    """For a format of ``bits`` with ``mantissa`` stored bits and this exponent bias."""
    least = 128 - bias
    up = 23 - mantissa
    return Rounding(
        least << 23,
        up << 23 | 0x400000,
        up,
        (least + up) << mantissa | 1 << (mantissa - 1),
        32 - bits,
        1 << (bits - 1),
    )


ROUNDING: Final = {
    "float16": rounding(10, 15, 16),
    "float8_e4m3fn": rounding(3, 7, 8),
    "float8_e5m2": rounding(2, 15, 8),
}


def torch_dtype(name: str) -> Any:
    """The torch dtype of a format name."""
    return getattr(load_torch(), name)


def bits_dtype(item_bytes: int) -> Any:
    """The integer dtype that carries the bits of an element."""
    torch = load_torch()
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[item_bytes]


def dtype_name(dtype: Any) -> str:
    """The format's name of a torch dtype; raises ``usage.argument``."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise UsageError(
            "usage.argument",
            "values cannot be restored to this dtype",
            expected=", ".join(ITEM_BYTES),
            found=name,
        )
    return name
