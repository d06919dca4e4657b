"""The real vLLM on a CPU: adapters, preemption, latent attention, calibration profiles.

Ranks in processes of their own take minutes to start: ``tools/live_topologies.py`` has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat
from kvformat.errors import UsageError
from kvformat.profiles import parse_profile

vllm = pytest.importorskip("vllm", reason="vllm is not installed")

from kvformat.integrations.transformers import rope_of  # noqa: E402
from kvformat.integrations.vllm.identity import rope_from  # noqa: E402
from tests.stores import stepwise_profile  # noqa: E402
from tests.vllm_engine import (  # noqa: E402
    VOCABULARY,
    Engine,
    make_adapter,
    make_latent_model,
    make_model,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # the engine's own, raised in this process
COUNT, WHOLE = 700, 512
LAYERS, HEADS, WIDTH = 4, 2, 32


def prompt(seed: int) -> list[int]:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, COUNT)
    return [int(item) for item in ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines to close."""
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def test_what_an_adapter_computed_is_served_to_that_adapter_alone(
    model: Path, tmp_path: Path, engines: list[Engine]
) -> None:
    from vllm.lora.request import LoRARequest

    one = LoRARequest("one", 1, str(make_adapter(tmp_path / "one", 1)))
    other = LoRARequest("other", 2, str(make_adapter(tmp_path / "other", 2)))
    # The same weights under another name and number are another adapter, which costs a miss.
    renamed = LoRARequest("renamed", 3, str(make_adapter(tmp_path / "renamed", 1)))
    engine = Engine(
        model, {"url": str(tmp_path / "store"), "quality": "exact"},
        enable_lora=True, max_lora_rank=8, max_loras=2,
    )  # fmt: skip
    engines.append(engine)
    ids = prompt(0)
    found: dict[Any, list[int]] = {}
    for lora in (None, one, other):
        ((found[lora], cached),) = engine.run([ids], lora=lora)
        assert cached == 0
        engine.drain()
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    for lora, tokens in found.items():
        assert engine.run([ids], lora=lora) == [(tokens, WHOLE)]
    assert engine.run([ids], lora=renamed) == [(found[one], 0)]


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_preempted_requests_end_with_the_same_tokens(
    model: Path, tmp_path: Path, engines: list[Engine], load: str
) -> None:
    """Three requests in room for two and a bit: one loses its blocks and is resumed."""
    prompts = [prompt(seed) for seed in (1, 2, 3)]
    engine = Engine(
        model, {"url": str(tmp_path), "quality": "exact", "load": load}, num_gpu_blocks_override=70
    )
    engines.append(engine)
    alone = [engine.run([ids], tokens=80)[0][0] for ids in prompts]
    engine.drain()
    engine.empty_store()
    scheduler, preempted = engine.core.scheduler, []
    preempt = scheduler._preempt_request

    def noted(request: Any, *more: Any, **named: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *more, **named)

    scheduler._preempt_request = noted
    for cached in (0, WHOLE):
        preempted.clear()
        assert engine.run(prompts, tokens=80) == [(tokens, cached) for tokens in alone]
        assert preempted
        engine.drain()


def test_latents_come_back_bit_for_bit_and_are_refused_where_the_engine_cannot_use_them(
    tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs vLLM turns off what needs latents in front of a prefill; tokens then differ.

    So there the connector refuses to start. The engine's layers are real, and what they wrote is
    what is loaded.
    """
    import torch
    from vllm.platforms.cpu import CpuPlatform

    folder = make_latent_model(tmp_path / "model")
    extra = {"url": str(tmp_path / "store"), "quality": "exact"}
    with pytest.raises(UsageError, match="behind a loaded prefix of latents"):
        Engine(folder, extra)
    check = CpuPlatform.check_and_update_config

    def allowed(_: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.enable_chunked_prefill = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(allowed))
    engine = Engine(folder, extra)
    engines.append(engine)
    paged, read = engine.worker._paged, engine.worker._paged.layout.read
    assert set(paged.layout.places) == {"latent"}
    orders: dict[str, Any] = {}
    save, load = engine.worker._saves.run, engine.worker._loads.run

    def saved(order: Any, *more: Any) -> None:
        orders["save"] = order
        save(order, *more)

    def loaded(job: Any, *more: Any) -> None:
        orders["load"] = job.order
        for cache in paged.caches.values():
            cache.zero_()
        load(job, *more)

    monkeypatch.setattr(engine.worker._saves, "run", saved)
    monkeypatch.setattr(engine.worker._loads, "run", loaded)
    ids = prompt(4)
    engine.run([ids])
    engine.drain()
    computed = {
        layer: read(cache, "latent", orders["save"].block_ids)
        for layer, cache in paged.caches.items()
    }
    assert engine.run([ids])[0][1] == WHOLE
    for layer, rows in computed.items():
        assert rows.shape == (WHOLE, 1, 576)
        assert rows.any()
        found = read(paged.caches[layer], "latent", orders["load"].block_ids)
        assert found.view(torch.int16).equal(rows.view(torch.int16))


def profile_of(model: str) -> bytes:
    """Keys are turned as the model turns them."""
    angles = 10_000.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))
    turns = np.array([np.cos(angles), np.sin(angles)])
    return stepwise_profile((LAYERS, HEADS, WIDTH), 1 / 16, model=model, turns=turns)


def test_a_profile_is_written_and_read_with(
    model: Path, tmp_path: Path, engines: list[Engine]
) -> None:
    data = profile_of(str(model))
    file = tmp_path / "own.kvp"
    file.write_bytes(data)
    extra = {"url": str(tmp_path / "store"), "profile": str(file)}
    engine = Engine(model, extra)
    engines.append(engine)
    ids = prompt(5)
    engine.run([ids])
    engine.drain()
    (path,) = {item.stat().st_ino: item for item in (tmp_path / "store").rglob("*.kvf")}.values()
    with kvformat.open(path, profiles=file) as artifact:
        assert artifact.manifest.profile == parse_profile(data).digest
        assert len(artifact.manifest.identity.rope) == 1
        assert artifact.read().kv.shape == (2, LAYERS, WHOLE, HEADS, WIDTH)
    counts = engine.worker.counts
    assert engine.run([ids])[0][1] == WHOLE
    assert counts["tokens loaded"] == WHOLE
    # Without the profile everything is computed, and nothing raised.
    engine.worker._saves._views.store.profiles._kept.clear()
    file.rename(tmp_path / "away.kvp")
    before = counts["tokens loaded"]
    engine.run([ids])
    assert counts["tokens loaded"] == before
    assert counts["tokens computed anew after a failed load"] == WHOLE
    assert engine.worker._saves._views.store.metrics.value("misses", "profile") > 0


def test_a_profile_of_another_model_is_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.kvp"
    file.write_bytes(profile_of("another/model"))
    with pytest.raises(kvformat.InvalidError, match="another model"):
        Engine(model, {"url": str(tmp_path / "store"), "profile": str(file)})


SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 8192,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Llama", {}),
        ("Llama", {"rope_parameters": SCALED}),
        ("Qwen2", {}),
        ("Gemma3Text", {"sliding_window": 16, "sliding_window_pattern": 3}),
    ],
)
def test_the_rotation_is_known_without_weights(name: str, more: dict[str, Any]) -> None:
    """As of the model itself, which the scheduler does not have."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**SMALL, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = rope_of(model)
    assert expected
    assert rope_from(config) == expected


def test_a_rotation_that_is_not_known_is_refused_by_name() -> None:
    import transformers

    with pytest.raises(UsageError, match="no profile can be used"):
        rope_from(transformers.ViTConfig())
