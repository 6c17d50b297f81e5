"""Routes as OpenAPI describes them: what each takes, what it answers, and every status that it may have."""

from __future__ import annotations

from typing import Any

from coppice_scheduler.edge.base.request_id import HEADER
from coppice_scheduler.edge.http.field_table import IGNORED_HEADER
from coppice_scheduler.edge.http.openapi.schema import Schema, ref
from coppice_scheduler.edge.http.rate_headers import ALL_LIMITS, anthropic_rate_headers, rate_headers

JSON = "application/json"
ERROR = "Error"
_ERRORS = {
    400: "The request is wrong; the message says what.",
    401: "The API key is missing or not known.",
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    409: "Too many calls wait for the first one with this Idempotency-Key.",
    413: "The body is too large.",
    422: "The Idempotency-Key was used for another call.",
    429: "A limit is reached, or the deadline cannot be met; Retry-After says when to come back.",
    499: "Another call of the tenant ended it.",
    500: "The server failed.",
    503: "Not ready, draining, or a part was lost; Retry-After says when to come back.",
    504: "The deadline of the request passed.",
}
_BODY_STATUSES = (400, 401, 404, 408, 413, 429, 500, 503)
_DIGITS: Schema = {"type": "string", "pattern": "^[0-9]+$"}
_RETRY_HEADERS = {
    "retry-after": {"description": "Seconds, rounded up.", "schema": _DIGITS},
    "retry-after-ms": {"description": "Milliseconds.", "schema": _DIGITS},
}
_ANSWER_HEADERS = {
    HEADER: {"description": "The client's own, or one of ours.", "schema": {"type": "string"}},
    IGNORED_HEADER: {
        "description": "Fields that were taken without effect; `idempotency-key` where it was.",
        "schema": {"type": "string"},
    },
}
_ANSWER_HEADERS["idempotent-replayed"] = {
    "description": "`true`: the answer of the first call with this `Idempotency-Key`.",
    "schema": {"const": "true"},
}
_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "New with each call, the same when it is sent again: it gets the first one's answer.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}
_TIMES: dict[str, Schema] = {
    "x": {"type": "string", "pattern": "^[0-9.]+s$"},
    "anthropic": {"type": "string", "format": "date-time"},
}


def _described_limit(name: str) -> Schema:
    parts = name.split("-")
    text = "Of a limit per minute: all of it, what is left, when all is left again."
    return {"description": text, "schema": _TIMES[parts[0]] if "reset" in parts else _DIGITS}


_RATE_HEADERS = {name: _described_limit(name) for name in rate_headers(ALL_LIMITS)}
_ANTHROPIC_RATE_HEADERS = {name: _described_limit(name) for name in anthropic_rate_headers(ALL_LIMITS, 0)}


def document(version: str, paths: dict[str, Any], schemas: dict[str, Schema]) -> Schema:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Coppice",
            "version": version,
            "description": "The OpenAI API, with vLLM's additions, and the Anthropic API. In a body, null is the same "
            "as a field left out.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"key": []}, {"apiKey": []}, {}],
    }


def post(name: str, summary: str, request: str | Schema, ok: Schema, *, generates: bool, error: str = ERROR) -> Schema:
    """A route that reads a body. `error`: the schema of its refusals."""
    schema = {"$ref": ref(request)} if isinstance(request, str) else request
    statuses = (*_BODY_STATUSES, 409, 422, 499, 504) if generates else _BODY_STATUSES
    keyed = {"parameters": [_IDEMPOTENCY_KEY]} if generates else {}
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            **keyed,
            "requestBody": {"required": True, "content": {JSON: {"schema": schema}}},
            "responses": _with_limits({"200": ok, **_errors(statuses, error)}, error),
        }
    }


def read(name: str, summary: str, ok: Schema, statuses: tuple[int, ...]) -> Schema:
    responses = {"200": ok, **_errors((*statuses, 400, 500, 503), ERROR)}
    if 401 in statuses:
        responses = _with_limits(responses, ERROR)
    return {"operationId": name, "summary": summary, "responses": responses}


def _with_limits(responses: dict[str, Schema], error: str) -> dict[str, Schema]:
    """Answers to a tenant have them: all but those to nobody known, and of faults."""
    told = _RATE_HEADERS if error == ERROR else {**_RATE_HEADERS, **_ANTHROPIC_RATE_HEADERS}
    return {
        status: response
        if status in ("401", "500")
        else {**response, "headers": {**response.get("headers", {}), **told}}
        for status, response in responses.items()
    }


def _errors(statuses: tuple[int, ...], error: str) -> dict[str, Schema]:
    found = {}
    for status in sorted(statuses):
        content = {JSON: {"schema": {"$ref": ref(error)}}}
        found[str(status)] = {"description": _ERRORS[status], "content": content}
        if status in (409, 429, 503):
            found[str(status)]["headers"] = _RETRY_HEADERS
    return found


def json_answer(name: str) -> Schema:
    return {"description": "Done.", "content": {JSON: {"schema": {"$ref": ref(name)}}}}


def generated(whole: str, event: Schema) -> Schema:
    """What a generation answers; `event` describes one of a stream."""
    content = {JSON: {"schema": {"$ref": ref(whole)}}, "text/event-stream": {"schema": event}}
    what = "The answer, whole or, with stream: true, as it comes."
    return {"description": what, "content": content, "headers": _ANSWER_HEADERS}


def event_data(*schemas: str) -> Schema:
    """JSON in the data of an event."""
    any_of = [{"$ref": ref(name)} for name in schemas]
    return {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": any_of}}


def plain(text: str) -> Schema:
    return {"description": text, "content": {"text/plain": {"schema": {"type": "string"}}}}
