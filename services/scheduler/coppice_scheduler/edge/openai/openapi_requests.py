"""JSON schemas of request bodies. Bounds come from where they are enforced, refused fields from their table."""

from __future__ import annotations

from coppice.messages.sampling import BIAS, CHOICES_MAX, LENGTH_PENALTY, LOGPROBS_MAX, RANGES
from coppice_scheduler.edge.frontend.generation_spec import (
    ASSISTANT,
    MAX_CACHE_SALT,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOP_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    ROLES,
)
from coppice_scheduler.edge.http.field_table import FieldTable
from coppice_scheduler.edge.http.openapi.schema import Schema, body, inner, one_of, ref
from coppice_scheduler.edge.openai.openapi_tools import earlier_calls, tool_fields
from coppice_scheduler.edge.openai.parsing.cache_retention import REUSE
from coppice_scheduler.edge.openai.parsing.fields import CHAT, COMPLETION, NO_EFFECT, STREAM_OPTIONS_REFUSED
from coppice_scheduler.edge.openai.parsing.messages import MESSAGE_EMPTY, MESSAGE_NO_EFFECT, REASONING
from coppice_scheduler.edge.openai.parsing.output_format import GUIDED
from coppice_scheduler.edge.openai.parsing.template_values import MAX_EFFORT_CHARS, MAX_VALUES
from coppice_scheduler.edge.text.chat import SWITCHES
from coppice_scheduler.edge.text.output_format import MAX_FORMAT_CHOICES, FormatKind

TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_U31 = 2**31 - 1


def request_schemas(model_id: str, template_variables: frozenset[str], *, has_tools: bool) -> dict[str, Schema]:
    model: Schema = {"type": "string", "enum": [model_id]}
    shared = {"model": model, **_generation()}
    chat = {
        **shared,
        **_chat_fields(),
        **tool_fields(has_tools=has_tools),
        **_template_fields(template_variables),
        **_refused(CHAT),
    }
    completion = {**shared, **_completion_fields(), **_refused(COMPLETION)}
    messages = {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": {"$ref": ref("Message")}}
    return {
        "Message": _message(),
        "ChatRequest": body(chat, ("model", "messages"), "A chat to continue."),
        "CompletionRequest": body(completion, ("model", "prompt"), "One prompt or several to continue."),
        "TokenizeTextRequest": body(
            {
                "model": {"enum": [model_id, None]},
                "prompt": {"type": "string", "minLength": 1},
                "add_special_tokens": one_of("boolean", default=True),
                "return_token_strs": one_of("boolean", default=False),
                "messages": {"type": "null"},
                "chat_template_kwargs": {"enum": [{}, None]},
                "tools": {"enum": [[], None]},
                "add_generation_prompt": {"enum": [True, None]},
                "continue_final_message": {"enum": [False, None]},
            },
            ("prompt",),
            "A text to tokenise.",
        ),
        "TokenizeChatRequest": body(
            {
                "model": {"enum": [model_id, None]},
                "messages": messages,
                "chat_template_kwargs": _template_fields(template_variables)["chat_template_kwargs"],
                "tools": tool_fields(has_tools=has_tools)["tools"],
                **_prompt_end(),
                "add_special_tokens": {"enum": [False, None]},
                "return_token_strs": one_of("boolean", default=False),
                "prompt": {"type": "null"},
            },
            ("messages",),
            "A chat to tokenise, open for the assistant's answer.",
        ),
        "DetokenizeRequest": body(
            {"model": {"enum": [model_id, None]}, "tokens": {"type": "array", "items": TOKEN_ID}},
            ("tokens",),
            "Token ids to show as text.",
        ),
    }


def _ranged(name: str) -> Schema:
    allowed = RANGES[name]
    low = {"exclusiveMinimum" if allowed.above_low else "minimum": allowed.low}
    if name == "top_k":
        return one_of("integer", "0 or -1: off.", **low, maximum=int(allowed.high))
    return one_of("number", "", **low, maximum=allowed.high)


def _prompt_end() -> dict[str, Schema]:
    return {
        "add_generation_prompt": one_of("boolean", "False: the prompt ends behind the last message."),
        "continue_final_message": one_of(
            "boolean", "The answer goes on from the last message; not with add_generation_prompt: true.", default=False
        ),
    }


def _generation() -> dict[str, Schema]:
    return {
        "n": one_of("integer", "Answers to each prompt.", minimum=1, maximum=CHOICES_MAX, default=1),
        "best_of": one_of(
            "integer", "Answers that are computed to choose the n best of.", minimum=1, maximum=CHOICES_MAX
        ),
        "max_tokens": one_of("integer", maximum=_U31),
        "max_completion_tokens": one_of("integer", "The same under its newer name.", maximum=_U31),
        "min_tokens": one_of("integer", minimum=0, maximum=_U31),
        **{name: _ranged(name) for name in RANGES},
        "logit_bias": one_of(
            "object",
            "By token id.",
            maxProperties=MAX_LOGIT_BIASES,
            propertyNames={"pattern": "^[0-9]{1,10}$"},
            additionalProperties={"type": "number", "minimum": BIAS.low, "maximum": BIAS.high},
        ),
        "seed": one_of("integer", minimum=-(2**63), maximum=2**64 - 1),
        "stop": {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}, {"type": "null"}]},
        "stop_token_ids": one_of("array", maxItems=MAX_STOP_TOKEN_IDS, items=TOKEN_ID),
        "ignore_eos": one_of("boolean", default=False),
        "include_stop_str_in_output": one_of("boolean", default=False),
        "skip_special_tokens": one_of("boolean", default=True),
        "stream": one_of("boolean", default=False),
        "stream_options": one_of("object", "Only with stream: true.", additionalProperties=False, properties=_STREAM),
        "return_token_ids": one_of("boolean", default=False),
        "use_beam_search": one_of("boolean", "The n best of a search with best_of beams, or n.", default=False),
        "length_penalty": one_of(
            "number", "Of a beam search.", minimum=LENGTH_PENALTY.low, maximum=LENGTH_PENALTY.high, default=1
        ),
        "prompt_logprobs": one_of(
            "integer", "Likeliest tokens to tell beside each of the prompt's.", minimum=0, maximum=LOGPROBS_MAX
        ),
        "return_tokens_as_token_ids": one_of("boolean", "Log-probabilities name tokens `token_id:5`.", default=False),
        "prompt_cache_key": one_of("string", "Prompts with a key belong together: they are expected again."),
        "prompt_cache_options": one_of(
            "object", "What is known of the prompt's future.", additionalProperties=False, properties=CACHE_OPTIONS
        ),
        "prompt_cache_retention": {"enum": ["in_memory", "in-memory", "24h", None], "deprecated": True},
        **_output_formats(),
        "cache_salt": one_of(
            "string",
            "Cached prefixes are shared with requests of the same salt alone.",
            minLength=1,
            maxLength=MAX_CACHE_SALT,
        ),
        "priority": one_of("integer", "Lower goes first.", minimum=-(2**31), maximum=_U31),
        "timeout": one_of("number", "Seconds after which the answer is worth nothing.", exclusiveMinimum=0),
        **{name: {"description": f"Taken, without effect: {why}."} for name, why in NO_EFFECT.items()},
    }


