"""What the caller and the input's metadata say about a cache: identity, tokens, lineage."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.cache import Restored
from kvformat.cli.foreign import parsing, unicode_text, whole
from kvformat.cli.inputs import Input
from kvformat.cli.options import HASH
from kvformat.errors import UsageError
from kvformat.identity import Identity, Lineage, Model, Reference, Rope
from kvformat.manifest import Manifest
from kvformat.tracks import EXACT

LINEAGE_KEY: Final = "kvformat.lineage"
UNSCALED_ROPES: Final = ("default", "linear", "dynamic", "llama3")
"""Kinds of rope whose cosines and sines carry no factor."""
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")
_GENERATIONS: Final = re.compile(r"0{0,9}[1-9][0-9]{0,15}")


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says; None where it is silent."""

    model: str | None = None
    revision: str | None = None
    weights_digest: str | None = None
    tokenizer: str | None = None
    adapters: tuple[str, ...] = ()
    layers_total: int | None = None
    component: str = "main"


def reference(text: str) -> Reference:
    """``ID`` or ``ID=sha256:...``."""
    name, equals, digest = text.rpartition("=")
    if equals and HASH.fullmatch(digest):
        return Reference(name, digest)
    return Reference(text)


def make_identity(given: Given, source: Input, *, bound: bool) -> Identity:
    """The identity object; ``bound`` tells whether token ids are known."""
    said = source.metadata
    model = given.model or said.get("model_id")
    if not model:
        raise UsageError(
            "input.identity",
            "the model is not known: neither --model nor the metadata of a .safetensors file "
            "(key model_id) names it",
            next_step="Name it with --model; kvformat encode --help lists what a .safetensors "
            "file can say",
        )
    mine = given.model in (None, said.get("model_id"))  # what the file says is about this model
    tokenizer = given.tokenizer or (said.get("tokenizer_id") if mine else None)
    groups = [item.group for item in source.cache.groups]
    layers_total = given.layers_total or 1 + max(group.layers[-1] for group in groups)
    if given.layers_total is None and mine:
        layers_total = max(layers_total, _layers(said.get("num_layers")))
    return Identity(
        model=Model(
            model,
            given.revision or (said.get("revision") if mine else None),
            given.weights_digest or (_weights_digest(said) if mine else None),
        ),
        layers_total=layers_total,
        cache_dtype=groups[0].dtype,
        kind="tokens" if bound else "unbound",
        component=given.component,
        tokenizer=reference(tokenizer) if tokenizer else None,
        adapters=tuple(reference(item) for item in given.adapters),
        rope=_ropes(source, layers_total),
    )


def _layers(text: str | None) -> int:
    """What ``num_layers`` says; 0 for nothing, or for what is no number."""
    if text is None or not text.isascii() or not text.isdigit():
        return 0
    with parsing("metadata num_layers", "this is no number of layers"):
        return whole(int(text))


def _weights_digest(said: Mapping[str, str]) -> str | None:
    found = said.get("weights_digest") or f"sha256:{said.get('weights_sha256', '')}"
    return found if HASH.fullmatch(found) else None


def _ropes(source: Input, layers_total: int) -> tuple[Rope, ...]:
    """One element for all layers that have keys, if the file holds the model's frequencies."""
    said, inv_freq = source.metadata, source.inv_freq
    known = said.get("keys_rotated") in ("true", "false")
    if inv_freq is None or not known or said.get("rope_type", "default") not in UNSCALED_ROPES:
        return ()
    if inv_freq.dtype != np.float32 or inv_freq.ndim != 1 or not len(inv_freq):
        raise UsageError(
            "input.dtype",
            "inv_freq is not a list of float32",
            expected="float32 [rotary_dim / 2]",
            found=f"{inv_freq.dtype} {list(inv_freq.shape)}",
        )
    layers = sorted(
        {
            layer
            for item in source.cache.groups
            if item.group.role == "key"
            for layer in item.group.layers
            if layer < layers_total
        }
    )
    if not layers:
        return ()
    return (
        Rope.from_array(
            np.asarray(inv_freq),
            tuple(layers),
            keys_rotated=said["keys_rotated"] == "true",
        ),
    )


def token_ids_of(source: Input, given: NDArray[Any] | None, first: int) -> NDArray[Any] | None:
    """The ids from position 0 on: those given, else those in the file, if they are enough."""
    if given is not None:
        return given
    ids = source.token_ids
    if ids is not None and len(ids) == source.cache.token_count and first:
        return None  # the ids before the first position are missing
    return ids


def parse_lineage(text: str) -> Lineage:
    """``--lossy-source QUALITY[:GENERATIONS]``."""
    quality, colon, count = text.partition(":")
    good = _NAME.fullmatch(quality) and quality != EXACT
    if not good or (colon and not _GENERATIONS.fullmatch(count)):
        raise UsageError(
            "usage.argument",
            "--lossy-source is not understood",
            expected="QUALITY or QUALITY:GENERATIONS, for example near-lossless:1",
            found=ascii(text[:80]),
        )
    return Lineage("lossy", int(count) if colon else 1, quality)


def source_lineage(source: Input) -> Lineage:
    """LIN-1: from the input's metadata."""
    raw = source.metadata.get(LINEAGE_KEY)
    if raw is None:
        return Lineage()
    with parsing(
        f"metadata {LINEAGE_KEY}",
        "where the tensors come from is not understood",
        code="input.identity",
        found=ascii(raw[:80]),
        next_step="Say where the tensors come from with --lossy-source",
    ):
        said = json.loads(raw)
        if said == {"kind": EXACT}:
            return Lineage()
        profile = said["profile"]
        return Lineage(
            "lossy",
            max(1, whole(said["generations"])),
            unicode_text(said["quality"]),
            None if profile is None else unicode_text(profile),
        )


def restored_metadata(
    manifest: Manifest, manifest_digest: str, restored: Restored
) -> dict[str, str]:
    """The metadata of restored tensors, which ``encode`` understands."""
    model, tokenizer = manifest.identity.model, manifest.identity.tokenizer
    found = {
        "kvformat.manifest_digest": manifest_digest,
        "kvformat.content_id": manifest.content_id,
        "kvformat.track": restored.track,
        LINEAGE_KEY: json.dumps(restored.lineage.to_json(), sort_keys=True),
        "model_id": model.id,
        "revision": model.revision,
        "weights_digest": model.weights_digest,
        "tokenizer_id": tokenizer.id if tokenizer else None,
        "num_layers": str(manifest.identity.layers_total),
    }
    return {key: value for key, value in found.items() if value is not None}
