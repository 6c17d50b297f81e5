"""What `coppice cache` prints for people."""

from __future__ import annotations

import pytest

from coppice_cli.cache.views import show_statement, show_tree


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


def test_a_statement_says_hours_once_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    hour = 3_600 * 10**9
    parts = ("leased", "cached", "draining", "guaranteed", "borrowed", "lent")
    domain = {"domain": "", "held_block_ns": 3 * hour, "evicted_blocks": 7, "displaced_blocks": 5}
    domain |= {f"{part}_block_ns": number * hour for number, part in enumerate(parts)}
    sums = {"pool_block_ns": 24 * hour, "free_block_ns": 20 * hour, "unclaimed_block_ns": hour}
    pool = {"tier": "host", "num_epochs": 2, "domains": [domain], **sums}
    show_statement({"cache_epoch": 3, "elapsed_ns": 3 * hour, "totals": [pool]}, as_json=False)
    said, _, title, _, *rows = capsys.readouterr().out.splitlines()
    assert said == "3rd start of the cache, for 3 h, in block-hours"
    assert title == "host blocks of 2 worker epochs"
    assert [row.split() for row in rows] == [
        ["(others)", "12.5%", "3.0", "0", "1.0", "2.0", "3.0", "4.0", "5.0", "7", "5"],
        ["(unclaimed)", "4.2%", "1.0"],
        ["(free)", "83.3%", "20.0"],
        ["(all)", "100.0%", "24.0"],
    ]
