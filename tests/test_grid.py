"""The cells of section 7.3, listed one by one as the text says and sorted by its keys."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvformat import Extent, Group
from kvformat.groups import GroupSegmentation, Segmentation, count_cells, make_grid
from tests.requirements import covers

Cells = list[tuple[Any, tuple[int, ...]]]


def cells_of(index: int, group: Group, cut: GroupSegmentation, step: int, count: int) -> Cells:
    """(sort key, coordinates) of the cells of one group in token-major order."""
    if group.tokens.kind == "state":
        blocks = [(-(-count // step), 0, 1)]
    else:
        begin = group.tokens.held_start
        blocks = [
            (b, max(step * b, begin), min(step * (b + 1), count))
            for b in range(-(-count // step))
            if max(step * b, begin) < min(step * (b + 1), count)
        ]
    result: Cells = []
    for b, start, stop in blocks:
        for layer in range(0, len(group.layers), cut.layers):
            layers = min(layer + cut.layers, len(group.layers)) - layer
            for j, head in enumerate(range(0, group.heads, cut.heads)):
                heads = min(head + cut.heads, group.heads) - head
                key = (b, group.layers[layer], index, j)
                result.append((key, (index, layer, layers, head, heads, start, stop - start)))
    return result


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[Group, ...], Segmentation, int]:
    count = draw(st.sampled_from([0, 1, 5, 8, 9, 20]))
    groups, cuts = [], []
    for index in range(draw(st.integers(1, 4))):
        layers = tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=7))))
        heads = draw(st.integers(1, 5))
        extent = draw(
            st.sampled_from([Extent(), Extent("state", shape=(4,))])
            | st.integers(0, count).map(lambda n: Extent("window", n, count))
        )
        groups.append(Group(f"g{index}", "key", "float16", layers, heads, 4, heads, tokens=extent))
        cuts.append(GroupSegmentation(draw(st.integers(1, 3)), draw(st.integers(1, heads))))
    return tuple(groups), Segmentation(draw(st.sampled_from([1, 3, 4, 100])), tuple(cuts)), count


@covers("SEG-1", "SEG-2", "SEG-3", "TAB-2")
@pytest.mark.parametrize("order", ["token-major", "layer-major"])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=grids())
def test_the_grid_is_that_of_the_text(
    order: str, case: tuple[tuple[Group, ...], Segmentation, int]
) -> None:
    groups, cut, count = case
    cut = Segmentation(cut.tokens, cut.groups, order)
    cells = [
        cell
        for index, group in enumerate(groups)
        for cell in cells_of(index, group, cut.groups[index], cut.tokens, count)
    ]
    if order == "layer-major":
        cells = [((layer, index, j, b), cell) for (b, layer, index, j), cell in cells]
    found = [tuple(int(value) for value in row) for row in make_grid(groups, cut, count).fields]
    assert found == [cell for _, cell in sorted(cells)]
    assert count_cells(groups, cut, count) == len(found)
