"""How tests are collected: in an order that is random, and again the same by its seed; with ids that are the same in
every process, as xdist runs nothing where its processes collect different tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import LONG_FILES, ORDER_SEED, check_ids, pytest_collection_modifyitems
from tests.shares import ONE_IN, TREE, left_out, one_in

ROOT = Path(__file__).parents[3]
SUITE = """
import pytest

class TestSome:
    @pytest.mark.parametrize("value", [object()], ids=repr)
    def test_one(self, value): pass

def test_two(): pass
"""
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
    assert [file for file in LONG_FILES if not (ROOT / file).exists()] == []


def items(*cases: str) -> list[Any]:
    return [SimpleNamespace(nodeid=f"tests/a.py::test_one[{case}]") for case in cases]


@pytest.mark.parametrize("shown", ["<object object at {}>", "x-<function f at {}>", "<bound method f of <A at {}>>"])
def test_the_address_of_an_object_is_found(shown: str) -> None:
    name = shown.format(hex(id(shown)))
    with pytest.raises(pytest.Collector.CollectError) as refused:
        check_ids(items("5", name))
    assert str(refused.value).startswith(f"tests/a.py::test_one[{name}] has the address of an object in its id")


def test_other_numbers_and_words_are_taken() -> None:
    check_ids(items("0x10", "an object at the end", "at 0", "object at", "0xab at 7"))


@pytest.mark.parametrize("processes", [("-p", "no:xdist"), ("-p", "xdist", "-n", "2")], ids=["one", "two"])
def test_a_run_is_refused_by_the_name_of_the_test(processes: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_pycollect_makeitem\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--disable-plugin-autoload", *processes, "--rootdir", ".", "test_suite.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode not in (0, 5), ended.stdout
    assert "test_suite.py::TestSome::test_one[<object object at 0x" in ended.stdout
    assert "in its id, which differs in each process" in ended.stdout
    assert "Different tests were collected" not in ended.stdout


def test_each_tree_draws_batches_of_seeds() -> None:
    batches = [f"tests/{file}.py::test_many[{number}]" for file in "ab" for number in range(10)]
    shares = [set(batches) - left_out(batches, f"tree {number}", 4) for number in range(40)]
    assert {len(share) for share in shares} == {6}, "a quarter of ten, rounded up, of each function"
    assert set().union(*shares) == set(batches)
    assert left_out(batches, "tree 0", 4) == left_out(batches[::-1], "tree 0", 4)
    assert left_out(batches, "tree 0", 1) == set()
    assert left_out(batches[:1], "tree 0", 100) == set(), "a function is never left out whole"


@pytest.mark.parametrize("given", ["0", "half", ""])
def test_a_share_is_one_in_so_many(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONE_IN, given)
    with pytest.raises(pytest.UsageError, match=f"LONG_SHARE={given}: give a whole number"):
        one_in()


@pytest.mark.parametrize(
    ("arguments", "num_taken"),
    [
        (["test_some.py"], 2),
        (["test_some.py", "-k", "test_many"], 8),
        (["test_some.py::test_many[3]", "test_some.py::test_many[5]"], 2),
        (["test_some.py", "-m", "not batch"], 0),
    ],
)
def test_a_run_takes_a_share_unless_tests_are_asked_for(arguments: list[str], num_taken: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.shares import Shares\ndef pytest_configure(config): config.pluginmanager.register(Shares(config))\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = batch: of seeds\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.batch\n@pytest.mark.parametrize('n', range(8))\ndef test_many(n): pass\n"
        "def test_one(): pass\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in (ONE_IN, TREE)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-c", "pytest.ini", *arguments]
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("::test_many[") == num_taken
