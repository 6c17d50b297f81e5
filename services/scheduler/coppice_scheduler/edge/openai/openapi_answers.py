"""JSON schemas of answers."""

from __future__ import annotations

from typing import Any

from coppice_scheduler.edge.openai.openapi_requests import TOKEN_ID, Schema, ref

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


_MAY_USE: Schema = _nullable({"$ref": ref("Usage")})
_REASON: Schema = {"enum": ["stop", "length", None]}


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
    return _object({**counts, "prompt_tokens_details": details})


def _choice(required: dict[str, Schema], logprobs: str, optional: dict[str, Schema]) -> Schema:
    common: dict[str, Any] = {"index": _COUNT, "finish_reason": _REASON, "logprobs": _nullable({"$ref": ref(logprobs)})}
    return _object({**common, **required}, {"token_ids": _IDS, "stop_reason": _nullable(_TEXT), **optional})


def _chat_choice() -> Schema:
    message = _object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": {"type": "null"}})
    return _choice({"message": message}, "ChatLogprobs", {})


def _chat_part() -> Schema:
    delta = _object({}, {"role": {"const": "assistant"}, "content": _TEXT, "refusal": {"type": "null"}})
    return _choice({"delta": delta}, "ChatLogprobs", {})


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
