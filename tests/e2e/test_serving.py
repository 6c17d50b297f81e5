"""The stack as its users meet it: shared prefixes, separate tenants, wrong input, real clients over REST and gRPC."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coppice.tenants.keys import digest_of_key
from coppice_rpc.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.e2e.stack import Stack
from tests.fakes.checkpoints import MAX_CONTEXT
from tests.fakes.waiting import wait_for

BLOCK = 16
TENANTS = f"""
tenants:
  - id: acme
    api_key_sha256: {digest_of_key("acme-key")}
    max_share: 0.5
  - id: zeta
    api_key_sha256: {digest_of_key("zeta-key")}
    max_share: 0.25
    concurrency: 2
"""


@pytest.fixture(scope="module")
def tenants(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "tenants.yaml").write_text(TENANTS)
    with Stack(checkpoint, folder, num_blocks=128, tenants=folder / "tenants.yaml") as stack:
        yield stack


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


@pytest.mark.parametrize("num_shared", [0, 15, 16, 47, 48, 100])
def test_a_common_prefix_is_computed_once(stack: Stack, num_shared: int) -> None:
    prefix = tokens(num_shared, seed=1000 + num_shared)
    first = prefix + [1, *tokens(30, seed=2000 + num_shared)]
    second = prefix + [2, *tokens(30, seed=3000 + num_shared)]
    stack.complete(first, 2)
    before = stack.tokens_computed()
    usage = stack.complete(second, 2)["usage"]
    cached = num_shared  # what does not fill a block is copied
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    assert stack.tokens_computed() - before == len(second) - cached + 1


def test_tenants_share_nothing(tenants: Stack) -> None:
    body = {"model": "tiny", "prompt": tokens(100, seed=7), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answers = [tenants.post("/v1/completions", body, key) for key in ("acme-key", "zeta-key", "acme-key", "zeta-key")]
    assert [status for status, _ in answers] == [200] * 4
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for _, answer in answers]
    assert cached == [0, 0, 96, 96]


def test_users_of_one_tenant_share_nothing_across_salts(tenants: Stack) -> None:
    """The same prompt for each (key, salt), twice: only the second time it is found, and the answer is the same."""
    body = {"model": "tiny", "prompt": tokens(100, seed=8), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    users = [("acme-key", "user 1"), ("acme-key", "user 2"), ("acme-key", None), ("zeta-key", "user 1")]
    answers = [tenants.post("/v1/completions", {**body, "cache_salt": salt}, key) for key, salt in 2 * users]
    assert [status for status, _ in answers] == [200] * 8
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for _, answer in answers]
    assert cached == [0] * 4 + [96] * 4
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1


def test_a_key_is_needed_when_there_are_tenants(tenants: Stack) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    for key in (None, "wrong"):
        status, answer = tenants.post("/v1/completions", body, key)
        assert status == 401
        assert answer["error"]["code"]
    assert tenants.get(f"{tenants.url}/v1/models")[0] == 401


def test_metrics_that_name_tenants_are_not_for_tenants(tenants: Stack) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    assert tenants.post("/v1/completions", body, "acme-key")[0] == 200
    assert tenants.get(f"{tenants.url}/metrics")[0] == 404
    status, text = tenants.get(f"http://127.0.0.1:{tenants.metrics_port}/metrics")
    assert status == 200
    assert 'tenant="acme"' in text


def test_a_tenant_at_its_maximum_is_refused_while_the_other_is_served(tenants: Stack) -> None:
    body = {"model": "tiny", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    def ask(key: str, seed: int) -> tuple[int, Any]:
        return tenants.post("/v1/completions", {**body, "prompt": tokens(40, seed)}, key)

    with ThreadPoolExecutor(12) as pool:
        zeta = [pool.submit(ask, "zeta-key", 100 + index) for index in range(8)]
        acme = [pool.submit(ask, "acme-key", 200 + index) for index in range(3)]
        zeta_status = sorted(future.result()[0] for future in zeta)
        assert [future.result()[0] for future in acme] == [200] * 3
    assert set(zeta_status) == {200, 429}
    refused = next(future.result()[1] for future in zeta if future.result()[0] == 429)
    assert refused["error"]["type"]
    # Asked for more blocks than a quarter of the pool in all: 600 tokens never fit into 32 blocks of 16.
    status, answer = tenants.post("/v1/completions", {**body, "prompt": tokens(600, 9)}, "zeta-key")
    assert status in (400, 413, 429), answer
    assert tenants.post("/v1/completions", {**body, "prompt": tokens(600, 9), "max_tokens": 1}, "acme-key")[0] == 200


@pytest.mark.parametrize(
    ("body", "statuses", "word"),
    [
        ({"model": "gpt-9", "prompt": "x"}, {404}, "gpt-9"),
        ({"model": "tiny", "prompt": [1] * (MAX_CONTEXT + 1)}, {400}, str(MAX_CONTEXT)),
        ({"model": "tiny", "prompt": [400_000]}, {400}, "400000"),
        ({"model": "tiny", "prompt": ""}, {200, 400}, ""),
        ({"model": "tiny", "prompt": []}, {400, 422}, "prompt"),
        ({"model": "tiny", "prompt": "x", "logit_bias": {"1": 101}}, {400}, "logit_bias"),
        ({"model": "tiny", "prompt": "x", "max_tokens": -1}, {400, 422}, "max_tokens"),
        ({"model": "tiny", "prompt": "x", "temprature": 1}, {400}, "temperature"),
        (b"{not json", {400, 422}, ""),
        (b"[" * 100_000, {400, 422}, ""),
    ],
)
def test_wrong_input_is_refused_with_a_reason(stack: Stack, body: Any, statuses: set[int], word: str) -> None:
    status, answer = stack.post("/v1/completions", body)
    assert status in statuses, answer
    if status != 200:
        assert set(answer["error"]) >= {"message", "type", "param", "code"}
        assert word in answer["error"]["message"]
    stack.wait_at_rest()


def test_openai_package(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        question: Any = [{"role": "user", "content": "hello there"}]
        whole = client.chat.completions.create(model="tiny", messages=question, temperature=0, max_tokens=12)
        pieces = client.chat.completions.create(
            model="tiny", messages=question, temperature=0, max_tokens=12, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(pieces)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        batch = client.completions.create(model="tiny", prompt=["one", "two"], temperature=0, max_tokens=4)
        assert [choice.index for choice in batch.choices] == [0, 1]
        alone = client.completions.create(model="tiny", prompt="two", temperature=0, max_tokens=4)
        assert alone.choices[0].text == batch.choices[1].text
        seeded = [
            client.completions.create(model="tiny", prompt="x", temperature=1.0, seed=11, max_tokens=8).choices[0].text
            for _ in range(2)
        ]
        assert seeded[0] == seeded[1]


def test_a_client_that_leaves_frees_its_blocks(stack: Stack) -> None:
    stack.wait_at_rest()
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny", prompt=tokens(50, seed=77), max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert stack.cache_stats()["leases"] == 1
        stream.close()
    wait_for(lambda: stack.cache_stats()["leases"] == 0, "the lease to be released")
    before = stack.tokens_computed()
    stack.complete(tokens(3, seed=78), 1)
    assert stack.tokens_computed() - before <= 3 + 2, "the abandoned request went on"


def test_grpc_generates_the_same(stack: Stack) -> None:
    prompt = tokens(40, seed=99)
    expected = stack.complete(prompt, 8)["choices"][0]["token_ids"]
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        stub = scheduler_pb2_grpc.GenerationStub(channel)
        assert [model.id for model in stub.ListModels(scheduler_pb2.ListModelsRequest(), timeout=60).models] == ["tiny"]
        request = scheduler_pb2.GenerateRequest(
            model="tiny",
            token_ids=scheduler_pb2.TokenIds(tokens=struct.pack(f"<{len(prompt)}I", *prompt)),
            max_tokens=8,
            temperature=0,
            ignore_eos=True,
        )
        responses = list(stub.Generate(request, timeout=60))
        packed = b"".join(response.tokens for response in responses)
        assert list(struct.unpack(f"<{len(packed) // 4}I", packed)) == expected
        assert [response.finish_reason for response in responses][-1] == "length"
        assert responses[-1].usage.cached_tokens == 32
        request.model = "gpt-9"
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=60))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("which", ["cache", "worker", "scheduler"])
def test_health_and_reflection(stack: Stack, which: str) -> None:
    port = {"cache": stack.cache_grpc, "worker": stack.worker_grpc[0], "scheduler": stack.grpc_port}[which]
    service = {"cache": "PrefixIndex", "worker": "Worker", "scheduler": "Generation"}[which]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=60).status == serving
        assert next(iter(health.Watch(health_pb2.HealthCheckRequest(), timeout=60))).status == serving
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        listed = next(iter(reflection.ServerReflectionInfo(asked, timeout=60))).list_services_response
        assert f"coppice_rpc.v1.{service}" in [found.name for found in listed.service]


def test_worker_stats_over_grpc(stack: Stack) -> None:
    stack.complete(tokens(5, seed=1), 1)
    with grpc.insecure_channel(f"127.0.0.1:{stack.worker_grpc[0]}") as channel:
        stats = worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest(), timeout=60)
    assert stats.tokens_computed == stack.tokens_computed()
    assert stats.refusals == 0
