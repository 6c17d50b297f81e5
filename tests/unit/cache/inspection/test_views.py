"""What `coppice cache` prints for people."""

from __future__ import annotations

import pytest

from coppice_cli.cache.views import show_tree


def test_a_tree_shows_its_namespace_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """It is what --namespace wants, and longer than a line of most terminals."""
    namespace = "0123456789abcdef" * 40
    root = {"node": "", "depth": 0, "first_block": 0, "num_blocks": 0, "num_pins": 0, "num_children": 1, "idle_ms": 0}
    node = {**root, "node": "ab" * 16, "depth": 1, "num_blocks": 2, "num_children": 0}
    tree = {"worker_id": "w", "namespace": namespace, "nodes": [root, node]}
    found = {"domain": "d", "trees": [tree], "moved": False, "cut_by_depth": False, "next_page_token": ""}
    show_tree(found, as_json=False)
    title, first = capsys.readouterr().out.splitlines()
    assert title == f"d on w  namespace {namespace}"
    assert "blocks 0-1" in first
