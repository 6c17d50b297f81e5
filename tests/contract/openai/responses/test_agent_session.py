"""A coding agent's session over `/v1/responses`; the engine says what a model would have said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from coppice.messages.reuse import Reuse
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.edge.frontend.admission import call_kind_of
from coppice_scheduler.edge.frontend.generation_spec import Endpoint, GenerationSpec
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.text.tools.tool import ToolUse
from tests.fakes.api.engine import Script, unpack
from tests.fakes.api.responses_agent import CALL, MESSAGE, REASONING, Agent, items_of, message, output
from tests.fakes.api.rest import DEMO, MODEL, Served, serving

CONTEXT = 8192
# What it writes of an answer that is sent back is what the model wrote.
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}<tool>{{ t.function | tojson }}</tool>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first else '' }}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}[assistant]"
)
OPENING = [
    message("developer", "<permissions>The sandbox lets you write here.</permissions>", "Ask before you delete."),
    message("user", "<environment_context><cwd>/src/app</cwd><shell>bash</shell></environment_context>"),
    message("user", "Mend the test."),
]


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


# What the model says in each turn, and the items that this is.
SAID: list[tuple[str, list[str]]] = [
    (thought("The test first.") + call("shell", command=["cat", "tests/test_a.py"]), [REASONING, CALL]),
    (
        thought("Two steps.") + "I have a plan.\n" + call("update_plan", plan=[{"step": "Mend", "status": "pending"}]),
        [REASONING, MESSAGE, CALL],
    ),
    (call("shell", command=["pytest", "-q"], timeout_ms=120000), [CALL]),
    ("The test is mended.", [MESSAGE]),
    (thought("They want more.") + "Nothing is left.", [REASONING, MESSAGE]),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(checkpoint=replace(load_checkpoint_text(DEMO), chat_template=TEMPLATE), context=CONTEXT) as served:
        yield served


def agent_of(served: Served, **options: Any) -> Agent:
    return Agent(lambda body, headers: served.post(body, "/v1/responses", headers=headers), MODEL, OPENING, **options)


def prompt_of(served: Served) -> str:
    return str(served.checkpoint.raw.decode(unpack(served.engine.requests[-1].tokens), skip_special_tokens=False))


def _said(script: Script, request: Request) -> Script:
    return script


@pytest.mark.parametrize("keeps_all", [False, True], ids=["what it needs", "all that came"])
@pytest.mark.parametrize("encrypted", [{"encrypted_content": None}, {}], ids=["null", "absent"])
def test_a_session_runs_through_and_each_prompt_begins_with_what_came_before(
    server: Served, encrypted: dict[str, Any], keeps_all: bool
) -> None:
    engine, agent = server.engine, agent_of(server, encrypted=encrypted, keeps_all=keeps_all)
    before, num_before = "", 0  # the last prompt and its answer; tokens of that prompt
    for said, kinds in SAID:
        script = Script(server.ids(said), tokens_per_output=3, num_cached_tokens=num_before)
        engine.script = partial(_said, script)
        events = agent.turn()
        request, prompt = engine.requests[-1], prompt_of(server)
        assert prompt.startswith(before)
        assert (request.reuse, request.sampling.grammar) == (Reuse.LIKELY, "")
        assert request.call_kind == call_kind_of(
            GenerationSpec("m", (), endpoint=Endpoint.RESPONSES, tool_use=ToolUse(()))
        )
        assert [item["type"] for item in items_of(events)] == kinds
        usage = events[-1]["response"]["usage"]
        assert usage["input_tokens"] == len(request.tokens) // 4
        assert usage["input_tokens_details"]["cached_tokens"] == num_before
        assert (usage["output_tokens_details"]["reasoning_tokens"] > 0) == (REASONING in kinds)
        before, num_before = prompt + said, len(request.tokens) // 4
        last = agent.items[-1]
        if last["type"] == CALL:
            assert call(last["name"], **json.loads(last["arguments"])) in said
            agent.items.append(output(last["call_id"], "1 failed", exit_code=1))
        else:
            agent.items.append(message("user", "Is anything left?"))


def test_what_the_developer_and_the_environment_say_stands_where_it_was_sent(server: Served) -> None:
    server.says("Fine.")
    agent_of(server).turn()
    expected = [
        "[system]You are a coding agent. Read before you write.",
        "[developer]<permissions>The sandbox lets you write here.</permissions>\nAsk before you delete.",
        "[user]<environment_context><cwd>/src/app</cwd><shell>bash</shell></environment_context>",
        "[user]Mend the test.",
    ]
    assert prompt_of(server).endswith("".join(expected) + "[assistant]")
