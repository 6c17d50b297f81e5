"""What the tests of the whole stack share: a small checkpoint, what it must answer, a stack that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import Stack
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.oracle import Oracle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen2", seed=6)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(checkpoint, tmp_path_factory.mktemp("stack"), num_blocks=256) as stack:
        yield stack
