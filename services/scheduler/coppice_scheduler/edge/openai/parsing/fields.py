"""Every field that a client of the OpenAI API may send, and what we do about it.

    supported    read by schema.py
    no effect    taken: it changes no output here, and need not
    refused      400 that names the field, unless its value is one that changes nothing
    unknown      400 that names the nearest field there is, or taken, as the operator says (`--unknown-fields`)

Nothing is ignored in silence: a caller who sends `tools` and gets an answer believes that they were offered.
What was taken without effect is listed in a header of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from coppice.settings import nearest
from coppice_scheduler.edge.base.errors import ApiError, invalid

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
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "priority",
        "timeout",
    }
)
CHAT_ONLY = frozenset(
    {
        "messages",
        "top_logprobs",
        "chat_template_kwargs",
        "enable_thinking",
        "reasoning_effort",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "include_reasoning",
    }
)
COMPLETION_ONLY = frozenset({"prompt", "echo"})
NAMED_MAX = 16  # fields in the header that lists them
NAME_CHARS = 64
_OF_ONE_ROUTE = CHAT_ONLY | COMPLETION_ONLY

# Any value is taken.
NO_EFFECT: Mapping[str, str] = {
    "user": "names the caller's user",
    "safety_identifier": "names the caller's user",
    "metadata": "labels of the caller's own",
    "store": "answers are not kept, whatever it says",
    "service_tier": "there is one",
    "session_id": "prefixes are found without it",
    "prediction": "the answer is computed without a guess",
    "parallel_tool_calls": "of completions, which call no tool",
    "verbosity": "the model is not told",
}

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
    "tools": _EMPTY,  # these two of completions
    "tool_choice": ("none", "auto"),
    "functions": _EMPTY,
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "request_id": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "spaces_between_special_tokens": (True,),
    "return_prompt_text": _OFF,
    "detokenize": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": _OFF,
    "chat_template": (),
    "documents": _EMPTY,
    "include_reasoning": (True,),
    "thinking_token_budget": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": _EMPTY,
    "kv_transfer_params": (),
}
_CHAT_ADDS_NONE = (False,)  # the template writes the special tokens of a chat
_COMPLETION_ADDS = (True,)


class UnknownFields(StrEnum):
    """What becomes of a field that nobody has heard of."""

    REFUSE = "refuse"
    WARN = "warn"  # taken; the log names it once
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a body is read against."""

    max_context: int  # tokens
    unknown_fields: UnknownFields = UnknownFields.REFUSE
    template_variables: frozenset[str] = frozenset()  # what a client may give the chat template


def check_fields(body: Mapping[str, Any], own: frozenset[str], unknown: UnknownFields) -> tuple[str, ...]:
    """Names of the fields that were taken without effect. `own`: CHAT_ONLY or COMPLETION_ONLY.

    Raises ApiError for the first field that would have to be ignored and must not be.
    """
    ignored = []
    for name, value in body.items():
        if name in SUPPORTED or name in own:
            continue
        harmless = _harmless(name, is_chat=own is CHAT_ONLY)
        is_elsewhere = name in _OF_ONE_ROUTE
        if harmless is None and name not in NO_EFFECT and (is_elsewhere or unknown is UnknownFields.REFUSE):
            raise unknown_field(name, SUPPORTED | own)
        if value is None:
            continue
        if harmless is None:
            ignored.append(name[:NAME_CHARS])
        elif not any(value == other and type(value) in _kin(other) for other in harmless):
            accepted = f" Leave it out or send {_shown(harmless, value)}." if harmless else " Leave it out."
            raise invalid(f"{name} is not supported yet.{accepted}", param=name, code="unsupported_parameter")
    return tuple(ignored)


def _harmless(name: str, *, is_chat: bool) -> tuple[Any, ...] | None:
    """Values of a refused field that change nothing; None of one that is not refused."""
    if name == "add_special_tokens":
        return _CHAT_ADDS_NONE if is_chat else _COMPLETION_ADDS
    return REFUSED.get(name)


def unknown_field(name: str, known: Iterable[str]) -> ApiError:
    """The refusal, with the nearest of those that are known."""
    message = f"Unknown field {name[:100]!r}; {nearest(name[:100], known)}"
    return invalid(message, param=name[:100], code="unknown_parameter")


IGNORED_HEADER = "x-coppice-ignored-fields"
_NO_TOKEN = re.compile(r"[^A-Za-z0-9_.\[\]-]")


def ignored_header(names: tuple[str, ...]) -> dict[str, str]:
    """The header that lists what was taken without effect; none where nothing was."""
    if not names:
        return {}
    shown = [_NO_TOKEN.sub("?", name) for name in names[:NAMED_MAX]]
    more = [f"and {len(names) - NAMED_MAX} more"] if len(names) > NAMED_MAX else []
    return {IGNORED_HEADER: ", ".join([*shown, *more])}


def _kin(value: Any) -> tuple[type, ...]:
    """Types that a value may have to count as equal: 0 and 0.0 do, 0 and false do not."""
    return (int, float) if type(value) in (int, float) else (type(value),)


def _shown(harmless: tuple[Any, ...], sent: Any) -> str:
    """A value that changes nothing, as JSON; of the type that was sent where there is one."""
    alike = [value for value in harmless if type(value) in _kin(sent)]
    return json.dumps((alike or harmless)[0])
