"""What the tests of crashes share: a small checkpoint, and what it must answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.oracle import Oracle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen2", seed=6)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)
