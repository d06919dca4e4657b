"""Compiling the kernels without a GPU, and reading their PTX.

``python -m kvformat.gpu.compiling`` prints one JSON object per architecture; exit status 1 if an
instruction is there that could change a result.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, Final

from kvformat.gpu.dtypes import MAX_FINITE

ARCHITECTURES: Final = (80, 90, 120)
_POINTERS: Final = {
    "plane": "*u8", "token_offset": "*i32", "number": "*i32", "channel_offset": "*i32",
    "scale": "*fp32", "zero": "*i32", "bias": "*fp32", "token_scale": "*fp32",
    "out_offset": "*i64",
}  # fmt: skip
_LONG: Final = frozenset(("plane_1", "plane_2", "out_1", "out_2", "head_stride", "dim_stride"))
_OUT: Final = {"float32": "*i32", "float16": "*i16", "bfloat16": "*i16", "float8_e4m3fn": "*u8",
               "float8_e5m2": "*u8"}  # fmt: skip
FORBIDDEN: Final = re.compile(
    r"\b(?:fma|mad)\S*\.f(?:16|32|64)\S*|\b\w+\S*\.ftz\S*|\bcvt\S*\.sat\S*"
)
"""Fused multiply-add, flush to zero, saturating conversion."""


def suspicious(ptx: str) -> list[str]:
    """Instructions of ``ptx`` that the arithmetic of section 9.4 does not allow."""
    return sorted(set(FORBIDDEN.findall(ptx)))


def compile_restore(dtype: str, architecture: int, *, scaled: bool, biased: bool) -> Any:
    """The compiled kernel for a dtype: ``asm`` has its PTX and cubin. Needs no GPU."""
    from kvformat.gpu.kernel import BLOCK_CHANNELS, BLOCK_TOKENS, constants, restore_kernel

    fixed = {
        **constants(dtype),
        "DIM": 128,
        "SCALED": scaled,
        "BIASED": biased,
        "TOKENS": BLOCK_TOKENS,
        "CHANNELS": BLOCK_CHANNELS,
    }
    return _compile(restore_kernel, fixed, _OUT[dtype], architecture)


def compile_sum(architecture: int) -> Any:
    """The same for the integer sum."""
    from kvformat.gpu.kernel import BLOCK_CHANNELS, BLOCK_TOKENS, sum_kernel
    from kvformat.sums import FACTOR, ROW

    fixed = {"FACTOR": FACTOR, "ROW": ROW, "TOKENS": BLOCK_TOKENS, "CHANNELS": BLOCK_CHANNELS}
    return _compile(sum_kernel, fixed, "*i64", architecture)


def _compile(kernel: Any, fixed: dict[str, Any], out: str, architecture: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvformat.gpu.kernel import OPTIONS

    signature = {
        name: "constexpr" if name in fixed
        else out if name == "out"
        else _POINTERS.get(name) or ("i64" if name in _LONG else "i32")
        for name in kernel.arg_names
    }  # fmt: skip
    made = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    return triton.compile(made, target=GPUTarget("cuda", architecture, 32), options=dict(OPTIONS))


def main() -> int:
    """Compile everything for every architecture."""
    bad = False
    for architecture in ARCHITECTURES:
        found: dict[str, Any] = {"architecture": architecture, "kernels": 0, "suspicious": {}}
        kernels = {
            f"{dtype}{' token scales' * scaled}{' bias' * biased}": compile_restore(
                dtype, architecture, scaled=scaled, biased=biased
            )
            for dtype in MAX_FINITE
            for scaled in (False, True)
            for biased in (False, True)
        }
        kernels["sum"] = compile_sum(architecture)
        for name, kernel in kernels.items():
            if not kernel.asm.get("cubin"):
                raise RuntimeError(f"no machine code for {name}")
            found["kernels"] += 1
            if strange := suspicious(kernel.asm["ptx"]):
                found["suspicious"][name] = strange
        bad = bad or bool(found["suspicious"])
        print(json.dumps(found))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
