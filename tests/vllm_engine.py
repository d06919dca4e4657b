"""The real vLLM on a CPU with a small random model, in this process; see ``test_vllm``."""

from __future__ import annotations

import os
from collections.abc import Sequence
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


class Engine:
    """An engine with or without the connector."""

    def __init__(self, model: Path, extra: dict[str, Any] | None = None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options: dict[str, Any] = {}
        if extra is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KvformatConnector",
                kv_connector_module_path="kvformat.integrations.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            )
        self.llm = LLM(
            model=str(model), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
            max_model_len=MOST_TOKENS, max_num_seqs=4, block_size=BLOCK,
            enable_prefix_caching=True, disable_log_stats=True, **options,
        )  # fmt: skip

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

        return SamplingParams(max_tokens=tokens, temperature=0, detokenize=False)

    def run(
        self, prompts: Sequence[Sequence[int]], *, forget: bool = True, salt: str | None = None
    ) -> list[tuple[list[int], int]]:
        """Tokens and cached tokens of each prompt; the engine's own cache is emptied first."""
        if forget:
            self.forget()
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        if salt is not None:
            asked = [{**item, "cache_salt": salt} for item in asked]
        found = self.llm.generate(asked, self.parameters(), use_tqdm=False)
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
