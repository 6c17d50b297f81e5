"""Options of the gRPC API beyond the plain ones, and the details of its errors."""

from __future__ import annotations

import time
from dataclasses import replace

import grpc
import numpy as np
import pytest

from coppice.messages.reuse import Reuse
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode, Refused, RefusedReason
from coppice_scheduler.edge.frontend.admission import call_kind_of
from coppice_scheduler.edge.frontend.generation_spec import Endpoint, GenerationSpec
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from tests.fakes.api.engine import Script, likely_ids, logprob_of, pack, rank_of, unpack
from tests.fakes.api.grpc_served import DEMO, MODEL, WAIT_S, Served, details_of, serve


def test_every_sampling_option_reaches_the_engine() -> None:
    async def test(served: Served) -> None:
        await served.ask(
            min_p=0.25,
            frequency_penalty=-0.5,
            presence_penalty=1.5,
            repetition_penalty=1.25,
            logit_bias={7: -2.5, 3: 100.0},
            min_tokens=2,
            max_tokens=9,
            stop_token_ids=[5],
            num_logprobs=3,
            priority=-4,
            prompt_cache_key="agent-7",
            prompt_cache_ttl_ms=90_000,
        )
        (request,) = served.engine.requests
        sampling = request.sampling
        assert (sampling.min_p, sampling.frequency_penalty, sampling.presence_penalty) == (0.25, -0.5, 1.5)
        assert (sampling.repetition_penalty, sampling.num_logprobs, sampling.min_tokens) == (1.25, 3, 2)
        pairs = np.frombuffer(sampling.logit_bias, np.dtype([("token", "<u4"), ("bias", "<f4")]))
        assert pairs.tolist() == [(3, 100.0), (7, -2.5)]
        assert unpack(sampling.stop_token_ids) == [0, 5]
        assert (request.priority, request.reuse, request.retain_ms) == (-4, Reuse.LIKELY, 90_000)
        assert request.call_kind == call_kind_of(GenerationSpec("m", (), endpoint=Endpoint.COMPLETIONS))
        assert request.streams
        left_s = ((request.deadline_ns or 0) - time.monotonic_ns()) / 1e9
        assert 0 < left_s <= WAIT_S + 1, "its deadline is the call's, rounded up on the wire"

    serve(test)


def test_an_answer_may_take_what_is_left_of_the_context() -> None:
    async def test(served: Served) -> None:
        assert "max_tokens" in ((await served.refusal(max_tokens=10_000)).details() or "")
        assert await served.ask(text="one two", max_tokens=10_000, fill_context=True)
        (request,) = served.engine.requests
        assert request.max_new_tokens == 512 - len(served.ids("one two"))

    serve(test)


def test_what_a_client_says_of_its_prompt_takes_precedence_over_its_key() -> None:
    async def test(served: Served) -> None:
        for said, reuse in ((pb.PROMPT_REUSE_LIKELY, Reuse.LIKELY), (pb.PROMPT_REUSE_UNLIKELY, Reuse.UNLIKELY)):
            await served.ask(max_tokens=1, prompt_cache_key="agent-7", prompt_reuse=said)
            assert served.engine.requests[-1].reuse is reuse
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
        await served.ask(max_tokens=1, chat=chat)
        assert served.engine.requests[-1].reuse is Reuse.UNKNOWN
        assert served.engine.requests[-1].call_kind == call_kind_of(GenerationSpec("m", (), endpoint=Endpoint.CHAT))
        refused = await served.refusal(max_tokens=1, prompt_reuse=77)
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "prompt_reuse has the unknown value 77" in (refused.details() or "")

    serve(test)


def test_choices_are_told_apart_and_the_prompt_is_counted_once() -> None:
    async def test(served: Served) -> None:
        served.engine.script = lambda request: Script(
            served.ids(f"answer {request.request_id[-1]}"), num_cached_tokens=1, num_written_tokens=2
        )
        answers = await served.ask(n=3, text="one two", max_tokens=20)
        texts = ["", "", ""]
        for answer in answers:
            texts[answer.index] += answer.text
        assert texts == ["answer 0", "answer 1", "answer 2"]
        usages = sorted((answer.index, answer.usage) for answer in answers if answer.finish_reason)
        assert [usage.prompt_tokens for _, usage in usages] == [len(served.ids("one two")), 0, 0]
        assert [usage.cached_tokens for _, usage in usages] == [1, 0, 0]
        assert [usage.cache_write_tokens for _, usage in usages] == [2, 0, 0]

    serve(test)


