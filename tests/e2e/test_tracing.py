"""One request is one trace through all three services, over HTTP and over gRPC; nothing in it tells what was said."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from coppice_rpc.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.stack import Stack
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.telemetry.collector import Collector, Span
from tests.fakes.waiting import wait_for

CANARY = "canary-7f3a"
EXPECTED = {
    ("coppice-scheduler", "tokenize"),
    ("coppice-scheduler", "acquire"),
    ("coppice-scheduler", "prefill"),
    ("coppice-scheduler", "decode"),
    ("coppice-scheduler", "chunk"),
    ("coppice-cache", "cache.acquire"),
    ("coppice-cache", "cache.release"),
    ("coppice-worker", "worker.prefill_chunk"),
    ("coppice-worker", "worker.decode"),
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def stack(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=8)
    otlp = [f"--otlp-endpoint={collector.endpoint}"]
    folder: Path = tmp_path_factory.mktemp("stack")
    chunked = [*otlp, "--max-chunk-tokens=32"]
    with Stack(checkpoint, folder, cache_args=otlp, worker_args=otlp, scheduler_args=chunked) as stack:
        yield stack


def spans_of(collector: Collector, client_trace_id: str, root: str) -> list[Span]:
    """All spans of the request that came with a client's trace, once everything that is expected has come, checked for
    what must hold of any request."""

    def complete() -> bool:
        spans = collector.trace_for(client_trace_id)
        return {(span.service, span.name) for span in spans} >= EXPECTED | {("coppice-scheduler", root)}

    wait_for(complete, f"the trace to be complete, not {[(s.service, s.name) for s in collector.spans]}")
    spans = collector.trace_for(client_trace_id)
    assert all(span.scope.startswith("coppice") for span in collector.spans), "nor has the web framework any of its own"
    request = next(span for span in spans if span.name == root)
    for span in spans:
        assert span.start_ns <= span.end_ns
        if span is not request:
            assert span.parent_id == request.span_id, f"{span.name} hangs in the air"
    assert request.trace_id != client_trace_id
    assert not request.parent_id
    assert [link.trace_id for link in request.links] == [client_trace_id]
    assert CANARY not in repr(spans)
    return spans


def test_a_request_over_http(stack: Stack, collector: Collector) -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    prompt = CANARY + " " + "x" * 80
    request = urllib.request.Request(
        f"{stack.url}/v1/completions",
        json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {CANARY}",
            "traceparent": f"00-{trace_id}-{parent}-01",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        usage = json.load(response)["usage"]
    spans = spans_of(collector, trace_id, "text_completion tiny")
    served = next(span for span in spans if span.name == "text_completion tiny")
    assert [link.span_id for link in served.links] == [parent]
    assert served.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert served.attributes["gen_ai.usage.output_tokens"] == 5
    assert served.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    chunks = [span for span in spans if span.name == "worker.prefill_chunk"]
    assert sum(span.attributes["coppice.tokens"] for span in chunks) == usage["prompt_tokens"]
    assert len(chunks) == -(-usage["prompt_tokens"] // 32)


def test_a_request_over_grpc(stack: Stack, collector: Collector) -> None:
    trace_id = "1bf7651916cd43dd8448eb211c80319d"
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        request = scheduler_pb2.GenerateRequest(model="tiny", text="hello there, " * 3, max_tokens=4, ignore_eos=True)
        metadata = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),)
        list(scheduler_pb2_grpc.GenerationStub(channel).Generate(request, timeout=60, metadata=metadata))
    spans_of(collector, trace_id, "text_completion tiny")
