"""Nothing that this user has measured or stored reaches a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_rates_of_this_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``track="auto"`` finds no measured rates, unless a test writes some here."""
    before = os.environ.get("KVFORMAT_RATES")
    place = tmp_path_factory.mktemp("rates") / "rates.json"
    os.environ["KVFORMAT_RATES"] = str(place)
    yield place
    if before is None:
        del os.environ["KVFORMAT_RATES"]
    else:
        os.environ["KVFORMAT_RATES"] = before
