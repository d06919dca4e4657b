"""Measure what a restored KV cache does to the model's predictions.

Takes a capture of ``tools/capture_kv.py`` and a restored cache in the same tensor naming,
lets the model read the text that follows the cached tokens (teacher forced) once on top of
each cache, and compares the next-token distributions: KL divergence of the restored from the
original in nats per token, and how often both rank the same token first. ``--fp8`` compares
the original cast to float8_e4m3fn and back, as a yardstick.

The first prediction compared is that of the second following token: the first following
token is predicted by the last cached token, whose forward pass is over.

The model runs in float32 by default, whatever the dtype of the capture. In bfloat16 its own
rounding dominates: changing one element of a cache by 1 % then gives about 0.002 nats.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

from capture_kv import (
    DTYPES,
    cache_argument,
    encode,
    fail,
    find_weights,
    load_model,
    load_tokenizer,
    need,
    positive,
    read_texts,
    sha256_of,
)
from safetensors import safe_open


class Capture(NamedTuple):
    """Keys and values of every layer as [token, head, dim], with what came beside them."""

    layers: list[tuple[Any, Any]]
    token_ids: list[int] | None
    metadata: dict[str, str]


class Scores(NamedTuple):
    """Comparison of two sequences of next-token distributions."""

    kl: Any
    same_top1: Any


def read_capture(path: Path) -> Capture:
    """Read the tensors and metadata of a capture or of a restored cache."""
    try:
        with safe_open(path, framework="pt") as handle:
            names = set(handle.keys())
            count = sum(name.endswith(".key") for name in names)
            layers = [
                (handle.get_tensor(f"layers.{i}.key"), handle.get_tensor(f"layers.{i}.value"))
                for i in range(count)
            ]
            ids = handle.get_tensor("token_ids").tolist() if "token_ids" in names else None
            metadata = handle.metadata() or {}
    except Exception as error:
        raise fail(f"cannot read {path}: {error}") from error
    if not layers:
        raise fail(f"{path} holds no tensor layers.0.key")
    return Capture(layers, ids, metadata)


def cut(capture: Capture, tokens: int | None, source: Path) -> Capture:
    """Keep the first tokens of a capture."""
    have = int(capture.layers[0][0].shape[0])
    if tokens is None:
        return capture
    if tokens > have:
        raise fail(f"--tokens {tokens} is more than the {have} tokens of {source}")
    return capture._replace(layers=[(k[:tokens], v[:tokens]) for k, v in capture.layers])


def fp8_round_trip(capture: Capture) -> Capture:
    """Cast keys and values to float8_e4m3fn, clamped to its range, and back."""
    torch = need("torch")
    limit = torch.finfo(torch.float8_e4m3fn).max

    def cast(data: Any) -> Any:
        clamped = data.to(torch.float32).clamp(-limit, limit)
        return clamped.to(torch.float8_e4m3fn).to(torch.float32)

    return capture._replace(layers=[(cast(k), cast(v)) for k, v in capture.layers])


def check_alike(original: Capture, restored: Capture) -> None:
    """Refuse to compare caches whose layers or shapes differ."""
    shapes = [[tuple(t.shape) for pair in c.layers for t in pair] for c in (original, restored)]
    if shapes[0] != shapes[1]:
        raise fail(
            f"the caches differ in shape: {len(original.layers)} layers of {shapes[0][0]} and "
            f"{len(restored.layers)} layers of {shapes[1][0]}"
        )


def build_cache(model: Any, capture: Capture) -> Any:
    """Build a model cache that holds the keys and values of a capture."""
    cache = need("transformers").DynamicCache(config=model.config)
    for index, pair in enumerate(capture.layers):
        key, value = (t.to(model.dtype).transpose(0, 1).unsqueeze(0).contiguous() for t in pair)
        cache.update(key, value, index)
    return cache


def following_tokens(args: argparse.Namespace, capture: Capture, tokens: int) -> list[int]:
    """Return the tokens that follow the cached ones, from the text or from the capture."""
    if capture.token_ids is None:
        raise fail("the capture holds no token_ids")
    known = capture.token_ids
    if args.text:
        skip = int(capture.metadata.get("skipped_tokens", "0")) if args.skip is None else args.skip
        ids = encode(load_tokenizer(find_weights()), read_texts(args.text))[skip:]
        if ids[: len(known)] != known:
            raise fail("the text does not begin with the captured tokens (check --text, --skip)")
    else:
        ids = known
    following = ids[tokens : tokens + args.continue_tokens]
    if len(following) < 2:
        raise fail("fewer than two tokens follow the cached ones; give --text or fewer --tokens")
    return following


def predictions(model: Any, cache: Any, part: Any) -> Any:
    """Let the model read the next tokens on a cache; return float64 log probabilities."""
    torch = need("torch")
    output = model(input_ids=part, use_cache=True, **{cache_argument(model): cache})
    return torch.log_softmax(output.logits[0].to(torch.float64), dim=-1)


def compare(
    model: Any, original: Capture, restored: Capture, following: Sequence[int], chunk: int
) -> Scores:
    """Read the following tokens on both caches and compare every prediction."""
    torch = need("torch")
    caches = build_cache(model, original), build_cache(model, restored)
    kls, same = [], []
    with torch.inference_mode():
        for start in range(0, len(following), chunk):
            part = torch.tensor([list(following[start : start + chunk])])
            p, q = (predictions(model, cache, part) for cache in caches)
            kls.append((p.exp() * (p - q)).sum(dim=-1))
            same.append(p.argmax(dim=-1) == q.argmax(dim=-1))
    return Scores(torch.cat(kls), torch.cat(same))


def check_weights(capture: Capture) -> None:
    """Refuse a capture that another set of weights made."""
    recorded = capture.metadata.get("weights_sha256")
    if recorded is not None and recorded != sha256_of(find_weights()):
        raise fail("the capture was made with other weights than those installed")


def run(args: argparse.Namespace) -> None:
    """Compare as the command line asks and print the result as one JSON object."""
    torch = need("torch")
    original = read_capture(args.original)
    check_weights(original)
    tokens = args.tokens or int(original.layers[0][0].shape[0])
    following = following_tokens(args, original, tokens)
    original = cut(original, args.tokens, args.original)
    if args.fp8:
        restored = fp8_round_trip(original)
    else:
        restored = cut(read_capture(args.restored), args.tokens, args.restored)
    check_alike(original, restored)
    scores = compare(
        load_model(find_weights(), args.dtype), original, restored, following, args.chunk
    )
    result = {
        "original": str(args.original),
        "restored": "float8_e4m3fn" if args.fp8 else str(args.restored),
        "cached_tokens": tokens,
        "compared_tokens": int(scores.kl.numel()),
        "model_dtype": args.dtype,
        "kl_mean_nats": float(scores.kl.mean()),
        "kl_p99_nats": float(torch.quantile(scores.kl, 0.99)),
        "kl_max_nats": float(scores.kl.max()),
        "top1_agreement": float(scores.same_top1.to(torch.float64).mean()),
    }
    print(json.dumps(result, indent=2))


def main(argv: Sequence[str]) -> None:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(
        description="Compare a model's predictions on a restored KV cache and on the original."
    )
    parser.add_argument("original", type=Path, help="capture of tools/capture_kv.py")
    parser.add_argument("restored", type=Path, nargs="?", help="restored cache, safetensors")
    parser.add_argument("--fp8", action="store_true", help="compare the original cast to fp8")
    parser.add_argument("--tokens", type=positive, help="use only the first tokens of the caches")
    parser.add_argument("--continue-tokens", type=positive, default=1000, help="tokens to follow")
    parser.add_argument("--text", type=Path, action="append", default=[], help="text (repeatable)")
    parser.add_argument("--skip", type=int, help="tokens of text to skip (default: as captured)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="model dtype")
    parser.add_argument("--chunk", type=positive, default=250, help="tokens a forward pass")
    args = parser.parse_args(argv)
    if args.fp8 == (args.restored is not None):
        parser.error("give either a restored cache or --fp8")
    run(args)


if __name__ == "__main__":
    main(sys.argv[1:])