def test_the_best_of_all_candidates_come_and_the_first_counts_the_prompt() -> None:
    async def test(served: Served) -> None:
        texts = ["three", "one two", "five", "go"]
        served.engine.script = lambda request: Script(served.ids(texts[int(request.request_id[-1])]))

        def likelihood(text: str) -> float:
            values = [logprob_of(token_id) for token_id in served.ids(text)]
            return sum(values) / len(values)

        answers = await served.ask(n=2, best_of=4, text="one two", max_tokens=20)
        told = ["", ""]
        for answer in answers:
            told[answer.index] += answer.text
        assert told == sorted(texts, key=likelihood)[:1:-1]
        usages = [answer.usage for answer in sorted(answers, key=lambda answer: answer.index) if answer.finish_reason]
        assert [usage.prompt_tokens for usage in usages] == [len(served.ids("one two")), 0]
        assert sum(usage.completion_tokens for usage in usages) == sum(len(served.ids(text)) + 1 for text in texts)
        assert not any(answer.logprobs for answer in answers)

    serve(test)


def test_log_probabilities_of_a_prompt_come_with_its_first_response() -> None:
    async def test(served: Served) -> None:
        first, *rest = await served.ask(num_prompt_logprobs=2, text="one two forest", max_tokens=9)
        assert not any(answer.prompt_logprobs for answer in rest)
        start, *told = first.prompt_logprobs
        ids = served.ids("one two forest")
        assert (start.token_id, start.HasField("logprob"), start.HasField("rank")) == (ids[0], False, False)
        assert [(entry.token_id, entry.logprob, entry.rank) for entry in told] == [
            (token_id, logprob_of(token_id), rank_of(token_id)) for token_id in ids[1:]
        ]
        assert [[likely.token_id for likely in entry.top] for entry in told] == [likely_ids(i, 2) for i in ids[1:]]
        assert b"".join(entry.token for entry in first.prompt_logprobs) == b"one two forest"
        assert not first.logprobs

    serve(test)


def test_log_probabilities_carry_bytes_that_make_up_the_text() -> None:
    async def test(served: Served) -> None:
        ids = served.says("Grüße 東京")
        answers = await served.ask(num_logprobs=2, max_tokens=60)
        entries = [entry for answer in answers for entry in answer.logprobs]
        assert [entry.token_id for entry in entries] == ids
        assert b"".join(entry.token for entry in entries).decode() == "Grüße 東京"
        assert [entry.logprob for entry in entries] == [logprob_of(token_id) for token_id in ids]
        assert [[top.token_id for top in entry.top] for entry in entries] == [likely_ids(i, 2) for i in ids]

    serve(test)


def test_echo_and_a_kept_stop_string() -> None:
    async def test(served: Served) -> None:
        served.says(" and a tree", hangs=True)
        answers = await served.ask(
            text="a forest", echo=True, num_logprobs=0, stop=["tree"], include_stop_str_in_output=True, max_tokens=50
        )
        text = "".join(answer.text for answer in answers)
        assert text == "a forest and a tree"
        assert (answers[-1].finish_reason, answers[-1].stop) == ("stop", "tree")
        entries = [entry for answer in answers for entry in answer.logprobs]
        assert not entries[0].HasField("logprob")
        assert b"".join(entry.token for entry in entries).decode() == text
        assert [text[entry.text_offset :].startswith(entry.token.decode()) for entry in entries] == [True] * len(
            entries
        )

    serve(test)


