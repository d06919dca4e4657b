"""Hugging Face transformers: a ``DynamicCache`` to an artifact and back.

::

    out = model(ids, use_cache=True)
    save("prefix.kvf", out.past_key_values, model, ids[0], model_id="acme/small")

    loaded = load("prefix.kvf", model, request_ids, model_id="acme/small")
    model.generate(request_ids[None], past_key_values=loaded.cache)

Full-attention and sliding-window layers are understood, with the counters of the latter; any
other kind of layer is refused by name. What the cache is the KV of is filled in from the model
and the token ids, and compared when it is loaded.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from transformers import DynamicCache

from kvformat.artifact import Artifact, open_artifact
from kvformat.cache import Cache
from kvformat.choosing import Auto
from kvformat.errors import MismatchError, UsageError
from kvformat.expectations import Expectation, token_array
from kvformat.groups import Group
from kvformat.identity import Identity, Model, Reference, Rope
from kvformat.integrations.torch_arrays import as_array, as_bits, dtype_name, empty
from kvformat.profile_shelf import ProfilePlaces
from kvformat.report import ReadReport
from kvformat.storage import Transport
from kvformat.writer import WriteReport, write

FULL: Final = "DynamicLayer"
SLIDING: Final = "DynamicSlidingWindowLayer"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A restored cache: the first ``tokens`` tokens of the request, and how they were read."""

    cache: DynamicCache
    tokens: int
    track: str
    report: ReadReport


def identity_of(
    model: Any,
    *,
    model_id: str | None = None,
    revision: str | None = None,
    weights_digest: str | None = None,
    tokenizer: Reference | None = None,
    adapters: tuple[Reference, ...] = (),
    rope: tuple[Rope, ...] | None = None,
) -> Identity:
    """What caches of ``model`` are the KV of: id, layers, dtype and rotary embedding.

    ``model_id`` and ``revision`` default to those that it was loaded from. Adapters that are
    active in the model must be named. ``rope`` replaces what is read from the model, for models
    whose rotation is not understood.
    """
    config = text_config(model)
    name = model_id or getattr(model.config, "_name_or_path", "") or None
    if name is None:
        raise UsageError(
            "input.identity", "the model does not say its id", next_step="Give model_id"
        )
    active = getattr(model, "active_adapters", None)
    if not adapters and getattr(model, "_hf_peft_config_loaded", False):
        names = active() if callable(active) else active
        raise UsageError(
            "input.identity",
            "the model has adapters, which change its cache",
            found=ascii(names),
            next_step="Give adapters, with digests of their weights",
        )
    commit = getattr(model.config, "_commit_hash", None)
    return Identity(
        Model(name, revision or commit, weights_digest),
        layers_total=int(config.num_hidden_layers),
        cache_dtype=dtype_name(model.dtype, "model"),
        tokenizer=tokenizer,
        adapters=adapters,
        rope=rope_of(model) if rope is None else rope,
    )


def text_config(model: Any) -> Any:
    """The configuration of the decoder that owns the cache."""
    return model.config.get_text_config(decoder=True)


def cache_argument(module: Any) -> str:
    """What this version of transformers calls the cache in a call of ``module``."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def rope_of(model: Any) -> tuple[Rope, ...]:
    """The rotary embeddings that the model holds, per kind of layer (IDN-2).

    Raises ``input.identity`` for a model whose rotation is not understood.
    """
    found = [
        module
        for name, module in model.named_modules()
        if name.endswith("rotary_emb") and "vision" not in name
    ]
    config = text_config(model)
    layers = tuple(range(int(config.num_hidden_layers)))
    if not found:
        if getattr(config, "rope_parameters", None):
            raise _strange_rope(model, "no module rotary_emb")
        return ()
    module = found[0]
    pairing = _pairing(model)
    if hasattr(module, "inv_freq"):
        scaling = float(getattr(module, "attention_scaling", 1.0))
        return (_rope(module.inv_freq, layers, pairing, scaling),)
    kinds = list(getattr(config, "layer_types", None) or [])
    result = []
    for kind in dict.fromkeys(kinds):
        frequencies = getattr(module, f"{kind}_inv_freq", None)
        if frequencies is None:
            raise _strange_rope(model, f"no {kind}_inv_freq")
        mine = tuple(layer for layer in layers if kinds[layer] == kind)
        scaling = float(getattr(module, f"{kind}_attention_scaling", 1.0))
        result.append(_rope(frequencies, mine, pairing, scaling))
    if not result:
        raise _strange_rope(model, type(module).__name__)
    return tuple(result)


def _rope(inv_freq: torch.Tensor, layers: tuple[int, ...], pairing: str, scaling: float) -> Rope:
    array = inv_freq.detach().to("cpu", torch.float32).numpy()
    return Rope.from_array(array, layers, pairing=pairing, scaling=scaling)


def _pairing(model: Any) -> str:
    """Which dims rotate together: what the model's own ``rotate_half`` does to 0, 1, 2, 3."""
    for module in model.modules():
        home = sys.modules.get(type(module).__module__)
        rotate = getattr(home, "rotate_half", None)
        if rotate is not None:
            turned = [int(item) for item in rotate(torch.arange(4.0).reshape(1, 1, 1, 4)).flatten()]
            if turned == [-2, -3, 0, 1]:
                return "half"
            if turned == [-1, 0, -3, 2]:
                return "interleaved"
    raise _strange_rope(model, "no rotate_half that is understood")


