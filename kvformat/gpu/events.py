"""Completion of layers, for host threads and for CUDA streams."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from kvformat.errors import StorageError, UsageError
from kvformat.gpu.libraries import as_device, load_torch


class LayerEvents:
    """Which layers of a read are complete. Safe to share between threads."""

    def __init__(self, device: Any) -> None:
        self._device = as_device(device)
        self._changed = threading.Condition()
        self._recorded: dict[int, Any] = {}
        self._closed = False
        self._error: BaseException | None = None

    def done(self, layers: Iterable[int]) -> None:
        """These layers are queued to the end on the device's default stream."""
        found = list(layers)
        if not found:
            return
        event = None
        if self._device.type == "cuda":
            torch = load_torch()
            event = torch.cuda.Event()
            event.record(torch.cuda.default_stream(self._device))
        with self._changed:
            self._recorded.update(dict.fromkeys(found, event))
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """No layer will come any more; who still waits gets ``error``."""
        with self._changed:
            self._closed = True
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def complete(self) -> tuple[int, ...]:
        """Layers that are complete, in order of completion."""
        with self._changed:
            return tuple(self._recorded)

    def wait(self, layer: int, *, stream: Any = None, timeout_s: float | None = None) -> None:
        """Wait until ``layer`` is queued, and have a CUDA stream wait for the device's part.

        ``stream`` defaults to the current one. Raises the error of the read, ``usage.argument``
        for a layer that the read does not bring, ``io.timeout``.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: layer in self._recorded or self._closed, timeout_s
            ):
                raise StorageError("io.timeout", f"layer {layer} is not there yet")
            if layer not in self._recorded:
                if self._error is not None:
                    raise self._error
                raise UsageError("usage.argument", "the read does not hold this layer", found=layer)
            event = self._recorded[layer]
        if event is not None:
            (stream or load_torch().cuda.current_stream(self._device)).wait_event(event)

    def begin(self) -> None:
        """Have the default stream wait for what the caller queued on the current one."""
        if self._device.type == "cuda":
            cuda = load_torch().cuda
            cuda.default_stream(self._device).wait_stream(cuda.current_stream(self._device))

    def synchronise(self) -> None:
        """Wait until the device has done what was queued on its default stream."""
        if self._device.type == "cuda":
            load_torch().cuda.default_stream(self._device).synchronize()
