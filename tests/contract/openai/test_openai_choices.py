"""Several answers to one prompt, cache hints, deadlines, and what of a request the engine is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from coppice.messages.reuse import CALL_KINDS, Reuse
from coppice.messages.sampling import CHOICES_MAX
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode, Refused, RefusedReason, Request
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import Script, logprob_of, unpack
from tests.fakes.api.rest import MODEL, Served, error_of, events_of

__all__ = ["served", "shared_server"]


def numbered(served: Served) -> None:
    """Every answer says which one it is."""
    served.engine.script = lambda request: Script(served.ids(f"answer {request.request_id.rsplit('-', 1)[1]}"))


def test_choices_of_several_prompts_are_in_order_and_forks_of_their_first(served: Served) -> None:
    numbered(served)
    answer = served.client().completions.create(model=MODEL, prompt=["one two", "three"], n=3, max_tokens=20, seed=11)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(i, f"answer {i}") for i in range(6)]
    requests = served.engine.requests
    ids = [request.request_id for request in requests]
    assert [request.fork_of for request in requests] == [None, ids[0], ids[0], None, ids[3], ids[3]]
    assert [request.num_to_come for request in requests] == [6, 5, 4, 3, 2, 1]
    assert [unpack(request.tokens) for request in requests] == [served.ids("one two")] * 3 + [served.ids("three")] * 3
    seeds = [request.sampling.seed for request in requests]
    assert seeds[0] == 11
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(served.ids("one two")) + len(served.ids("three"))
    assert answer.usage.completion_tokens == sum(len(served.ids(f"answer {i}")) + 1 for i in range(6))


def test_without_a_seed_no_two_answers_share_one(served: Served) -> None:
    served.complete(prompt=["a", "a"], n=4)
    assert len({request.sampling.seed for request in served.engine.requests}) == 8


def test_a_chat_stream_of_choices(served: Served) -> None:
    numbered(served)
    *events, done = events_of(served.chat(n=3, stream=True, stream_options={"include_usage": True}).text)
    assert done == "[DONE]"
    usage = events.pop()["usage"]
    assert usage["prompt_tokens"] == len(unpack(served.engine.requests[0].tokens))
    roles = [event["choices"][0]["index"] for event in events if event["choices"][0]["delta"].get("role")]
    assert roles == [0, 1, 2]
    texts, reasons = ["", "", ""], []
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        reasons += [choice["index"]] * (choice["finish_reason"] == "stop")
    assert texts == ["answer 0", "answer 1", "answer 2"]
    assert sorted(reasons) == [0, 1, 2]


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_each_chunk_tells_the_usage_of_its_answer_so_far(served: Served, kind: str, include_usage: bool) -> None:
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    fields: dict[str, Any] = {"n": 2, "stream": True, "stream_options": options, "return_token_ids": True}
    served.says("some words, stop and more")
    *events, done = events_of(getattr(served, kind)(**fields, stop=" stop").text)
    assert done == "[DONE]"
    whole = events.pop()["usage"] if include_usage else None
    num_prompt = len(unpack(served.engine.requests[0].tokens))
    num_told = [0, 0]
    for event in events:
        (choice,) = event["choices"]
        num_told[choice["index"]] += len(choice.get("token_ids", ()))
        told = num_told[choice["index"]]
        assert event["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": told,
            "total_tokens": num_prompt + told,
        }
    assert num_told[0] == num_told[1] > 1
    assert whole is None or (whole["prompt_tokens"], whole["completion_tokens"]) == (num_prompt, sum(num_told))


def test_as_many_choices_as_vllm_gives(served: Served) -> None:
    numbered(served)
    answer = served.complete(prompt="one two", n=CHOICES_MAX, max_tokens=20)
    assert [choice["text"] for choice in answer.json()["choices"]] == [f"answer {i}" for i in range(CHOICES_MAX)]
    assert answer.json()["usage"]["prompt_tokens"] == len(served.ids("one two"))
    assert error_of(served.complete(n=CHOICES_MAX + 1), 400)["param"] == "n"
    assert error_of(served.complete(prompt=["a", "b"], best_of=CHOICES_MAX), 400)["param"] == "best_of"


TEXTS = ("one two", "three", "the forest and a tree", "go go stop", "five")


def likelihood(served: Served, text: str) -> float:
    """Of one token of it, on average."""
    values = [logprob_of(token_id) for token_id in served.ids(text)]
    return sum(values) / len(values)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}])
def test_the_best_of_all_candidates_are_told(served: Served, n: int, fields: dict[str, object]) -> None:
    """Of two prompts; the second one's candidates come in another order."""

    def script(request: Request) -> Script:
        prompt, candidate = divmod(int(request.request_id.rsplit("-", 1)[1]), len(TEXTS))
        return Script(served.ids((TEXTS, TEXTS[::-1])[prompt][candidate]))

    served.engine.script = script
    answer = served.complete(prompt=["one", "x y z"], n=n, best_of=len(TEXTS), max_tokens=30, **fields).json()
    best = sorted(TEXTS, key=lambda text: -likelihood(served, text))[:n]
    assert len({likelihood(served, text) for text in TEXTS}) == len(TEXTS)
    assert [choice["text"] for choice in answer["choices"]] == best * 2
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * n))
    assert [choice["logprobs"] is not None for choice in answer["choices"]] == [bool(fields)] * 2 * n
    # All that was computed counts, and each prompt once.
    assert answer["usage"]["completion_tokens"] == 2 * sum(len(served.ids(text)) + 1 for text in TEXTS)
    assert answer["usage"]["prompt_tokens"] == len(served.ids("one")) + len(served.ids("x y z"))
    assert [request.fork_of is None for request in served.engine.requests] == ([True] + [False] * 4) * 2


