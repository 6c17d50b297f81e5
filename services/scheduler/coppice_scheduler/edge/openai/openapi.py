"""The routes of the OpenAI API, health and metrics, for `/openapi.json`.

Written by hand: parsing is done by `json_body.Fields`, which is faster than models and names what is wrong. A test
throws generated requests at a server and compares its answers with this document.
"""

from __future__ import annotations

from typing import Any

from coppice_scheduler.edge.http.openapi.routes import ERROR, event_data, generated, json_answer, plain, post, read
from coppice_scheduler.edge.http.openapi.schema import TEXT, Schema, ref
from coppice_scheduler.edge.openai.openapi_answers import answer_schemas
from coppice_scheduler.edge.openai.openapi_requests import request_schemas
from coppice_scheduler.edge.openai.responses.openapi import response_schemas

_MODEL_PARAMETER = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def openai_routes(
    model_id: str, template_variables: frozenset[str], *, has_metrics: bool, has_tools: bool
) -> tuple[dict[str, Any], dict[str, Schema]]:
    """Paths and schemas of a server that has one model, whose chat template reads these variables, and tools or not."""
    paths: dict[str, Any] = {
        "/v1/chat/completions": post(
            "chatCompletions", "ChatRequest", _generated("ChatCompletion", "ChatChunk"), generates=True
        ),
        "/v1/completions": post(
            "completions", "CompletionRequest", _generated("Completion", "Completion"), generates=True
        ),
        "/v1/responses": post("responses", "ResponseRequest", _responded(), generates=True),
        "/v1/models": {"get": read("listModels", json_answer("ModelList"), (401, 429))},
        "/v1/models/{model_id}": {
            "get": {**read("getModel", json_answer("Model"), (401, 404, 429)), "parameters": [_MODEL_PARAMETER]}
        },
        "/healthz": {"get": {**read("health", plain("The process lives."), ()), "security": []}},
        "/readyz": {"get": {**read("readiness", plain("Requests are served."), ()), "security": []}},
        "/health": {"get": {**read("readinessAsVllm", plain("Requests are served."), ()), "security": []}},
    }
    tokenize = {"anyOf": [{"$ref": ref("TokenizeTextRequest")}, {"$ref": ref("TokenizeChatRequest")}]}
    for prefix, suffix in (("", ""), ("/v1", "V1")):
        paths[f"{prefix}/tokenize"] = post(f"tokenize{suffix}", tokenize, json_answer("Tokenized"), generates=False)
        paths[f"{prefix}/detokenize"] = post(
            f"detokenize{suffix}", "DetokenizeRequest", json_answer("Detokenized"), generates=False
        )
    if has_metrics:
        paths["/metrics"] = {"get": {**read("metrics", plain("Prometheus metrics."), ()), "security": []}}
    return paths, {
        **request_schemas(model_id, template_variables, has_tools=has_tools),
        **answer_schemas(),
        **response_schemas(model_id, has_tools=has_tools),
    }


def _responded() -> Schema:
    event = {
        "type": "object",
        "description": "One event; its name is the type of its data. Nothing follows completed, incomplete, error.",
        "properties": {"event": TEXT, "data": event_data("ResponseEvent")},
        "required": ["event", "data"],
    }
    return generated("Response", event)


def _generated(whole: str, chunk: str) -> Schema:
    any_of = [{"const": "[DONE]"}, event_data(chunk, ERROR)]
    data = {"description": "A chunk; an error is the last; else [DONE] is.", "anyOf": any_of}
    event = {"type": "object", "description": "One event.", "properties": {"data": data}, "required": ["data"]}
    return generated(whole, event)
