"""What one tenant's key cannot do to others at the front door over gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.base.metrics import FrontDoorMetrics
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.frontend.generation_spec import (
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from coppice_scheduler.edge.frontend.text_work import SHORT_SIZE
from coppice_scheduler.edge.grpc.generation import READING_MAX, Generation
from coppice_scheduler.edge.grpc.messages import spec_of
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from tests.fakes.api.engine import FakeEngine, pack
from tests.fakes.api.grpc_served import DEMO, MODEL, WAIT_S, Served, details_of, serve
from tests.fakes.seen_text_work import SeenTextWork

TENANTS = TenantDirectory(
    [
        Tenant(id="a", api_key_sha256=(digest_of_key("key-a"),), requests_per_minute=3),
        Tenant(id="b", api_key_sha256=(digest_of_key("key-b"),)),
        Tenant(id="c", api_key_sha256=(digest_of_key("key-c"),)),
    ]
)


def key(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer key-{tenant}"),)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize("is_wrong", [False, True])
def test_every_call_counts_whatever_becomes_of_it(is_wrong: bool) -> None:
    async def test(served: Served) -> None:
        model = "no such" if is_wrong else MODEL

        def tokenize(tenant: str) -> Any:
            return served.stub.Tokenize(pb.TokenizeRequest(model=model, text="x"), timeout=WAIT_S, metadata=key(tenant))

        for _ in range(3):
            if is_wrong:
                assert (await refusal(tokenize("a"))).code() is grpc.StatusCode.NOT_FOUND
            else:
                await tokenize("a")
        error = await refusal(served.ask(metadata=key("a")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = details_of(error)
        assert details["ErrorInfo"].reason == "tenant_rate"
        assert details["QuotaFailure"].violations[0].subject == "tenant:a"
        assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        assert await served.ask(metadata=key("b"), max_tokens=1)

    serve(test, TENANTS)


TOO_LONG = pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)}, "logit_bias has 1025 entries"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop has 17 strings"),
        ({"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids has 65 ids"),
        (
            {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")] * (MAX_MESSAGES + 1))},
            "messages has 4097 entries",
        ),
    ],
)


@TOO_LONG
def test_lengths_have_a_maximum(fields: dict[str, Any], words: str) -> None:
    async def test(served: Served) -> None:
        assert words in str((await served.refusal(**fields)).details())

    serve(test)


@TOO_LONG
def test_lengths_are_looked_at_before_entries_are_converted(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words):
        spec_of(pb.GenerateRequest(model=MODEL, **fields), WAIT_S)


class Silent:
    """A call's messages, none of which comes; and the context of the call."""

    def __init__(self, tenant: str) -> None:
        self.metadata = key(tenant)
        self.is_asked = False

    def __aiter__(self) -> Silent:
        return self

    async def __anext__(self) -> bytes:
        self.is_asked = True
        await asyncio.Event().wait()
        raise AssertionError

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata

    def set_trailing_metadata(self, metadata: object) -> None:
        pass

    def time_remaining(self) -> float:
        return WAIT_S

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


def test_the_library_takes_in_few_messages_of_a_tenant_at_a_time() -> None:
    """It holds up to 4 MiB for each that was asked for, and does not say so."""

    async def test() -> None:
        answer = method(front_door(), "Generate")
        calls = [Silent("b") for _ in range(READING_MAX + 5)] + [Silent("c")]
        tasks = [asyncio.create_task(anext(answer(call, call))) for call in calls]
        for _ in range(20):
            await asyncio.sleep(0)
        assert [call.is_asked for call in calls] == [True] * READING_MAX + [False] * 5 + [True]
        tasks[0].cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert sum(call.is_asked for call in calls) == READING_MAX + 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(test())


class Spoken(Silent):
    """A call whose only message comes at once."""

    def __init__(self, tenant: str, message: bytes) -> None:
        super().__init__(tenant)
        self.message = message

    async def __anext__(self) -> bytes:
        return self.message


def test_large_messages_are_read_beside_the_loop() -> None:
    async def test() -> None:
        frontdoor, work = front_door(), SeenTextWork()
        frontdoor.text_work = work
        tokens = pack([5] * (SHORT_SIZE // 4 + 1))
        call = Spoken("b", pb.DetokenizeRequest(model=MODEL, tokens=tokens).SerializeToString())
        assert [answer async for answer in method(frontdoor, "Detokenize")(call, call)]
        assert work.sizes == [len(call.message), len(tokens)]

    asyncio.run(test())


def front_door() -> FrontDoor:
    engine, metrics = FakeEngine(ModelInfo(MODEL, 512, 1)), FrontDoorMetrics(CollectorRegistry(), MODEL)
    return FrontDoor(engine, load_checkpoint_text(DEMO), TENANTS, metrics)


def method(frontdoor: FrontDoor, name: str) -> Any:
    handler: Any = Generation(frontdoor).handler().service(cast(Any, Details(f"/coppice_rpc.v1.Generation/{name}")))
    return handler.stream_stream


@dataclass
class Details:
    method: str
    invocation_metadata: tuple[()] = ()
