"""transformers: caches of small random models here, of two real ones with the mark ``real``."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from kvformat.integrations import torch_arrays as arrays  # noqa: E402
from kvformat.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
MODEL = "acme/random"
WINDOW = 8


def small(kind: str, dtype: str = "float32") -> Any:
    torch.manual_seed(1)
    common = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=3, **common)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Gemma3TextConfig(num_hidden_layers=7, sliding_window=WINDOW, **common)
        model = transformers.Gemma3ForCausalLM(config)
    return model.eval().to(getattr(torch, dtype))


def prompt(count: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 96, (1, count)))


def forward(model: Any, ids: Any, cache: Any = None) -> Any:
    with torch.inference_mode():
        name = "cache" if "cache" in model.forward.__code__.co_varnames else "past_key_values"
        options = {} if cache is None else {name: cache}
        return model(ids, use_cache=True, **options)


def cache_of(out: Any) -> Any:
    return out["cache"] if "cache" in out else out["past_key_values"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kind", "held"),
    [("llama", 300), ("llama", 1), ("gemma", 300), ("gemma", WINDOW - 1), ("gemma", WINDOW),
     ("gemma", 3)],
)  # fmt: skip
def test_generation_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, kind: str, held: int, dtype: str
) -> None:
    model, ids = small(kind, dtype), prompt(held + 9)
    cache = cache_of(forward(model, ids[:, :held]))
    wanted = forward(model, ids[:, held:], copy.deepcopy(cache)).logits
    path = tmp_path / "a.kvf"
    integration.save(path, cache, model, ids[:, :held], model_id=MODEL, tracks=["exact/zstd"])
    loaded = integration.load(path, model, ids, model_id=MODEL)
    assert (loaded.tokens, loaded.track) == (held, "exact/zstd")
    for before, after in zip(cache.layers, loaded.cache.layers, strict=True):
        assert type(before) is type(after)
        assert torch.equal(before.keys, after.keys)
        assert torch.equal(before.values, after.values)
        assert before.get_seq_length() == after.get_seq_length()
        assert before.get_mask_sizes(4) == after.get_mask_sizes(4)
    got = forward(model, ids[:, held:], loaded.cache).logits
    assert torch.equal(got, wanted)
    kvformat.verify(path)


def test_damaged_values_change_the_output(tmp_path: Path) -> None:
    """The comparison above would notice: other KV gives other logits."""
    model, ids = small("llama"), prompt(40)
    cache = cache_of(forward(model, ids[:, :30]))
    wanted = forward(model, ids[:, 30:], copy.deepcopy(cache)).logits
    other = cache_of(forward(model, prompt(30, seed=5)))
    path = tmp_path / "a.kvf"
    integration.save(path, other, model, ids[:, :30], model_id=MODEL, tracks=["exact/zstd"])
    loaded = integration.load(path, model, ids, model_id=MODEL)
    assert not torch.equal(forward(model, ids[:, 30:], loaded.cache).logits, wanted)


def test_generate_takes_the_cache(tmp_path: Path) -> None:
    model, ids = small("llama"), prompt(60)
    path = tmp_path / "a.kvf"
    cache = cache_of(forward(model, ids[:, :50]))
    integration.save(path, cache, model, ids[:, :50], model_id=MODEL, tracks=["exact/stored"])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(ids, **options)
    loaded = integration.load(path, model, ids[0].tolist(), model_id=MODEL)
    assert torch.equal(model.generate(ids, past_key_values=loaded.cache, **options), wanted)


def test_one_token_is_left_to_compute(tmp_path: Path) -> None:
    model, ids = small("llama"), prompt(50)
    path = tmp_path / "a.kvf"
    cache = cache_of(forward(model, ids))
    integration.save(path, cache, model, ids, model_id=MODEL, tracks=["exact/stored"])
    assert integration.load(path, model, ids, model_id=MODEL).tokens == 49


def test_a_shorter_common_prefix_is_served_in_whole_blocks(tmp_path: Path) -> None:
    model, ids = small("llama"), prompt(600)
    path = tmp_path / "a.kvf"
    cache = cache_of(forward(model, ids))
    integration.save(path, cache, model, ids, model_id=MODEL, tracks=["exact/stored"])
    request = ids.clone()
    request[0, 520:] = (request[0, 520:] + 1) % 96
    loaded = integration.load(path, model, request, model_id=MODEL)
    assert loaded.tokens == 512
    wanted = forward(model, request).logits[:, 512:]
    got = forward(model, request[:, 512:], loaded.cache).logits
    assert torch.allclose(got, wanted, atol=1e-4)


def refused(code: str, *args: Any, **options: Any) -> kvformat.KvformatError:
    with pytest.raises(kvformat.KvformatError) as caught:
        integration.load(*args, **{"model_id": MODEL, **options})
    assert caught.value.code == code
    return caught.value


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, ids = small("llama"), prompt(300)
    path = tmp_path / "a.kvf"
    cache = cache_of(forward(model, ids))
    integration.save(path, cache, model, ids, model_id=MODEL, tracks=["exact/stored"])
    refused("identity.field", path, model, ids, model_id="acme/other")
    refused("identity.field", path, small("llama", "bfloat16"), ids)
    refused("identity.tokens", path, model, prompt(300, seed=9))
    refused("identity.tokens", path, model, ids, salt=b"another tenant")
    deeper = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_hidden_layers=4,
        )
    ).eval()  # fmt: skip
    refused("identity.field", path, deeper, ids)
    other_rope = copy.deepcopy(model)
    other_rope.model.rotary_emb.inv_freq *= 1.5
    assert "/identity/rope" in refused("identity.field", path, other_rope, ids).where


def test_a_window_serves_only_its_own_length(tmp_path: Path) -> None:
    model, ids = small("gemma"), prompt(300)
    path = tmp_path / "a.kvf"
    cache = cache_of(forward(model, ids))
    integration.save(path, cache, model, ids, model_id=MODEL, tracks=["exact/stored"])
    refused("tokens.length", path, model, ids)  # all but one would be needed
    assert integration.load(path, model, _longer(ids), model_id=MODEL).tokens == 300


def _longer(ids: Any) -> Any:
    return torch.cat([ids, ids[:, :5]], dim=1)


def test_a_strange_layer_is_named() -> None:
    model, ids = small("llama"), prompt(20)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    forward(model, ids, cache)
    with pytest.raises(kvformat.UsageError, match="StaticLayer") as caught:
        integration.cache_of(cache)
    assert caught.value.code == "input.shape"
    with pytest.raises(kvformat.UsageError, match="no filled cache"):
        integration.cache_of(object())


def test_a_batch_needs_an_index(tmp_path: Path) -> None:
    model, ids = small("llama"), torch.cat([prompt(40), prompt(40, seed=3)])
    cache = cache_of(forward(model, ids))
    with pytest.raises(kvformat.UsageError, match="several sequences"):
        integration.cache_of(cache)
    path = tmp_path / "a.kvf"
    options: dict[str, Any] = {"model_id": MODEL, "tracks": ["exact/stored"]}
    integration.save(path, cache, model, ids, batch_index=1, **options)
    loaded = integration.load(path, model, ids[1], model_id=MODEL)
    assert torch.equal(loaded.cache.layers[2].keys[0], cache.layers[2].keys[1][:, :39])


def test_identity_says_what_rotates() -> None:
    llama = integration.identity_of(small("llama"), model_id=MODEL)
    assert (llama.layers_total, llama.cache_dtype) == (3, "float32")
    assert [rope.pairing for rope in llama.rope] == ["half"]
    gemma = integration.identity_of(small("gemma"), model_id=MODEL)
    assert sorted(layer for rope in gemma.rope for layer in rope.layers) == list(range(7))
    assert len({rope.inv_freq for rope in gemma.rope}) == 2
    with pytest.raises(kvformat.UsageError, match="does not say its id"):
        integration.identity_of(small("llama"))


@pytest.mark.parametrize("name", list(arrays.TORCH_DTYPES))
def test_tensors_and_arrays_share_bits(name: str) -> None:
    bits = np.arange(48, dtype=np.uint8).repeat(4).reshape(2, 24, 4)
    dtype = arrays.NUMPY_DTYPES[name]
    array = np.ascontiguousarray(bits[..., : dtype.itemsize]).view(dtype)[..., 0]
    tensor = arrays.as_tensor(array, name)
    assert tensor.dtype == arrays.TORCH_DTYPES[name]
    back = arrays.as_array(tensor.t(), "here")
    assert back.dtype == dtype
    assert back.T.tobytes() == array.tobytes()


def test_a_dtype_that_the_format_lacks() -> None:
    with pytest.raises(kvformat.UsageError, match="float64") as caught:
        arrays.as_array(torch.zeros(3, dtype=torch.float64))
    assert caught.value.code == "input.dtype"


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_real_models_go_on_with_equal_logits(tmp_path: Path, name: str) -> None:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))
    import models

    try:
        real = models.load(name, "bfloat16")
    except models.MissingModelError as error:
        pytest.skip(str(error))
    text = (Path(__file__).resolve().parent.parent / "spec" / "kvformat.md").read_text()
    ids = real.tokenizer(text, return_tensors="pt")["input_ids"][:, :720]
    held = 700  # more than the window of Gemma 3, which is 512
    cache = cache_of(forward(real.model, ids[:, :held]))
    wanted = forward(real.model, ids[:, held:], copy.deepcopy(cache)).logits
    path = tmp_path / "a.kvf"
    integration.save(
        path, cache, real.model, ids[:, :held], model_id=real.model_id, tracks=["exact/zstd"]
    )
    loaded = integration.load(path, real.model, ids, model_id=real.model_id)
    assert loaded.tokens == held
    assert torch.equal(forward(real.model, ids[:, held:], loaded.cache).logits, wanted)
    lossy = tmp_path / "b.kvf"
    integration.save(lossy, cache, real.model, ids[:, :held], model_id=real.model_id, tracks="zstd")
    near = integration.load(lossy, real.model, ids, model_id=real.model_id)
    got = forward(real.model, ids[:, held:], near.cache).logits.float().log_softmax(-1)
    divergence = (got.exp() * (got - wanted.float().log_softmax(-1))).sum(-1).mean()
    assert 0 < float(divergence) < 0.02
