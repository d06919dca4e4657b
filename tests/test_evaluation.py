"""``kvformat evaluate``: the figures on small random models, one run on a real one."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat
from kvformat.measured import measured
from tests.test_cli_common import refused, run

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from kvformat.integrations import evaluated_tracks as tracks_of  # noqa: E402
from kvformat.integrations import evaluation, model_runs  # noqa: E402
from kvformat.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
MODEL = "acme/random"
HELD = 60
LENGTH = 140
OPTIONS = evaluation.Options(tokens=60, greedy=8, turns=3, depths=0)


def small(kind: str = "llama", dtype: str = "float32") -> Any:
    torch.manual_seed(1)
    common = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }  # fmt: skip
    if kind == "llama":
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_hidden_layers=3, **common)
        )
    else:
        model = transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(num_hidden_layers=7, sliding_window=8, **common)
        )
    return model.eval().to(getattr(torch, dtype))


def token_ids(count: int = LENGTH, seed: int = 0) -> list[int]:
    return [int(n) for n in np.random.default_rng(seed).integers(0, 96, count)]


def saved(
    path: Path, model: Any, ids: list[int], tracks: str, *, dtype: str = "bfloat16",
    held: int = HELD,
) -> Path:  # fmt: skip
    """An artifact of the first ids in the engine's dtype; the model stays as it was."""
    with model_runs.parameters_as(model, getattr(torch, dtype)):
        cache = model_runs.Runner(model).prefill(ids[:held])
        integration.save(path, cache, model, ids[:held], model_id=MODEL, tracks=tracks)
    return path


OPEN: list[kvformat.Artifact] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


