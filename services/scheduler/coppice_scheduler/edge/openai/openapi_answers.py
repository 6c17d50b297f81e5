"""JSON schemas of answers."""

from __future__ import annotations

from typing import Any

from coppice_scheduler.edge.http.openapi.schema import COUNT, TEXT, Schema, exactly, list_of, nullable, ref
from coppice_scheduler.edge.openai.openapi_requests import TOKEN_ID
from coppice_scheduler.edge.openai.parsing.messages import REASONING

_IDS: Schema = {"type": "array", "items": TOKEN_ID}
_LOGPROB: Schema = {"type": "number", "maximum": 0}


def answer_schemas() -> dict[str, Schema]:
    error = {
        "message": {"type": "string", "minLength": 1},
        "type": TEXT,
        "param": nullable(TEXT),
        "code": nullable(TEXT),
    }
    model = {
        "id": TEXT,
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": TEXT,
        "max_model_len": COUNT,
    }
    tokenized = {"count": COUNT, "max_model_len": COUNT, "tokens": _IDS, "token_strs": nullable(list_of(TEXT))}
    return {
        "Error": exactly({"error": exactly(error)}),
        "Model": exactly(model),
        "ModelList": exactly({"object": {"const": "list"}, "data": list_of({"$ref": ref("Model")})}),
        "Tokenized": exactly(tokenized),
        "Detokenized": exactly({"prompt": TEXT}),
        "Usage": _usage(),
        "UsageSoFar": exactly(_COUNTS),
        "TokenLogprob": _token_logprob(),
        "ChatLogprobs": _chat_logprobs(),
        "CompletionLogprobs": _completion_logprobs(),
        "ChatCompletion": _frame(
            "chat.completion",
            _chat_choice(),
            {"prompt_token_ids": _IDS, "prompt_logprobs": _prompt_logprobs()},
            usage="Usage",
        ),
        "ChatChunk": _frame("chat.completion.chunk", _chat_part(), {"prompt_token_ids": _IDS, "usage": _MAY_USE}),
        "Completion": _frame("text_completion", _completion_choice(), {"usage": _MAY_USE}),
    }


_REASONING: dict[str, Schema] = dict.fromkeys(REASONING, TEXT)
_COUNTS: dict[str, Schema] = {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT}
_MAY_USE: Schema = {"anyOf": [{"$ref": ref("Usage")}, {"$ref": ref("UsageSoFar")}, {"type": "null"}]}
_REASONS = ("stop", "length", None)


def _frame(kind: str, choice: Schema, optional: dict[str, Schema], usage: str | None = None) -> Schema:
    required: dict[str, Schema] = {
        "id": TEXT,
        "object": {"const": kind},
        "created": COUNT,
        "model": TEXT,
        "choices": list_of(choice),
    }
    if usage is not None:
        required["usage"] = {"$ref": ref(usage)}
    return exactly(required, optional)


def _usage() -> Schema:
    details = exactly({"cached_tokens": COUNT, "cache_write_tokens": COUNT})
    of_answer = exactly({"reasoning_tokens": COUNT})
    return exactly({**_COUNTS, "prompt_tokens_details": details}, {"completion_tokens_details": of_answer})


def _choice(required: dict[str, Schema], logprobs: str, optional: dict[str, Schema], *more_reasons: str) -> Schema:
    common: dict[str, Any] = {
        "index": COUNT,
        "finish_reason": {"enum": [*_REASONS, *more_reasons]},
        "logprobs": nullable({"$ref": ref(logprobs)}),
    }
    return exactly({**common, **required}, {"token_ids": _IDS, "stop_reason": nullable(TEXT), **optional})


def _chat_choice() -> Schema:
    function = exactly({"name": TEXT, "arguments": TEXT})
    call = exactly({"id": TEXT, "type": {"const": "function"}, "function": function})
    message = exactly(
        {"role": {"const": "assistant"}, "content": nullable(TEXT), "refusal": {"type": "null"}},
        {"tool_calls": list_of(call), **_REASONING},
    )
    return _choice({"message": message}, "ChatLogprobs", {}, "tool_calls")


def _chat_part() -> Schema:
    piece = exactly(
        {"index": COUNT, "function": exactly({"arguments": TEXT}, {"name": TEXT})},
        {"id": TEXT, "type": {"const": "function"}},
    )
    delta = exactly(
        {},
        {
            "role": {"const": "assistant"},
            "content": TEXT,
            "refusal": {"type": "null"},
            "tool_calls": list_of(piece),
            **_REASONING,
        },
    )
    return _choice({"delta": delta}, "ChatLogprobs", {}, "tool_calls")


def _completion_choice() -> Schema:
    prompt = {"prompt_token_ids": _IDS, "prompt_logprobs": _prompt_logprobs()}
    return _choice({"text": TEXT}, "CompletionLogprobs", prompt)


def _prompt_logprobs() -> Schema:
    token = exactly({"logprob": _LOGPROB, "rank": {"type": "integer", "minimum": 1}, "decoded_token": TEXT})
    return list_of(nullable({"type": "object", "additionalProperties": token}))


def _chat_logprobs() -> Schema:
    return exactly({"content": list_of({"$ref": ref("TokenLogprob")}), "refusal": {"type": "null"}})


def _token_logprob() -> Schema:
    byte = {"type": "integer", "minimum": 0, "maximum": 255}
    token = {"token": TEXT, "logprob": _LOGPROB, "bytes": list_of(byte)}
    return exactly({**token, "top_logprobs": list_of(exactly(token))})


def _completion_logprobs() -> Schema:
    top = {"type": "object", "additionalProperties": _LOGPROB}
    return exactly(
        {
            "tokens": list_of(TEXT),
            "token_logprobs": list_of(nullable(_LOGPROB)),
            "top_logprobs": list_of(nullable(top)),
            "text_offset": list_of(COUNT),
        }
    )
