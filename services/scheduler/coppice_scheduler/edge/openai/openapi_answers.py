"""JSON schemas of answers."""

from __future__ import annotations

from typing import Any

from coppice_scheduler.edge.openai.openapi_requests import TOKEN_ID
from coppice_scheduler.edge.openai.openapi_schema import Schema, ref
from coppice_scheduler.edge.openai.parsing.messages import REASONING

_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_IDS: Schema = {"type": "array", "items": TOKEN_ID}
_LOGPROB: Schema = {"type": "number", "maximum": 0}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def answer_schemas() -> dict[str, Schema]:
    error = {
        "message": {"type": "string", "minLength": 1},
        "type": _TEXT,
        "param": _nullable(_TEXT),
        "code": _nullable(_TEXT),
    }
    model = {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "max_model_len": _COUNT,
    }
    tokenized = {"count": _COUNT, "max_model_len": _COUNT, "tokens": _IDS, "token_strs": _nullable(_list(_TEXT))}
    return {
        "Error": _object({"error": _object(error)}),
        "Model": _object(model),
        "ModelList": _object({"object": {"const": "list"}, "data": _list({"$ref": ref("Model")})}),
        "Tokenized": _object(tokenized),
        "Detokenized": _object({"prompt": _TEXT}),
        "Usage": _usage(),
        "ChatLogprobs": _chat_logprobs(),
        "CompletionLogprobs": _completion_logprobs(),
        "ChatCompletion": _frame("chat.completion", _chat_choice(), {"prompt_token_ids": _IDS}, usage="Usage"),
        "ChatChunk": _frame("chat.completion.chunk", _chat_part(), {"prompt_token_ids": _IDS, "usage": _MAY_USE}),
        "Completion": _frame("text_completion", _completion_choice(), {"usage": _MAY_USE}),
    }


_REASONING: dict[str, Schema] = dict.fromkeys(REASONING, _TEXT)
_MAY_USE: Schema = _nullable({"$ref": ref("Usage")})
_REASONS = ("stop", "length", None)


def _frame(kind: str, choice: Schema, optional: dict[str, Schema], usage: str | None = None) -> Schema:
    required: dict[str, Schema] = {
        "id": _TEXT,
        "object": {"const": kind},
        "created": _COUNT,
        "model": _TEXT,
        "choices": _list(choice),
    }
    if usage is not None:
        required["usage"] = {"$ref": ref(usage)}
    return _object(required, optional)


def _usage() -> Schema:
    details = _object({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT})
    counts = {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT}
    of_answer = _object({"reasoning_tokens": _COUNT})
    return _object({**counts, "prompt_tokens_details": details}, {"completion_tokens_details": of_answer})


def _choice(required: dict[str, Schema], logprobs: str, optional: dict[str, Schema], *more_reasons: str) -> Schema:
    common: dict[str, Any] = {
        "index": _COUNT,
        "finish_reason": {"enum": [*_REASONS, *more_reasons]},
        "logprobs": _nullable({"$ref": ref(logprobs)}),
    }
    return _object({**common, **required}, {"token_ids": _IDS, "stop_reason": _nullable(_TEXT), **optional})


def _chat_choice() -> Schema:
    function = _object({"name": _TEXT, "arguments": _TEXT})
    call = _object({"id": _TEXT, "type": {"const": "function"}, "function": function})
    message = _object(
        {"role": {"const": "assistant"}, "content": _nullable(_TEXT), "refusal": {"type": "null"}},
        {"tool_calls": _list(call), **_REASONING},
    )
    return _choice({"message": message}, "ChatLogprobs", {}, "tool_calls")


def _chat_part() -> Schema:
    piece = _object(
        {"index": _COUNT, "function": _object({"arguments": _TEXT}, {"name": _TEXT})},
        {"id": _TEXT, "type": {"const": "function"}},
    )
    delta = _object(
        {},
        {
            "role": {"const": "assistant"},
            "content": _TEXT,
            "refusal": {"type": "null"},
            "tool_calls": _list(piece),
            **_REASONING,
        },
    )
    return _choice({"delta": delta}, "ChatLogprobs", {}, "tool_calls")


def _completion_choice() -> Schema:
    return _choice({"text": _TEXT}, "CompletionLogprobs", {"prompt_token_ids": _IDS})


def _chat_logprobs() -> Schema:
    byte = {"type": "integer", "minimum": 0, "maximum": 255}
    token = {"token": _TEXT, "logprob": _LOGPROB, "bytes": _list(byte)}
    return _object(
        {"content": _list(_object({**token, "top_logprobs": _list(_object(token))})), "refusal": {"type": "null"}}
    )


def _completion_logprobs() -> Schema:
    top = {"type": "object", "additionalProperties": _LOGPROB}
    return _object(
        {
            "tokens": _list(_TEXT),
            "token_logprobs": _list(_nullable(_LOGPROB)),
            "top_logprobs": _list(_nullable(top)),
            "text_offset": _list(_COUNT),
        }
    )
