"""The real vLLM on a CPU with a small random model, in this process; see ``test_vllm``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
}
os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
VOCABULARY = 512
BLOCK = 32
MOST_TOKENS = 2048


def make_model(folder: Path, seed: int = 0) -> Path:
    """Weights large enough that the next token depends on the whole prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=MOST_TOKENS, initializer_range=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_latent_model(folder: Path) -> Path:
    """DeepSeek V2's attention, whose layers hold one latent per token; its real widths."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        first_k_dense_replace=2, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, n_group=1,
        topk_group=1, topk_method="greedy", n_routed_experts=4, n_shared_experts=1,
        max_position_embeddings=MOST_TOKENS, initializer_range=0.2,
    )  # fmt: skip
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of ``make_model`` that changes keys and values."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, width in (("k_proj", 64), ("v_proj", 64)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (8, 128), "lora_B": (width, 8)}
            for part, shape in shapes.items():
                tensors[f"{place}.{part}.weight"] = torch.randn(shape, generator=generator) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "v_proj"],
        "bias": "none", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def mend_llvmlite() -> None:
    """vLLM's build for CPUs looks into all modules; llvmlite's library has any attribute at all.

    LMCache imports numba, and that imports llvmlite.
    """
    ffi = import_module("llvmlite.binding.ffi")
    kind = type(ffi.lib)
    plain = kind.__getattr__

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return plain(self, name)

    kind.__getattr__ = attribute


class Engine:
    """An engine with or without the connector; ``options`` are the engine's own."""

    def __init__(self, model: Path, extra: dict[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        if "llvmlite" in sys.modules:
            mend_llvmlite()
        if extra is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KvformatConnector",
                kv_connector_module_path="kvformat.integrations.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            )
        usual: dict[str, Any] = {
            "skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True,
            "max_model_len": MOST_TOKENS, "max_num_seqs": 4, "block_size": BLOCK,
            "enable_prefix_caching": True, "disable_log_stats": True,
        }  # fmt: skip
        try:
            self.llm = LLM(model=str(model), **{**usual, **options})
        except BaseException:
            ensure_kv_transfer_shutdown()  # or the next engine gets the connector of this one
            raise

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def planner(self) -> Any:
        return self.core.scheduler.connector._planner

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def parameters(self, tokens: int = 8) -> Any:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        forget: bool = True,
        salt: str | None = None,
        tokens: int = 8,
        lora: Any = None,
    ) -> list[tuple[list[int], int]]:
        """Tokens and cached tokens of each prompt; the engine's own cache is emptied first."""
        if forget:
            self.forget()
        asked: list[Any] = [{"prompt_token_ids": list(ids)} for ids in prompts]
        if salt is not None:
            asked = [{**item, "cache_salt": salt} for item in asked]
        found = self.llm.generate(asked, self.parameters(tokens), use_tqdm=False, lora_request=lora)
        return [(list(item.outputs[0].token_ids), item.num_cached_tokens) for item in found]

    def forget(self) -> None:
        """Empty the engine's own cache; blocks of a finished request are freed by a later step."""
        for _ in range(100):
            if self.llm.reset_prefix_cache():
                return
            self.llm.llm_engine.step()
        raise AssertionError("blocks are held for ever")

    def drain(self) -> None:
        """Wait until what was computed is in the store."""
        self.worker._saving.submit(int).result()
        assert self.worker._saves._views.store.drain(60)

    def empty_store(self) -> None:
        """Delete all artifacts, and forget which were damaged."""
        store = self.worker._saves._views.store
        for file in Path(store.backend.url).rglob("*.kvf"):
            file.unlink()
        store._damaged.clear()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
