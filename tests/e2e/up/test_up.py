"""`coppice up` as a newcomer uses it: real services, real clients, Ctrl-C."""

from __future__ import annotations

import json
import os
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
from openai import OpenAI

from tests.fakes.ports import FREE_PORTS_OF_UP
from tests.fakes.waiting import WAIT_S, wait_for

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
BLOCK = 16


class Up:
    """A running `coppice up` of the demo model."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output

    def output(self) -> str:
        return self._output.read_text()

    def find(self, pattern: str) -> str:
        found = re.search(pattern, self.output())
        assert found, self.output()
        return found[1]

    def socket_dir(self) -> Path:
        return Path(self.find(r"sessions +unix:(\S+)")).parent

    def stats(self) -> Any:
        with urllib.request.urlopen(self.find(r"cache admin +(\S+)") + "/v1/stats", timeout=60) as answer:
            return json.load(answer)


@contextmanager
def started(folder: Path, *options: str) -> Iterator[Up]:
    output = folder / "output"
    command = [sys.executable, "-m", "coppice_cli", "up", "--port=0", *FREE_PORTS_OF_UP, "--dtype=float32", *options]
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "--log-dir", str(folder)], stdout=sink, stderr=subprocess.STDOUT, env=ENVIRONMENT
        )
    running = Up(process, output)
    wait_for(lambda: "development setup" in running.output() or process.poll() is not None, "coppice up")
    assert process.poll() is None, running.output()
    try:
        yield running
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(WAIT_S)


def ctrl_c_leaves_nothing_running(up: Up) -> None:
    def leases() -> int:
        return sum(worker["leases"] for worker in up.stats()["workers"])

    wait_for(lambda: leases() == 0, "all leases released")
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(WAIT_S) == 0, up.output()
    assert up.output().rstrip().endswith("stopped")
    folder = up.find(r"logs +(\S+)")
    assert not up.socket_dir().exists()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert folder not in entry.read_bytes().decode(errors="replace"), entry
        except (FileNotFoundError, ProcessLookupError):
            continue


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Whatever was asked of it, a Ctrl-C ends it in order."""
    with started(tmp_path_factory.mktemp("up"), "--threads", "1") as up:
        yield up
        ctrl_c_leaves_nothing_running(up)


@pytest.fixture(scope="module")
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.find(r"OpenAI API +(\S+)"), api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_chat_and_the_same_chat_again_from_the_cache(client: OpenAI) -> None:
    question: Any = [{"role": "user", "content": "What does collections.OrderedDict.move_to_end do? " * 3}]
    first = client.chat.completions.create(model="coppice-demo", messages=question, max_tokens=24, temperature=0)
    again = client.chat.completions.create(model="coppice-demo", messages=question, max_tokens=24, temperature=0)
    assert first.choices[0].message.content
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached, end = again.usage.prompt_tokens_details.cached_tokens, again.usage.prompt_tokens - 1
    assert cached % BLOCK, "what the prompt has of a block that the answer filled counts too"
    assert cached == end


def test_a_streamed_completion_is_the_same_text(client: OpenAI) -> None:
    arguments: Any = {"model": "coppice-demo", "prompt": "def sorted(iterable):", "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**arguments).choices[0].text
    # How many pieces come depends on how busy the machine is.
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**arguments, stream=True)) == whole


def test_the_printed_curl_works(up: Up) -> None:
    body = json.loads(up.find(r"-d '(\{.*\})'"))
    url = up.find(r"curl -N (\S+)")
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read().rstrip().endswith(b"data: [DONE]")


def test_bench_smoke_prints_one_json_line(up: Up) -> None:
    url = up.find(r"OpenAI API +(\S+)/v1")
    command = [sys.executable, "-m", "coppice_cli", "bench", "smoke", "--json", "--url", url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    result = json.loads(line)
    for name in ("prefill_tok_s", "decode_tok_s", "ttft_cold_ms_p50", "ttft_warm_ms_p50"):
        assert result[name] > 0, name
    assert result["cached_share"] > 0.8


@pytest.mark.long
def test_a_worker_of_two_ranks_answers_and_ends_as_another(tmp_path: Path) -> None:
    with started(tmp_path, "--tensor-parallel", "2") as up:
        with OpenAI(base_url=up.find(r"OpenAI API +(\S+)"), api_key="none", max_retries=0, timeout=60) as client:
            test_a_chat_and_the_same_chat_again_from_the_cache(client)
        ctrl_c_leaves_nothing_running(up)
    assert "Traceback" not in (tmp_path / "worker-0.log").read_text()
    assert "rank 1: loading" in (tmp_path / "worker-0.log").read_text()


@pytest.mark.wide
def test_a_truncated_checkpoint_is_named_and_ends_with_a_failure(tmp_path: Path) -> None:
    import coppice

    demo = Path(coppice.__file__).parent / "demo_model"
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in demo.iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    command = [
        sys.executable,
        "-m",
        "coppice_cli",
        "up",
        "--port=0",
        *FREE_PORTS_OF_UP,
        "--model",
        str(broken),
        "--log-dir",
        str(tmp_path),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
    assert ended.returncode == 1
    assert "model.safetensors" in ended.stdout
    assert "worker-0 died while it started" in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
