"""Where restored values go: new arrays, or buffers of the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvformat.cache import RestoredGroup, kv_pair
from kvformat.errors import UsageError
from kvformat.selection import GroupSelection

Buffers = NDArray[Any] | Mapping[str, NDArray[Any]]


def allocate(
    wanted: Sequence[GroupSelection],
) -> tuple[dict[str, RestoredGroup], NDArray[Any] | None]:
    """New arrays per group, and the canonical array that they share where they match.

    Raises ``usage.selection`` where memory does not hold them.
    """
    try:
        base = None
        if kv_pair([item.group for item in wanted]):
            base = np.empty((2, *wanted[0].shape), wanted[0].group.numpy_dtype)
        arrays = [
            np.empty(item.shape, item.group.numpy_dtype) if base is None else base[index]
            for index, item in enumerate(wanted)
        ]
    except (MemoryError, ValueError) as error:
        size_bytes = sum(prod(item.shape) * item.group.numpy_dtype.itemsize for item in wanted)
        raise UsageError(
            "usage.selection",
            "the part asked for does not fit in memory",
            found=f"{size_bytes:,} bytes",
            next_step="Ask for fewer tokens or layers at a time, or use stream()",
        ) from error
    return name_groups(wanted, arrays), base


def name_groups(
    wanted: Sequence[GroupSelection], arrays: Sequence[NDArray[Any]]
) -> dict[str, RestoredGroup]:
    """The arrays with their coordinates."""
    return {
        item.group.name: RestoredGroup(
            item.group,
            array,
            tuple(item.group.layers[layer] for layer in item.layers),
            item.tokens[0],
            item.group.head_start + item.heads[0],
        )
        for item, array in zip(wanted, arrays, strict=True)
    }


def adopt(wanted: Sequence[GroupSelection], buffers: Buffers) -> dict[str, RestoredGroup]:
    """The caller's buffers, checked: one ``[L, T, H, D]`` per group, or ``[2, L, T, H, D]``.

    Any strides will do if the last axis is contiguous. The dtype is the group's, or unsigned
    integers of its size, which then receive the same bits. Raises ``usage.argument``.
    """
    if isinstance(buffers, Mapping):
        names = [item.group.name for item in wanted]
        if sorted(buffers) != sorted(names):
            raise UsageError(
                "usage.argument",
                "there must be one buffer for each selected group",
                expected=", ".join(names),
                found=", ".join(map(ascii, buffers)) or "none",
            )
        given = [buffers[name] for name in names]
    else:
        array = buffers
        if not isinstance(array, np.ndarray) or array.ndim != 5 or len(array) != len(wanted):
            raise UsageError(
                "usage.argument",
                "the buffer is neither one array [2, L, T, H, D] nor a mapping of arrays",
                found=type(array).__name__,
            )
        given = list(array)
    return name_groups(wanted, [_checked(i, a) for i, a in zip(wanted, given, strict=True)])


def _checked(item: GroupSelection, array: object) -> NDArray[Any]:
    where = f"buffer of group {item.group.name}"
    if not isinstance(array, np.ndarray):
        raise UsageError(
            "usage.argument", "a buffer is no numpy array", where=where, found=type(array).__name__
        )
    dtype = item.group.numpy_dtype
    bits = np.dtype(f"<u{dtype.itemsize}")
    if array.dtype not in (dtype, bits) or array.shape != item.shape:
        raise UsageError(
            "usage.argument",
            "a buffer does not fit what was asked for",
            where=where,
            expected=f"{item.group.dtype} {list(item.shape)}",
            found=f"{array.dtype} {list(array.shape)}",
        )
    if not array.flags.writeable:
        raise UsageError("usage.argument", "a buffer is read-only", where=where)
    if array.size and array.strides[-1] != dtype.itemsize and array.shape[-1] > 1:
        raise UsageError(
            "usage.argument",
            "the last axis of a buffer is not contiguous",
            where=where,
            expected=f"a stride of {dtype.itemsize} bytes",
            found=array.strides[-1],
        )
    return array.view(dtype)
