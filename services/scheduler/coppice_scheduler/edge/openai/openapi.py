"""The routes of the OpenAI API, health and metrics, for `/openapi.json`.

Written by hand: parsing is done by `json_body.Fields`, which is faster than models and names what is wrong. A test
throws generated requests at a server and compares its answers with this document.
"""

from __future__ import annotations

from typing import Any

from coppice_scheduler.edge.http.openapi.routes import (
    ERROR,
    JSON,
    event_data,
    generated,
    json_answer,
    plain,
    post,
    read,
)
from coppice_scheduler.edge.http.openapi.schema import TEXT, Schema, ref
from coppice_scheduler.edge.openai.openapi_answers import answer_schemas
from coppice_scheduler.edge.openai.openapi_requests import request_schemas
from coppice_scheduler.edge.openai.responses.openapi import response_schemas

_ANY_OBJECT = {"description": "OpenAPI 3.1.", "content": {JSON: {"schema": {"type": "object"}}}}
_MODEL_PARAMETER = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def openai_routes(
    model_id: str, template_variables: frozenset[str], *, has_metrics: bool, has_tools: bool
) -> tuple[dict[str, Any], dict[str, Schema]]:
    """Paths and schemas of a server that has one model, whose chat template reads these variables, and tools or not."""
    paths: dict[str, Any] = {
        "/v1/chat/completions": post(
            "chatCompletions",
            "Answer a chat, whole or as events.",
            "ChatRequest",
            _generated("ChatCompletion", "ChatChunk"),
            generates=True,
        ),
        "/v1/completions": post(
            "completions",
            "Continue prompts, whole or as events.",
            "CompletionRequest",
            _generated("Completion", "Completion"),
            generates=True,
        ),
        "/v1/responses": post(
            "responses",
            "Answer a conversation in items, whole or as events.",
            "ResponseRequest",
            _responded(),
            generates=True,
        ),
        "/v1/models": {"get": read("listModels", "The model that is served.", json_answer("ModelList"), (401, 429))},
        "/v1/models/{model_id}": {
            "get": {
                **read("getModel", "The same by its id.", json_answer("Model"), (401, 404, 429)),
                "parameters": [_MODEL_PARAMETER],
            }
        },
        **_token_routes(),
        **_open_routes(has_metrics),
    }
    return paths, {
        **request_schemas(model_id, template_variables, has_tools=has_tools),
        **answer_schemas(),
        **response_schemas(model_id, has_tools=has_tools),
    }


def _token_routes() -> dict[str, Any]:
    paths = {}
    tokenize = {"anyOf": [{"$ref": ref("TokenizeTextRequest")}, {"$ref": ref("TokenizeChatRequest")}]}
    for prefix, suffix in (("", ""), ("/v1", "V1")):
        paths[f"{prefix}/tokenize"] = post(
            f"tokenize{suffix}",
            "Token ids of a text or a chat, in vLLM's shapes.",
            tokenize,
            json_answer("Tokenized"),
            generates=False,
        )
        paths[f"{prefix}/detokenize"] = post(
            f"detokenize{suffix}",
            "The text of token ids.",
            "DetokenizeRequest",
            json_answer("Detokenized"),
            generates=False,
        )
    return paths


def _open_routes(has_metrics: bool) -> dict[str, Any]:
    """Without a key."""
    serves = "Whether requests are served now, else 503."
    routes = {
        "/healthz": read("health", "Whether the process lives.", plain("The process lives."), ()),
        "/readyz": read("readiness", serves, plain("Requests are served."), ()),
        "/health": read("readinessAsVllm", serves, plain("Requests are served."), ()),
        "/openapi.json": read("describe", "The description of all routes, fields and statuses.", _ANY_OBJECT, ()),
    }
    if has_metrics:
        routes["/metrics"] = read("metrics", "What Prometheus reads.", plain("Prometheus metrics."), ())
    return {path: {"get": {**route, "security": []}} for path, route in routes.items()}


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
