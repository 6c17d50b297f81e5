"""Routes about requests at work, for `/openapi.json`."""

from __future__ import annotations

from typing import Any

from coppice_scheduler.edge.base.request_id import ASKED_CHARS_MAX, HEADER
from coppice_scheduler.edge.http.openapi.routes import json_answer, read
from coppice_scheduler.edge.http.openapi.schema import TEXT, Schema, exactly

_ID = {
    "name": "request_id",
    "in": "path",
    "required": True,
    "description": f"What its {HEADER} was, or the id of its answer.",
    "schema": {"type": "string", "pattern": f"^[A-Za-z0-9._:-]{{1,{ASKED_CHARS_MAX}}}$"},
}
_NOT_FOUND = "No such request of the tenant is running or waiting."


def request_routes() -> tuple[dict[str, Any], dict[str, Schema]]:
    """Paths and schemas."""
    route = read(
        "abortRequest", "End calls of the tenant that run or wait.", json_answer("AbortedRequest"), (401, 404, 429)
    )
    route["responses"]["404"]["description"] = _NOT_FOUND
    return {"/v1/requests/{request_id}/abort": {"post": {**route, "parameters": [_ID]}}}, {
        "AbortedRequest": exactly(
            {
                "id": TEXT,
                "object": {"const": "request.aborted"},
                "num_answers": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "That were computed for it, those of best_of and beams among them, and end.",
                },
            }
        )
    }
