"""The routes of the Anthropic API, for `/openapi.json`. Bounds come from where they are enforced."""

from __future__ import annotations

from typing import Any

from coppice.messages.sampling import RANGES
from coppice_scheduler.edge.anthropic.blocks import MAX_BLOCKS, SCOPE, TTL_MS
from coppice_scheduler.edge.anthropic.conversation import OF_ANSWER, SYSTEM, USER
from coppice_scheduler.edge.anthropic.errors import TYPES
from coppice_scheduler.edge.anthropic.fields import CACHE_CONTROL, COUNT, MESSAGES, NO_EFFECT, REFUSED
from coppice_scheduler.edge.anthropic.message import PIECES, STOP_REASONS, TEXT, THINKING, TOOL_USE
from coppice_scheduler.edge.anthropic.request import DISPLAYS, EFFORTS, KINDS_OF_THINKING
from coppice_scheduler.edge.anthropic.routes import COUNT_PATH, MESSAGES_PATH
from coppice_scheduler.edge.anthropic.tools import MODES
from coppice_scheduler.edge.frontend.generation_spec import (
    ASSISTANT,
    MAX_CACHE_SALT,
    MAX_MESSAGES,
    MAX_STOP_BYTES,
    MAX_STOPS,
)
from coppice_scheduler.edge.http.openapi import schema
from coppice_scheduler.edge.http.openapi.routes import event_data, generated, json_answer, post
from coppice_scheduler.edge.http.openapi.schema import (
    LEFT_OUT,
    Schema,
    body,
    exactly,
    inner,
    list_of,
    nullable,
    one_of,
    ref,
)
from coppice_scheduler.edge.text.tools.tool import MAX_TOOLS, NAME

_ERROR = "AnthropicError"
_NAME: Schema = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES}
_NO_EFFECT: Schema = {"description": "Taken, without effect."}
_CACHE: Schema = one_of(
    "object",
    "What is before it will come again; keep it so long at least.",
    properties={"type": {"const": "ephemeral"}, "ttl": {"enum": [*TTL_MS, None]}, SCOPE: _NO_EFFECT},
    required=["type"],
    additionalProperties=LEFT_OUT,
)


def anthropic_routes(model_id: str, *, has_tools: bool) -> tuple[dict[str, Any], dict[str, Schema]]:
    """Paths and schemas of a server that has one model, with tools or without."""
    event = {
        "type": "object",
        "description": "One event; its name is the type of its data. Nothing follows message_stop or an error.",
        "properties": {"event": schema.TEXT, "data": event_data("MessageEvent", _ERROR)},
        "required": ["event", "data"],
    }
    paths = {
        MESSAGES_PATH: post(
            "messages",
            "Answer a conversation, whole or as events, in Anthropic's shape.",
            "MessageRequest",
            generated("AnthropicMessage", event),
            generates=True,
            error=_ERROR,
        ),
        COUNT_PATH: post(
            "countTokens",
            "Count the tokens of such a conversation.",
            "CountTokensRequest",
            json_answer("TokenCount"),
            generates=False,
            error=_ERROR,
        ),
    }
    return paths, {**_requests(model_id, has_tools), **_answers()}


def _requests(model_id: str, has_tools: bool) -> dict[str, Schema]:
    prompt = _prompt(model_id, has_tools)
    refused = {name: refusal.described() for name, refusal in REFUSED.items()}
    no_effect = {name: {"description": f"Taken, without effect: {why}."} for name, why in NO_EFFECT.items()}
    message = {**prompt, **_generation(), **no_effect, **refused}
    counted = {**prompt, **dict.fromkeys(COUNT.no_effect, _NO_EFFECT), **no_effect, **refused}
    assert message.keys() == MESSAGES.supported | no_effect.keys() | refused.keys()
    return {
        "AnthropicTurn": _turn(),
        "MessageRequest": body(message, ("model", "messages", "max_tokens"), "A conversation to answer."),
        "CountTokensRequest": body(counted, ("model", "messages"), "A conversation to count."),
    }


