"""The element types of the format (spec section 7.1, registry)."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from kvformat.errors import UsageError

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "uint8": np.dtype("u1"),
}
OPAQUE: Final = "uint8"


def name_of(dtype: np.dtype[Any]) -> str:
    """The format's name of a numpy dtype; raises ``input.dtype`` for one that it lacks."""
    for name, known in DTYPES.items():
        if dtype.newbyteorder("<") == known:
            return name
    raise UsageError(
        "input.dtype",
        "this dtype cannot be stored",
        expected=", ".join(DTYPES),
        found=dtype,
    )
