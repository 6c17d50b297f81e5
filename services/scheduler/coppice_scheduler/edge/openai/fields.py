"""Every field that a client of the OpenAI API may send, and what we do about it.

    supported    read by schema.py
    refused      400 that names the field, unless its value is one that changes nothing
    unknown      400 that names the nearest field there is

Nothing is ignored in silence: a caller who sends `response_format` and gets an answer believes that it was applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coppice.settings import nearest
from coppice_scheduler.edge.base.errors import invalid

SUPPORTED = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "return_token_ids",
        "n",
        "best_of",  # only as many as n
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "logprobs",
        "return_tokens_as_token_ids",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "cache_salt",
        "priority",
        "timeout",
        "user",  # says who the caller's user is; changes nothing
        "safety_identifier",  # the same under its newer name
    }
)
CHAT_ONLY = frozenset({"messages", "top_logprobs"})
COMPLETION_ONLY = frozenset({"prompt", "echo"})

_OFF: tuple[Any, ...] = (False,)
_EMPTY: tuple[Any, ...] = ([], {}, "")

# Field -> values that change nothing. `null` is one for all of them.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": _OFF,
    "prompt_logprobs": (),
    "echo": _OFF,
    "top_logprobs": (0,),
    "length_penalty": (1,),
    "allowed_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "logits_processors": _EMPTY,
    "suffix": ("",),
    "tools": _EMPTY,
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": _EMPTY,
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": _EMPTY,
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "metadata": _EMPTY,
    "store": _OFF,
    "service_tier": ("auto", "default"),
    "moderation": (),
    "request_id": (),
    "session_id": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "spaces_between_special_tokens": (True,),
    "return_prompt_text": _OFF,
    "detokenize": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": _OFF,
    "chat_template": (),
    "chat_template_kwargs": _EMPTY,
    "documents": _EMPTY,
    "include_reasoning": (True,),
    "thinking_token_budget": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": _EMPTY,
    "kv_transfer_params": (),
}
_CHAT_ADDS_NONE = (False,)  # the template writes the special tokens of a chat
_COMPLETION_ADDS = (True,)


def check_fields(body: Mapping[str, Any], own: frozenset[str]) -> None:
    """Raises ApiError for the first field that we would have to ignore. `own`: CHAT_ONLY or COMPLETION_ONLY."""
    is_chat = own is CHAT_ONLY
    for name, value in body.items():
        if name in SUPPORTED or name in own or value is None:
            _refuse_unknown(name, own)
            continue
        if name == "add_special_tokens":
            harmless = _CHAT_ADDS_NONE if is_chat else _COMPLETION_ADDS
        elif name in REFUSED:
            harmless = REFUSED[name]
        else:
            _refuse_unknown(name, own)
            continue
        if not any(value == other and type(value) in _kin(other) for other in harmless):
            accepted = f" Leave it out or send {_shown(harmless, value)}." if harmless else " Leave it out."
            raise invalid(
                f"{name} is not supported yet.{accepted}",
                param=name,
                code="unsupported_parameter",
            )


def _kin(value: Any) -> tuple[type, ...]:
    """Types that a value may have to count as equal: 0 and 0.0 do, 0 and false do not."""
    return (int, float) if type(value) in (int, float) else (type(value),)


def _shown(harmless: tuple[Any, ...], sent: Any) -> str:
    """A value that changes nothing, as JSON; of the type that was sent where there is one."""
    alike = [value for value in harmless if type(value) in _kin(sent)]
    return json.dumps((alike or harmless)[0])


def _refuse_unknown(name: str, own: frozenset[str]) -> None:
    if name in SUPPORTED or name in own or name in REFUSED or name == "add_special_tokens":
        return
    raise invalid(
        f"Unknown field {name[:100]!r}; {nearest(name[:100], SUPPORTED | own)}",
        param=name[:100],
        code="unknown_parameter",
    )
