"""What a case needs (``requires``) against what an implementation declares in ``info``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

CODECS: Final = ("stored", "zstd", "hevc")
"""The codecs of version 0.9; a case may need that one of them is not declared."""


def declared(info: dict[str, Any]) -> set[str]:
    """Every need that an implementation meets: ``http``, and codec, lacks and other names."""
    codecs = set(info["codecs"])
    return {
        *(f"codec:{name}" for name in codecs),
        *(f"lacks:{name}" for name in CODECS if name not in codecs),
        *(f"encode:{name}" for name in info.get("encode", ())),
        *(f"feature:{name}" for name in info.get("features", ())),
        *(("http",) if info.get("http") else ()),
    }


def entry_level(needs: Iterable[str]) -> bool:
    """Whether a reader whose only codec is ``stored`` meets them."""
    return all(name == "codec:stored" or name.startswith("lacks:") for name in needs)


def reason(missing: Iterable[str]) -> str:
    """Why a case is skipped, empty if nothing is missing."""
    names = sorted(missing)
    lacking = [name for name in names if not name.startswith("lacks:")]
    if lacking:
        return f"not declared: {', '.join(lacking)}"
    found = ", ".join(name.removeprefix("lacks:") for name in names)
    return f"only for readers without {found}" if found else ""
