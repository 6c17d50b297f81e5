"""JSON schemas of responses. Bounds come from where they are enforced, refused fields from their table."""

from __future__ import annotations

from coppice.messages.sampling import LOGPROBS_MAX, RANGES
from coppice_scheduler.edge.frontend.generation_spec import ASSISTANT, MAX_CACHE_SALT, MAX_MESSAGES
from coppice_scheduler.edge.http.openapi.schema import (
    COUNT,
    LEFT_OUT,
    TEXT,
    Schema,
    body,
    exactly,
    inner,
    list_of,
    nullable,
    one_of,
    ref,
)
from coppice_scheduler.edge.openai.openapi_requests import CACHE_OPTIONS
from coppice_scheduler.edge.openai.parsing.template_values import MAX_EFFORT_CHARS
from coppice_scheduler.edge.openai.responses.fields import INCLUDABLE, LOGPROBS, NO_EFFECT, REFUSED, RESPONSES
from coppice_scheduler.edge.openai.responses.input_items import (
    CALL,
    ITEM_NO_EFFECT,
    MESSAGE,
    PART_NO_EFFECT,
    PARTS,
    REASONING,
    REASONING_PARTS,
    RESULT,
    ROLES,
)
from coppice_scheduler.edge.openai.responses.request import (
    MAX_INCLUDES,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
)
from coppice_scheduler.edge.openai.responses.response import CUT, DONE, FAILED, OPEN
from coppice_scheduler.edge.openai.responses.tools import PARALLEL, TOOL_CHOICE, TOOLS
from coppice_scheduler.edge.text.tools.tool import MAX_TOOLS, NAME, ToolMode

_NAME: Schema = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_NO_EFFECT: Schema = {"description": "Taken, without effect."}
_METADATA: Schema = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": MAX_METADATA_KEY},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
}
_LOGPROBS: Schema = {
    "type": "array",
    "items": {"$ref": ref("TokenLogprob")},
    "description": f"Empty, unless include has {LOGPROBS}.",
}


def response_schemas(model_id: str, *, has_tools: bool) -> dict[str, Schema]:
    """Of a server that has one model, with tools or without."""
    request = _request(model_id, has_tools)
    assert request.keys() == RESPONSES.supported | NO_EFFECT.keys() | REFUSED.keys()
    return {
        "ResponseItem": {"anyOf": _items()},
        "ResponseRequest": body(request, ("model", "input"), "What to respond to."),
        **_answers(),
    }