def _strange_rope(model: Any, found: str) -> UsageError:
    return UsageError(
        "input.identity",
        "the rotary embedding of this model is not understood",
        where=type(model).__name__,
        found=found,
        next_step="Give rope, or an identity of your own",
    )


def cache_of(cache: Any, *, batch_index: int | None = None) -> Cache:
    """The tensors of a transformers cache as views where they are in CPU memory.

    Raises ``input.shape`` for an unknown kind of layer, naming it, and for a batch of several
    sequences without ``batch_index``. Layers that share the cache of others hold nothing and
    are left out.
    """
    layers = getattr(cache, "layers", None)
    if not layers:
        raise UsageError("input.shape", "this is no filled cache", found=type(cache).__name__)
    tensors: dict[str, NDArray[Any]] = {}
    lengths = set()
    for index, layer in enumerate(layers):
        kind = type(layer).__name__
        if kind not in (FULL, SLIDING):
            raise UsageError(
                "input.shape",
                "this kind of cache layer is not supported",
                where=f"layer {index}",
                expected=f"{FULL} or {SLIDING}",
                found=kind,
                next_step="Use a DynamicCache of a model with plain attention layers",
            )
        if not layer.is_initialized:
            continue
        lengths.add(int(layer.get_seq_length()))
        for role, data in (("key", layer.keys), ("value", layer.values)):
            one = _one_sequence(data, index, batch_index)
            tensors[f"layers.{index}.{role}"] = as_array(one, f"layer {index}")
    if len(lengths) != 1:
        raise UsageError(
            "input.shape", "the layers have seen unlike numbers of tokens", found=sorted(lengths)
        )
    return Cache.from_tensors(tensors, token_count=lengths.pop())


def _one_sequence(data: torch.Tensor, layer: int, batch_index: int | None) -> torch.Tensor:
    """``[T, H, D]`` of one sequence of ``[B, H, T, D]``."""
    if batch_index is None and data.shape[0] != 1:
        raise UsageError(
            "input.shape",
            "the cache holds several sequences",
            where=f"layer {layer}",
            found=data.shape[0],
            next_step="Give batch_index, and write one artifact per sequence; padding is not KV",
        )
    number = batch_index or 0
    if not 0 <= number < data.shape[0]:
        raise UsageError(
            "usage.argument", "there is no such sequence in the batch", found=ascii(batch_index)
        )
    return data[number].transpose(0, 1)


def save(
    url: str | os.PathLike[str],
    cache: Any,
    model: Any,
    token_ids: Any,
    *,
    batch_index: int | None = None,
    identity: Identity | None = None,
    model_id: str | None = None,
    **options: Any,
) -> WriteReport:
    """Write a cache; ``token_ids`` are those that it holds, ``[T]`` or ``[1, T]``.

    ``options`` are those of ``kvformat.write``. ``identity`` defaults to ``identity_of(model)``.
    """
    source = cache_of(cache, batch_index=batch_index)
    ids = _ids(token_ids, batch_index)
    known = identity or identity_of(model, model_id=model_id)
    return write(url, source, identity=known, token_ids=ids, **options)


def _ids(token_ids: Any, batch_index: int | None = None) -> NDArray[np.uint32]:
    array = token_ids.cpu().numpy() if isinstance(token_ids, torch.Tensor) else token_ids
    array = np.asarray(array)
    if array.ndim == 2:
        if len(array) != 1 and batch_index is None:
            raise UsageError(
                "usage.argument", "token ids of several sequences", found=list(array.shape)
            )
        array = array[batch_index or 0]
    return token_array(array)


def load(
    source: str | os.PathLike[str] | Artifact,
    model: Any,
    token_ids: ArrayLike | torch.Tensor,
    *,
    identity: Identity | None = None,
    model_id: str | None = None,
    salt: bytes = b"",
    track: str | Auto | None = None,
    device: torch.device | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    transport: Transport | None = None,
    profiles: ProfilePlaces = (),
) -> Loaded:
    """The cache of the longest prefix of the request that the artifact holds and may serve.

    ``token_ids`` are those of the whole request. At least one of them is left to compute, since
    generation needs logits. The artifact must state the identity of ``model`` in all
    that ``identity_of`` knows. An open ``Artifact`` must have been opened with ``expect`` of
    the token ids. ``profiles`` are those of ``kvformat.open``. Raises ``MismatchError`` where
    nothing can be served.
    """
    known = identity or identity_of(model, model_id=model_id)
    ids = _ids(token_ids)
    if isinstance(source, Artifact):
        return _load(source, model, known, len(ids), track=track, device=device)
    expect = Expectation(token_ids=ids, salt=salt)
    with open_artifact(
        source,
        expect=expect,
        storage_options=storage_options,
        transport=transport,
        profiles=profiles,
    ) as artifact:
        return _load(artifact, model, known, len(ids), track=track, device=device)


