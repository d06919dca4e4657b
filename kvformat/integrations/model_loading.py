"""Loading a transformers model by directory, id, or the name of a model of this checkout."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from kvformat.errors import UsageError

TOOL: Final = Path(__file__).resolve().parents[2] / "tools" / "models.py"
"""There in a checkout only."""
ONLINE: Final = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and what artifacts call it."""

    model: Any
    tokenizer: Any
    model_id: str


def load_model(
    name: str, *, dtype: str = "float32", device: str = "cpu", gguf: str | None = None
) -> LoadedModel:
    """Load a model; ``device`` is one of torch, or ``auto`` to spread it (needs accelerate).

    Files on this machine only, unless the environment has ``HF_HUB_OFFLINE=0``; code that comes
    with a model is never run. Raises ``usage.argument``.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    own = _models_of_checkout()
    if own is not None and name in own.NAMES:
        try:
            found = own.load(name, dtype)
        except (own.MissingModelError, ImportError) as error:
            raise _cannot(name, error) from error
        return LoadedModel(found.model.to(device), found.tokenizer, found.model_id)
    local = os.environ.get("HF_HUB_OFFLINE", "").lower() not in ONLINE
    options: dict[str, Any] = {"local_files_only": local}
    if gguf is not None:
        options["gguf_file"] = gguf
    place = {"device_map": "auto"} if device == "auto" else {}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=getattr(torch, dtype), **options, **place
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        model = model.eval() if place else model.eval().to(device)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise _cannot(name, error) from error
    return LoadedModel(model, tokenizer, name)


def _models_of_checkout() -> Any:
    if not TOOL.is_file():
        return None
    spec = importlib.util.spec_from_file_location("kvformat_checkout_models", TOOL)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _cannot(name: str, error: Exception) -> UsageError:
    reason = " ".join(str(error).split())
    return UsageError(
        "usage.argument",
        f"the model cannot be loaded: {reason[:300]}",
        where=ascii(name)[1:-1],
        next_step="Name a directory with a transformers model. Nothing is downloaded unless the "
        "environment has HF_HUB_OFFLINE=0",
    )
