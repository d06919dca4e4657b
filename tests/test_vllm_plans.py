"""What of the vLLM connector is plain logic: topologies, planning, settings, identity.

The engine itself is in ``test_vllm``; nothing here shows that the two fit together.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvformat
from kvformat.errors import UsageError
from kvformat.identity import Reference
from kvformat.integrations import settings, weights
from kvformat.integrations.vllm import identity as identities
from kvformat.integrations.vllm import planning, topology
from kvformat.integrations.vllm.identity import Tenant
from kvformat.integrations.vllm.topology import Model, Part, Topology, even_split
from kvformat.integrations.vllm.views import Shape, Views
from kvformat.store import StoreOptions
from kvformat.store import open as open_store

IDENTITY = kvformat.Identity(kvformat.Model("acme/small", "1"), 2, "float16")
MODEL = Model(2, 1, even_split)
ONE = Topology(1, 1)


@st.composite
def divided(draw: st.DrawFn) -> tuple[Model, Topology]:
    heads, tp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4, 8, 16]))
    pp = draw(st.integers(1, 6))
    return Model(draw(st.integers(pp, 40)), heads, even_split), Topology(tp, pp)


@given(divided())
def test_parts_hold_everything_once_and_one_rank_writes_each(case: tuple[Model, Topology]) -> None:
    model, shape = case
    cells = [
        (layer, head)
        for part in model.parts(shape)
        for layer in range(*part.layers)
        for head in range(*part.heads)
    ]
    assert sorted(cells) == [(i, j) for i in range(model.layers) for j in range(model.heads)]
    assert len(cells) == len(set(cells))
    written = [model.part(shape, rank, 0).label for rank in range(shape.tp)
               if model.writes(shape, rank)]  # fmt: skip
    assert len(written) == len(set(written))
    stage = {model.part(shape, rank, 0) for rank in range(shape.tp)}
    assert {item.label for item in stage} == set(written)


@given(divided(), divided())
def test_any_topology_finds_its_part_in_those_of_another(
    one: tuple[Model, Topology], other: tuple[Model, Topology]
) -> None:
    model, mine = one
    theirs = other[1]
    if not model.fits(theirs):
        theirs = ONE
    part = model.part(mine, mine.tp - 1, mine.pp - 1)
    found = [item for x in model.parts(theirs) if (item := x.common(part)) is not None]
    cells = sum(
        (item.layers[1] - item.layers[0]) * (item.heads[1] - item.heads[0]) for item in found
    )
    assert cells == (part.layers[1] - part.layers[0]) * (part.heads[1] - part.heads[0])


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(10, 1, [10]), (10, 2, [5, 5]), (11, 2, [6, 5]), (30, 4, [7, 8, 8, 7]),
     (7, 3, [2, 3, 2]), (8, 3, [3, 3, 2])],
)  # fmt: skip
def test_layers_are_divided_as_vllm_does(layers: int, stages: int, expected: list[int]) -> None:
    spans = [even_split(layers, stage, stages) for stage in range(stages)]
    assert [stop - first for first, stop in spans] == expected
    assert spans[0][0] == 0
    assert spans[-1][1] == layers


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be divided"):
        Model(4, 6, even_split).parts(Topology(4, 1))


@pytest.mark.parametrize("text", ["tp0pp1", "tp2", "TP2PP1", "tp2pp1 ", "", "tp02pp1"])
def test_a_topology_that_is_not_understood(text: str) -> None:
    with pytest.raises(UsageError, match="topology"):
        topology.parse(text)


def test_labels_of_parts() -> None:
    assert Part((0, 30), (0, 3), 30, 3).label == "all"
    assert Part((0, 15), (0, 3), 30, 3).label == "l0-15-h0-3"
    assert topology.parse("tp4pp2") == Topology(4, 2)


# Settings.


def test_settings_name_the_nearest_key() -> None:
    with pytest.raises(UsageError, match=r"expected quality"):
        settings.parse({"url": "/x", "qualitty": "exact"}, {})


@pytest.mark.parametrize(
    "values",
    [{}, {"url": 3}, {"url": "/x", "limit_bytes": "1GB"}, {"url": "/x", "mixed": 1},
     {"url": "/x", "limit_bytes": True}, {"url": "/x", "transport": {}},
     {"url": "/x", "quality": "best"}, {"url": "/x", "load": 1}],
)  # fmt: skip
def test_settings_that_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        settings.parse(values, {"load": str})


def test_settings_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENANT_SECRET", "s3cret")
    found = settings.parse(
        {"url": "/x", "quality": "exact", "limit_bytes": None, "load_deadline_s": 3,
         "salt_env": "TENANT_SECRET", "load": "async"},
        {"load": str, "save": bool},
    )  # fmt: skip
    assert found.options == StoreOptions(quality="exact", load_deadline_s=3)
    assert (found.salt, found.own) == (b"s3cret", {"load": "async"})


def test_an_empty_salt_is_refused_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(UsageError, match="secret is empty"):
        settings.parse({"url": "/x", "salt_env": "NOT_THERE"}, {})


# Identity.


class Text:
    """A model's configuration, as far as it is read."""

    num_hidden_layers = 2

    def __init__(self, **more: Any) -> None:
        self.more = more

    def to_dict(self) -> dict[str, Any]:
        return {"num_hidden_layers": 2, "transformers_version": "5", **self.more}


