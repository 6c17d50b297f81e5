"""Clients that users have: `openai` in every combination, `langchain-openai`. Only the base URL is ours."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from coppice_scheduler.core.state.request import OutputError, OutputErrorCode, Refused, RefusedReason, Request
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.client_calls import COMBINATIONS, ask, check
from tests.fakes.api.engine import Script
from tests.fakes.api.rest import MODEL, Served

__all__ = ["served", "shared_server"]
SPOKEN = "Grüße aus dem Wald"


@pytest.mark.parametrize(("stream", "kind", "n", "logprobs"), COMBINATIONS)
def test_openai_in_every_combination(served: Served, stream: bool, kind: str, n: int, logprobs: bool) -> None:
    def script(request: Request) -> Script:
        return Script(served.ids(f"{SPOKEN} {request.request_id[-1]}"), num_cached_tokens=2)

    served.engine.script = script
    answers, usage = ask(
        served.client(), MODEL, stream=stream, kind=kind, n=n, logprobs=logprobs, max_tokens=60, temperature=0.5
    )
    check(answers, usage, n=n, logprobs=logprobs)
    assert [answer.text for answer in answers] == [f"{SPOKEN} {index}" for index in range(n)]
    assert {answer.reason for answer in answers} == {"stop"}
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert usage.completion_tokens == sum(len(served.ids(answer.text)) + 1 for answer in answers)


def test_openai_understands_our_refusals(served: Served) -> None:
    client = served.client()

    def fails(kind: type[openai.APIStatusError], **fields: Any) -> openai.APIStatusError:
        with pytest.raises(kind) as caught:
            client.completions.create(model=MODEL, **{"prompt": "x", **fields})
        return caught.value

    served.says("", refused=Refused(RefusedReason.TENANT_RATE, "60 a minute", 1500))
    limited = fails(openai.RateLimitError)
    assert (limited.response.headers["retry-after-ms"], limited.code) == ("1500", "tenant_rate")
    served.says("x", error=OutputError(OutputErrorCode.DEADLINE, "too late"))
    assert fails(openai.InternalServerError).code == "deadline_exceeded"
    wrong = fails(openai.BadRequestError, n=129)
    assert (wrong.param, wrong.type) == ("n", "invalid_request_error")
    assert fails(openai.BadRequestError, extra_body={"min_p": 2}).param == "min_p"


def test_openai_retries_after_the_time_that_it_is_told(served: Served) -> None:
    calls = []

    def script(request: Request) -> Script:
        calls.append(request)
        if len(calls) == 1:
            return Script([], refused=Refused(RefusedReason.QUEUE_FULL, "full", 20))
        return Script(served.ids(SPOKEN))

    served.engine.script = script
    answer = served.client().with_options(max_retries=1).completions.create(model=MODEL, prompt="x", max_tokens=60)
    assert answer.choices[0].text == SPOKEN
    assert len(calls) == 2


# --- langchain ----------------------------------------------------------------------------------------------------


def langchain(served: Served, **fields: Any) -> Any:
    module = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    return module.ChatOpenAI(model=MODEL, base_url=f"{served.url}/v1", api_key="none", max_retries=0, **fields)


def test_langchain_chats_and_streams(served: Served) -> None:
    served.says(SPOKEN)
    chat = langchain(served, max_tokens=60, stop=["zzz"], seed=3, presence_penalty=0.5, logit_bias={"7": 2})
    answer = chat.invoke([("system", "Be short."), ("human", "hi")])
    assert answer.content == SPOKEN
    assert answer.usage_metadata["output_tokens"] == len(served.ids(SPOKEN)) + 1
    assert answer.response_metadata["finish_reason"] == "stop"
    assert "".join(str(chunk.content) for chunk in chat.stream("hi")) == SPOKEN
    assert [one.content for one in chat.batch(["a", "b"])] == [SPOKEN] * 2
    sampling = served.engine.requests[0].sampling
    assert (sampling.seed, sampling.presence_penalty) == (3, 0.5)


def test_langchain_gets_logprobs_choices_and_errors(served: Served) -> None:
    served.says(SPOKEN)
    chat = langchain(served, max_tokens=60, logprobs=True, top_logprobs=2)
    content = chat.invoke("hi").response_metadata["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == SPOKEN
    messages = pytest.importorskip("langchain_core.messages")
    several = langchain(served, max_tokens=60, n=3).generate([[messages.HumanMessage("hi")]])
    assert [generation.text for generation in several.generations[0]] == [SPOKEN] * 3
    served.says("", refused=Refused(RefusedReason.QUEUE_FULL, "full up", 10))
    with pytest.raises(openai.RateLimitError, match="full up"):
        chat.invoke("hi")
