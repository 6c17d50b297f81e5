"""Log-probabilities, echo and the options around them, over a real socket with the `openai` package."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from coppice_scheduler.edge.http import generation
from coppice_scheduler.edge.http.long_lists import write_json
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import Script, likely_ids, logprob_of, rank_of, unpack
from tests.fakes.api.rest import MODEL, Served, error_of, events_of

__all__ = ["served", "shared_server"]
TEXT = "Grüße aus 東京!"
USER = [{"role": "user", "content": "hi"}]


def test_chat_logprobs_have_tokens_bytes_and_likely_ones(served: Served) -> None:
    served.says(TEXT)
    answer = served.client().chat.completions.create(
        model=MODEL,
        messages=USER,  # type: ignore[arg-type]
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.refusal is None
    content = logprobs.content
    assert content is not None
    ids = served.ids(TEXT)
    assert [entry.logprob for entry in content] == [logprob_of(token_id) for token_id in ids]
    assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == TEXT
    assert all(entry.token == bytes(entry.bytes or ()).decode("utf-8", "replace") for entry in content)
    assert any("�" in entry.token for entry in content)  # half a character: its bytes tell what it is
    for entry, token_id in zip(content, ids, strict=True):
        expected = [logprob_of(token_id, rank) for rank in range(3)]
        assert [likely.logprob for likely in entry.top_logprobs] == expected
    assert served.engine.requests[0].sampling.num_logprobs == 3


def test_a_chat_stream_gives_the_same_logprobs(served: Served) -> None:
    served.says(TEXT)
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1}
    whole = served.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    *events, _ = events_of(served.chat(stream=True, **fields).text)
    choices = [event["choices"][0] for event in events]
    streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert streamed == whole
    assert len([choice for choice in choices if choice["logprobs"]]) > 3
    assert served.chat().json()["choices"][0]["logprobs"] is None
    assert served.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_completion_logprobs(served: Served) -> None:
    served.says("one two forest")
    ids = served.ids("one two forest")
    answer = served.client().completions.create(model=MODEL, prompt="x", logprobs=2, max_tokens=30)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "one two forest"
    assert logprobs.token_logprobs == [logprob_of(token_id) for token_id in ids]
    offsets = logprobs.text_offset or []
    assert all("one two forest"[at:].startswith(token) for at, token in zip(offsets, logprobs.tokens, strict=True))
    assert logprobs.top_logprobs is not None
    for top, token, token_id in zip(logprobs.top_logprobs, logprobs.tokens, ids, strict=True):
        assert top[token] == logprob_of(token_id)
        assert len(top) == 2
    zero = served.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert [len(top) for top in zero["top_logprobs"]] == [1] * len(zero["tokens"])


def test_tokens_may_be_named_by_their_ids(served: Served) -> None:
    served.says("one two")
    ids = served.ids("one two")
    logprobs = served.complete(logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    chat = served.chat(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True).json()["choices"][0]
    for entry, token_id in zip(chat["logprobs"]["content"], ids, strict=True):
        assert entry["token"] == f"token_id:{token_id}"
        assert [top["token"] for top in entry["top_logprobs"]] == [f"token_id:{i}" for i in likely_ids(token_id, 2)]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt_and_tells_its_logprobs(served: Served, stream: bool) -> None:
    served.says(" and a tree")
    response = served.complete(prompt="the forest", echo=True, logprobs=1, max_tokens=30, n=2, stream=stream)
    if stream:
        *events, _ = events_of(response.text)
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == 1]
    else:
        choices = response.json()["choices"][1:]
    text = "".join(choice["text"] for choice in choices)
    assert text == "the forest and a tree"
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [token for logprobs in told for token in logprobs["tokens"]]
    assert "".join(tokens) == text
    values = [value for logprobs in told for value in logprobs["token_logprobs"]]
    ids = served.ids("the forest") + served.ids(" and a tree")
    assert values == [None, *(logprob_of(token_id) for token_id in ids[1:])]
    assert told[0]["top_logprobs"][0] is None
    offsets = [offset for logprobs in told for offset in logprobs["text_offset"]]
    assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
    # A fork has no log-probabilities of the prompt, so both answers compute it.
    assert [request.fork_of for request in served.engine.requests] == [None, None]
    assert all(request.sampling.num_prompt_logprobs == 1 for request in served.engine.requests)


def test_echo_without_a_token_scores_a_prompt(served: Served) -> None:
    answer = served.complete(prompt="one two three", echo=True, logprobs=1, max_tokens=0).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two three", "length")
    assert "".join(choice["logprobs"]["tokens"]) == "one two three"
    assert answer["usage"]["completion_tokens"] == 0
    assert served.engine.requests[0].max_new_tokens == 1
    assert (
        served.complete(prompt=served.ids("by ids"), echo=True, max_tokens=0).json()["choices"][0]["text"] == "by ids"
    )
    plain = served.complete(prompt="one", echo=True, n=2, max_tokens=2).json()["choices"]
    assert [choice["text"] for choice in plain] == ["oneoneone"] * 2
    assert served.engine.requests[-1].fork_of is not None


def expected_of(served: Served, ids: list[int], num_top: int) -> list[Any]:
    """Of a prompt, by token id: the token that is there, then the likeliest."""
    told: list[Any] = [None]
    for token_id in ids[1:]:
        entry = {str(token_id): (logprob_of(token_id), rank_of(token_id))}
        for rank, likely in enumerate(likely_ids(token_id, num_top)):
            entry.setdefault(str(likely), (logprob_of(token_id, rank), rank + 1))
        told.append(entry)
    return told


def shown(prompt: list[Any]) -> list[Any]:
    return [entry and {key: (each["logprob"], each["rank"]) for key, each in entry.items()} for entry in prompt]


@pytest.mark.parametrize("num_top", [0, 2])
def test_log_probabilities_of_prompts_stand_where_vllm_has_them(served: Served, num_top: int) -> None:
    prompts = ["one two forest", "Grüße"]
    answer = served.complete(prompt=prompts, prompt_logprobs=num_top, n=3, max_tokens=4)
    choices = answer.json()["choices"]
    for place, choice in enumerate(choices):
        ids = served.ids(prompts[place // 3])
        assert shown(choice["prompt_logprobs"]) == expected_of(served, ids, num_top)
        assert choice["logprobs"] is None
    asked = [(request.fork_of is None, request.sampling.num_prompt_logprobs) for request in served.engine.requests]
    assert asked == [(True, num_top), (False, None), (False, None)] * 2
    chat = served.chat(prompt_logprobs=num_top).json()
    ids = unpack(served.engine.requests[-1].tokens)
    assert shown(chat["prompt_logprobs"]) == expected_of(served, ids, num_top)
    assert "prompt_logprobs" not in served.chat().json()
    assert "prompt_logprobs" not in served.complete().json()["choices"][0]


def test_tokens_of_a_prompt_are_decoded(served: Served) -> None:
    ids = served.ids("one two forest")
    told = served.complete(prompt="one two forest", prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"]
    texts = [entry[str(token_id)]["decoded_token"] for entry, token_id in zip(told[1:], ids[1:], strict=True)]
    assert "one two forest".endswith("".join(texts))
    assert "".join(texts)


def test_a_prompt_may_be_echoed_and_told_with_other_numbers(served: Served) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 2}
    (choice,) = served.complete(prompt="the forest", **fields).json()["choices"]
    ids = served.ids("the forest")
    assert shown(choice["prompt_logprobs"]) == expected_of(served, ids, 3)
    assert choice["logprobs"]["token_logprobs"][: len(ids)] == [None, *(logprob_of(token_id) for token_id in ids[1:])]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1 : len(ids)]] == [1] * (len(ids) - 1)
    assert served.engine.requests[0].sampling.num_prompt_logprobs == 3


def test_the_best_candidate_brings_the_log_probabilities_of_the_prompt(served: Served) -> None:
    texts = ["three", "one two", "five", "go"]  # the first, which computes the prompt, is the worst
    texts.sort(key=lambda text: sum(map(logprob_of, served.ids(text))) / len(served.ids(text)))
    served.engine.script = lambda request: Script(served.ids(texts[int(request.request_id.rsplit("-", 1)[1])]))
    choices = served.complete(prompt="the forest", prompt_logprobs=1, n=2, best_of=4, max_tokens=9).json()["choices"]
    expected = expected_of(served, served.ids("the forest"), 1)
    assert [shown(choice["prompt_logprobs"]) for choice in choices] == [expected] * 2


def test_what_is_told_of_prompts_is_bounded_and_whole(served: Served) -> None:
    assert error_of(served.complete(prompt_logprobs=1, stream=True), 400)["param"] == "prompt_logprobs"
    assert error_of(served.complete(prompt_logprobs=21), 400)["param"] == "prompt_logprobs"
    assert error_of(served.complete(prompt_logprobs=-1), 400)["param"] == "prompt_logprobs"
    long = served.ids("a") * 100
    refused = error_of(served.complete(prompt=long, prompt_logprobs=20, n=128), 400)
    assert refused["param"] == "prompt_logprobs"
    assert "268800" in refused["message"]
    assert served.complete(prompt=long, prompt_logprobs=20, n=120, max_tokens=1).status_code == 200
    refused = error_of(served.complete(prompt=long, echo=True, logprobs=20, best_of=128), 400)
    assert (refused["param"], "268800" in refused["message"]) == ("logprobs", True)
    refused = error_of(served.complete(prompt=long, echo=True, logprobs=20, n=8, stream=True), 400)
    assert (refused["param"], "one stream" in refused["message"]) == ("logprobs", True)


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}, {"prompt_logprobs": 2}, {"logprobs": 20, "max_tokens": 13}],
)
def test_many_log_probabilities_are_written_beside_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    threads = []

    def seen(value: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return write_json(value)

    monkeypatch.setattr(generation, "write_json", seen)
    long = served.ids("a") * 300
    assert served.complete(prompt=long, **fields).status_code == 200
    assert served.complete(prompt=long).status_code == 200
    assert served.complete(prompt="the forest", logprobs=1, prompt_logprobs=1).status_code == 200
    (name,) = threads
    assert "text" in name


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_a_stop_string_shows_through_the_logprobs(served: Served, stream: bool) -> None:
    served.says("The answer is 42. User: and then?", hangs=True)
    response = served.chat(stop=["ser:"], logprobs=True, top_logprobs=0, stream=stream)
    choices = [event["choices"][0] for event in events_of(response.text)[:-1]] if stream else response.json()["choices"]
    tokens = [entry["token"] for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert "The answer is 42. U".startswith("".join(tokens))
    assert "The answer is 42." in "".join(tokens)


def test_a_stop_string_may_stay_and_special_tokens_may_show(served: Served) -> None:
    served.says("one two User: three", hangs=True)
    kept = served.complete(stop="User:", include_stop_str_in_output=True, max_tokens=40).json()["choices"][0]
    assert (kept["text"], kept["stop_reason"]) == ("one two User:", "User:")
    served.says("one")
    assert served.complete(max_tokens=9).json()["choices"][0]["text"] == "one"
    shown = served.complete(max_tokens=9, skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown.json()["choices"][0]["text"] == "one<|endoftext|>"


def test_stop_strings_count_after_min_tokens(served: Served) -> None:
    served.says("go go go stop", hangs=True)
    num_two = len(served.ids("go go"))
    choice = served.complete(stop="go", min_tokens=num_two, max_tokens=40).json()["choices"][0]
    assert choice["text"] == "go go "