def _load(
    artifact: Artifact,
    model: Any,
    known: Identity,
    request: int,
    *,
    track: str | Auto | None,
    device: torch.device | str | None,
) -> Loaded:
    check_same(artifact.manifest.identity, known)
    count = serving_length(artifact, request)
    tensors = {}
    buffers = {}
    for group in artifact.groups:
        start, stop = group.held(artifact.manifest.tokens.count)
        held = max(start, min(stop, count)) - start
        shape = (len(group.layers), group.heads, held, group.head_dim)
        tensors[group.name] = empty(shape, group.dtype)
        buffers[group.name] = as_bits(tensors[group.name]).transpose(0, 2, 1, 3)
    report = artifact.read_into(buffers, tokens=(0, count), track=track)
    cache = DynamicCache(config=text_config(model))
    sharing = int(getattr(text_config(model), "num_kv_shared_layers", 0) or 0)
    own = len(cache.layers) - sharing
    parts = _by_layer(artifact.groups, tensors)
    if sorted(parts) != list(range(own)):
        raise _cannot_fill(own, f"layers {sorted(parts)}")
    place = torch.device(device or model.device)
    for number, tensor in parts.items():
        fill_layer(cache.layers[number], number, tensor, count, place)
    return Loaded(cache, count, report.tracks[0], report)


def check_same(found: Identity, wanted: Identity) -> None:
    """Raise ``MismatchError`` unless ``found`` states all that ``wanted`` does."""
    for name in ("layers_total", "cache_dtype", "component", "adapters", "rope", "rotation"):
        _same(f"/identity/{name}", getattr(wanted, name), getattr(found, name))
    for name in ("id", "revision", "weights_digest"):
        _same(f"/identity/model/{name}", getattr(wanted.model, name), getattr(found.model, name))
    if wanted.tokenizer is not None:
        _same("/identity/tokenizer", wanted.tokenizer, found.tokenizer)


def _same(where: str, wanted: object, found: object) -> None:
    if wanted is None or wanted == found:
        return
    code = "identity.missing" if found is None else "identity.field"
    raise MismatchError(
        code,
        "this is the cache of something else",
        where=where,
        expected=ascii(wanted)[:120],
        found=ascii(found)[:120],
        next_step="Compute the cache anew",
    )


def serving_length(artifact: Artifact, request: int) -> int:
    """How many tokens of a request of ``request`` tokens the artifact serves, at least 1."""
    if artifact.verified_length is None:
        raise UsageError(
            "usage.argument", "the artifact was opened without the token ids of the request"
        )
    most = min(artifact.verified_length, request - 1)
    lengths = artifact.manifest.valid_lengths
    if lengths is not None:
        most = max((length for length in lengths if length <= most), default=0)
    if artifact.manifest.tokens.first_position or most < 1:
        raise MismatchError(
            "tokens.length",
            "the artifact holds no prefix of this request that it may serve",
            expected=f"a prefix of at most {request - 1} tokens",
            found=f"{artifact.verified_length} tokens agree, valid lengths {lengths}",
            next_step="Compute the cache anew",
        )
    return most


def _by_layer(
    groups: tuple[Group, ...], tensors: Mapping[str, torch.Tensor]
) -> dict[int, dict[str, torch.Tensor]]:
    """``[1, H, T, D]`` by layer and role."""
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for group in groups:
        for index, layer in enumerate(group.layers):
            parts.setdefault(layer, {})[group.role] = tensors[group.name][index][None]
    return parts


def fill_layer(
    layer: Any, number: int, parts: Mapping[str, torch.Tensor], count: int, device: torch.device
) -> None:
    """Give a layer of a new cache its keys and values ``[1, H, T, D]`` of ``count`` tokens.

    A sliding window gets the last of them, and its counter. Raises ``identity.field``.
    """
    kind = type(layer).__name__
    if kind not in (FULL, SLIDING) or set(parts) != {"key", "value"}:
        raise _cannot_fill(number, f"{kind} and {sorted(parts)}")
    key, value = parts["key"], parts["value"]
    needed = count
    if kind == SLIDING:
        needed = min(count, layer.sliding_window - 1)
        layer.cumulative_length = count
    held = key.shape[2]
    if held < needed or (kind == FULL and held != needed):
        raise _cannot_fill(number, f"{held} of {needed} tokens")
    layer.lazy_initialization(key, value)
    layer.device = device
    layer.keys, layer.values = (
        item[:, :, held - needed :].to(device).contiguous() for item in (key, value)
    )


def _cannot_fill(layer: int, found: str) -> MismatchError:
    return MismatchError(
        "identity.field",
        "the artifact does not hold what this layer of the model needs",
        where=f"layer {layer}",
        found=found,
        next_step="Compute the cache anew",
    )
