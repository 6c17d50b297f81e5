"""Of batches of seeds, a run of the long tests takes a share, which the committed tree draws: other trees, other seeds.
`LONG_SHARE=1` takes them all, `LONG_SHARE=8` one in eight.

A batch is a test with the marker `batch`. Of each test function at least one is taken, and all where tests are asked
for by id, by `-k` or as the last ones that failed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ONE_IN = "LONG_SHARE"
DEFAULT_ONE_IN = 4
# Found once, and inherited by test processes: they must agree, whatever is committed meanwhile.
TREE = "LONG_SHARE_OF_TREE"


def one_in() -> int:
    given = os.environ.get(ONE_IN, str(DEFAULT_ONE_IN))
    if not given.isdecimal() or int(given) < 1:
        raise pytest.UsageError(f"{ONE_IN}={given}: give a whole number from 1 up; 1 runs all batches of seeds")
    return int(given)


def left_out(batches: Iterable[str], tree: str, one_in: int) -> set[str]:
    """Of ids of batches, those that this tree did not draw."""
    by_function = defaultdict(list)
    for batch in batches:
        by_function[batch.partition("[")[0]].append(batch)
    left: set[str] = set()
    for several in by_function.values():
        several.sort(key=lambda batch: hashlib.blake2b(f"{tree} {batch}".encode(), digest_size=8).digest())
        left.update(several[-(-len(several) // one_in) :])
    return left


def tree_of(root: Path) -> str:
    """What is committed; where git does not say it, always the same."""
    command = ["git", "rev-parse", "HEAD^{tree}"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


class Shares:
    """A plugin that comes last: what it sees is what would run."""

    def __init__(self, config: pytest.Config) -> None:
        options = config.option
        self._are_chosen = bool(options.keyword or getattr(options, "lf", False)) or any("::" in a for a in config.args)
        os.environ.setdefault(TREE, tree_of(config.rootpath))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        batches = [item for item in items if item.get_closest_marker("batch")]
        if not batches or self._are_chosen:
            return
        left = left_out([item.nodeid for item in batches], os.environ[TREE], one_in())
        config.hook.pytest_deselected(items=[item for item in batches if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]
