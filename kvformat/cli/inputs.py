"""Reading a cache from a .npy or .safetensors file, memory-mapped, never unpickled."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvformat.cache import Cache
from kvformat.cli.foreign import parsing, unicode_text, whole
from kvformat.cli.options import NPY_MAGIC
from kvformat.dtypes import DTYPES
from kvformat.errors import UsageError
from kvformat.storage import local_path, storage_errors

SAFETENSORS_DTYPES: Final = {
    "F32": DTYPES["float32"],
    "F16": DTYPES["float16"],
    "BF16": DTYPES["bfloat16"],
    "F8_E4M3": DTYPES["float8_e4m3fn"],
    "F8_E5M2": DTYPES["float8_e5m2"],
    "U8": DTYPES["uint8"],
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
LARGEST_HEADER: Final = 100_000_000
SIDE_TENSORS: Final = ("token_ids", "inv_freq")


@dataclass(frozen=True, slots=True)
class Input:
    """A cache and what its file says about it."""

    cache: Cache
    token_ids: NDArray[Any] | None = None
    inv_freq: NDArray[Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


def read_input(
    file: str,
    *,
    dtype: str | None = None,
    first_position: int = 0,
    head_start: int = 0,
    heads_total: int | None = None,
) -> Input:
    """The cache in ``file``; raises ``UsageError`` or ``StorageError``."""
    with (
        parsing(file, "the input cannot be read"),
        storage_errors(file, "io.read", "opening the input"),
    ):
        path = _local(file)
        with path.open("rb") as handle:
            head = handle.read(len(NPY_MAGIC))
        if head == NPY_MAGIC:
            array = with_dtype(open_npy(path), dtype, file)
            return Input(Cache.from_kv(array, head_start=head_start, heads_total=heads_total))
        if path.suffix != ".safetensors":
            raise _unreadable(file, "this is neither a .npy nor a .safetensors file")
        tensors, metadata = open_safetensors(path)
        side = {name: tensors.pop(name, None) for name in SIDE_TENSORS}
        _check_list(side["token_ids"], file)
        cache = Cache.from_tensors(
            {name: with_dtype(tensor, dtype, name[:80]) for name, tensor in tensors.items()},
            first_position=first_position,
            head_start=head_start,
            heads_total=heads_total,
        )
        return Input(cache, side["token_ids"], side["inv_freq"], metadata)


def _local(file: str) -> Path:
    path = local_path(file)
    if path is None:
        raise UsageError(
            "usage.argument",
            "the input must be a local file",
            found=ascii(file[:200]),
            next_step="Fetch it first",
        )
    return path


def _check_list(ids: NDArray[Any] | None, file: str) -> None:
    if ids is not None and ids.ndim != 1:
        raise UsageError(
            "input.shape",
            "token_ids is not one list",
            where=file,
            expected="[tokens]",
            found=list(ids.shape),
        )


def _unreadable(file: object, message: str, found: object = None) -> UsageError:
    return UsageError("usage.argument", message, where=str(file), found=found)


def open_npy(path: Path) -> NDArray[Any]:
    """The array of a .npy file as a read-only memory map; Python objects are refused."""
    with (
        parsing(path, "the .npy file cannot be read"),
        storage_errors(str(path), "io.read", "opening the array"),
    ):
        return _map_npy(path)


def _map_npy(path: Path) -> NDArray[Any]:
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        start = file.tell()
    if dtype.hasobject:
        raise _unreadable(path, "the array holds Python objects, which are never loaded", dtype)
    if any(side < 0 for side in shape):
        raise _unreadable(path, "the .npy file cannot be read", found=list(shape))
    order: Literal["F", "C"] = "F" if fortran else "C"
    if prod(shape) == 0:
        return np.empty(shape, dtype, order)
    needed = start + prod(shape) * dtype.itemsize
    if path.stat().st_size < needed:
        raise UsageError(
            "usage.argument",
            "the .npy file is truncated",
            where=str(path),
            expected=f"{needed:,} bytes",
            found=f"{path.stat().st_size:,}",
        )
    array: NDArray[Any] = np.memmap(path, dtype, "r", offset=start, shape=tuple(shape), order=order)
    return array


def with_dtype(array: NDArray[Any], dtype: str | None, where: str) -> NDArray[Any]:
    """``array`` seen as ``dtype``: the bits stay, values are never converted."""
    raw = array.dtype.kind == "V" and array.dtype.names is None and array.dtype.itemsize <= 2
    if dtype is None:
        if (raw and array.dtype not in DTYPES.values()) or array.dtype == np.uint16:
            raise UsageError(
                "input.dtype",
                "the element type is not known",
                where=where,
                expected=", ".join(DTYPES),
                found=array.dtype,
                next_step="Say what the bits are with --dtype, for example --dtype bfloat16",
            )
        return array
    wanted = DTYPES[dtype]
    if array.dtype.newbyteorder("<") == wanted:
        return array
    if array.dtype.itemsize != wanted.itemsize or not (raw or array.dtype.kind == "u"):
        raise UsageError(
            "input.dtype",
            "the array has another dtype, and kvformat does not convert values",
            where=where,
            expected=f"{dtype}, or raw bytes of {wanted.itemsize} per element",
            found=array.dtype,
        )
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.view(wanted)


def open_safetensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """All tensors, memory-mapped, and the metadata.

    Read here rather than with ``safetensors.numpy``, which has no bfloat16 and no float8.
    """
    size = path.stat().st_size
    with storage_errors(str(path), "io.read", "reading the input"), path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(LARGEST_HEADER, size - 8):
            raise _unreadable(path, "this is not a .safetensors file")
        raw = file.read(length)
    with parsing(path, "the header of the .safetensors file cannot be read"):
        header = json.loads(raw.decode("utf-8"))
        said = header.pop("__metadata__", {})
        metadata = {unicode_text(key): unicode_text(text) for key, text in said.items()}
        for name in header:
            unicode_text(name)
    data: NDArray[np.uint8] = np.empty(0, np.uint8)
    if size > 8 + length:
        data = np.memmap(path, np.uint8, "r", offset=8 + length)
    return {name: _tensor(path, data, name, entry) for name, entry in header.items()}, metadata


def _tensor(path: Path, data: NDArray[np.uint8], name: str, entry: Any) -> NDArray[Any]:
    where = f"{path}, tensor {name[:80]!a}"
    with parsing(where, "the tensor's header cannot be read"):
        dtype, shape = unicode_text(entry["dtype"]), [whole(side) for side in entry["shape"]]
        start, stop = (whole(item) for item in entry["data_offsets"])
    if dtype not in SAFETENSORS_DTYPES:
        raise UsageError(
            "input.dtype",
            "this dtype cannot be stored",
            where=where,
            expected=", ".join(SAFETENSORS_DTYPES),
            found=ascii(dtype[:80]),
        )
    wanted = SAFETENSORS_DTYPES[dtype]
    fits = stop - start == prod(shape) * wanted.itemsize
    if not fits or not start <= stop <= len(data):
        raise UsageError(
            "usage.argument",
            "the tensor does not lie inside the file, or has another size than its shape",
            where=where,
            expected=f"{list(shape)} {dtype}, file data of {len(data):,} bytes",
            found=f"bytes {start:,} to {stop:,}",
            next_step="The file may be truncated",
        )
    with parsing(where, "the tensor has a shape that no array can have"):
        return data[start:stop].view(wanted).reshape(shape)
