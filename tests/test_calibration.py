"""Calibration (spec 9.6) of small random models, some with sliding windows, and of a real one."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvformat
from kvformat import profiles
from kvformat.coefficients import WIDE, LayerForward, ProfileWriter, token_facts
from kvformat.digests import digest
from kvformat.identity import Identity, Model
from kvformat.profiles import parse_profile

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from kvformat.integrations import calibration, model_runs  # noqa: E402
from kvformat.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
MODEL = "acme/random"
WINDOW = 24
HELD = 60
FINE, COARSE = "high", "small"
STEPS = {FINE: 0.002, COARSE: 0.2}


def small(kind: str) -> Any:
    torch.manual_seed(1)
    common = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
    }  # fmt: skip
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=3, **common)
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.Gemma3TextConfig(num_hidden_layers=7, sliding_window=WINDOW, **common)
    return transformers.Gemma3ForCausalLM(config).eval()


def token_ids(count: int, seed: int = 0) -> list[int]:
    return [int(n) for n in np.random.default_rng(seed).integers(0, 96, count)]


def calibrated(model: Any, **more: Any) -> bytes:
    options: dict[str, Any] = {
        "model_id": MODEL, "steps": STEPS, "windows": 2, "samples": 2, "cache_tokens": 80,
        "text_tokens": 40, "progress": [].append,
    }  # fmt: skip
    return calibration.calibrate(model, token_ids(240, seed=3), **{**options, **more})


def measured(model: Any, cache_tokens: int) -> tuple[dict[int, calibration.Held], Identity]:
    identity = integration.identity_of(model, model_id=MODEL)
    rotations = calibration._rotations(identity, identity.layers_total)
    found = calibration._measure(
        model, token_ids(cache_tokens + 30), cache_tokens=cache_tokens, samples=2,
        rotations=rotations, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    return found, identity


def is_window(model: Any, layer: int) -> bool:
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 99
    return bool(kinds[layer] == "sliding_attention")


@pytest.mark.parametrize("cache_tokens", [80, 10])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_rows_are_those_of_the_cache_without_rotation(kind: str, cache_tokens: int) -> None:
    """Turned by their positions they are the keys of the model, whatever the window left out."""
    model = small(kind)
    found, identity = measured(model, cache_tokens)
    cache = model_runs.Runner(model).prefill(token_ids(cache_tokens + 30)[:cache_tokens])
    rotations = calibration._rotations(identity, identity.layers_total)
    assert list(found) == list(range(identity.layers_total))
    for layer, held in found.items():
        window = is_window(model, layer)
        inside = min(cache_tokens, WINDOW - 1) if window else cache_tokens
        first = cache_tokens - inside
        skipped = max(0, 4 - first)
        count = inside - skipped
        assert held.window == (WINDOW if window else 0)
        assert held.rows[0].shape == held.rows[1].shape == (count, 2, 16)
        assert held.gradients[0].shape == held.gradients[1].shape == (2, count, 2, 16)
        assert held.features.shape == (count, (3 if window else 2) + 4 + 64)
        keys = held.rows[0].copy()
        rotation = rotations[layer]
        assert rotation is not None
        rotation.turn(keys, np.arange(first + skipped, cache_tokens))
        wanted = [
            part[0].transpose(0, 1).numpy()[skipped:]
            for part in (cache.layers[layer].keys, cache.layers[layer].values)
        ]
        assert np.allclose(keys, wanted[0], atol=1e-4)
        assert np.array_equal(held.rows[1], wanted[1])


def test_gradients_are_those_of_the_likelihood() -> None:
    """Small moves of one layer's window change the likelihood as its gradient says."""
    model = small("gemma").double()
    ids, held = token_ids(HELD + 30), HELD
    cache = model_runs.Runner(model).prefill(ids[:held])
    leaves = {
        number: (layer.keys.clone().requires_grad_(), layer.values.clone().requires_grad_())
        for number, layer in enumerate(cache.layers)
    }

    def likelihood(pairs: Any) -> Any:
        fresh = transformers.DynamicCache(config=model.config)
        for number, (key, value) in pairs.items():
            parts = {"key": key, "value": value}
            integration.fill_layer(fresh.layers[number], number, parts, held, torch.device("cpu"))
        return fresh

    drawn = calibration._draw(
        model, ids[held:], likelihood(leaves), leaves, samples=1,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    with torch.no_grad():
        before = torch.log_softmax(
            calibration._forward(model, ids[held:], likelihood(leaves)).logits[0].float(), -1
        )
        tokens = torch.multinomial(before.exp(), 1, generator=torch.Generator().manual_seed(1))
        for layer in (0, 5):
            for role in (0, 1):
                change = torch.from_numpy(
                    np.random.default_rng(layer).standard_normal(leaves[layer][role].shape)
                )
                sums = []
                for size in (-1e-3, 1e-3):
                    moved = [item.detach() for item in leaves[layer]]
                    moved[role] = moved[role] + size * change
                    pairs = {**leaves, layer: tuple(moved)}
                    logits = calibration._forward(model, ids[held:], likelihood(pairs)).logits[0]
                    sums.append(float(torch.log_softmax(logits, -1).gather(1, tokens).sum()))
                slope = float((drawn[layer][role][0] * change).sum())
                assert (sums[1] - sums[0]) / 2e-3 == pytest.approx(slope, rel=0.02), (layer, role)


@pytest.mark.parametrize("held", [HELD, WINDOW - 1, 3])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_cache_goes_through_its_profile(tmp_path: Path, kind: str, held: int) -> None:
    model, ids = small(kind), token_ids(HELD + 9)
    profile = tmp_path / "p.kvp"
    profile.write_bytes(calibrated(model))
    cache = model_runs.Runner(model).prefill(ids[:held])
    path = tmp_path / "a.kvf"
    integration.save(
        path, cache, model, ids[:held], model_id=MODEL, profile=profile,
        tracks=[f"{FINE}/zstd", f"{COARSE}/zstd"],
    )  # fmt: skip
    assert kvformat.verify(path).checked["integers"] > 0
    with kvformat.open(path) as artifact:
        for quality in artifact.manifest.qualities:
            assert set(quality.encodings) == {"transformed"}
        windows = {g.tokens.held_start for g in artifact.groups if g.tokens.kind == "window"}
    assert windows == ({held - WINDOW + 1} if kind == "gemma" and held >= WINDOW else set())
    errors = []
    for quality in (FINE, COARSE):
        loaded = integration.load(
            path, model, ids, model_id=MODEL, profiles=profile, track=f"{quality}/zstd"
        )
        assert loaded.tokens == held
        parts: list[float] = []
        for before, after in zip(cache.layers, loaded.cache.layers, strict=True):
            assert before.get_seq_length() == after.get_seq_length() == held
            for x, y in ((before.keys, after.keys), (before.values, after.values)):
                assert torch.equal(x[:, :, : max(0, 4 - (held - x.shape[2]))],
                                   y[:, :, : max(0, 4 - (held - x.shape[2]))])  # fmt: skip
                parts.append(float(((x - y) ** 2).sum() / (x**2).sum()))
        errors.append(max(parts))
    assert errors[0] < 0.3  # large only where the metric says that it does not matter
    assert errors[0] < errors[1] or held < 4


def test_the_model_reads_on_from_a_fine_profile(tmp_path: Path) -> None:
    model, ids = small("gemma"), token_ids(HELD + 30)
    profile = tmp_path / "p.kvp"
    profile.write_bytes(calibrated(model))
    runner = model_runs.Runner(model)
    cache = runner.prefill(ids[:HELD])
    path = tmp_path / "a.kvf"
    integration.save(path, cache, model, ids[:HELD], model_id=MODEL, profile=profile,
                     tracks=[f"{FINE}/zstd", f"{COARSE}/zstd"])  # fmt: skip
    wanted = runner.log_probs(ids[HELD:], copy.deepcopy(cache))
    means = []
    for quality in (FINE, COARSE):
        loaded = integration.load(
            path, model, ids, model_id=MODEL, profiles=profile, track=f"{quality}/zstd"
        )
        got = runner.log_probs(ids[HELD:], loaded.cache)
        means.append(float((wanted.exp() * (wanted - got)).sum(-1).mean()))
    assert 0 <= means[0] < 0.03 < means[1], means


def test_a_window_counts_who_will_see_a_token() -> None:
    key = np.random.default_rng(0).standard_normal((9, 2, 4)).astype(np.float32)
    plain, windowed = (token_facts(key, key, window).matrix() for window in (0, 12))
    assert np.array_equal(windowed[:, :2], plain[:, :2])
    assert np.array_equal(windowed[:, 3:], plain[:, 2:])
    assert np.allclose(np.exp(windowed[:, 2]), [3, 4, 5, 6, 7, 8, 9, 10, 11])
    assert np.allclose(np.exp(token_facts(key, key, 4).few[:, 2]), [1, 1, 1, 1, 1, 1, 1, 2, 3])


def test_facts_times_a_vector_are_their_matrix_times_it() -> None:
    random = np.random.default_rng(0)
    key, value = random.standard_normal((2, 9, 2, 4)).astype(np.float32)
    facts = token_facts(key, value, 12)
    vector = random.standard_normal(facts.matrix().shape[1])
    assert np.allclose(facts.times(vector), facts.matrix() @ vector, atol=1e-5)


@pytest.mark.parametrize(
    ("deviation", "multiples"),
    [(1, [1, 1, 1, 1]), (16, [2, 1, 1, 1]), (33, [4, 1, 1, 1]), (65, [WIDE, 1, 1, 1])],
)
def test_large_components_get_longer_steps_or_a_second_slot(
    deviation: float, multiples: list[int]
) -> None:
    """In the order of slots: high parts first, then the components, the smallest dropped."""
    variance = np.array([deviation, 0.4, 0.2, 0.1]) ** 2
    learnt = calibration._Learnt(np.zeros(4), np.eye(4), np.eye(4), variance)
    record = calibration._record((FINE, "value", 0), (2, 2), None)
    transform, slots = learnt.at_step(record, 1.0, None)
    wide = multiples[0] == WIDE
    assert slots["component"].tolist() == ([0, 0, 1, 2] if wide else [0, 1, 2, 3])
    assert slots["multiple"].tolist() == multiples
    matrices = parse_profile(profiles.build(Model(MODEL), [transform], generator="test")).matrices(
        replace(record, digest=digest(transform.to_bytes()).hex()), "here"
    )
    forward = LayerForward.make(
        matrices, np.eye(4, dtype=np.float32), slots["component"], slots["multiple"], 2
    )
    x = np.array([[[deviation * 7, 3], [-2, 0]], [[-deviation * 7, -1], [1, 0]]], np.float32)
    ones, positions = np.ones(2, np.float32), np.arange(2)
    q, unfit = forward.quantise(x, ones, positions)
    assert not unfit.any()
    back = matrices.values(q, np.float32(1), ones, positions)
    assert np.abs(back - x).max() <= (1 if wide else max(multiples)) / 2 + 0.01


def test_weights_know_their_window() -> None:
    model = small("gemma")
    writer = ProfileWriter(parse_profile(calibrated(model)))
    heads, head_dim = model.config.num_key_value_heads, model.config.head_dim
    count = 2 + 2 * heads * (1 + head_dim)
    for layer in range(7):
        for role in ("key", "value"):
            weights = writer.weights(role, layer, {0: count, 1: count + 1})
            assert weights is not None
            assert weights.window == (WINDOW if is_window(model, layer) else 0)


def test_every_window_begins_as_a_sequence_does() -> None:
    """A window of text is one token shorter for it."""
    model, seen = small("llama"), []
    forward = model.forward

    def spy(ids: Any, **options: Any) -> Any:
        seen.append(ids[0].tolist())
        return forward(ids, **options)

    model.forward = spy
    text = token_ids(240, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "cache_argument", lambda _: "past_key_values")
        calibrated(model, beginning=[7])
    assert seen == [[7, *text[:79]], text[79:119], [7, *text[119:198]], text[198:238]]


@pytest.mark.parametrize(
    ("bos", "ids", "wanted"), [(2, [2, 5], [2]), (2, [5], []), (None, [5], []), (0, [0, 5], [0])]
)
def test_what_a_sequence_begins_with(bos: int | None, ids: list[int], wanted: list[int]) -> None:
    class Tokenizer:
        bos_token_id = bos

        def __call__(self, text: str) -> dict[str, list[int]]:
            assert text
            return {"input_ids": ids}

    assert calibration.beginning_of(Tokenizer()) == wanted


def test_text_that_is_too_short() -> None:
    with pytest.raises(kvformat.UsageError, match="too short") as caught:
        calibrated(small("llama"), cache_tokens=300)
    assert caught.value.code == "usage.argument"


def test_a_kind_of_layer_that_is_not_known() -> None:
    with pytest.raises(kvformat.UsageError) as caught:
        calibration._windows(SimpleNamespace(layers=[SimpleNamespace()]))
    assert (caught.value.code, caught.value.where) == ("usage.argument", "layer 0")


@pytest.mark.real
def test_gemma_with_its_windows(tmp_path: Path) -> None:
    """15 layers of the last 511 tokens, 3 of all: every group transformed, finer is better."""
    from kvformat.integrations.model_loading import load_model

    try:
        loaded = load_model("gemma3-270m")
    except kvformat.UsageError as error:
        pytest.skip(str(error))
    text = (Path(__file__).resolve().parent.parent / "spec" / "kvformat.md").read_text()
    ids = loaded.tokenizer(text)["input_ids"]
    assert calibration.beginning_of(loaded.tokenizer) == ids[:1]
    held, compared = 600, 100
    profile = tmp_path / "p.kvp"
    profile.write_bytes(
        calibration.calibrate(
            loaded.model, ids[2000:], beginning=ids[:1], model_id=loaded.model_id, windows=1,
            samples=1, cache_tokens=held, text_tokens=compared, progress=[].append,
            steps={FINE: 0.0001, COARSE: 0.02},
        )
    )  # fmt: skip
    runner = model_runs.Runner(loaded.model)
    path = tmp_path / "a.kvf"
    with model_runs.parameters_as(loaded.model, torch.bfloat16):
        cache = runner.prefill(ids[:held])
        integration.save(path, cache, loaded.model, ids[:held], model_id=loaded.model_id,
                         profile=profile, tracks=[f"{FINE}/zstd", f"{COARSE}/zstd"])  # fmt: skip
    kvformat.verify(path)
    with kvformat.open(path) as artifact:
        identity = artifact.manifest.identity
        shapes = sorted(group.shape(held)[:2] for group in artifact.groups)
    assert shapes == [(3, 600), (3, 600), (15, 511), (15, 511)]
    wanted = runner.log_probs(ids[held : held + compared], runner.placed(cache))
    means = []
    for quality in (FINE, COARSE):
        restored = integration.load(path, loaded.model, ids[: held + compared], identity=identity,
                                    profiles=profile, track=f"{quality}/zstd")  # fmt: skip
        got = runner.log_probs(ids[held : held + compared], runner.placed(restored.cache))
        means.append(float((wanted.exp() * (wanted - got)).sum(-1).mean()))
    assert 0 < means[0] < 0.02 < means[1]