def test_best_of_is_told_whole_and_at_least_n(served: Served) -> None:
    assert len(served.complete(n=2, best_of=2, stream=True).text) > 0
    refused = error_of(served.complete(n=3, best_of=2), 400)
    assert (refused["param"], refused["message"]) == ("best_of", "best_of is 2; it must be from n to 128")
    streamed = error_of(served.complete(n=1, best_of=2, stream=True), 400)
    assert streamed["param"] == "best_of"
    assert len(served.chat(n=1, best_of=2).json()["choices"]) == 1
    assert all(request.sampling.num_logprobs == 0 for request in served.engine.requests[-2:])


@pytest.mark.parametrize(
    ("fields", "streams"),
    [({}, False), ({"stop": "x"}, True), ({"stream": True}, True)],
)
def test_the_engine_hears_whether_somebody_reads_along(
    served: Served, fields: dict[str, object], streams: bool
) -> None:
    served.complete(**fields)
    (request,) = served.engine.requests
    assert request.streams == streams


def test_cache_hints_reach_the_engine_and_the_operator_caps_them(served: Served) -> None:
    def told(**fields: object) -> tuple[Reuse, int]:
        served.engine.requests.clear()
        assert served.chat(**fields).status_code == 200
        return served.engine.requests[0].reuse, served.engine.requests[0].retain_ms

    assert told() == (Reuse.UNKNOWN, 0)
    assert told(prompt_cache_key="agent-7", prompt_cache_options={"mode": "implicit"}) == (Reuse.LIKELY, 0)
    assert told(prompt_cache_options={"reuse": "likely"}) == (Reuse.LIKELY, 0)
    assert told(prompt_cache_key="agent-7", prompt_cache_options={"reuse": "unlikely"}) == (Reuse.UNLIKELY, 0)
    assert told(prompt_cache_options={"ttl": "90s"}) == (Reuse.UNKNOWN, 90_000)
    assert told(prompt_cache_options={"ttl": "30m"}) == (Reuse.UNKNOWN, 30 * 60_000)
    assert told(prompt_cache_options={"ttl": "9h"}) == (Reuse.UNKNOWN, 30 * 60_000)
    assert told(prompt_cache_retention="24h") == (Reuse.UNKNOWN, 30 * 60_000)
    assert told(prompt_cache_retention="in_memory") == (Reuse.UNKNOWN, 0)
    part = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert told(messages=[{"role": "user", "content": [part]}]) == (Reuse.UNKNOWN, 0)
    part["prompt_cache_breakpoint"] = {"mode": "explicit", "ttl": "12h"}
    assert "breakpoint" in error_of(served.chat(messages=[{"role": "user", "content": [part]}]), 400)["message"]