def config(model: str, text: Text, *, cache_dtype: str = "auto", **more: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model, hf_text_config=text, hf_config=SimpleNamespace(), revision=None,
            dtype="torch.bfloat16",
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        parallel_config=SimpleNamespace(decode_context_parallel_size=more.pop("dcp", 1)),
        speculative_config=more.pop("speculative_config", None),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "model"
    place.mkdir()
    (place / "model.safetensors").write_bytes(b"weights")
    return place


def test_other_weights_under_the_same_path_are_another_model(folder: Path) -> None:
    before = identities.identity_of(config(str(folder), Text()), {})
    assert identities.identity_of(config(str(folder), Text()), {}) == before
    (folder / "model.safetensors").write_bytes(b"Weights")
    after = identities.identity_of(config(str(folder), Text()), {})
    assert after.model.id == before.model.id
    assert after.model.weights_digest != before.model.weights_digest


def test_other_settings_are_another_model(folder: Path) -> None:
    plain = identities.identity_of(config(str(folder), Text()), {})
    other = identities.identity_of(config(str(folder), Text(rope_scaling={"factor": 2})), {})
    assert plain.model.revision != other.model.revision
    newer = Text()
    newer.more["transformers_version"] = "6"
    assert identities.identity_of(config(str(folder), newer), {}) == plain


def test_a_model_of_a_hub_needs_a_revision() -> None:
    with pytest.raises(UsageError, match="which weights"):
        identities.identity_of(config("acme/on-a-hub", Text()), {})
    known = identities.identity_of(config("acme/on-a-hub", Text()), {"revision": "abc"})
    assert known.model.revision is not None
    assert known.model.revision.startswith("abc+config.")


@pytest.mark.parametrize(
    ("change", "text"),
    [({"cache_dtype": "fp8"}, "cache dtype"), ({"dcp": 2}, "context parallelism"),
     ({"speculative_config": SimpleNamespace(method="eagle")}, "draft model")],
)  # fmt: skip
def test_engines_that_cannot_be_expressed_are_refused(
    folder: Path, change: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        identities.identity_of(config(str(folder), Text(), **change), {})


def test_the_digest_of_weights_is_remembered_and_survives_a_bad_memory(folder: Path) -> None:
    first = weights.folder_digest(folder)
    (memory,) = (folder.parent / "cache" / "kvformat" / "weights").iterdir()
    memory.write_text("00" * 32)
    assert weights.folder_digest(folder) == "blake3:" + "00" * 32
    memory.write_text("not a digest")
    assert weights.folder_digest(folder) == first
    assert weights.folder_digest(folder.parent / "nothing") is None


def test_salts_of_operator_and_request_make_one() -> None:
    pairs = [(b"", None), (b"x", None), (b"", ""), (b"", "x"), (b"x", "x"), (b"xx", "")]
    salts = [settings.combined_salt(salt, own) for salt, own in pairs]
    assert salts[:2] == [b"", b"x"]
    assert len(set(salts)) == len(salts)
    adapter = Reference("lora", "blake3:" + "00" * 32)
    assert identities.for_tenant(IDENTITY, Tenant(None, adapter)).adapters == (adapter,)


# Planning.


@pytest.fixture
def views(tmp_path: Path) -> Iterator[Views]:
    with open_store(str(tmp_path / "store"), StoreOptions(quality="exact")) as store:
        yield Views(store, IDENTITY, b"")


def planner(views: Views, **options: Any) -> planning.Planner:
    return planning.Planner(views, MODEL, [ONE], block_tokens=32, **{"layerwise": False, **options})


def request(ids: list[int], name: str = "r", **more: Any) -> Any:
    fields = {"prompt_embeds": None, "mm_features": [], "lora_request": None, "cache_salt": None}
    return SimpleNamespace(
        request_id=name, prompt_token_ids=ids, num_prompt_tokens=len(ids), **{**fields, **more}
    )


def step(new: dict[str, tuple[int, int, list[int]]] | None = None, **more: Any) -> Any:
    """``new`` is name to (computed, scheduled, blocks)."""
    new = new or {}
    cached = more.pop("cached", {})
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, (computed, _, blocks) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[(blocks,) for _, _, blocks in cached.values()],
            num_computed_tokens=[computed for computed, _, _ in cached.values()],
            resumed_req_ids=more.pop("resumed", set()),
        ),
        num_scheduled_tokens={name: count for name, (_, count, _) in {**new, **cached}.items()},
        preempted_req_ids=more.pop("preempted", None),
    )


