"""Reading into torch tensors and paged caches, on NVIDIA video engines or on the CPU.

``kvformat.gpu.read(url, device="cuda:0", decoder="nvdec")`` gives tensors, ``read_paged`` fills the
pages of a serving engine, ``load_paged`` does so in the background with an event per layer. Needs
``torch``; ``pip install 'kvformat[gpu]'``. Names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvformat.gpu.driver import Capability, Device, Hardware
    from kvformat.gpu.engine import Engine
    from kvformat.gpu.events import LayerEvents
    from kvformat.gpu.placements import Pages, slots_of_blocks
    from kvformat.gpu.pool import DecoderPool
    from kvformat.gpu.probing import probe
    from kvformat.gpu.reading import DeviceRestored, Load, load_paged, read, read_paged

_HOMES: Final = {
    "Capability": "driver",
    "DecoderPool": "pool",
    "Device": "driver",
    "DeviceRestored": "reading",
    "Engine": "engine",
    "Hardware": "driver",
    "LayerEvents": "events",
    "Load": "reading",
    "Pages": "placements",
    "load_paged": "reading",
    "probe": "probing",
    "read": "reading",
    "read_paged": "reading",
    "slots_of_blocks": "placements",
}

__all__ = [
    "Capability",
    "DecoderPool",
    "Device",
    "DeviceRestored",
    "Engine",
    "Hardware",
    "LayerEvents",
    "Load",
    "Pages",
    "load_paged",
    "probe",
    "read",
    "read_paged",
    "slots_of_blocks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvformat.gpu' has no attribute {name!r}")
    value = getattr(import_module(f"kvformat.gpu.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
