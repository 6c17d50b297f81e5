"""What an operator sees of a running stack: chats in the cache, a request's waterfall, who runs and holds memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from typer.testing import CliRunner

from coppice_cli.app import app
from coppice_cli.cache.chats import chat_tokens
from tests.e2e.up.test_up import BLOCK, Up, ctrl_c_leaves_nothing_running, started
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what still runs")
DOMAIN = "tenant/default"
SYSTEM = {
    "role": "system",
    "content": "You answer questions about the standard library of Python. Answer in a sentence.",
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with started(tmp_path_factory.mktemp("up"), "--threads", "1") as up:
        yield up
        ctrl_c_leaves_nothing_running(up)


def said(*arguments: str) -> str:
    ended = CliRunner().invoke(app, list(arguments), env={"COPPICE_ADMIN_URL": None, "COPPICE_REQUESTS_URL": None})
    assert ended.exit_code == 0, (ended.output, ended.exception)
    return ended.output


def chat(up: Up, question: str) -> Any:
    messages: Any = [SYSTEM, {"role": "user", "content": question}]
    with OpenAI(base_url=up.find(r"OpenAI API +(\S+)"), api_key="none", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(model="coppice-demo", messages=messages, max_tokens=4, temperature=0)
    return answer, messages


def test_explain_finds_what_a_chat_cached_and_pin_holds_its_beginning(up: Up, tmp_path: Path) -> None:
    admin = up.find(r"cache admin +(\S+)")
    answer, messages = chat(up, "What does sorted do?")
    whole, begun = tmp_path / "chat.json", tmp_path / "system.json"
    whole.write_text(json.dumps({"model": "coppice-demo", "messages": messages, "max_tokens": 4}))
    begun.write_text(json.dumps([SYSTEM]))
    count = answer.usage.prompt_tokens
    found = said("cache", "explain", DOMAIN, "--messages", str(whole), "--url", admin)
    assert f"worker-0: {count // BLOCK * BLOCK} of {count} tokens are cached" in found
    common = len(chat_tokens(begun, "", whole=False))
    assert common < len(chat_tokens(begun, "", whole=True)), "an answer's beginning is not in common"
    pinned = said("cache", "pin", "system", DOMAIN, "--messages", str(begun), "--url", admin)
    assert pinned == f"Pinned system: {common // BLOCK * BLOCK} of {common} tokens are held now on 1 worker.\n"
    assert "1st start of the cache, 1 session, " in said("cache", "stats", "--url", admin)
    assert said("cache", "unpin", "system", "--url", admin)


def test_trace_shows_the_life_of_a_chat(up: Up) -> None:
    operators = up.find(r"requests +(\S+)")
    answer, _ = chat(up, "What does reversed do?")

    def is_kept() -> bool:
        ended = CliRunner().invoke(app, ["trace", answer.id, "--url", operators])
        return ended.exit_code == 0

    wait_for(is_kept, "the record")
    lines = said("trace", answer.id, "--url", operators).splitlines()
    names = [line.split("|")[0].split("ms")[-1].strip() for line in lines[1:] if "|" in line]
    assert names[0] == names[-1] == "front door"
    assert [name for name in names if name in ("acquire", "prefill", "decode")] == ["acquire", "prefill", "decode"]
    assert any(name.startswith("chunk of ") for name in names)


def test_top_shows_the_tenant_and_the_worker(up: Up) -> None:
    chat(up, "What does list do?")
    urls = ["--cache-url", up.find(r"cache admin +(\S+)"), "--scheduler-url", up.find(r"requests +(\S+)")]
    worker = up.find(r"metrics +\S+ \S+ (\S+)/metrics")
    frame = said("top", "--once", "--interval", "0.2", *urls, "--worker", f"worker-0={worker}")
    (tenant,) = (line.split() for line in frame.splitlines() if line.startswith("default"))
    assert int(tenant[7]) > 0, "blocks are held"
    assert "ms" in tenant
    (row,) = (line.split() for line in frame.splitlines() if line.startswith("worker-0"))
    assert row[1] == "open"
    assert row[-1] != "-", "its steps are known"