def ids(count: int, seed: int = 0) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 999, count)]


def fill(views: Views, tokens: list[int]) -> None:
    kv = np.random.default_rng(1).standard_normal((2, 2, len(tokens), 1, 16)).astype(np.float16)
    views.get(Tenant(), MODEL.parts(ONE)[0]).put(kv, tokens)
    assert views.store.drain(60)


def answered(made: planning.Planner, asked: Any, computed: int = 0) -> tuple[int | None, bool]:
    """The answer, once the lookup is done."""
    made._tracked(asked)
    made._requests[asked.request_id].answer.result()
    return made.match(asked, computed)


def test_a_hit_is_loaded_once_and_the_rest_is_saved(views: Views) -> None:
    prompt = ids(1400)
    fill(views, prompt[:512])
    made = planner(views)
    asked = request(prompt)
    assert answered(made, asked) == (512, True)
    blocks = list(range(100, 144))
    made.allocated(asked, blocks, 512)
    first = made.orders(step())
    (load,) = first.loads
    assert (load.begin, load.end, load.block_ids) == (0, 512, tuple(blocks[:16]))
    assert not first.saves
    assert made.match(asked, 0) == (0, False)  # it failed: the engine asks again
    chunked = made.orders(step({"r": (512, 500, blocks[:32])}))
    assert not chunked.saves
    last = made.orders(step(cached={"r": (1012, 388, blocks[32:])}))
    (save,) = last.saves
    assert (len(save.token_ids), save.stored, save.lossy) == (1280, 512, False)
    assert save.block_ids == tuple(blocks[:40])
    assert not made.orders(step(cached={"r": (1400, 1, [])})).saves
    assert made.finished(asked)
    assert made.orders(step()).waiting == {"r"}


def test_a_prompt_that_is_stored_to_its_end_leaves_one_block_to_compute(views: Views) -> None:
    prompt = ids(512)
    fill(views, prompt)
    made = planner(views)
    assert answered(made, request(prompt)) == (480, True)
    assert answered(made, request([*prompt, 1], "longer")) == (512, True)
    assert answered(made, request(prompt, "cached"), 480) == (0, False)
    assert answered(made, request(prompt, "partly"), 64) == (416, True)


