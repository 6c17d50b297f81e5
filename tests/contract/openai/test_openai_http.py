"""The REST API over a real socket, with the `openai` package as the client."""

from __future__ import annotations

import httpx
import openai
import pytest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import Script, unpack
from tests.fakes.api.rest import MODEL, Served, error_of, events_of, serving

__all__ = ["served", "shared_server"]


def test_models(served: Served) -> None:
    (model,) = served.client().models.list().data
    assert (model.id, model.created, model.object) == (MODEL, 1_700_000_000, "model")
    assert served.client().models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("org/other")


def test_chat(served: Served) -> None:
    served.says("Hello there, wörld!", num_cached_tokens=3)
    answer = served.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "Hello there, wörld!",
        "stop",
    )
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.prompt_tokens == len(unpack(served.engine.requests[0].tokens))
    assert usage.completion_tokens == len(served.ids("Hello there, wörld!")) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert served.checkpoint.raw.decode(unpack(served.engine.requests[0].tokens)) == "user: hi\nassistant:\n"


def test_chat_stream(served: Served) -> None:
    served.says("Grüße aus 東京 🌲!", num_cached_tokens=2)
    stream = served.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(pieces) == "Grüße aus 東京 🌲!"
    assert not any("�" in piece for piece in pieces)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 2
    assert len({chunk.id for chunk in chunks}) == 1
    assert "a\nb" in served.checkpoint.raw.decode(unpack(served.engine.requests[0].tokens))


def test_completion_and_its_stream_say_the_same(served: Served) -> None:
    client = served.client()
    whole = client.completions.create(model=MODEL, prompt="one two three", max_tokens=7)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 7
    chunks = list(client.completions.create(model=MODEL, prompt="one two three", max_tokens=7, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_several_prompts_run_at_once_and_keep_their_places(served: Served) -> None:
    prompts = ["alpha beta", "gamma", "delta epsilon zeta"]
    lengths = [len(served.ids(prompt)) for prompt in prompts]
    served.engine.script = lambda request: Script(unpack(request.tokens), tokens_per_output=2)
    whole = served.client().completions.create(model=MODEL, prompt=prompts, max_tokens=30)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(prompts))
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(lengths)
    assert whole.usage.completion_tokens == sum(lengths) + 3
    assert served.engine.max_running == 3
    texts = ["", "", ""]
    for chunk in served.client().completions.create(model=MODEL, prompt=prompts, max_tokens=30, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == prompts


def test_prompts_as_token_ids(served: Served) -> None:
    ids = served.ids("alpha beta")
    served.client().completions.create(model=MODEL, prompt=ids, max_tokens=2)
    served.client().completions.create(model=MODEL, prompt=[ids, ids[:1]], max_tokens=2)
    assert [unpack(request.tokens) for request in served.engine.requests] == [ids, ids, ids[:1]]


def test_sampling_options_reach_the_engine(served: Served) -> None:
    served.complete(temperature=0, top_p=0.5, top_k=7, seed=-1, max_tokens=3, ignore_eos=True)
    served.complete(temperature=None, max_tokens=None)
    first, second = served.engine.requests
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.0, 0.5, 7)
    assert (first.sampling.seed, first.max_new_tokens, first.stop_token_ids) == (2**64 - 1, 3, frozenset())
    # generation_config.json of the demo model; 16 is OpenAI's default for completions.
    assert (second.sampling.temperature, second.sampling.top_p, second.max_new_tokens) == (0.7, 0.9, 16)
    assert second.stop_token_ids == {0}
    served.chat()
    served.chat(max_completion_tokens=5, stop_token_ids=[3])
    assert [request.max_new_tokens for request in served.engine.requests[2:]] == [80, 5]
    assert served.engine.requests[3].stop_token_ids == {0, 3}


def test_calls_without_a_seed_differ_and_calls_with_one_do_not(served: Served) -> None:
    for fields in ({}, {}, {"seed": 5}, {"seed": 5}):
        served.complete(**fields)
    seeds = [request.sampling.seed for request in served.engine.requests]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [5, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(served: Served, stream: bool) -> None:
    served.says("The answer is 42. User: and then?", hangs=True)
    response = served.complete(stop=["zzz", "User:"], max_tokens=100, stream=stream, return_token_ids=True)
    if stream:
        events = events_of(response.text)
        assert events.pop() == "[DONE]"
        choices = [event["choices"][0] for event in events]
    else:
        choices = response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "The answer is 42. "
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "User:")
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert served.checkpoint.raw.decode(ids).endswith("User:")
    assert len(served.engine.finished_early) == 1
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == len(ids)


def test_token_ids_stand_where_vllm_puts_them(served: Served) -> None:
    served.says("a b c")
    end_token = served.ids("<|endoftext|>")
    prompt, output = served.ids("one"), served.ids("a b c") + end_token
    whole = served.complete(return_token_ids=True).json()["choices"][0]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == (prompt, output)
    *events, _ = events_of(served.complete(return_token_ids=True, stream=True).text)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in choice for choice in choices[1:])
    assert [token for choice in choices for token in choice["token_ids"]] == output
    chat = served.chat(return_token_ids=True).json()
    assert chat["prompt_token_ids"] == unpack(served.engine.requests[-1].tokens)
    assert chat["choices"][0]["token_ids"] == output
    *events, _ = events_of(served.chat(return_token_ids=True, stream=True).text)
    assert events[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert [token for event in events[1:] for token in event["choices"][0]["token_ids"]] == output
    plain = served.complete().json()["choices"][0]
    assert "token_ids" not in plain
    assert "prompt_token_ids" not in plain


def test_the_stream_on_the_wire(served: Served) -> None:
    response = served.chat(stream=True, stream_options={"include_usage": True}, max_tokens=2)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events_of(response.text)[0]["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert all(event["usage"] is None for event in events[:-2])
    without = events_of(served.chat(stream=True, max_tokens=2).text)
    assert not any("usage" in event for event in without[:-1])


def test_the_credential_decides_who_asks() -> None:
    tenants = [Tenant(id=name, api_key_sha256=(digest_of_key(f"key-{name}"),)) for name in ("a", "b")]
    with serving(TenantDirectory(tenants)) as served:
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic key-a"}):
            response = served.post({"model": MODEL, "prompt": "x"}, headers=headers)
            assert error_of(response, 401)["type"] == "authentication_error"
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        error_of(served.post(b"{", headers={"authorization": "Bearer nope"}), 401)
        with pytest.raises(openai.AuthenticationError):
            served.client("nope").models.list()
        for name in ("a", "b"):
            stream = served.client(f"key-{name}").completions.create(
                model=MODEL, prompt="x", user="somebody else", stream=True
            )
            assert len(list(stream)) > 1
        assert [(request.tenant, request.domain) for request in served.engine.requests] == [
            ("a", "tenant/a"),
            ("b", "tenant/b"),
        ]
        metrics = httpx.get(f"{served.url}/metrics").text
        assert 'vllm:request_success_total{finished_reason="length",model_name="org/demo",tenant="a"} 1.0' in metrics
        assert 'vllm:prompt_tokens_total{model_name="org/demo",tenant="b"} 1.0' in metrics
        assert 'vllm:generation_tokens_total{model_name="org/demo",tenant="b"} 16.0' in metrics
        assert 'vllm:time_to_first_token_seconds_count{model_name="org/demo",tenant="a"} 1.0' in metrics
        assert 'vllm:inter_token_latency_seconds_count{model_name="org/demo",tenant="a"} 15.0' in metrics
        assert 'vllm:e2e_request_latency_seconds_count{model_name="org/demo",tenant="a"} 1.0' in metrics
