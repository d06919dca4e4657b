"""Names and the prefix search of a store: pure functions, laws for all inputs of a size."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import kvformat
from kvformat.errors import UsageError
from kvformat.store.lookup import Grid, longest_prefix, probe_limit
from kvformat.store.names import (
    CELL_BLOCKS,
    Namespace,
    ObjectName,
    checked_part,
    key_digest,
    model_name,
    parse_path,
    part_name,
    quality_name,
    tenant_name,
)
from tests.stores import IDENTITY

GRIDS = [Grid(size, dense) for size in CELL_BLOCKS for dense in (True, False)]


def ends_stored(grid: Grid, blocks: int) -> set[int]:
    """The names that a store has after a prompt of so many blocks was put."""
    whole = blocks // grid.cell_blocks * grid.cell_blocks
    if grid.dense:
        return set(range(1, blocks + 1))
    tails, start = set(), whole
    while (end := grid.next_end(start, blocks)) > start:
        tails.add(end)
        start = end
    return set(grid.ends(whole)) | tails


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.label)
def test_the_longest_prefix_is_found_within_the_bound(grid: Grid) -> None:
    for asked in range(130):
        for stored in range(132):
            names, probes = ends_stored(grid, stored), []

            def present(end: int, names: set[int] = names, probes: list[int] = probes) -> bool:
                probes.append(end)
                return end in names

            found = longest_prefix(asked, grid, present)
            best = max((end for end in names if end <= asked), default=0)
            assert found == best
            assert len(probes) <= probe_limit(asked)
            assert len(set(probes)) == len(probes)
            assert all(1 <= end <= asked for end in probes)


@given(st.integers(1, 2**31), st.sampled_from(GRIDS), st.data())
def test_the_bound_holds_for_any_answers(blocks: int, grid: Grid, data: st.DataObject) -> None:
    """Also where holes make the answers contradict each other."""
    probes = []

    def present(end: int) -> bool:
        probes.append(end)
        return data.draw(st.booleans())

    assert 0 <= longest_prefix(blocks, grid, present) <= blocks
    assert len(probes) <= probe_limit(blocks)


def test_the_bound_is_twice_the_logarithm() -> None:
    assert [probe_limit(n) for n in (0, 1, 2, 4, 400, 1024)] == [0, 1, 2, 4, 17, 20]


@given(st.sampled_from(GRIDS), st.integers(1, 3000))
def test_extents_of_a_prefix_cover_it(grid: Grid, end: int) -> None:
    reached = 0
    for found in grid.ends(end):
        assert grid.cell_of(found) == reached
        assert found - reached <= grid.cell_blocks
        reached = found
    assert reached == end


@given(st.sampled_from(GRIDS), st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_extents_of_a_growing_prompt_follow_one_another(grid: Grid, steps: list[int]) -> None:
    """Nothing is stored twice, and less than half a cell is left for the next time."""
    stored = total = 0
    for step in steps:
        total += step
        while (end := grid.next_end(stored, total)) > stored:
            assert grid.cell_of(end) == grid.cell_of(stored + 1)
            assert end in grid.names_in_cell(end)
            stored = end
        assert stored == total or not grid.dense
        cell = grid.cell_of(total)
        assert stored >= cell
        assert 2 * (stored - cell) >= total - cell


NAMESPACES = st.builds(
    Namespace,
    tenant=st.just("shared") | st.from_regex(r"t-[0-9a-f]{32}", fullmatch=True),
    model=st.from_regex(r"[a-z0-9]{1,20}-[0-9a-f]{32}", fullmatch=True),
    quality=st.sampled_from(["exact", "near-lossless", "exact.mixed", "small.mixed"]),
    grid=st.sampled_from([grid.label for grid in GRIDS] + ["k"]),
    part=st.sampled_from(["all", "l0-16-h0-4"]),
    version=st.sampled_from(["0.9", "1.0", "0.10"]),
)
NAMES = st.builds(
    ObjectName,
    NAMESPACES,
    st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    st.integers(0, 2**30),
    st.sampled_from(["", "hevc"]),
)


@given(NAMES)
def test_a_path_leads_back_to_its_name(name: ObjectName) -> None:
    assert parse_path(name.path) == name
    assert re.fullmatch(r"[a-z0-9./-]+", name.path)


@given(NAMES, st.data())
def test_a_changed_path_is_another_name_or_none(name: ObjectName, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(name.path) - 1))
    changed = name.path[:place] + data.draw(st.characters()) + name.path[place + 1 :]
    if changed != name.path:
        assert parse_path(changed) != name


@pytest.mark.parametrize(
    "path",
    ["", "a.kvf", "../x", ".gc.lock", "shared/m/v0.9/exact.g4/00/" + "0" * 64 + "-1.kvf.tmp",
     "shared/m/v0.9/exact.g4/01/" + "0" * 64 + "-1.kvf",
     "shared/m/v0.9/exact.g3/00/" + "0" * 64 + "-1.kvf"],
)  # fmt: skip
def test_foreign_paths_are_nobodys(path: str) -> None:
    assert parse_path(path) is None


def test_another_identity_is_another_model() -> None:
    def name(**changes: object) -> str:
        fields = {"model": IDENTITY.model, "layers_total": 2, "cache_dtype": "float16", **changes}
        return model_name(kvformat.Identity(**fields))  # type: ignore[arg-type]

    others = [
        name(model=kvformat.Model("acme/small", "2")),
        name(model=kvformat.Model("other/small", "1")),
        name(cache_dtype="bfloat16"),
        name(component="draft"),
        name(adapters=(kvformat.Reference("lora"),)),
        name(rotation=kvformat.Rotation("hadamard")),
    ]
    assert name() == model_name(IDENTITY)
    assert len({name(), *others}) == 1 + len(others)
    assert name().startswith("small-")


def test_keys_of_an_engine_share_a_namespace_and_differ_by_tenant() -> None:
    keys = [kvformat.EngineKey("lmcache", "builtin", key) for key in ("a", "b")]
    models = {
        model_name(
            kvformat.Identity(IDENTITY.model, 2, "float16", kind="engine_key", engine_key=key)
        )
        for key in keys
    }
    assert len(models) == 1
    assert len({key_digest(key, salt) for key in keys for salt in (b"", b"x")}) == 4


def test_tenants_are_told_apart_without_their_salts() -> None:
    assert tenant_name(b"") == "shared"
    names = {tenant_name(salt) for salt in (b"secret", b"secret2")}
    assert len(names) == 2
    assert all("secret" not in name and len(name) == 34 for name in names)


def test_bad_labels_are_refused() -> None:
    assert part_name((0, 16), (0, 4)) == checked_part("l0-16-h0-4")
    for part in ("", "..", "A", "a/b", "x" * 65):
        with pytest.raises(UsageError):
            checked_part(part)
    with pytest.raises(UsageError):
        quality_name("best", mixed=False)


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=40))
def test_any_model_id_makes_a_path(model: str) -> None:
    identity = kvformat.Identity(kvformat.Model(model), 2, "float16")
    name = ObjectName(Namespace("shared", model_name(identity), "exact", "g4"), "0" * 64, 1)
    assert parse_path(name.path) == name
