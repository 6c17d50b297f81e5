"""A front door over a fake engine, on a real uvicorn at a free port of loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from prometheus_client import CollectorRegistry

import coppice
from coppice.tenants import TenantDirectory
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.metrics import FrontDoorMetrics
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.http_server import HttpLimits, uvicorn_config
from coppice_scheduler.edge.openai.routes import create_app
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText, load_checkpoint_text
from tests.fakes.engine import FakeEngine, Script

DEMO = Path(coppice.__file__).parent / "demo_model"
MODEL = "org/demo"
CONTEXT = 512
WAIT_S = 60


@dataclass
class Served:
    url: str
    engine: FakeEngine
    checkpoint: CheckpointText
    registry: CollectorRegistry
    http: httpx.Client

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def ids(self, text: str) -> list[int]:
        return list(self.checkpoint.raw.encode(text).ids)

    def says(self, text: str, **fields: Any) -> None:
        self.engine.script = lambda request: Script(self.ids(text), **fields)

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return self.http.post(path, content=content, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post({"model": MODEL, "prompt": "one", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "one"}], **fields}
        return self.post(body, "/v1/chat/completions")


@contextmanager
def serving(tenants: TenantDirectory | None = None, **options: Any) -> Iterator[Served]:
    checkpoint = load_checkpoint_text(DEMO)
    engine = FakeEngine(ModelInfo(MODEL, CONTEXT, 1_700_000_000))
    registry = CollectorRegistry()
    frontdoor = FrontDoor(
        engine, checkpoint, tenants or TenantDirectory.single_default(), FrontDoorMetrics(registry, MODEL)
    )
    app = create_app(frontdoor, registry, body_timeout_s=options.pop("body_timeout_s", 30.0))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the service has it
    server = uvicorn.Server(uvicorn_config(app, "127.0.0.1", 0, HttpLimits(**options)))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=WAIT_S) as http:
            yield Served(url, engine, checkpoint, registry, http)
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listener.close()


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)
