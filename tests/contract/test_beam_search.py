"""Beam search over REST; what it finds is compared with `transformers` in `tests/e2e/test_openai_options.py`."""

from __future__ import annotations

from typing import Any

import pytest

from coppice.messages.sampling import BEAMS_MAX, LIKELY_MAX
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode, Refused, RefusedReason, Request
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.frontend.admission import check_width
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec, TextPrompt
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import Script, unpack
from tests.fakes.api.rest import MODEL, Served, error_of

__all__ = ["served", "shared_server"]
SEARCH: dict[str, Any] = {"use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 4, "ignore_eos": True}


def test_each_step_is_a_request_for_one_token_of_each_beam(served: Served) -> None:
    answer = served.complete(prompt="one two", **SEARCH).json()
    prompt, requests = served.ids("one two"), served.engine.requests
    assert [len(unpack(request.tokens)) - len(prompt) for request in requests] == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all(unpack(request.tokens)[: len(prompt)] == prompt for request in requests)
    assert {request.max_new_tokens for request in requests} == {1}
    assert {(request.sampling.temperature, request.sampling.num_logprobs) for request in requests} == {(0.0, 6)}
    assert len({request.request_id for request in requests}) == 10
    # The prompt counts once against limits per minute, and once in what the client is told.
    assert [request.fork_of for request in requests] == [None] + [requests[0].request_id] * 9
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 10
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


def test_the_call_of_a_search_is_open_from_its_start_to_its_end(served: Served) -> None:
    body = {"model": MODEL, "prompt": "one two", **SEARCH}
    assert served.post(body, headers={"X-Request-Id": "search-1"}).status_code == 200
    (call,) = served.engine.open_calls
    assert (call.num_places, call.tokens, "search-1" in call.names) == (3, b"", True)
    assert {(step.step_of, step.names) for step in served.engine.requests} == {(call.request_id, ())}
    assert served.engine.finished_early == [call.request_id], "it ended well, and is measured"
    assert not served.engine.running


def test_a_search_that_is_aborted_between_two_steps_ends(served: Served) -> None:
    """The fourth step is held back, so that nothing but the call itself is there to be ended."""
    aborted = OutputError(OutputErrorCode.ABORTED, "The request was aborted.")

    def script(request: Request) -> Script:
        if len(served.engine.requests) == 4:
            served.engine.end(served.engine.open_calls[0].request_id, aborted)
        return Script(served.ids("x"), hangs=len(served.engine.requests) > 4)

    served.engine.script = script
    assert error_of(served.complete(**{**SEARCH, "max_tokens": 9}), 499)["code"] == "request_aborted"
    assert not served.engine.running


def test_several_prompts_and_chats_are_searched(served: Served) -> None:
    choices = (
        served.client()
        .completions.create(
            model=MODEL, prompt=["one", "two three"], n=2, max_tokens=3, extra_body={"use_beam_search": True}
        )
        .choices
    )
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    assert len(served.chat(use_beam_search=True, n=2, max_tokens=2).json()["choices"]) == 2


def test_a_stop_token_ends_an_answer_and_has_no_text(served: Served) -> None:
    """The fake engine's likeliest token is the script's, then those that differ in their last bits."""
    served.engine.script = lambda request: Script(served.ids("x"))
    (first,) = served.ids("x")
    answer = served.complete(use_beam_search=True, n=2, max_tokens=3, stop_token_ids=[first], return_token_ids=True)
    ended, other = answer.json()["choices"]
    assert (ended["text"], ended["token_ids"], ended["finish_reason"]) == ("", [first], "stop")
    assert other["token_ids"] != [first]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "best_of": None}, "stream"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"stop": "x"}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"best_of": BEAMS_MAX + 1}, "best_of"),
        ({"best_of": None, "n": BEAMS_MAX + 1}, "n"),
        ({"best_of": BEAMS_MAX, "stop_token_ids": [*range(LIKELY_MAX // BEAMS_MAX)]}, "stop_token_ids"),
    ],
)
def test_what_has_no_place_in_a_search_is_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    assert error_of(served.complete(**{**SEARCH, **fields}), 400)["param"] == param
    assert not served.engine.requests


def test_what_changes_nothing_is_taken(served: Served) -> None:
    fields = {"temperature": 0, "top_p": 1, "top_k": -1, "seed": 3, "length_penalty": 0.5, "response_format": None}
    assert served.complete(**SEARCH, **fields).status_code == 200
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert error_of(served.chat(use_beam_search=True, tools=tools), 400)["param"] == "tools"
    assert error_of(served.complete(length_penalty=0.5), 400)["param"] == "length_penalty"
    assert served.complete(length_penalty=1, use_beam_search=False).status_code == 200


@pytest.mark.parametrize("refuses", [True, False])
def test_the_first_failure_ends_the_search_and_all_its_steps(served: Served, refuses: bool) -> None:
    def script(request: Request) -> Script:
        if len(served.engine.requests) == 6:
            if refuses:
                return Script([], refused=Refused(RefusedReason.QUEUE_FULL, "full", 700))
            return Script([], error=OutputError(OutputErrorCode.WORKER_LOST, "gone"))
        return Script(served.ids("x"), hangs=len(served.engine.requests) in (5, 7))

    served.engine.script = script
    refused = served.complete(**{**SEARCH, "max_tokens": 9})
    error_of(refused, 429 if refuses else 503)
    assert served.engine.num_running == 0
    assert len(served.engine.requests) == 7


def spec_of(**fields: Any) -> GenerationSpec:
    return GenerationSpec("m", (TextPrompt("x"),), uses_beams=True, **fields)


def test_beams_are_bounded_by_what_the_tenant_may_have_at_work() -> None:
    tenant = Tenant.model_construct(concurrency=2)
    check_width(spec_of(n=2), tenant)
    with pytest.raises(ApiError, match="2 requests at work") as caught:
        check_width(spec_of(n=1, best_of=3), tenant)
    assert caught.value.param == "best_of"
