"""What an operator can set for the connector, beside the settings of every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

NAME: Final = "KvformatConnector"
MODULE: Final = "kvformat.integrations.vllm"
OWN_SETTINGS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "model_id": str,
    "revision": str,
    "weights_digest": str,
    "load": str,
    "save": bool,
    "topologies": list,
}
LOADS: Final = ("async", "layerwise")
