"""Writing files of the command line: checked first, visible in one step, or not at all."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.cli.inputs import SAFETENSORS_DTYPES
from kvformat.cli.text import require_output
from kvformat.errors import StorageError, UsageError
from kvformat.storage import ensure_absent, local_path, publish, spool_directory, storage_errors

WRITE_BYTES: Final = 8 * 2**20
_NAMES: Final = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def require_name(target: str) -> None:
    """Refuse what names no file; ``-`` means standard output elsewhere, which is never written."""
    if target == "-":
        raise UsageError(
            "usage.argument",
            "nothing is written to standard output",
            expected="a path or URL",
            found="'-'",
            next_step="Name a file; one that is really called - is ./-",
        )
    if not target or "\0" in target:
        raise UsageError("usage.argument", "this is not a path or URL", found=ascii(target[:80]))


def check_target(target: str, source: str, *, overwrite: bool) -> None:
    """Refuse early what ``publish`` would refuse late, and what it would regret."""
    require_name(target)
    require_output()
    with storage_errors(target, "io.write", "looking at the target"):
        path = local_path(target)
        ensure_absent(target, overwrite=overwrite)
        spool_directory(target)
        if path is None or not path.exists():
            return
        if not path.is_file():
            raise StorageError("io.exists", "the target is no regular file", where=str(path))
        if _same(path, source):
            raise UsageError(
                "usage.argument", "the output would replace the input", where=str(path)
            )


def _same(path: Path, source: str) -> bool:
    """Whether ``source`` is that file; one that cannot be looked at is told when it is opened."""
    with contextlib.suppress(OSError, ValueError):
        origin = local_path(source)
        return origin is not None and origin.samefile(path)
    return False


def require_suffix(target: str, *suffixes: str) -> str:
    """The suffix of ``target``, one of ``suffixes``."""
    require_name(target)
    suffix = Path(target).suffix
    if suffix not in suffixes:
        raise UsageError(
            "usage.argument",
            "the output's suffix says which format to write",
            expected=" or ".join(suffixes),
            found=ascii(Path(target).name[:80]),
        )
    return suffix


def raw_parts(array: NDArray[Any]) -> Iterator[memoryview]:
    """The bytes of ``array`` in C order, some rows of the first axis at a time."""
    if array.ndim == 0 or array.size == 0:
        return
    if array.flags.c_contiguous:
        yield array.reshape(-1).view(np.uint8).data
        return
    rows = max(1, WRITE_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield np.ascontiguousarray(array[start : start + rows]).reshape(-1).view(np.uint8).data


def write_npy(target: str, array: NDArray[Any], *, overwrite: bool) -> None:
    """A .npy file; dtypes that numpy lacks are written as raw bytes, '|V2' and '|V1'."""
    if array.dtype.type.__module__ != "numpy":
        array = array.view(f"V{array.dtype.itemsize}")

    def write(file: IO[bytes]) -> None:
        header = np.lib.format.header_data_from_array_1_0(array[:0])
        header["shape"], header["fortran_order"] = array.shape, False
        np.lib.format.write_array_header_1_0(file, header)
        for part in raw_parts(array):
            file.write(part)

    publish(target, write, overwrite=overwrite)


def write_safetensors(
    target: str,
    tensors: Mapping[str, NDArray[Any]],
    metadata: Mapping[str, str],
    *,
    overwrite: bool,
) -> None:
    """A .safetensors file, tensor by tensor, without a second copy of the cache in memory."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    cursor = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [cursor, cursor + array.nbytes],
        }
        cursor += array.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)

    def write(file: IO[bytes]) -> None:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for array in tensors.values():
            for part in raw_parts(array):
                file.write(part)

    publish(target, write, overwrite=overwrite)


def write_bytes(target: str, data: bytes | memoryview, *, overwrite: bool) -> None:
    """Bytes as they are."""
    publish(target, lambda file: _write_all(file, data), overwrite=overwrite)


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    file.write(data)