def test_calls_are_told_apart_by_endpoint_and_whether_they_yield(served: Served) -> None:
    def kind(call: Callable[..., Any], **fields: object) -> int:
        served.engine.requests.clear()
        assert call(**fields).status_code == 200
        return served.engine.requests[0].call_kind

    calls = [
        (served.complete, {}),
        (served.chat, {}),
        (served.complete, {"priority": 1}),
        (served.chat, {"priority": 5}),
    ]
    kinds = [kind(call, **fields) for call, fields in calls]
    assert len(set(kinds)) == 4
    assert all(0 < each < CALL_KINDS for each in kinds)
    assert kind(served.chat, priority=-1) == kind(served.chat)


def test_usage_tells_what_was_cached_and_what_was_written(served: Served) -> None:
    served.says("yes", num_cached_tokens=3, num_written_tokens=16)
    details = served.chat(n=2).json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 3, "cache_write_tokens": 16}


def test_a_timeout_is_a_deadline(served: Served) -> None:
    before_ns = time.monotonic_ns()
    served.complete(timeout=2.5, priority=-3)
    served.complete()
    first, second = served.engine.requests
    assert before_ns + 2.5e9 <= (first.deadline_ns or 0) <= time.monotonic_ns() + 2.5e9
    assert (first.priority, second.deadline_ns, second.priority) == (-3, None, 0)
    served.complete(timeout=1e300)
    assert served.engine.requests[2].deadline_ns is None


def test_a_deadline_that_cannot_be_met_is_shed_and_one_that_passed_is_told(served: Served) -> None:
    served.says("", refused=Refused(RefusedReason.DEADLINE, "it would take 9 s", 1500))
    shed = served.complete()
    assert error_of(shed, 429)["code"] == "deadline"
    assert (shed.headers["retry-after"], shed.headers["retry-after-ms"]) == ("2", "1500")
    served.says("a b", error=OutputError(OutputErrorCode.DEADLINE, "its time is over"))
    passed = served.complete()
    assert error_of(passed, 504)["code"] == "deadline_exceeded"
    assert "retry-after" not in passed.headers
    assert events_of(served.complete(stream=True).text)[-1]["error"]["code"] == "deadline_exceeded"


_STATUS_OF_OWN: dict[RefusedReason | OutputErrorCode, tuple[int, ...]] = {
    RefusedReason.INTERNAL: (500,),
    RefusedReason.TENANT_REMOVED: (401,),
    OutputErrorCode.INTERNAL: (500,),
    OutputErrorCode.TENANT_REMOVED: (401,),
    OutputErrorCode.KEY_REVOKED: (401,),
    OutputErrorCode.ABORTED: (499,),
}


def test_every_refusal_and_failure_there_is_has_a_status_that_fits(served: Served) -> None:
    for reason in RefusedReason:
        served.says("", refused=Refused(reason, "no", 10))
        expected = _STATUS_OF_OWN.get(reason, (400, 429, 503))
        assert served.complete().status_code in expected, reason
    for code in OutputErrorCode:
        served.says("", error=OutputError(code, "no"))
        expected = _STATUS_OF_OWN.get(code, (400, 429, 503, 504))
        assert served.complete().status_code in expected, code


def test_one_failed_choice_ends_the_call_and_all_others(served: Served) -> None:
    def script(request: Request) -> Script:
        if request.request_id.endswith("-1"):
            return Script([], error=OutputError(OutputErrorCode.WORKER_LOST, "gone"))
        return Script(served.ids("fine"), hangs=True)

    served.engine.script = script
    error_of(served.chat(n=3), 503)
    assert served.engine.num_running == 0
    assert len(served.engine.cancelled) == 2


@pytest.mark.parametrize("n", [2**70, -(2**70), 129, 0])
def test_a_number_of_choices_that_is_refused_costs_the_next_call_nothing(served: Served, n: int) -> None:
    assert error_of(served.complete(n=n), 400)["param"] == "n"
    assert served.complete().status_code == 200
