"""One stack for all tests of this folder, and the environment of the programs. Only `-m programs` runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.openai.test_tool_calls import TEMPLATE
from tests.e2e.stack import Stack
from tests.fakes.checkpoints import write_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / "build" / "programs" / "bin"  # `make test-programs` makes it
ASKED = Path(__file__).parent / "asked"
ASK_S = 280.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Their environment is made by `make test-programs` alone: no part of what is selected otherwise."""
    if "programs" in str(config.option.markexpr):
        return
    left_out = [item for item in items if item.get_closest_marker("programs")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def bin_folder() -> Path:
    if not (BIN / "python").exists():
        pytest.exit("there are no programs: make test-programs installs them", returncode=1)
    return BIN


@pytest.fixture(scope="session")
def environ() -> dict[str, str]:
    """Nothing is fetched: litellm has a list of prices with it."""
    return {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A model without sense, whose template reads tools: what is in form, is so by its grammar."""
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("programs"), "qwen2", seed=6)
    template = TEMPLATE.replace("in tools %}", "in tools or [] %}")  # some chats have none
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    with Stack(path, tmp_path_factory.mktemp("stack"), num_blocks=1024) as stack:
        yield stack
        stack.wait_at_rest()


@pytest.fixture(scope="session")
def ask(stack: Stack, bin_folder: Path, environ: dict[str, str]) -> Callable[[str], dict[str, Any]]:
    """What a file of `asked` prints, when a program has asked everything in it."""

    def run(name: str) -> dict[str, Any]:
        command = [str(bin_folder / "python"), str(ASKED / f"{name}.py"), stack.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, env=environ, check=False)
        print(done.stderr, file=sys.stderr)
        assert done.returncode == 0, done.stderr
        answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answers

    return run
