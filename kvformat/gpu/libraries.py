"""The optional libraries of this package, imported late, each with one clear error."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvformat.errors import UnsupportedError, UsageError

INSTALL = "pip install 'kvformat[gpu]'"


def load_torch() -> Any:
    """The module ``torch``; raises ``codec.unavailable``."""
    return _load("torch", "kvformat.gpu needs torch", INSTALL)


def load_triton() -> Any | None:
    """The module ``triton``, or None: then restoring takes torch operations."""
    try:
        return import_module("triton")
    except ImportError:
        return None


def load_pynv() -> Any:
    """The module ``PyNvVideoCodec``; raises ``codec.unavailable``.

    Importing it loads ``libnvidia-encode`` also where one only decodes.
    """
    return _load(
        "PyNvVideoCodec",
        "the decoder nvdec-pynv needs PyNvVideoCodec and the driver's video libraries",
        "pip install 'kvformat[gpu]'; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,video",
    )


def _load(name: str, message: str, next_step: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        found = str(error).strip().splitlines()
        raise UnsupportedError(
            "codec.unavailable",
            message,
            found=f"{type(error).__name__}: {found[0] if found else ''}"[:200],
            next_step=next_step,
        ) from error


def as_device(device: object) -> Any:
    """A ``torch.device``, with an index for CUDA.

    Raises ``usage.argument`` for no device, ``codec.unavailable`` where torch finds no GPU.
    """
    torch = load_torch()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            "usage.argument", "not a device", expected="cpu or cuda:0", found=ascii(device)[:60]
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise UsageError("usage.argument", "not a device", expected="cpu or cuda:0", found=found)
    if found.type == "cpu":
        return found
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        raise UnsupportedError(
            "codec.unavailable",
            "torch finds no CUDA device",
            found="no usable driver or GPU" if built else "a build of torch without CUDA",
            next_step="Run kvformat doctor --gpu, or read with device='cpu'",
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    if not 0 <= index < torch.cuda.device_count():
        raise UsageError(
            "usage.argument",
            "no such CUDA device",
            expected=f"below {torch.cuda.device_count()}",
            found=index,
        )
    return torch.device("cuda", index)
