"""What the KV of a vLLM engine is the KV of, from its configuration. Needs no vLLM to import.

Scheduler and workers must come to the same identity on their own, so everything here follows from
the configuration and the files of the model. What cannot be expressed is refused when the engine
starts, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from blake3 import blake3

from kvformat.errors import UsageError
from kvformat.identity import Identity, Model, Reference, Rope
from kvformat.integrations.weights import folder_digest

CACHE_DTYPES: Final = ("float32", "float16", "bfloat16")
VOLATILE: Final = ("transformers_version", "_name_or_path", "name_or_path", "architectures")
"""Members of a model's configuration that do not change its KV."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose KV: the request's own cache salt, and the adapter it runs with."""

    salt: str | None = None
    adapter: Reference | None = None


def identity_of(config: Any, own: Mapping[str, Any], *, rotated: bool = False) -> Identity:
    """The identity of a ``VllmConfig``; ``own`` are the operator's settings.

    ``model_id``, ``revision`` and ``weights_digest`` of the settings replace what is found. The
    revision ends in a digest of the effective model configuration: overrides such as another
    rotary scaling make other KV. With ``rotated`` it also states the rotary embedding, which a
    calibration profile needs (TRF-5).
    """
    model = config.model_config
    _require_plain(config)
    name = own.get("model_id") or str(model.model)
    digest = own.get("weights_digest") or folder_digest(str(model.model))
    revision = own.get("revision") or getattr(model, "revision", None) or _commit(model)
    settings = _settings_digest(model.hf_text_config)
    label = f"{revision}+{settings}" if revision else settings
    if digest is None and revision is None:
        raise UsageError(
            "input.identity",
            "nothing says which weights the model has",
            where=ascii(name)[:80],
            next_step="Set revision or weights_digest in kv_connector_extra_config",
        )
    return Identity(
        Model(name, label, digest),
        layers_total=int(model.hf_text_config.num_hidden_layers),
        cache_dtype=cache_dtype(config),
        rope=rope_from(model.hf_text_config) if rotated else (),
    )


def rope_from(text_config: Any) -> tuple[Rope, ...]:
    """As transformers has it, found without weights; raises ``input.identity``.

    vLLM's own modules exist in workers only, and the scheduler must come to the same identity.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from kvformat.integrations.transformers import rope_of

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text_config)
        for name, module in list(model.named_modules()):
            if name.rpartition(".")[2] == "rotary_emb":  # its frequencies are no weights
                with torch.device("cpu"):
                    model.set_submodule(name, type(module)(config=module.config))
    except Exception as error:
        raise UsageError(
            "input.identity",
            "the rotary embedding of this model is not known, so no profile can be used",
            found=f"{type(error).__name__}: {error}"[:200],
        ) from error
    return rope_of(model)


def for_tenant(identity: Identity, tenant: Tenant) -> Identity:
    """The identity with the adapter of a request."""
    return identity if tenant.adapter is None else replace(identity, adapters=(tenant.adapter,))


def cache_dtype(config: Any) -> str:
    """The dtype of the cache; raises ``input.dtype`` for quantised ones."""
    name = str(config.cache_config.cache_dtype)
    if name == "auto":
        name = str(config.model_config.dtype).removeprefix("torch.")
    if name not in CACHE_DTYPES:
        raise UsageError(
            "input.dtype", "the connector does not support this cache dtype",
            expected=", ".join(CACHE_DTYPES), found=ascii(name)[:40],
            next_step="Run with --kv-cache-dtype auto; the store compresses anyway",
        )  # fmt: skip
    return name


def _require_plain(config: Any) -> None:
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None and getattr(speculative, "method", None) not in ("ngram", None):
        raise UsageError(
            "input.shape",
            "speculative decoding with a draft model is not supported",
            found=ascii(getattr(speculative, "method", None)),
        )
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UsageError(
                "input.shape", "context parallelism is not supported", where=name,
                expected=1, found=getattr(parallel, name),
            )  # fmt: skip


def _settings_digest(text_config: Any) -> str:
    said = {key: value for key, value in text_config.to_dict().items() if key not in VOLATILE}
    text = json.dumps(said, sort_keys=True, default=str)
    return f"config.{blake3(text.encode()).hexdigest()[:16]}"


def _commit(model: Any) -> str | None:
    found = getattr(model.hf_config, "_commit_hash", None)
    return str(found) if found else None


def adapter_of(lora: Any) -> Reference | None:
    """The adapter of a request; None where its files cannot be read, so that it is not cached."""
    digest = folder_digest(str(lora.lora_path))
    return None if digest is None else Reference(str(lora.lora_name), digest)
