"""The gRPC API over a real channel, against the same fake engine as the REST API."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode, Refused, RefusedReason
from tests.fakes.api.engine import pack, unpack
from tests.fakes.api.grpc_served import MODEL, WAIT_S, Served, details_of, serve


def test_text_tokens_usage_and_one_end() -> None:
    async def test(served: Served) -> None:
        ids = served.says("Grüße 🌲!", num_cached_tokens=2)
        answers = await served.ask(max_tokens=40, temperature=0.0, top_k=3, seed=2**64 - 1)
        assert "".join(answer.text for answer in answers) == "Grüße 🌲!"
        end_token = 0
        assert unpack(b"".join(answer.tokens for answer in answers)) == [*ids, end_token]
        assert [answer.finish_reason for answer in answers] == [""] * (len(answers) - 1) + ["stop"]
        assert not any(answer.HasField("usage") for answer in answers[:-1])
        usage = answers[-1].usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (1, 2, len(ids) + 1)
        request = served.engine.requests[0]
        assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.0, 3, 2**64 - 1)
        assert request.tenant == "default"
        await served.ask(ignore_eos=True)
        assert served.engine.requests[1].stop_token_ids == frozenset()
        assert served.engine.requests[1].sampling.temperature == 0.7  # the checkpoint's default: the field was absent

    serve(test)


def test_chats_and_token_ids() -> None:
    async def test(served: Served) -> None:
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
        await served.ask(chat=chat)
        await served.ask(token_ids=pb.TokenIds(tokens=pack([5, 6])), max_tokens=2)
        first, second = served.engine.requests
        assert served.checkpoint.raw.decode(unpack(first.tokens)) == "user: hi\nassistant:\n"
        assert unpack(second.tokens) == [5, 6]

    serve(test)


def test_a_stop_string_ends_before_it() -> None:
    async def test(served: Served) -> None:
        served.says("one two three four", hangs=True)
        answers = await served.ask(stop=["three"], max_tokens=100)
        assert "".join(answer.text for answer in answers) == "one two "
        assert answers[-1].finish_reason == "stop"

    serve(test)


@pytest.mark.parametrize(
    ("fields", "code", "reason", "words"),
    [
        ({"model": ""}, "INVALID_ARGUMENT", "missing", "model is required"),
        ({"model": "gpt-9"}, "NOT_FOUND", "model_not_found", "gpt-9"),
        ({"model": "m" * (1 << 20)}, "NOT_FOUND", "model_not_found", "mmm"),
        ({"text": ""}, "INVALID_ARGUMENT", "empty", "empty"),
        ({"token_ids": pb.TokenIds()}, "INVALID_ARGUMENT", "empty", "empty"),
        ({"token_ids": pb.TokenIds(tokens=b"\1\2\3")}, "INVALID_ARGUMENT", "invalid", "4-byte"),
        ({"token_ids": pb.TokenIds(tokens=pack([9999]))}, "INVALID_ARGUMENT", "invalid_token_id", "9999"),
        ({"chat": pb.ChatMessages()}, "INVALID_ARGUMENT", "empty", "messages is empty"),
        (
            {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="function", content="x")])},
            "INVALID_ARGUMENT",
            "unsupported_parameter",
            "messages[0].role",
        ),
        ({"text": "word " * 700}, "INVALID_ARGUMENT", "context_length_exceeded", "512"),
        ({"text": "x" * (2 << 20)}, "INVALID_ARGUMENT", "request_too_large", "2097152"),
        ({"max_tokens": 0}, "INVALID_ARGUMENT", "invalid", "max_tokens is 0"),
        ({"max_tokens": 512}, "INVALID_ARGUMENT", "context_length_exceeded", "At most 511"),
        ({"temperature": float("nan")}, "INVALID_ARGUMENT", "invalid", "temperature"),
        ({"temperature": -1.0}, "INVALID_ARGUMENT", "invalid", "temperature"),
        ({"top_p": 0.0}, "INVALID_ARGUMENT", "invalid", "top_p"),
        ({"top_k": 2**32 - 1}, "INVALID_ARGUMENT", "invalid", "top_k"),
        ({"stop": ["x"] * 17}, "INVALID_ARGUMENT", "invalid", "16"),
    ],
)
def test_wrong_calls_are_refused(fields: dict[str, Any], code: str, reason: str, words: str) -> None:
    async def test(served: Served) -> None:
        error = await served.refusal(**fields)
        assert error.code().name == code
        assert words in str(error.details())
        assert details_of(error)["ErrorInfo"].reason == reason
        assert served.engine.requests == []

    serve(test)


def test_a_call_without_a_deadline_is_refused() -> None:
    async def test(served: Served) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in served.stub.Generate(pb.GenerateRequest(model=MODEL, text="x")):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "deadline" in str(caught.value.details())

    serve(test)


def test_refusals_say_when_to_come_back() -> None:
    async def test(served: Served) -> None:
        served.says("", refused=Refused(RefusedReason.TENANT_QUEUE, "too many of yours wait", 1500))
        error = await served.refusal()
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata() or ())["retry-after-ms"] == "1500"
        details = details_of(error)
        assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1500
        (violation,) = details["QuotaFailure"].violations
        assert (violation.subject, violation.description) == ("tenant:default", "tenant_queue: too many of yours wait")
        served.says("", refused=Refused(RefusedReason.QUEUE_FULL, "full", 10))
        assert "QuotaFailure" not in details_of(await served.refusal())
        served.says("", refused=Refused(RefusedReason.DRAINING, "going down", 10))
        assert (await served.refusal()).code() is grpc.StatusCode.UNAVAILABLE
        served.engine.ready = False
        assert (await served.refusal()).code() is grpc.StatusCode.UNAVAILABLE

    serve(test)


def test_a_failure_mid_stream_is_a_status_after_the_text() -> None:
    async def test(served: Served) -> None:
        served.says("some text", error=OutputError(OutputErrorCode.INTERNAL, "it broke"))
        call = served.stub.Generate(pb.GenerateRequest(model=MODEL, text="x"), timeout=WAIT_S)
        texts: list[str] = []

        async def read() -> None:
            async for response in call:
                texts.append(response.text)

        with pytest.raises(grpc.aio.AioRpcError, match="it broke"):
            await read()
        assert "".join(texts) == "some text"

    serve(test)


def test_a_cancelled_call_cancels_the_request() -> None:
    async def test(served: Served) -> None:
        served.says("some text", hangs=True)
        call = served.stub.Generate(pb.GenerateRequest(model=MODEL, text="x"), timeout=WAIT_S)
        assert (await call.read()).text
        call.cancel()
        await asyncio.to_thread(served.engine.some_cancelled.wait, WAIT_S)
        assert served.engine.num_running == 0
        assert len(served.engine.cancelled) == 1

    serve(test)


def test_the_deadline_ends_the_request() -> None:
    async def test(served: Served) -> None:
        served.says("some text", hangs=True)
        await served.stub.ListModels(pb.ListModelsRequest(), timeout=WAIT_S)  # connecting takes none of the deadline
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in served.stub.Generate(pb.GenerateRequest(model=MODEL, text="x"), timeout=3.0):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await asyncio.to_thread(served.engine.some_cancelled.wait, WAIT_S)

    serve(test)


def test_models_and_credentials() -> None:
    tenants = TenantDirectory([Tenant(id="a", api_key_sha256=(digest_of_key("key-a"),))])

    async def test(served: Served) -> None:
        key = (("authorization", "Bearer key-a"),)
        models = await served.stub.ListModels(pb.ListModelsRequest(), metadata=key, timeout=WAIT_S)
        assert [(model.id, model.max_context) for model in models.models] == [(MODEL, 512)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.ListModels(pb.ListModelsRequest(), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await served.refusal()).code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await served.refusal(metadata=(("authorization", "Bearer b"),))).code().name == "UNAUTHENTICATED"
        await served.ask(metadata=key, max_tokens=1)
        assert [request.domain for request in served.engine.requests] == ["tenant/a"]

    serve(test, tenants)
