"""A model without sense, and `coppice.LLM` over it; each module has its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice import LLM
from tests.fakes.checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("offline") / "tiny")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, num_blocks=512, threads=1)
