"""`coppice up` with a checkpoint of each newer family: chats, and completions that `transformers` would give."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cache.cached_tokens import cached_tokens
from tests.fakes.checkpoints import Family, write_tiny_checkpoint
from tests.fakes.oracle import Oracle
from tests.fakes.ports import FREE_PORTS_OF_UP
from tests.fakes.waiting import WAIT_S, wait_for

NUM_TOKENS = 16
LENGTHS = (1, 23, 24, 25, 100, 300)  # the windows are of 24


@contextmanager
def serving(checkpoint: Path, folder: Path) -> Iterator[str]:
    """The base URL of a `coppice up`."""
    output = folder / "output"
    command = [sys.executable, "-m", "coppice_cli", "up", "--port=0", *FREE_PORTS_OF_UP, "--threads=1"]
    command += ["--dtype=float32"]
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [*command, f"--model={checkpoint}", f"--log-dir={folder}"],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )
    try:
        wait_for(lambda: "development setup" in output.read_text() or process.poll() is not None, "coppice up")
        found = re.search(r"OpenAI API +(\S+)", output.read_text())
        assert found, output.read_text()
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0, output.read_text()


def post(url: str, **body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("mistral", marks=pytest.mark.long),
        pytest.param("qwen3", marks=pytest.mark.long),
        pytest.param("gemma2", marks=pytest.mark.wide),
    ],
)
def test_a_family_is_served(tmp_path: Path, family: Family) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / family, family, seed=4)
    oracle = Oracle(checkpoint)
    rng = random.Random(family)
    with serving(checkpoint, tmp_path) as url:
        chat = post(
            f"{url}/chat/completions", model=family, max_tokens=8, temperature=0, ignore_eos=True,
            messages=[{"role": "user", "content": "Hello!" * 9}],
        )  # fmt: skip
        assert chat["usage"]["completion_tokens"] == 8
        for length in LENGTHS:
            prompt = [rng.randrange(256) for _ in range(length)]
            for cached in (0, cached_tokens(length - 1, num_written=length + NUM_TOKENS - 1)):
                answer = post(
                    f"{url}/completions", model=family, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0,
                    ignore_eos=True, return_token_ids=True,
                )  # fmt: skip
                oracle.check(prompt, answer["choices"][0]["token_ids"])
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
