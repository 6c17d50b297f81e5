"""`litellm` as a proxy in front: programs ask it, it asks us."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.openai.test_tool_calls import TOOLS, USER, checked
from tests.e2e.stack import STOP_S, Stack
from tests.fakes.ports import free_port
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.programs
KEY = "sk-of-this-test"
OPTIONS: dict[str, Any] = {"model": "ours", "messages": [USER], "max_tokens": 900, "temperature": 1.2, "seed": 3}


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def proxy(
    stack: Stack, bin_folder: Path, environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Its URL."""
    folder, port = tmp_path_factory.mktemp("proxy"), free_port()
    parameters = {"model": "openai/tiny", "api_base": f"{stack.url}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "ours", "litellm_params": parameters}]}
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    command = [str(bin_folder / "litellm"), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env={**environ, "LITELLM_MASTER_KEY": KEY}
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: process.poll() is not None or answers(f"{url}/health/liveliness"), "the proxy")
        assert process.poll() is None, (folder / "log").read_text("utf-8")
        yield url
    finally:
        process.terminate()
        process.wait(STOP_S)


@pytest.fixture(scope="module")
def client(proxy: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_text_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {**OPTIONS, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(stream=True, stream_options=usage, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [20]


def test_calls_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {**OPTIONS, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = checked(client.chat.completions.create(**options).choices[0].message.tool_calls)
    with client.chat.completions.stream(**options) as events:
        (streamed,) = checked(events.get_final_completion().choices[0].message.tool_calls)
    assert streamed.function.arguments == whole.function.arguments


def test_completions_and_responses(client: openai.OpenAI) -> None:
    text = client.completions.create(model="ours", prompt="sorted", max_tokens=5, temperature=0)
    assert text.usage is not None
    assert text.usage.completion_tokens == 5
    answer = client.responses.create(model="ours", input="hi", max_output_tokens=9, temperature=0)
    assert answer.status in ("incomplete", "completed")
    assert answer.output_text


def test_programs_of_the_anthropic_api_go_through_it_too(proxy: str) -> None:
    with anthropic.Anthropic(base_url=proxy, api_key=KEY, max_retries=0) as client:
        answer = client.messages.create(model="ours", messages=[{"role": "user", "content": "hi"}], max_tokens=20)
    assert answer.role == "assistant"
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert 0 < answer.usage.output_tokens <= 20


def test_refusals_come_through(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="n is 999; it must be from 1 to"):
        client.chat.completions.create(**{**OPTIONS, "n": 999})