def _prompt(model_id: str, has_tools: bool) -> dict[str, Schema]:
    turns = {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": {"$ref": ref("AnthropicTurn")}}
    effort: Schema = {"enum": [*EFFORTS, None]}
    form = inner({"type": {"const": "json_schema"}, "schema": {"type": "object"}, "name": _NO_EFFECT},
                ("type", "schema"), "JSON that a schema describes.")  # fmt: skip
    thinking: dict[str, Schema] = {
        "type": {"enum": list(KINDS_OF_THINKING)},
        "budget_tokens": one_of("integer", "Taken, without effect."),
        "display": {"enum": [*DISPLAYS, None]},
        "block_binding": _NO_EFFECT,
    }
    return {
        "model": {"type": "string", "enum": [model_id]},
        "messages": turns,
        "system": nullable(_text()),
        "tools": _tools() if has_tools else {"enum": [[], None], "description": "This model has no way to call them."},
        "tool_choice": nullable({"anyOf": [_choice(kind) for kind in MODES]}),
        "thinking": nullable(inner(thinking, ("type",), "Whether the model thinks first, where its template knows.")),
        "output_config": nullable(
            inner(
                {"effort": effort, "format": nullable(form), "task_budget": _NO_EFFECT},
                (),
                "What the answer looks like.",
            )
        ),
        "output_format": nullable(form),
        CACHE_CONTROL: _CACHE,
    }


def _generation() -> dict[str, Schema]:
    def ranged(name: str, kind: str) -> Schema:
        allowed = RANGES[name]
        low = {"exclusiveMinimum" if allowed.above_low else "minimum": allowed.low}
        return one_of(kind, "", **low, maximum=int(allowed.high) if kind == "integer" else allowed.high)

    return {
        "max_tokens": {"type": "integer", "minimum": 1, "description": "Where fewer fit, the answer ends there."},
        "stop_sequences": one_of("array", maxItems=MAX_STOPS, items=_STOP),
        "stream": one_of("boolean", default=False),
        "temperature": ranged("temperature", "number"),
        "top_p": ranged("top_p", "number"),
        "top_k": ranged("top_k", "integer"),
        "seed": one_of("integer", minimum=-(2**63), maximum=2**64 - 1),
        "cache_salt": one_of("string", "As in the OpenAI API.", minLength=1, maxLength=MAX_CACHE_SALT),
        "priority": one_of("integer", "Lower goes first.", minimum=-(2**31), maximum=2**31 - 1),
        "timeout": one_of("number", "Seconds after which the answer is worth nothing.", exclusiveMinimum=0),
    }


def _block(kind: str, required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    fields = {"type": {"const": kind}, **required, **(optional or {})}
    return inner(fields, ("type", *required), f"A block of {kind}.")


def _text() -> Schema:
    return _content(_text_block())


def _text_block() -> Schema:
    return _block("text", {"text": schema.TEXT}, {"citations": _NO_EFFECT, CACHE_CONTROL: _CACHE})


def _content(*blocks: Schema) -> Schema:
    items = {"anyOf": [*blocks]}
    return {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": MAX_BLOCKS, "items": items}]}


def _turn() -> Schema:
    text = _text_block()
    result = _block(
        "tool_result",
        {"tool_use_id": schema.TEXT},
        {
            "content": nullable(_text()),
            "is_error": one_of("boolean"),
            "toolset_name": _NO_EFFECT,
            CACHE_CONTROL: _CACHE,
        },
    )
    thought = _block("thinking", {"thinking": schema.TEXT}, {"signature": one_of("string")})
    hidden = _block("redacted_thinking", {}, {"data": _NO_EFFECT})
    call = _block(
        "tool_use",
        {"id": schema.TEXT, "name": _NAME, "input": {"type": "object"}},
        {"caller": _NO_EFFECT, "toolset_name": _NO_EFFECT, CACHE_CONTROL: _CACHE},
    )
    roles = {USER: _content(text, result), ASSISTANT: _content(text, thought, hidden, call), SYSTEM: _text()}
    of_answer = {**dict.fromkeys(OF_ANSWER, _NO_EFFECT), "type": _NO_EFFECT}
    return {
        "anyOf": [
            inner({"role": {"const": role}, "content": content, **of_answer}, ("role", "content"), f"Of the {role}.")
            for role, content in roles.items()
        ]
    }


def _tools() -> Schema:
    parameters: Schema = {"type": "object", "properties": {"type": {"const": "object"}}}
    tool = inner(
        {
            "type": {"enum": ["custom", None]},
            "name": _NAME,
            "description": one_of("string"),
            "input_schema": parameters,
            "strict": one_of("boolean", "The input follows the schema in any case."),
            "allowed_callers": {"enum": [[], ["direct"], None]},
            "defer_loading": {"enum": [False, None]},
            "eager_input_streaming": _NO_EFFECT,
            "input_examples": _NO_EFFECT,
            CACHE_CONTROL: _CACHE,
        },
        ("name", "input_schema"),
        "A tool.",
    )
    return one_of("array", "No two have one name.", maxItems=MAX_TOOLS, items=tool)


def _choice(kind: str) -> Schema:
    fields: dict[str, Schema] = {
        "type": {"const": kind},
        "disable_parallel_tool_use": one_of("boolean", "One call at most."),
    }
    named: dict[str, Schema] = {"name": _NAME} if kind == "tool" else {}
    return inner({**fields, **named}, ("type", *named), "How the model may call.")


# --- answers ------------------------------------------------------------------------------------------------------


def _answers() -> dict[str, Schema]:
    text = schema.TEXT
    usage = exactly(
        dict.fromkeys(
            ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"),
            schema.COUNT,
        ),
        {"output_tokens_details": exactly({"thinking_tokens": schema.COUNT})},
    )
    blocks: Schema = {
        "anyOf": [
            exactly({"type": {"const": TEXT}, "text": text}),
            exactly({"type": {"const": THINKING}, "thinking": text, "signature": text}),
            exactly({"type": {"const": TOOL_USE}, "id": text, "name": text, "input": {"type": "object"}}),
        ]
    }
    stop: dict[str, Schema] = {"stop_reason": {"enum": [*STOP_REASONS, None]}, "stop_sequence": nullable(text)}
    message: dict[str, Schema] = {
        "id": text,
        "type": {"const": "message"},
        "role": {"const": ASSISTANT},
        "model": text,
        "content": list_of({"$ref": ref("AnthropicBlock")}),
        **stop,
        "usage": {"$ref": ref("AnthropicUsage")},
    }
    error = exactly({"type": {"enum": sorted(set(TYPES.values()))}, "message": {"type": "string", "minLength": 1}})
    return {
        "AnthropicUsage": usage,
        "AnthropicBlock": blocks,
        "AnthropicMessage": exactly(message),
        "MessageEvent": {"anyOf": _events(stop)},
        "TokenCount": exactly({"input_tokens": schema.COUNT}),
        _ERROR: exactly({"type": {"const": "error"}, "error": error, "request_id": text}),
    }


def _events(stop: dict[str, Schema]) -> list[Schema]:
    text, index = schema.TEXT, {"index": schema.COUNT}
    pieces = [
        exactly({"type": {"const": kind}, name: text})
        for kind, name in (*PIECES.values(), ("signature_delta", "signature"))
    ]
    usage = {"usage": {"$ref": ref("AnthropicUsage")}}
    fields: dict[str, dict[str, Schema]] = {
        "message_start": {"message": {"$ref": ref("AnthropicMessage")}},
        "content_block_start": {**index, "content_block": {"$ref": ref("AnthropicBlock")}},
        "content_block_delta": {**index, "delta": {"anyOf": pieces}},
        "content_block_stop": index,
        "message_delta": {"delta": exactly(stop), **usage},
        "message_stop": {},
    }
    return [exactly({"type": {"const": kind}, **inner}) for kind, inner in fields.items()]