def _request(model_id: str, has_tools: bool) -> dict[str, Schema]:
    item = {"$ref": ref("ResponseItem")}
    items = {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": item}
    reasoning: dict[str, Schema] = {
        "effort": one_of("string", minLength=1, maxLength=MAX_EFFORT_CHARS),
        **dict.fromkeys(("summary", "generate_summary", "context", "mode"), _NO_EFFECT),
    }
    include: Schema = {"enum": [*INCLUDABLE]}
    return {
        "model": {"type": "string", "enum": [model_id]},
        "input": {"anyOf": [TEXT, items]},
        "instructions": one_of("string", "Goes before the input, as the system's."),
        "include": {"anyOf": [include, one_of("array", maxItems=MAX_INCLUDES, items=include)]},
        "top_logprobs": one_of("integer", f"Has an effect with {LOGPROBS}.", minimum=0, maximum=LOGPROBS_MAX),
        "reasoning": one_of("object", "", properties=reasoning, additionalProperties=LEFT_OUT),
        "text": one_of(
            "object",
            "",
            properties={"format": nullable(_format()), "verbosity": _NO_EFFECT},
            additionalProperties=LEFT_OUT,
        ),
        **_tool_fields(has_tools),
        **_options(),
        **{name: {"description": f"Taken, without effect: {why}."} for name, why in NO_EFFECT.items()},
        **{name: refusal.described() for name, refusal in REFUSED.items()},
    }


def _options() -> dict[str, Schema]:
    top_k = RANGES["top_k"]
    return {
        "max_output_tokens": one_of("integer", "Where fewer fit, the answer ends there.", minimum=1),
        "temperature": _ranged("temperature"),
        "top_p": _ranged("top_p"),
        "top_k": one_of("integer", "0 or -1: off.", minimum=top_k.low, maximum=int(top_k.high)),
        "seed": one_of("integer", minimum=-(2**63), maximum=2**64 - 1),
        "metadata": nullable(_METADATA),
        "stream": one_of("boolean", default=False),
        "stream_options": one_of(
            "object", "", properties={"include_obfuscation": one_of("boolean")}, additionalProperties=LEFT_OUT
        ),
        "prompt_cache_key": one_of("string", "Prompts with a key belong together: they are expected again."),
        "prompt_cache_options": one_of(
            "object",
            "What is known of the prompt's future.",
            properties=CACHE_OPTIONS,
            additionalProperties=False,
        ),
        "prompt_cache_retention": {"enum": ["in_memory", "in-memory", "24h", None]},
        "cache_salt": one_of("string", "As in chats.", minLength=1, maxLength=MAX_CACHE_SALT),
        "priority": one_of("integer", "Lower goes first.", minimum=-(2**31), maximum=2**31 - 1),
        "timeout": one_of("number", "Seconds after which the answer is worth nothing.", exclusiveMinimum=0),
    }


def _ranged(name: str) -> Schema:
    allowed = RANGES[name]
    low = {"exclusiveMinimum" if allowed.above_low else "minimum": allowed.low}
    return one_of("number", "", **low, maximum=allowed.high)


def _format() -> Schema:
    schema: dict[str, Schema] = {
        "type": {"const": "json_schema"},
        "name": one_of("string"),
        "description": one_of("string"),
        "schema": {"type": "object"},
        "strict": one_of("boolean", "The answer follows the schema in any case."),
    }
    plain = inner({"type": {"enum": ["text", "json_object"]}}, ("type",), "Any answer, or any object in JSON.")
    return {"anyOf": [plain, inner(schema, ("type", "schema"), "JSON that a schema describes.")]}


def _tool_fields(has_tools: bool) -> dict[str, Schema]:
    function: dict[str, Schema] = {
        "type": {"const": "function"},
        "name": _NAME,
        "description": one_of("string"),
        "parameters": one_of("object", "A JSON schema.", properties={"type": {"const": "object"}}),
        "strict": one_of("boolean", "Arguments follow the schema in any case."),
        "allowed_callers": {"enum": [[], ["direct"], None]},
        "defer_loading": {"enum": [False, None]},
        "output_schema": _NO_EFFECT,
        "async": _NO_EFFECT,
    }
    tools = one_of("array", maxItems=MAX_TOOLS, items=inner(function, ("type", "name"), "A tool."))
    named = inner({"type": {"const": "function"}, "name": _NAME}, ("type", "name"), "One of the tools.")
    some: dict[str, Schema] = {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": [ToolMode.AUTO, ToolMode.REQUIRED]},
        "tools": {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": named},
    }
    choices: list[Schema] = [{"enum": [*ToolMode, None]}, named, inner(some, tuple(some), "A part of the tools.")]
    without: list[Schema] = [{"enum": [ToolMode.NONE, ToolMode.AUTO, None]}]
    return {
        TOOLS: tools if has_tools else {"enum": [[], None], "description": "This model has no way to call them."},
        TOOL_CHOICE: {"anyOf": choices if has_tools else without},
        PARALLEL: one_of("boolean", "False: one call at most.", default=True),
    }


def _items() -> list[Schema]:
    """Forms of one item of the input."""
    no_effect = dict.fromkeys(ITEM_NO_EFFECT, _NO_EFFECT)

    def texts(kinds: tuple[str, ...]) -> Schema:
        part: dict[str, Schema] = {
            "type": {"enum": list(kinds)},
            "text": TEXT,
            **dict.fromkeys(PART_NO_EFFECT, _NO_EFFECT),
        }
        refusal = {"type": {"const": "refusal"}, "refusal": TEXT}
        either = [
            inner(part, ("type", "text"), "A part."),
            {"type": "object", "properties": refusal, "required": [*refusal]},
        ]
        return {"anyOf": [TEXT, list_of({"anyOf": either})]}

    message: dict[str, Schema] = {
        "type": {"enum": [MESSAGE, None]},
        "role": {"enum": list(ROLES)},
        "content": texts(PARTS),
        **no_effect,
    }
    call: dict[str, Schema] = {
        "type": {"const": CALL},
        "call_id": TEXT,
        "name": _NAME,
        "arguments": one_of("string", "JSON."),
        **no_effect,
    }
    result: dict[str, Schema] = {
        "type": {"const": RESULT},
        "call_id": TEXT,
        "output": texts(PARTS),
        "name": one_of("string"),
        **no_effect,
    }
    thought: dict[str, Schema] = {
        "type": {"const": REASONING},
        "content": nullable(texts(REASONING_PARTS)),
        "summary": nullable(texts(REASONING_PARTS)),
        **no_effect,
    }
    return [
        inner(message, ("role", "content"), "A message."),
        inner(call, ("type", "call_id", "name"), "A call of an earlier answer."),
        inner(result, ("type", "call_id", "output"), "What a call gave."),
        inner(thought, ("type",), "What was thought before."),
    ]


# --- answers ------------------------------------------------------------------------------------------------------


def _answers() -> dict[str, Schema]:
    status: Schema = {"enum": [DONE, CUT, OPEN]}
    of_all: Schema = {"enum": [DONE, CUT, OPEN, FAILED]}
    output_text: Schema = exactly(
        {"type": {"const": "output_text"}, "text": TEXT, "annotations": list_of(TEXT), "logprobs": _LOGPROBS}
    )
    thought: Schema = exactly({"type": {"const": "reasoning_text"}, "text": TEXT})
    items: list[Schema] = [
        exactly(
            {
                "id": TEXT,
                "type": {"const": MESSAGE},
                "role": {"const": ASSISTANT},
                "content": list_of(output_text),
                "status": status,
            }
        ),
        exactly(
            {
                "id": TEXT,
                "type": {"const": REASONING},
                "summary": list_of(TEXT),
                "content": list_of(thought),
                "status": status,
            }
        ),
        exactly(
            {"id": TEXT, "type": {"const": CALL}, "call_id": TEXT, "name": TEXT, "arguments": TEXT, "status": status}
        ),
    ]
    usage = exactly(
        {
            "input_tokens": COUNT,
            "input_tokens_details": exactly({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
            "output_tokens": COUNT,
            "output_tokens_details": exactly({"reasoning_tokens": COUNT}),
            "total_tokens": COUNT,
        }
    )
    return {
        "OutputItem": {"anyOf": items},
        "ResponseUsage": usage,
        "Response": _response(of_all),
        "ResponseEvent": {"anyOf": _events({"anyOf": [output_text, thought]})},
    }


def _response(status: Schema) -> Schema:
    reason = exactly({"reason": {"const": "max_output_tokens"}})
    number: Schema = {"type": ["number", "null"]}
    return exactly(
        {
            "id": TEXT,
            "object": {"const": "response"},
            "created_at": COUNT,
            "model": TEXT,
            "status": status,
            "error": nullable(exactly({"code": TEXT, "message": TEXT})),
            "incomplete_details": nullable(reason),
            "output": list_of({"$ref": ref("OutputItem")}),
            "usage": nullable({"$ref": ref("ResponseUsage")}),
            "instructions": {"type": "null"},
            "previous_response_id": {"type": "null"},
            "store": {"const": False},
            "tools": {"type": "array", "maxItems": 0},
            "truncation": {"const": "disabled"},
            "max_output_tokens": nullable(COUNT),
            "metadata": _METADATA,
            PARALLEL: {"type": "boolean"},
            "reasoning": exactly({"effort": nullable(TEXT), "summary": {"type": "null"}}),
            "temperature": number,
            "text": exactly({"format": {"type": "object"}}),
            TOOL_CHOICE: {"anyOf": [{"enum": list(ToolMode)}, {"type": "object"}]},
            "top_logprobs": COUNT,
            "top_p": number,
        }
    )


def _events(part: Schema) -> list[Schema]:
    response: dict[str, Schema] = {"response": {"$ref": ref("Response")}}
    item: dict[str, Schema] = {"output_index": COUNT, "item": {"$ref": ref("OutputItem")}}
    call: dict[str, Schema] = {"item_id": TEXT, "output_index": COUNT}
    place = {**call, "content_index": COUNT}
    fields: dict[str, dict[str, Schema]] = {
        **dict.fromkeys(("created", "in_progress", "completed", "incomplete", "failed"), response),
        **dict.fromkeys(("output_item.added", "output_item.done"), item),
        **{key: {**place, "part": part} for key in ("content_part.added", "content_part.done")},
        "output_text.delta": {**place, "delta": TEXT, "logprobs": _LOGPROBS},
        "output_text.done": {**place, "text": TEXT, "logprobs": _LOGPROBS},
        "reasoning_text.delta": {**place, "delta": TEXT},
        "reasoning_text.done": {**place, "text": TEXT},
        "function_call_arguments.delta": {**call, "delta": TEXT},
        "function_call_arguments.done": {**call, "arguments": TEXT},
    }
    events = {f"response.{name}": inner for name, inner in fields.items()}
    error: dict[str, Schema] = {"code": TEXT, "message": TEXT, "param": nullable(TEXT)}
    events["error"] = {**error, "error": exactly({**error, "type": TEXT})}
    return [exactly({"type": {"const": kind}, "sequence_number": COUNT, **inner}) for kind, inner in events.items()]
