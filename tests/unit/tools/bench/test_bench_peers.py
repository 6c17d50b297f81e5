"""`benchmarks/peers/index.py` where no peer is installed, and the imports that leave an engine behind."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks.peers.index import measure, ratios
from benchmarks.peers.index_imports import PeerMissing, import_alone


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A peer of two modules that count, and an engine around them that cannot be imported."""
    package = tmp_path / "peerlib" / "core"
    package.mkdir(parents=True)
    (tmp_path / "peerlib" / "__init__.py").write_text("raise RuntimeError('the engine starts')\n")
    (package / "__init__.py").write_text("raise RuntimeError('the engine starts')\n")
    (package / "tree.py").write_text(
        "from not_installed_here import helper\n"
        "from peerlib.engine.heavy import Base, decorated\n"
        "from peerlib.core.node import Node\n"
        "class Tree(Base):\n"
        "    kind: Base | None = None\n"
        "    @decorated\n"
        "    def root(self): return Node(1)\n"
    )
    (package / "node.py").write_text("class Node:\n    def __init__(self, value): self.value = value\n")
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("peerlib", "not_installed_here"):
            del sys.modules[name]


def test_named_modules_are_real_and_the_engine_is_a_stand_in(site: Path) -> None:
    found = import_alone(site, "peerlib.core.tree", "peerlib.core.node")
    assert found[0].Tree().root().value == 1
    assert found[1].__file__ == str(site / "peerlib" / "core" / "node.py")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("another_that_is_not_installed")


def test_a_peer_that_is_missing_or_changed_is_named(site: Path) -> None:
    with pytest.raises(PeerMissing, match="no folder vllm"):
        import_alone(site, "vllm.v1.core.block_pool")
    with pytest.raises(PeerMissing, match=r"peerlib\.core\.gone"):
        import_alone(site, "peerlib.core.gone")


def test_ours_is_measured_when_no_peer_is_there(tmp_path: Path) -> None:
    report = measure(tmp_path, quick=True)
    assert report["vs"] == {}
    assert set(report["left_out"]) == {"sglang_python", "sglang_rust", "vllm_block_pool", "dynamo_radix_tree"}
    assert report["lookup_us"]["coppice"] > 0
    assert report["store_us"]["coppice"] > report["store_us"]["coppice_seals"] > 0
    assert list(report["evict_us"]) == ["coppice"]


def test_ratios_are_their_time_over_ours() -> None:
    lookup = {"coppice": 2.0, "coppice_acquire_release": 9.0, "theirs": 10.0}
    store = {"coppice": 5.0, "coppice_seals": 3.0, "theirs": 4.0}
    table = ratios(lookup, store, {"coppice": {1_000: 1.0}, "theirs": {1_000: 7.0}})
    assert table == {"theirs": {"lookup": 5.0, "store": 2.0, "store_with_seals": 0.8, "evict_1000": 7.0}}