def _output_formats() -> dict[str, Schema]:
    """Ways to say what the answer looks like, of which a request may use one."""
    schema: Schema = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}
    kinds: dict[FormatKind, Schema] = {
        FormatKind.JSON: {**schema, "description": "A JSON schema, or its text."},
        FormatKind.REGEX: one_of("string", "Of the whole answer, without look-around.", minLength=1),
        FormatKind.CHOICE: one_of(
            "array", minItems=1, maxItems=MAX_FORMAT_CHOICES, items={"type": "string", "minLength": 1}
        ),
        FormatKind.GRAMMAR: one_of("string", "Lark, or GBNF.", minLength=1),
    }
    any_object = one_of("boolean", "Any object in JSON.")
    named = inner(
        {
            "name": one_of("string"),
            "description": one_of("string"),
            "schema": {"type": "object"},
            "strict": one_of("boolean", "The answer follows the schema in any case."),
        },
        ("schema",),
        "A JSON schema.",
    )
    return {
        "response_format": {
            "anyOf": [
                inner(
                    {"type": {"enum": ["text", "json_object"]}, "json_schema": {"type": "null"}},
                    ("type",),
                    "Any answer, or any object in JSON.",
                ),
                inner(
                    {"type": {"enum": ["json_schema"]}, "json_schema": named},
                    ("type", "json_schema"),
                    "JSON that a schema describes.",
                ),
                {"type": "null"},
            ],
            "description": "What the answer looks like.",
        },
        "structured_outputs": one_of(
            "object",
            "What the answer looks like: one of these.",
            properties={**kinds, FormatKind.JSON_OBJECT: any_object},
            additionalProperties=False,
        ),
        **{name: {**kinds[kind], "deprecated": True} for name, kind in GUIDED.items()},
    }