class Opened:
    """An artifact as the command opens it, with its tracks."""

    def __init__(self, path: Path, model: Any, ids: list[int], profiles: Any = ()) -> None:
        expect = kvformat.Expectation(token_ids=ids)
        self.artifact = kvformat.open(path, expect=expect, profiles=profiles)
        OPEN.append(self.artifact)
        self.runner = model_runs.Runner(model)
        identity = tracks_of.known_identity(self.artifact, model, MODEL)
        self.tracks = tracks_of.Tracks(self.artifact, self.runner, ids, identity, profiles)
        self.ids = ids

    def methods(self) -> list[evaluation.Method]:
        return [self.tracks.method(item, 4.0) for item in self.artifact.manifest.tracks]

    def evaluate(
        self, methods: list[evaluation.Method], options: evaluation.Options = OPTIONS, **more: Any
    ) -> evaluation.Evaluation:
        original = self.tracks.original()
        return evaluation.evaluate(
            self.runner, self.ids, original.cache, methods, options, cached=HELD,
            rounded=self.tracks.rounded, **more,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_an_exact_track_changes_nothing(tmp_path: Path, kind: str) -> None:
    model, ids = small(kind), token_ids()
    opened = Opened(saved(tmp_path / "a.kvf", model, ids, "exact/zstd"), model, ids)
    original = opened.tracks.original()
    assert (original.origin, original.is_source) == (tracks_of.EXACT_TRACK, True)
    found = opened.evaluate(opened.methods())
    (result,) = found.methods
    assert result.divergence == evaluation.Divergence(0.0, 0.0, 0.0, 1.0, 0.0)
    assert result.greedy_same == found.greedy_tokens == 8
    assert [item.layer for item in result.layers] == list(range(len(model.model.layers)))
    assert all((i.key, i.value, i.attention) == (0, 0, 0) for i in result.layers)
    assert [turn.tokens for turn in result.turns] == [20, 20, 20]
    assert all((turn.kl_mean, turn.kl_once) == (0, 0) for turn in result.turns)
    assert found.compared_tokens == 60


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_coarser_tracks_diverge_more(tmp_path: Path, kind: str) -> None:
    model, ids = small(kind), token_ids()
    names = "high/zstd,balanced/zstd,balanced/stored"
    opened = Opened(saved(tmp_path / "a.kvf", model, ids, names), model, ids)
    original = opened.tracks.original()
    assert (original.origin, original.is_source) == (tracks_of.COMPUTED, True)
    assert opened.runner.model.dtype == torch.float32  # it computed in another dtype meanwhile
    found = opened.evaluate([*opened.methods(), evaluation.fp8_method(original.cache)])
    high, balanced, again, fp8 = found.methods
    assert 0 < high.divergence.kl_mean < balanced.divergence.kl_mean
    assert replace(again, name=balanced.name) == balanced  # tracks of one quality are alike
    for part in ("key", "value", "attention"):
        errors = [[getattr(item, part) for item in one.layers] for one in (high, balanced)]
        assert np.mean(errors[0]) < np.mean(errors[1])
    assert fp8.bits_per_value == 8
    assert 0.01 < fp8.layers[0].key < 0.05  # three bits of mantissa
    assert fp8.turns[2].kl_mean > 0
    for result in (high, balanced):
        one = result.divergence
        assert one.kl_mean <= one.kl_max
        assert one.kl_p99 <= one.kl_max
        assert result.turns[0].kl_mean == result.turns[0].kl_once


def test_the_figures_are_those_of_their_definition(tmp_path: Path) -> None:
    """KL, top-1 and cross-entropy once more, from whole-sequence logits in float64."""
    model, ids = small(), token_ids()
    path = saved(tmp_path / "a.kvf", model, ids, "balanced/zstd,exact/zstd", dtype="float32")
    opened = Opened(path, model, ids)
    options = replace(OPTIONS, turns=0)
    (balanced, exact) = opened.evaluate(opened.methods(), options).methods
    assert exact.divergence.kl_max == 0
    follow, target = ids[HELD : HELD + 60], torch.tensor(ids[HELD + 1 : HELD + 61])
    logs = []
    for name in ("exact", "balanced"):
        with kvformat.open(path, expect=kvformat.Expectation(token_ids=ids)) as artifact:
            loaded = integration.load(artifact, model, ids, model_id=MODEL, track=name)
        with torch.inference_mode():
            out = model(torch.tensor([follow]), past_key_values=loaded.cache).logits[0]
        logs.append(out.double().log_softmax(-1))
    p, q = logs
    kl = (p.exp() * (p - q)).sum(-1)
    surprise = [-log.gather(1, target[:, None]).mean() for log in logs]
    wanted = {
        "kl_mean": kl.mean(),
        "kl_p99": kl.quantile(0.99),
        "kl_max": kl.max(),
        "top1": (p.argmax(-1) == q.argmax(-1)).double().mean(),
        "cross_entropy_change": surprise[1] - surprise[0],
    }
    for name, value in wanted.items():
        assert getattr(balanced.divergence, name) == pytest.approx(float(value), abs=1e-5), name


def test_transformed_tracks_go_through_their_profile(tmp_path: Path) -> None:
    from kvformat.integrations.calibration import calibrate

    model, ids = small(), token_ids()
    profile = tmp_path / "p.kvp"
    profile.write_bytes(
        calibrate(
            model, token_ids(200, seed=3), model_id=MODEL, steps={"balanced": 0.05}, windows=1,
            samples=2, cache_tokens=128, text_tokens=64, progress=[].append,
        )
    )  # fmt: skip
    path = tmp_path / "a.kvf"
    cache = model_runs.Runner(model).prefill(ids[:HELD])
    names = ["balanced/zstd", "exact/zstd"]
    options: dict[str, Any] = {"model_id": MODEL, "tracks": names, "profile": profile}
    integration.save(path, cache, model, ids[:HELD], **options)
    opened = Opened(path, model, ids, profiles=[tmp_path])
    balanced, exact = opened.evaluate(opened.methods()).methods
    assert exact.divergence.kl_max == 0 < balanced.divergence.kl_mean
    assert [turn.kl_mean > 0 for turn in balanced.turns] == [True] * 3
    track, other = opened.artifact.manifest.tracks
    found = opened.tracks.profile_of(track)
    assert found is not None
    assert found.digest == opened.artifact.manifest.profile
    assert opened.tracks.profile_of(other) is None
    without = Opened(path, model, ids)
    with pytest.raises(kvformat.UnsupportedError) as caught:
        without.evaluate(without.methods())
    assert caught.value.code == "profile.missing"


def test_noise_raises_everything(tmp_path: Path) -> None:
    model, ids = small(), token_ids()
    opened = Opened(saved(tmp_path / "a.kvf", model, ids, "exact/zstd"), model, ids)
    original = opened.tracks.original()

    def noisy(amount: float) -> evaluation.Method:
        def start() -> Any:
            cache = copy.deepcopy(original.cache)
            generator = torch.Generator().manual_seed(0)
            for layer in cache.layers[1:2]:
                layer.keys += amount * torch.randn(layer.keys.shape, generator=generator)
            return cache

        return evaluation.Method(f"noise {amount}", 16.0, start, reason="only once")

    found = opened.evaluate([noisy(0.0), noisy(0.1), noisy(1.0)])
    means = [item.divergence.kl_mean for item in found.methods]
    assert means[0] == 0 < means[1] < means[2]
    last = found.methods[2]
    assert (last.turns, last.needle, last.left_out) == ([], [], "only once")
    # Each layer sees the original's input: the noise of layer 1 is no error of layer 2.
    assert [item.attention > 0 for item in last.layers] == [False, True, False]
    assert [item.key > 0 for item in last.layers] == [False, True, False]


def test_a_text_that_ends_too_early(tmp_path: Path) -> None:
    model, ids = small(), token_ids()
    path = saved(tmp_path / "a.kvf", model, ids, "exact/zstd")
    for count in (HELD + 1, HELD + 2):
        opened = Opened(path, model, ids[:count])
        with pytest.raises(kvformat.UsageError, match="too few tokens follow"):
            opened.evaluate([])
    assert Opened(path, model, ids[: HELD + 3]).evaluate([]).compared_tokens == 2


def test_what_is_of_something_else_is_refused(tmp_path: Path) -> None:
    model, ids = small(), token_ids()
    path = saved(tmp_path / "a.kvf", model, ids, "exact/zstd")
    with pytest.raises(kvformat.MismatchError) as caught:
        Opened(path, model, token_ids(seed=5))
    assert caught.value.code == "identity.tokens"
    with pytest.raises(kvformat.MismatchError, match="all tokens of the artifact"):
        long = token_ids(300)
        Opened(saved(tmp_path / "b.kvf", model, long, "exact", held=300), model, long[:256])
    other = small("gemma")
    with pytest.raises(kvformat.MismatchError) as caught:
        Opened(path, other, ids)
    assert caught.value.code == "identity.field"
    with kvformat.open(path) as artifact, pytest.raises(kvformat.MismatchError) as caught:
        tracks_of.known_identity(artifact, model, "acme/other")
    assert "/identity/model/id" in caught.value.where


def test_a_reference_must_hold_the_same_cache(tmp_path: Path) -> None:
    model, ids = small(), token_ids()
    lossy = Opened(saved(tmp_path / "a.kvf", model, ids, "zstd"), model, ids)
    exact = saved(tmp_path / "b.kvf", model, ids, "exact/zstd")
    with kvformat.open(exact, expect=kvformat.Expectation(token_ids=ids)) as other:
        assert lossy.tracks.original(other).origin == tracks_of.EXACT_TRACK
    strange = saved(tmp_path / "c.kvf", model, ids, "exact/zstd", dtype="float16")
    with (
        kvformat.open(strange, expect=kvformat.Expectation(token_ids=ids)) as other,
        pytest.raises(kvformat.MismatchError, match="something else"),
    ):
        lossy.tracks.original(other)


def test_a_model_that_computes_another_cache_is_noticed(tmp_path: Path) -> None:
    model, ids = small(), token_ids()
    path = saved(tmp_path / "a.kvf", model, ids, "zstd")
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight *= 1.01
    original = Opened(path, model, ids).tracks.original()
    assert (original.origin, original.is_source) == (tracks_of.COMPUTED, False)


# ---------------------------------------------------------------------------------------------
# Needles through the encoder, and the command


class Tokenizer:
    """Characters as tokens, with the token 1 in front where special tokens are wanted."""

    bos_token_id = 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [ord(char) % 96 for char in text]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


def test_needles_go_through_the_encoder(tmp_path: Path) -> None:
    model, ids = small(), [1, *token_ids(LENGTH - 1)]
    names = "exact/zstd,balanced/zstd"
    opened = Opened(saved(tmp_path / "a.kvf", model, ids, names, dtype="float32"), model, ids)
    options = replace(OPTIONS, turns=0, depths=2, context=400)
    hay = evaluation.haystack_of(opened.runner, Tokenizer(), ids, options)
    assert hay is not None
    assert hay.ids[:1] == (1,)
    found = opened.evaluate(opened.methods(), options, haystack=hay)
    exact, balanced = found.methods
    assert [item.depth for item in found.needle] == [0, 1]
    assert exact.needle == found.needle
    assert [i.answer_nats for i in balanced.needle] != [i.answer_nats for i in found.needle]
    assert found.context_tokens == len(hay.ids)
    with pytest.raises(kvformat.UsageError, match="no such context"):
        evaluation.haystack_of(opened.runner, Tokenizer(), ids, replace(options, context=513))
    full = evaluation.haystack_of(opened.runner, Tokenizer(), ids, replace(options, context=None))
    assert full is not None
    assert 400 < len(full.ids) < 512


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory, its text, and artifacts, with a tokenizer of characters."""
    model = small()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Tokenizer())
    text = "".join(chr(32 + number) for number in token_ids(400))
    (tmp_path / "text.txt").write_text(text)
    ids = Tokenizer()(text)["input_ids"]
    for name, tracks in (("a", "balanced/hevc,balanced/zstd,small/zstd"), ("exact", "exact")):
        saved(tmp_path / f"{name}.kvf", model, ids, tracks)
    return tmp_path


def asked(folder: Path, *options: object, name: str = "a.kvf") -> tuple[object, ...]:
    few = ("--tokens", 60, "--greedy", 4, "--turns", 2, "--depths", 2)
    given = ("--model", folder / "model", "--model-id", MODEL, "--text", folder / "text.txt")
    return ("evaluate", folder / name, *given, *few, *options)


def test_the_command_prints_tables_and_writes_plots(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plots = folder / "plots"
    result = run(*asked(folder, "--fp8", "--plots", plots), columns=120)
    assert result.exit_code == 0, result.output
    for word in ("balanced/zstd", "small/zstd", "fp8 e4m3fn", "lossy turns", "Needles", "KL p99"):
        assert word in result.stdout
    assert "bit for bit the source" in result.stdout
    assert not result.stderr
    assert sorted(item.name for item in plots.iterdir()) == ["layers.png", "rate.png", "sizes.png"]
    assert all(item.read_bytes().startswith(b"\x89PNG") for item in plots.iterdir())
    refused(74, "io.exists", *asked(folder, "--plots", plots))


def test_the_json_becomes_a_property_of_the_tracks(folder: Path) -> None:
    result = run(*asked(folder, "--json", "--no-needle", "--reference", folder / "exact.kvf"))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["original"] == {"origin": "exact track", "is_source": True}
    methods = report["result"]["methods"]
    assert [item["name"] for item in methods] == ["balanced/zstd", "small/zstd"]
    stated = [item["track"] for item in report["measurements"]]
    assert stated == ["balanced/hevc", "balanced/zstd", "small/zstd"]  # hevc has the same bits
    assert not report["result"]["needle"]
    assert sum(run["bytes"] for run in report["sizes"]["small/zstd"]) > 0
    (folder / "q.json").write_text(result.stdout)
    np.save(folder / "kv.npy", np.ones((2, 3, 8, 2, 16), np.float16))
    out = folder / "b.kvf"
    given = ("--model", MODEL, "--measured", folder / "q.json", "--tracks", "balanced/hevc,exact")
    assert run("encode", folder / "kv.npy", out, *given).exit_code == 0
    with kvformat.open(out) as artifact:
        (one,) = measured(artifact.manifest)
    wanted = methods[0]["divergence"]
    assert (one.track, one.top1) == ("balanced/hevc", wanted["top1"])
    assert one.kl_mean == wanted["kl_mean"]


def test_the_command_refuses(folder: Path) -> None:
    data = bytearray((folder / "a.kvf").read_bytes())
    data[-1] ^= 1
    (folder / "damaged.kvf").write_bytes(data)
    few = ("--no-needle", "--track", "small")
    refused(65, "segment.digest", *asked(folder, *few, name="damaged.kvf"))
    refused(76, "identity.field", *asked(folder, "--model-id", "acme/other", "--no-needle"))
    (folder / "text.txt").write_text("another text " * 30)
    refused(76, "identity.tokens", *asked(folder, "--no-needle"))
    refused(64, "usage.selection", *asked(folder, "--track", "nothing"))
    refused(64, "usage.argument", *asked(folder, "--token-ids", folder / "text.txt"))
    refused(74, "io.not-found", *asked(folder, name="none.kvf"))
    away = ("evaluate", folder / "a.kvf", "--text", folder / "text.txt")
    assert (
        "model cannot be loaded"
        in refused(64, "usage.argument", *away, "--model", folder / "nowhere").stderr
    )


def test_without_torch_the_extra_is_named(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom kvformat.cli.main import run\n"
        "sys.argv[1:] = sys.argv[1:]\nrun()"
    )
    identity = kvformat.Identity(kvformat.Model(MODEL), 1, "float16")
    kvformat.write(
        tmp_path / "a.kvf", np.ones((2, 1, 4, 1, 8), np.float16), identity=identity,
        token_ids=[1, 2, 3, 4], tracks="zstd",
    )  # fmt: skip
    (tmp_path / "t").write_text("a text")
    found = subprocess.run(
        [sys.executable, "-c", code, "evaluate", str(tmp_path / "a.kvf"), "--model", "m",
         "--text", str(tmp_path / "t")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 64
    assert "kvformat[transformers]" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.real
def test_a_real_model(tmp_path: Path) -> None:
    """SmolLM2 on few tokens: near-lossless stays near fp8, balanced diverges more."""
    from kvformat.integrations.model_loading import load_model

    try:
        loaded = load_model("smollm2")
    except kvformat.UsageError as error:
        pytest.skip(str(error))
    text = (Path(__file__).resolve().parent.parent / "spec" / "kvformat.md").read_text()
    ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"][:260]
    held = 160
    runner = model_runs.Runner(loaded.model)
    path = tmp_path / "a.kvf"
    with model_runs.parameters_as(loaded.model, torch.bfloat16):
        cache = runner.prefill(ids[:held])
        integration.save(
            path, cache, loaded.model, ids[:held], model_id=loaded.model_id,
            tracks="near-lossless/zstd,balanced/zstd,exact/zstd",
        )  # fmt: skip
    options = evaluation.Options(tokens=90, greedy=4, turns=2, depths=2, context=280)
    with kvformat.open(path, expect=kvformat.Expectation(token_ids=ids)) as artifact:
        identity = tracks_of.known_identity(artifact, loaded.model, loaded.model_id)
        tracks = tracks_of.Tracks(artifact, runner, ids, identity)
        methods = [tracks.method(item, 4.0) for item in artifact.manifest.tracks]
        original = tracks.original()
        methods.append(evaluation.fp8_method(original.cache))
        hay = evaluation.haystack_of(runner, loaded.tokenizer, ids, options)
        found = evaluation.evaluate(
            runner, ids, original.cache, methods, options, cached=held, haystack=hay,
            rounded=tracks.rounded,
        )  # fmt: skip
    near, balanced, exact, fp8 = found.methods
    assert exact.divergence == evaluation.Divergence(0.0, 0.0, 0.0, 1.0, 0.0)
    assert exact.greedy_same == 4
    assert 0 < near.divergence.kl_mean < 5 * fp8.divergence.kl_mean
    assert near.divergence.kl_mean < balanced.divergence.kl_mean < 0.2
    assert near.divergence.top1 > 0.9
    assert len(near.layers) == 30
    assert [item.depth for item in near.needle] == [0, 1]
