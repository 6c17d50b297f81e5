"""What the tenants file narrows for one tenant, over gRPC: models, context, retention, counts of cached tokens."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import ApiKey, digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.edge.frontend.frontdoor import DEFAULT_MAX_RETAIN_MS
from tests.fakes.api.grpc_served import MODEL, WAIT_S, Served, details_of, serve

CONTEXT = 512  # of the model
LIMIT = 40  # of the tenant; tokens
KEY = {name: (("authorization", f"Bearer key-{name}"),) for name in "ab"}


def directory(**fields: Any) -> TenantDirectory:
    """Tenant a has these fields, tenant b none."""
    given: dict[str, dict[str, Any]] = {"a": fields, "b": {}}
    return TenantDirectory(
        [Tenant(id=name, api_key_sha256=(ApiKey(sha256=digest_of_key(f"key-{name}")),), **given[name]) for name in "ab"]
    )


async def said(served: Served, method: str, model: str = MODEL, tenant: str = "a") -> tuple[str, str]:
    """Status and words of a call that names a model."""
    call: Any = {
        "Generate": lambda: served.ask(KEY[tenant], model=model),
        "Tokenize": lambda: served.stub.Tokenize(
            pb.TokenizeRequest(model=model, text="one"), metadata=KEY[tenant], timeout=WAIT_S
        ),
        "Detokenize": lambda: served.stub.Detokenize(
            pb.DetokenizeRequest(model=model, tokens=b"\5\0\0\0"), metadata=KEY[tenant], timeout=WAIT_S
        ),
    }[method]
    try:
        await call()
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize"])
def test_a_model_that_is_not_for_a_tenant_does_not_exist_for_it(method: str) -> None:
    async def test(served: Served) -> None:
        code, words = await said(served, method)
        assert (code, words) == (
            "NOT_FOUND",
            f"The model {MODEL!r} does not exist; this server has none for this tenant.",
        )
        assert await said(served, method, "no/such") == (code, words.replace(MODEL, "no/such"))
        assert served.engine.requests == []
        assert await said(served, method, tenant="b") == ("OK", "")

    serve(test, directory(models=("org/other",)))


def test_the_list_has_models_and_context_of_the_tenant() -> None:
    async def listed(served: Served, tenant: str) -> list[tuple[str, int]]:
        models = await served.stub.ListModels(pb.ListModelsRequest(), metadata=KEY[tenant], timeout=WAIT_S)
        return [(model.id, model.max_context) for model in models.models]

    async def none(served: Served) -> None:
        assert (await listed(served, "a"), await listed(served, "b")) == ([], [(MODEL, CONTEXT)])

    async def some(served: Served) -> None:
        assert await listed(served, "a") == [(MODEL, LIMIT)]
        request = pb.TokenizeRequest(model=MODEL, text="one")
        tokenized = await served.stub.Tokenize(request, metadata=KEY["a"], timeout=WAIT_S)
        assert tokenized.max_context == LIMIT

    serve(none, directory(models=("org/other",)))
    serve(some, directory(models=(MODEL,), max_context=LIMIT))


@pytest.mark.parametrize(
    "prompt",
    [{"text": "one two three " * LIMIT}, {"token_ids": pb.TokenIds(tokens=b"\5\0\0\0" * LIMIT)}],
    ids=["text", "tokens"],
)
def test_a_prompt_beyond_a_tenants_context_is_refused_with_its_number(prompt: dict[str, Any]) -> None:
    async def test(served: Served) -> None:
        error = await served.refusal(metadata=KEY["a"], **prompt)
        assert error.code().name == "INVALID_ARGUMENT"
        assert (error.details() or "").startswith(f"This tenant's context is {LIMIT} tokens and must hold")
        assert details_of(error)["ErrorInfo"].reason == "context_length_exceeded"
        assert served.engine.requests == []
        await served.ask(KEY["b"], **prompt)

    serve(test, directory(max_context=LIMIT))


def test_new_tokens_end_with_a_tenants_context() -> None:
    async def test(served: Served) -> None:
        prompt = pb.TokenIds(tokens=b"\5\0\0\0" * (LIMIT - 9))
        error = await served.refusal(metadata=KEY["a"], token_ids=prompt, max_tokens=10)
        assert "At most 9 tokens can follow this prompt." in (error.details() or "")
        await served.ask(KEY["a"], token_ids=prompt)
        assert [request.max_new_tokens for request in served.engine.requests] == [9]

    serve(test, directory(max_context=LIMIT))


@pytest.mark.parametrize(("most", "kept"), [(0, 0), (7_000, 7_000), (None, DEFAULT_MAX_RETAIN_MS)])
def test_a_tenant_keeps_prompts_as_long_as_it_may(most: int | None, kept: int) -> None:
    async def test(served: Served) -> None:
        for tenant in "ab":
            await served.ask(KEY[tenant], prompt_cache_ttl_ms=10 * DEFAULT_MAX_RETAIN_MS)
        assert [request.retain_ms for request in served.engine.requests] == [kept, DEFAULT_MAX_RETAIN_MS]

    serve(test, directory(max_retain_ms=most))


def test_usage_tells_nothing_of_the_cache_where_the_file_says_so() -> None:
    async def test(served: Served) -> None:
        served.says("Fine.", num_cached_tokens=1, num_written_tokens=2)
        usages = {tenant: (await served.ask(KEY[tenant]))[-1].usage for tenant in "ab"}
        counts = {tenant: (usage.cached_tokens, usage.cache_write_tokens) for tenant, usage in usages.items()}
        assert counts == {"a": (0, 0), "b": (1, 2)}
        assert len({(usage.prompt_tokens, usage.completion_tokens) for usage in usages.values()}) == 1

    serve(test, directory(shows_cached_tokens=False))
