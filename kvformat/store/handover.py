"""Tensors to another process without a copy through a pipe: anonymous shared memory.

The memory has no name, only a descriptor that goes over the socket, so nothing is left of it when
the processes are killed. (``multiprocessing.shared_memory`` has names, and a tracker process that
unlinks and warns.)
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.cache import Cache, GroupTensors
from kvformat.dtypes import DTYPES
from kvformat.groups import Group

ALIGNMENT: Final = 64
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Spec:
    """Where the arrays of a cache lie in shared memory."""

    token_count: int
    groups: tuple[Group, ...]
    rows: tuple[tuple[int, ...], ...]
    """Per group: rows of the token axis of its arrays, one number for each layer's offset."""
    offsets: tuple[tuple[int, ...], ...]
    size_bytes: int


def plan(cache: Cache) -> Spec:
    """Lay out all arrays of a cache one behind the other."""
    cursor = 0
    rows: list[tuple[int, ...]] = []
    offsets: list[tuple[int, ...]] = []
    for item in cache.groups:
        places = []
        for array in item.layers:
            places.append(cursor)
            cursor += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        offsets.append(tuple(places))
        rows.append(tuple(item.layers[0].shape))
    groups = tuple(item.group for item in cache.groups)
    return Spec(cache.token_count, groups, tuple(rows), tuple(offsets), max(cursor, 1))


class SharedMemory:
    """Anonymous memory behind a descriptor."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._map = mmap.mmap(descriptor, size_bytes)

    @staticmethod
    def make(size_bytes: int) -> SharedMemory:
        """New memory; raises ``OSError`` where there is no room."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("kvformat", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        try:
            os.ftruncate(descriptor, size_bytes)
            return SharedMemory(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    def cache(self, spec: Spec) -> Cache:
        """The arrays as views of the memory."""
        groups = []
        for group, shape, offsets in zip(spec.groups, spec.rows, spec.offsets, strict=True):
            dtype = DTYPES[group.dtype]
            count = int(np.prod(shape))
            layers: list[NDArray[Any]] = [
                np.frombuffer(self._map, np.uint8, count * dtype.itemsize, offset)
                .view(dtype)
                .reshape(shape)
                for offset in offsets
            ]
            groups.append(GroupTensors(group, tuple(layers)))
        return Cache(spec.token_count, tuple(groups))

    def close(self) -> None:
        """Give the memory back as soon as no array uses it."""
        os.close(self.descriptor)
        del self._map


def copy_cache(cache: Cache, spec: Spec, memory: SharedMemory) -> None:
    """Copy all arrays; the only copy on the request path."""
    for item, target in zip(cache.groups, memory.cache(spec).groups, strict=True):
        for array, place in zip(item.layers, target.layers, strict=True):
            np.copyto(place, array)


def send(connection: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    """A message between parent and child, who are one program."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    head = _LENGTH.pack(len(data))
    if descriptors:
        socket.send_fds(connection, [head], list(descriptors))
    else:
        connection.sendall(head)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next message and its descriptors; raises ``EOFError`` when the other one is gone."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 4)
    head += _exactly(connection, _LENGTH.size - len(head)) if head else b""
    if not head:
        raise EOFError
    data = _exactly(connection, _LENGTH.unpack(head)[0])
    return pickle.loads(data), descriptors  # noqa: S301 - from our own process only


def _exactly(connection: socket.socket, size_bytes: int) -> bytes:
    parts = []
    while size_bytes:
        part = connection.recv(min(size_bytes, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)