def test_a_layerwise_load_is_part_of_the_step(views: Views) -> None:
    prompt = ids(600)
    fill(views, prompt[:512])
    made = planner(views, layerwise=True)
    asked = request(prompt)
    assert answered(made, asked) == (512, False)
    made.allocated(asked, list(range(19)), 512)
    orders = made.orders(step({"r": (512, 88, list(range(19)))}))
    assert orders.loads[0].layerwise
    made.load_failed({3})
    again = made.orders(step(cached={"r": (96, 504, [])}))
    assert [item.request_id for item in again.saves] == ["r"]


def test_a_slow_lookup_is_asked_for_again(views: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planner(views)
    blocked = threading.Event()
    monkeypatch.setattr(made, "_look_up", lambda *_: blocked.wait(60))
    asked = request(ids(300))
    assert made.match(asked, 0) == (None, False)
    blocked.set()


def test_a_lookup_that_breaks_is_a_miss(views: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planner(views)

    def broken(*_: Any) -> Any:
        raise RuntimeError("bug")

    monkeypatch.setattr(made, "_look_up", broken)
    asked = request(ids(300))
    made._tracked(asked)
    with pytest.raises(RuntimeError):
        made._requests["r"].answer.result()
    assert made.match(asked, 0) == (0, False)
    assert not made.orders(step({"r": (0, 300, list(range(10)))})).saves
    assert made.counts["lookups that failed"] == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"prompt_embeds": 1}, "embeddings"), ({"mm_features": [1]}, "images"),
     ({"prompt_token_ids": None}, "embeddings"),
     ({"lora_request": SimpleNamespace(lora_name="a", lora_path="/nowhere")}, "adapter")],
)  # fmt: skip
def test_requests_that_are_more_than_token_ids_are_left_alone(
    views: Views, change: dict[str, Any], reason: str
) -> None:
    made = planner(views)
    asked = request(ids(600))
    for name, value in change.items():
        setattr(asked, name, value)
    assert made.match(asked, 0) == (0, False)
    assert not made.orders(step({"r": (0, 600, list(range(19)))})).saves
    assert not made.finished(asked)
    assert any(reason in text for text in made.counts)


def test_kv_on_top_of_lossy_kv_is_not_stored_even_behind_the_engines_own_cache(
    tmp_path: Path,
) -> None:
    prompt = ids(1400)
    with open_store(str(tmp_path / "lossy"), StoreOptions()) as store:
        views = Views(store, IDENTITY, b"")
        fill(views, prompt[:1024])
        made = planner(views)
        asked = request(prompt)
        assert answered(made, asked) == (1024, True)
        made.allocated(asked, list(range(44)), 1024)
        assert not made.orders(step({"r": (1024, 376, list(range(44)))})).saves
        behind = request(prompt[:600] + ids(500, 2), "behind")
        answered(made, behind, 576)  # found in the engine's own cache
        assert not made.orders(step({"behind": (576, 524, list(range(35)))})).saves
        fresh = request(ids(600, 3), "fresh")
        answered(made, fresh)
        assert len(made.orders(step({"fresh": (0, 600, list(range(19)))})).saves) == 1


def test_forgotten_prefixes_count_as_lossy() -> None:
    prefixes = planning.LossyPrefixes(most=2)
    prefixes.add(["a", "b"])
    assert prefixes.touches(["a"])
    assert not prefixes.touches(["c"])
    prefixes.add(["d"])
    assert prefixes.touches(["c"])
    assert not prefixes.touches([])


def test_shapes_say_what_an_artifact_of_a_part_holds() -> None:
    part = Part((2, 4), (1, 3), 4, 4)
    key, value = Shape("float16", (("key", 16), ("value", 8))).groups(part)
    assert (key.layers, key.heads, key.head_start, key.heads_total) == ((2, 3), 2, 1, 4)
    assert (key.head_dim, value.head_dim, value.role) == (16, 8, "value")
    assert json.dumps(key.to_json())
