"""Of batches of seeds, a run of the long tests takes a share: another one for each tree, so that each next one adds to
what was run before. `LONG_SHARE=1` takes them all, `LONG_SHARE=8` one in eight.

A batch is a test with the marker `batch`. Of each test function at least one is taken.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ONE_IN = "LONG_SHARE"
DEFAULT_ONE_IN = 4


def one_in() -> int:
    given = os.environ.get(ONE_IN, str(DEFAULT_ONE_IN))
    if not given.isdecimal() or int(given) < 1:
        raise pytest.UsageError(f"{ONE_IN}={given}: give a whole number from 1 up; 1 runs all batches of seeds")
    return int(given)


def left_out(batches: Iterable[str], tree: str, one_in: int) -> set[str]:
    """Of ids of batches, those that another tree runs."""
    by_function = defaultdict(list)
    for batch in batches:
        by_function[batch.partition("[")[0]].append(batch)
    left: set[str] = set()
    for several in by_function.values():
        several.sort(key=lambda batch: hashlib.blake2b(f"{tree} {batch}".encode(), digest_size=8).digest())
        left.update(several[-(-len(several) // one_in) :])
    return left


@cache
def tree_of(root: Path) -> str:
    """What is committed; where there is no git, always the same."""
    command = ["git", "rev-parse", "HEAD^{tree}"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return ""
    return done.stdout.strip()


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    batches = [item for item in items if item.get_closest_marker("batch")]
    if not batches:
        return
    left = left_out([item.nodeid for item in batches], tree_of(config.rootpath), one_in())
    config.hook.pytest_deselected(items=[item for item in batches if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]
