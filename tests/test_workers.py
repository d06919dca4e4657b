"""Products stay on the thread that asks for them, whichever thread came first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from kvformat.workers import single_threaded_blas

Act = Callable[[], object]
USUAL = 3


def blas_threads() -> set[int]:
    libraries = ThreadpoolController().select(user_api="blas").info()
    return {library["num_threads"] for library in libraries}


@pytest.fixture
def threads() -> Iterator[list[ThreadPoolExecutor]]:
    """Two threads; BLAS would use three, as set by one that is gone."""
    assert np.ones((2, 2)).dot(np.ones((2, 2))).sum() == 8  # BLAS is loaded
    before = blas_threads()
    assert len(before) == 1

    def limit(count: int) -> None:
        with ThreadPoolExecutor(1) as other:
            other.submit(ThreadpoolController().limit, limits=count, user_api="blas").result()

    limit(USUAL)
    pools = [ThreadPoolExecutor(1) for _ in range(2)]
    yield pools
    for pool in pools:
        pool.shutdown()
    limit(before.pop())


ENTER, LEAVE = single_threaded_blas.__enter__, single_threaded_blas.__exit__


@pytest.mark.parametrize(
    "turns",
    ["aAaA", "aAbB", "abAB", "abBA", "aabBAA", "abAaABbB"],
)
def test_the_limit_holds_while_anyone_is_inside(
    threads: list[ThreadPoolExecutor], turns: str
) -> None:
    """Small letters enter, capitals leave, on the first or second thread."""
    assert blas_threads() == {USUAL}
    inside = 0
    for turn in turns:
        act: Act = ENTER if turn.islower() else LEAVE
        threads["ab".index(turn.lower())].submit(act).result()
        inside += 1 if turn.islower() else -1
        assert blas_threads() == {1 if inside else USUAL}, turn
    assert not inside