def test_tokens_and_back() -> None:
    async def test(served: Served) -> None:
        found = await served.stub.Tokenize(pb.TokenizeRequest(model=MODEL, text="Grüße 🌲"), timeout=WAIT_S)
        assert unpack(found.tokens) == served.ids("Grüße 🌲")
        assert found.max_context == 512
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
        of_chat = await served.stub.Tokenize(pb.TokenizeRequest(model=MODEL, chat=chat), timeout=WAIT_S)
        assert served.checkpoint.raw.decode(unpack(of_chat.tokens)) == "user: hi\nassistant:\n"
        request = pb.DetokenizeRequest(model=MODEL, tokens=found.tokens)
        assert (await served.stub.Detokenize(request, timeout=WAIT_S)).text == "Grüße 🌲"
        for wrong in (pb.TokenizeRequest(model=MODEL), pb.TokenizeRequest(model=MODEL, text="")):
            with pytest.raises(grpc.aio.AioRpcError, match="prompt"):
                await served.stub.Tokenize(wrong, timeout=WAIT_S)
        added = pb.TokenizeRequest(model=MODEL, chat=chat, add_special_tokens=True)
        with pytest.raises(grpc.aio.AioRpcError, match="special tokens of its template"):
            await served.stub.Tokenize(added, timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError, match="2097152"):
            await served.stub.Tokenize(pb.TokenizeRequest(model=MODEL, text="a" * (2 << 20)), timeout=WAIT_S)
        for tokens in (b"123", pack([10**6]), pack([1] * (1 << 19))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.stub.Detokenize(pb.DetokenizeRequest(model=MODEL, tokens=tokens), timeout=WAIT_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    serve(test)


def test_a_chat_may_give_its_template_values() -> None:
    template = "{% for m in messages %}{{ m.name }}:{{ m.content }}({{ m.reasoning_content }}){% endfor %}{{ level }}"
    checkpoint = replace(load_checkpoint_text(DEMO), chat_template=template)

    async def test(served: Served) -> None:
        message = pb.ChatMessage(role="assistant", content="hi", name="bo", reasoning_content="why")
        chat = pb.ChatMessages(messages=[message])
        chat.chat_template_kwargs.update({"level": {"a": [1, 2.5, True, None, "é"]}})
        await served.ask(chat=chat)
        (request,) = served.engine.requests
        prompt = served.checkpoint.raw.decode(unpack(request.tokens))
        assert prompt == "bo:hi(why){'a': [1, 2.5, True, None, 'é']}"
        for kwargs, words in (
            ({"hue": 1}, "it reads level"),
            ({"level": "x" * 20_000}, "at most 16384"),
            ({"level": float("nan")}, "cannot be read"),
        ):
            chat.chat_template_kwargs.Clear()
            chat.chat_template_kwargs.update(kwargs)
            error = await served.refusal(chat=chat)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in (error.details() or "")

    serve(test, checkpoint=checkpoint)


def test_the_id_of_a_request_comes_back() -> None:
    async def test(served: Served) -> None:
        request = pb.GenerateRequest(model=MODEL, text="x")
        call = served.stub.Generate(request, timeout=WAIT_S, metadata=(("x-request-id", "g-7"),))
        assert [answer async for answer in call]
        assert dict(await call.trailing_metadata())["x-request-id"] == "g-7"
        assert served.engine.requests[-1].request_id.startswith("cmpl-g-7-")
        call = served.stub.Generate(pb.GenerateRequest(model="other", text="x"), timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert len(str(dict(caught.value.trailing_metadata())["x-request-id"])) == 32

    serve(test)


def test_wrong_fields_are_named_in_the_details() -> None:
    async def test(served: Served) -> None:
        for fields, field in (
            ({"n": 129}, "n"),
            ({"min_p": 2.0}, "min_p"),
            ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ):
            error = await served.refusal(**fields)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            (violation,) = details_of(error)["BadRequest"].field_violations
            assert (violation.field, violation.description) == (field, error.details())
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
        assert "echo" in ((await served.refusal(chat=chat, echo=True)).details() or "")

    serve(test)


def test_deadlines_and_rates_have_their_codes() -> None:
    async def test(served: Served) -> None:
        served.says("", refused=Refused(RefusedReason.TENANT_RATE, "60 requests a minute", 2500))
        error = await served.refusal()
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = details_of(error)
        assert details["RetryInfo"].retry_delay.ToMilliseconds() == 2500
        assert details["QuotaFailure"].violations[0].subject == "tenant:default"
        served.says("", refused=Refused(RefusedReason.DEADLINE, "it cannot be met", 700))
        assert (await served.refusal()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        served.says("a b", error=OutputError(OutputErrorCode.DEADLINE, "its time is over"))
        error = await served.refusal()
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert details_of(error)["ErrorInfo"].reason == "deadline_exceeded"

    serve(test)


def test_a_chat_ends_where_it_says() -> None:
    async def test(served: Served) -> None:
        async def told(**fields: bool) -> list[int]:
            served.engine.requests.clear()
            messages = [pb.ChatMessage(role="user", content="one"), pb.ChatMessage(role="assistant", content="It is")]
            await served.ask(chat=pb.ChatMessages(messages=messages, **fields))
            return unpack(served.engine.requests[0].tokens)

        whole, behind = await told(), await told(add_generation_prompt=False)
        within = await told(continue_final_message=True)
        assert within == behind[: len(within)] == whole[: len(within)]
        assert len(within) < len(behind) < len(whole)
        assert within[-len(served.ids(" is")) :] == served.ids(" is")
        error = await served.refusal(
            chat=pb.ChatMessages(
                messages=[pb.ChatMessage(role="user", content="x")],
                add_generation_prompt=True,
                continue_final_message=True,
            )
        )
        assert "continue_final_message" in (error.details() or "")

    serve(test)
