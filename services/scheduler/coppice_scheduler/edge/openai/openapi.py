"""`/openapi.json`: every route, what it takes, what it answers, and every status that it may have.

Written by hand: parsing is done by `json_body.Fields`, which is faster than models and names what is wrong. A test
throws generated requests at a server and compares its answers with this document.
"""

from __future__ import annotations

from typing import Any

from coppice_scheduler.edge.base.request_id import HEADER
from coppice_scheduler.edge.openai.openapi_answers import answer_schemas
from coppice_scheduler.edge.openai.openapi_requests import request_schemas
from coppice_scheduler.edge.openai.openapi_schema import Schema, ref
from coppice_scheduler.edge.openai.parsing.fields import IGNORED_HEADER

_JSON = "application/json"
_ERRORS = {
    400: "The request is wrong; the message says what.",
    401: "The API key is missing or not known.",
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "A limit is reached, or the deadline cannot be met; Retry-After says when to come back.",
    500: "The server failed.",
    503: "Not ready, draining, or a part was lost; Retry-After says when to come back.",
    504: "The deadline of the request passed.",
}
_BODY_STATUSES = (400, 401, 404, 408, 413, 429, 500, 503)
_RETRY_HEADERS = {
    "retry-after": {"description": "Seconds, rounded up.", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
    "retry-after-ms": {"description": "Milliseconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
}
_ANSWER_HEADERS = {
    HEADER: {"description": "The client's own, or one of ours.", "schema": {"type": "string"}},
    IGNORED_HEADER: {"description": "Fields that were taken without effect.", "schema": {"type": "string"}},
}


def document(
    version: str, model_id: str, template_variables: frozenset[str], *, has_metrics: bool, has_tools: bool
) -> Schema:
    """OpenAPI 3.1 of a server that has one model, whose chat template reads these variables, and tools or not."""
    paths: dict[str, Any] = {
        "/v1/chat/completions": _post("chatCompletions", "ChatRequest", _answer("ChatCompletion", "ChatChunk"), True),
        "/v1/completions": _post("completions", "CompletionRequest", _answer("Completion", "Completion"), True),
        "/v1/models": {"get": _read("listModels", _json("ModelList"), (401, 429))},
        "/v1/models/{model_id}": {
            "get": {**_read("getModel", _json("Model"), (401, 404, 429)), "parameters": [_MODEL_PARAMETER]}
        },
        "/healthz": {"get": {**_read("health", _plain("The process lives."), ()), "security": []}},
        "/readyz": {"get": {**_read("readiness", _plain("Requests are served."), ()), "security": []}},
        "/health": {"get": {**_read("readinessAsVllm", _plain("Requests are served."), ()), "security": []}},
    }
    tokenize = {"anyOf": [{"$ref": ref("TokenizeTextRequest")}, {"$ref": ref("TokenizeChatRequest")}]}
    for prefix, suffix in (("", ""), ("/v1", "V1")):
        paths[f"{prefix}/tokenize"] = _post(f"tokenize{suffix}", tokenize, _json("Tokenized"), False)
        paths[f"{prefix}/detokenize"] = _post(f"detokenize{suffix}", "DetokenizeRequest", _json("Detokenized"), False)
    if has_metrics:
        paths["/metrics"] = {"get": {**_read("metrics", _plain("Prometheus metrics."), ()), "security": []}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Coppice",
            "version": version,
            "description": "The OpenAI API, with vLLM's additions. In a body, null is the same as a field left out.",
        },
        "paths": paths,
        "components": {
            "schemas": {**request_schemas(model_id, template_variables, has_tools=has_tools), **answer_schemas()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


_MODEL_PARAMETER = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _post(name: str, request: str | Schema, ok: Schema, generates: bool) -> Schema:
    schema = {"$ref": ref(request)} if isinstance(request, str) else request
    statuses = (*_BODY_STATUSES, 504) if generates else _BODY_STATUSES
    return {
        "post": {
            "operationId": name,
            "requestBody": {"required": True, "content": {_JSON: {"schema": schema}}},
            "responses": {"200": ok, **_errors(statuses)},
        }
    }


def _read(name: str, ok: Schema, statuses: tuple[int, ...]) -> Schema:
    return {"operationId": name, "responses": {"200": ok, **_errors((*statuses, 400, 500, 503))}}


def _errors(statuses: tuple[int, ...]) -> dict[str, Schema]:
    found = {}
    for status in sorted(statuses):
        content = {_JSON: {"schema": {"$ref": ref("Error")}}}
        found[str(status)] = {"description": _ERRORS[status], "content": content}
        if status in (429, 503):
            found[str(status)]["headers"] = _RETRY_HEADERS
    return found


def _json(name: str) -> Schema:
    return {"description": "Done.", "content": {_JSON: {"schema": {"$ref": ref(name)}}}}


def _answer(whole: str, chunk: str) -> Schema:
    content = {_JSON: {"schema": {"$ref": ref(whole)}}, "text/event-stream": {"schema": _event(chunk)}}
    what = "The answer, whole or, with stream: true, as it comes."
    return {"description": what, "content": content, "headers": _ANSWER_HEADERS}


def _event(chunk: str) -> Schema:
    part = {
        "type": "string",
        "contentMediaType": _JSON,
        "contentSchema": {"anyOf": [{"$ref": ref(chunk)}, {"$ref": ref("Error")}]},
    }
    data = {"description": "A chunk; an error is the last; else [DONE] is.", "anyOf": [{"const": "[DONE]"}, part]}
    return {"type": "object", "description": "One event.", "properties": {"data": data}, "required": ["data"]}


def _plain(text: str) -> Schema:
    return {"description": text, "content": {"text/plain": {"schema": {"type": "string"}}}}
