"""Attacks over gRPC: calls that never send their message, and floods of calls that are refused or cost something."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from coppice_bench.stack import MODEL_NAME
from coppice_rpc.v1 import scheduler_pb2 as pb

if TYPE_CHECKING:
    from benchmarks.attacks.attacker import Target

_SERVICE = "/coppice_rpc.v1.Generation"
_SILENT_CALLS = 1_500  # a front door takes 1,024 of a tenant that have sent nothing
_CHANNELS = 4
_DEADLINE_S = 15.0
_PAUSE_S = 1.0  # of a silent call that was refused
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))  # a connection for each channel


async def silent(target: Target, told: Counter[str]) -> None:
    async def again_and_again(channel: grpc.aio.Channel) -> None:
        while True:
            told["called"] += 1
            if await _call(channel, target.key, "Generate", None, told) is not grpc.StatusCode.DEADLINE_EXCEEDED:
                await asyncio.sleep(_PAUSE_S)

    channels = _channels(target)
    await asyncio.gather(*(again_and_again(channels[number % _CHANNELS]) for number in range(_SILENT_CALLS)))


async def flood(target: Target, told: Counter[str]) -> None:
    """A request that has no room, bytes that are no message, and a text to tokenise, 64 of them at once."""
    calls = (
        ("Generate", pb.GenerateRequest(model=MODEL_NAME, text="x", max_tokens=1 << 31).SerializeToString()),
        ("Detokenize", b"\xff" * 1_000),
        ("Tokenize", pb.TokenizeRequest(model=MODEL_NAME, text="x " * 30_000).SerializeToString()),
    )

    async def again_and_again(channel: grpc.aio.Channel) -> None:
        for method, message in itertools.cycle(calls):
            await _call(channel, target.key, method, _one(message), told)

    channels = _channels(target)
    await asyncio.gather(*(again_and_again(channels[number % _CHANNELS]) for number in range(64)))


async def _one(message: bytes) -> AsyncIterator[bytes]:
    yield message


async def _call(
    channel: grpc.aio.Channel, key: str, method: str, messages: AsyncIterator[bytes] | None, told: Counter[str]
) -> grpc.StatusCode:
    """Without `messages` it stays open and says nothing."""
    asked: Any = channel.stream_stream(f"{_SERVICE}/{method}")
    call = asked(messages, timeout=_DEADLINE_S, metadata=(("authorization", f"Bearer {key}"),))
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError:
        pass
    code: grpc.StatusCode = await call.code()
    told[f"{method} {code.name}"] += 1
    return code


def _channels(target: Target) -> list[grpc.aio.Channel]:
    address = f"{target.host}:{target.grpc_port}"
    return [grpc.aio.insecure_channel(address, options=_OPTIONS) for _ in range(_CHANNELS)]
