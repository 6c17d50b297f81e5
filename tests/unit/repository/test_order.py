"""The order of the tests: random, and again the same by its seed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import LONG_FILES, ORDER_SEED, pytest_collection_modifyitems

NAMES = [f"tests/{file}.py::test_{number}" for file in "abcde" for number in range(5)]
LONG = "tests/simulation/test_seeds.py::test_one"


@pytest.fixture
def order_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def order_of(names: list[str], seed: int) -> list[str]:
        monkeypatch.setenv(ORDER_SEED, str(seed))
        items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
        pytest_collection_modifyitems(items)
        return [item.nodeid for item in items]

    return order_of


def test_each_seed_has_an_order_and_keeps_files_together(order_of: Any) -> None:
    orders = {tuple(order_of(NAMES, seed)) for seed in range(20)}
    assert len(orders) == 20
    for order in orders:
        files = [name.partition("::")[0] for name in order]
        assert sum(file != before for file, before in zip(files[1:], files, strict=False)) == 4
    assert len({tuple(name for name in order if "/a.py" in name) for order in orders}) > 10
    assert len({order[0].partition("::")[0] for order in orders}) > 2


def test_the_order_depends_on_the_seed_alone(order_of: Any) -> None:
    order = order_of(NAMES, 5)
    assert order_of(NAMES[::-1], 5) == order
    assert order_of(NAMES[::3], 5) == [name for name in order if name in NAMES[::3]]


def test_long_files_begin_first_and_exist(order_of: Any) -> None:
    assert {order_of([*NAMES, LONG], seed)[0] for seed in range(20)} == {LONG}
    assert [file for file in LONG_FILES if not (Path(__file__).parents[3] / file).exists()] == []
