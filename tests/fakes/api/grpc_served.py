"""A front door over a fake engine, on a real gRPC server at a free port of loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from prometheus_client import CollectorRegistry

import coppice
from coppice.tenants.directory import TenantDirectory
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_rpc.v1 import scheduler_pb2_grpc as pb_grpc
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.metrics import FrontDoorMetrics
from coppice_scheduler.edge.base.public_tls import PublicTls
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.grpc.generation import MESSAGE_TIMEOUT_S, Generation
from coppice_scheduler.edge.grpc.keyless import KeylessLimits
from coppice_scheduler.edge.grpc.server import ConnectionLimits, GenerationServer
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText, load_checkpoint_text
from tests.fakes.api.engine import FakeEngine, Script
from tests.fakes.telemetry.records import FakeLog

DEMO = Path(coppice.__file__).parent / "demo_model"
MODEL = "org/demo"
WAIT_S = 60
MAX_CONNECTIONS = 8


@dataclass
class Served:
    engine: FakeEngine
    checkpoint: CheckpointText
    stub: Any
    channel: grpc.aio.Channel
    port: int
    server: GenerationServer
    records: FakeLog

    def ids(self, text: str) -> list[int]:
        return list(self.checkpoint.raw.encode(text).ids)

    def says(self, text: str, **fields: Any) -> list[int]:
        ids = self.ids(text)
        self.engine.script = lambda request: Script(ids, **fields)
        return ids

    async def ask(self, metadata: tuple[tuple[str, str], ...] = (), **fields: Any) -> list[pb.GenerateResponse]:
        if not {"text", "token_ids", "chat"} & set(fields):
            fields["text"] = "one"
        request = pb.GenerateRequest(**{"model": MODEL, **fields})
        return [r async for r in self.stub.Generate(request, timeout=WAIT_S, metadata=metadata)]

    async def refusal(self, **fields: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.ask(**fields)
        return caught.value


def serve(
    test: Callable[[Served], Awaitable[None]],
    tenants: TenantDirectory | None = None,
    message_timeout_s: float = MESSAGE_TIMEOUT_S,
    tls: tuple[Path, Path, Path] | None = None,
    checkpoint: CheckpointText | None = None,
    limits: ConnectionLimits | None = None,
    keyless: KeylessLimits | None = None,
) -> None:
    """`tls`: files of a public certificate, its key, and the CA that the client knows."""
    text = checkpoint or load_checkpoint_text(DEMO)

    async def run() -> None:
        engine = FakeEngine(ModelInfo(MODEL, 512, 1))
        metrics = FrontDoorMetrics(CollectorRegistry(), MODEL)
        frontdoor = FrontDoor(engine, text, tenants or TenantDirectory.single_default(), metrics)
        records = FakeLog()
        generation = Generation(frontdoor, message_timeout_s=message_timeout_s, log=records)
        public = PublicTls(*tls[:2]) if tls else None
        bounds = limits or ConnectionLimits(MAX_CONNECTIONS)
        server = GenerationServer(generation, "127.0.0.1", 0, bounds, public, keyless=keyless)
        await server.start()
        try:
            address = f"127.0.0.1:{server.port}"
            async with open_channel(address, tls[2] if tls else None) as channel:
                stub = pb_grpc.GenerationStub(channel)
                await test(Served(engine, text, stub, channel, server.port, server, records))
        finally:
            await server.stop(None)

    asyncio.run(run())


def open_channel(address: str, ca: Path | None) -> grpc.aio.Channel:
    if ca is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes()))


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """google.rpc details by their type's last name."""
    raw = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    found = {}
    for packed in status.details:
        name = packed.type_url.rsplit(".", 1)[-1]
        found[name] = getattr(error_details_pb2, name)()
        packed.Unpack(found[name])
    return found
