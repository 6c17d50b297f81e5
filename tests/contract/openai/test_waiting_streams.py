"""A stream that waits: empty lines until something comes, and then events as ever."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from coppice_scheduler.core.state.request import OutputError, OutputErrorCode, Refused, RefusedReason, Request
from coppice_scheduler.edge.http import sse
from tests.fakes.api.engine import Script
from tests.fakes.api.load_client import LoadAnswer, LoadRequest, Messages
from tests.fakes.api.rest import MODEL, WAIT_S, Served, error_of, events_of, serving
from tests.fakes.waiting import wait_for

AGAIN = "\n" * 6  # two of them behind an event


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(first_byte_s=0.01) as served:
        yield served


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_EVERY_S", 0.02)


def hanging(served: Served, *texts: str) -> list[Request]:
    """Requests hang after these tokens; those that came."""
    came: list[Request] = []

    def script(request: Request) -> Script:
        came.append(request)
        return Script(served.ids(" ".join(texts)) if texts else [], hangs=True)

    served.engine.script = script
    return came


def go_on(served: Served, request: Request, error: OutputError | None = None) -> None:
    assert served.engine.loop is not None
    hanging = served.engine._hanging
    wait_for(lambda: request.request_id in hanging, "the request hangs")
    if error is None:
        served.engine.loop.call_soon_threadsafe(hanging[request.request_id].set)
    else:
        served.engine.loop.call_soon_threadsafe(served.engine.end, request.request_id, error)


def body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "one"}], "stream": True, **fields}


@pytest.mark.parametrize("n", [1, 3])
def test_empty_lines_come_until_there_is_something_to_tell(served: Served, n: int) -> None:
    came = hanging(served)
    with served.http.stream("POST", "/v1/chat/completions", json=body(n=n)) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(6)] == [""] * 6
        for request in came:
            go_on(served, request)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    events = events_of("\n\n".join(rest[:-1]))
    assert [event["choices"][0]["delta"].get("role") for event in events[:n]] == ["assistant"] * n
    assert sorted(event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]) == [
        *range(n)
    ]


def test_a_stream_that_stands_still_in_the_middle_has_them_too(served: Served) -> None:
    came, seen = hanging(served, "one two"), ""
    with served.http.stream("POST", "/v1/chat/completions", json=body()) as answer:
        for line in answer.iter_lines():
            seen += f"{line}\n"
            if came and "one" in seen and seen.endswith(AGAIN):
                go_on(served, came.pop())
    assert seen.index("one") < seen.rindex(AGAIN) < seen.index("[DONE]")


def test_the_package_of_openai_skips_them(served: Served) -> None:
    came = hanging(served)
    with served.client().chat.completions.with_streaming_response.create(
        model=MODEL, messages=[{"role": "user", "content": "one"}], stream=True
    ) as answer:
        assert next(answer.iter_bytes()).startswith(sse.KEEP_ALIVE)
        go_on(served, came.pop())
    hanging(served, "one two")
    stream = served.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "one"}], stream=True
    )
    text = ""
    with stream:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text == "one two":
                break
    assert text == "one two"


def test_a_failure_after_empty_lines_is_an_event(served: Served) -> None:
    came = hanging(served)
    with served.http.stream("POST", "/v1/chat/completions", json=body()) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ""
        go_on(served, came[0], OutputError(OutputErrorCode.QUEUE_TIMEOUT, "too long", 5))
        events = [line for line in lines if line.startswith("data:")]
    (event,) = events_of("\n\n".join(events))
    assert event["error"]["code"] == "queue_timeout"


def test_a_client_that_goes_away_while_it_waits_cancels(served: Served) -> None:
    came = hanging(served)
    served.engine.some_cancelled.clear()
    with served.http.stream("POST", "/v1/chat/completions", json=body(n=2)) as answer:
        assert next(answer.iter_lines()) == ""
    assert served.engine.some_cancelled.wait(WAIT_S)
    wait_for(lambda: {r.request_id for r in came} <= set(served.engine.cancelled), "both are cancelled")


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_refusal_has_its_status_however_late_it_comes(served: Served, prompt: object) -> None:
    def script(request: Request) -> Script:
        if request.request_id.endswith(f"-{len(prompt) - 1}"):  # type: ignore[arg-type]
            return Script([], refused=Refused(RefusedReason.QUEUE_FULL, "full", 5), undecided_s=0.3)
        return Script([], hangs=True)

    served.engine.script = script
    answer = served.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "stream": True})
    assert error_of(answer, 429)["message"] == "full"


def test_an_answer_that_is_not_streamed_has_none(served: Served) -> None:
    came = hanging(served)
    content = json.dumps(body(stream=False)).encode()
    with served.begin(content, "/v1/chat/completions") as connection:
        wait_for(lambda: came, "the request")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    wait_for(lambda: came[0].request_id in served.engine.cancelled, "its end")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_trims_what_comes_loses_nothing(served: Served, path: str) -> None:
    """As `vllm bench serve` does: what comes alone is joined to what comes next."""
    request = LoadRequest(path, "one", 2, "bench-0")
    expected, answer, messages = LoadAnswer(), LoadAnswer(), Messages()

    def take(piece: bytes, into: LoadAnswer) -> None:
        for message in messages.feed(piece):
            into.take(message, is_chat=request.is_chat)

    served.engine.script = lambda _: Script([])
    take(served.http.post(path, json=request.body(MODEL)).content, expected)
    came = hanging(served)
    with served.http.stream("POST", path, json=request.body(MODEL)) as response:
        pieces = response.iter_raw()
        for _ in range(3):
            take(next(pieces), answer)
        go_on(served, came[0])
        for piece in pieces:
            take(piece, answer)
    assert answer == expected
    assert answer.is_done
    assert answer.num_chunks
    assert answer.num_prompt_tokens