_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES}
_STREAM: dict[str, Schema] = {
    "include_usage": one_of("boolean", "The last chunk has the usage of all answers."),
    "continuous_usage_stats": one_of("boolean", "Each chunk has the usage of its answer so far."),
    **{name: refusal.described() for name, refusal in STREAM_OPTIONS_REFUSED.items()},
}
CACHE_OPTIONS: dict[str, Schema] = {
    "mode": {"enum": ["implicit", None]},
    "ttl": one_of(
        "string", 'How long it stays cached at least, such as "90s", "30m" or "2h".', pattern="^[0-9]{1,6}[smh]$"
    ),
    "reuse": {"enum": [*REUSE, None], "description": "Whether what was said up to here is expected again."},
}


def _chat_fields() -> dict[str, Schema]:
    items = {"$ref": ref("Message")}
    return {
        "messages": {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": items},
        "logprobs": one_of("boolean", default=False),
        "top_logprobs": one_of("integer", "Only with logprobs: true.", minimum=0, maximum=LOGPROBS_MAX),
        **_prompt_end(),
        "include_reasoning": one_of("boolean", "False: what the model thought is not shown.", default=True),
    }


def _template_fields(variables: frozenset[str]) -> dict[str, Schema]:
    """What this model's chat template reads; all else would have no effect."""
    read: dict[str, Schema] = {name: {} for name in sorted(variables)}
    nothing: Schema = {"type": "null", "description": "The chat template of this model does not read it."}
    thinks = "reasoning_effort" in variables or variables.intersection(SWITCHES)
    return {
        "chat_template_kwargs": one_of(
            "object", "For the chat template.", properties=read, additionalProperties=False, maxProperties=MAX_VALUES
        ),
        "enable_thinking": one_of("boolean") if "enable_thinking" in variables else nothing,
        "reasoning_effort": one_of("string", minLength=1, maxLength=MAX_EFFORT_CHARS) if thinks else nothing,
    }


def _completion_fields() -> dict[str, Schema]:
    text, ids = {"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": TOKEN_ID}
    return {
        "prompt": {
            "anyOf": [
                text,
                ids,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": text},
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": ids},
            ]
        },
        "logprobs": one_of("integer", "Likeliest tokens to tell.", minimum=0, maximum=LOGPROBS_MAX),
        "echo": one_of("boolean", "The text begins with the prompt.", default=False),
    }


def _refused(table: FieldTable) -> dict[str, Schema]:
    return {name: refusal.described() for name, refusal in table.refused.items() if name not in table.supported}


_REASONING: Schema = {
    "anyOf": [{"type": ["string", "null"]}, {"enum": [[], {}]}],
    "description": "Of an answer that is sent back; for the chat template.",
}


def _message() -> Schema:
    breakpoint = {
        "type": ["object", "null"],
        "properties": {"mode": {"enum": ["explicit"]}},
        "required": ["mode"],
        "additionalProperties": False,
    }
    part = body(
        {"type": {"enum": ["text"]}, "text": {"type": "string"}, "prompt_cache_breakpoint": breakpoint},
        ("type", "text"),
        "A part of a message.",
    )
    nothing: dict[str, Schema] = {
        name: {"enum": [None, [], {}, ""], "description": "Of an answer that is sent back; nothing may be in it."}
        for name in MESSAGE_EMPTY
    }
    content: list[Schema] = [{"type": "string"}, {"type": "array", "items": part}]
    of_all: dict[str, Schema] = {
        "name": one_of("string"),
        "tool_call_id": one_of("string", "Of the call whose result this is."),
        **dict.fromkeys(REASONING, _REASONING),
        **{name: {"description": "Taken, without effect."} for name in MESSAGE_NO_EFFECT},
        **nothing,
    }
    plain: dict[str, Schema] = {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": content},
        "tool_calls": {"enum": [None, [], {}, ""]},
    }
    calling: dict[str, Schema] = {
        "role": {"const": ASSISTANT},
        "content": {"anyOf": [*content, {"type": "null"}]},
        **earlier_calls(),
    }
    return {
        "anyOf": [
            body({**plain, **of_all}, ("role", "content"), "One message of a chat."),
            body({**calling, **of_all}, ("role", "tool_calls"), "An answer that calls tools, sent back."),
        ]
    }
