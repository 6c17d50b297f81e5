"""Every field that a client of the OpenAI API may send, and what we do about it: see FieldTable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coppice_scheduler.edge.http.field_table import FieldTable

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
        "best_of",
        "use_beam_search",
        "length_penalty",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "logprobs",
        "prompt_logprobs",
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
        "add_generation_prompt",
        "continue_final_message",
    }
)
COMPLETION_ONLY = frozenset({"prompt", "echo"})
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
    "echo": _OFF,
    "top_logprobs": (0,),
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

CHAT = FieldTable(
    SUPPORTED | CHAT_ONLY,
    NO_EFFECT.keys(),
    {**REFUSED, "add_special_tokens": (False,)},  # the template writes the special tokens of a chat
    _OF_ONE_ROUTE,
)
COMPLETION = FieldTable(
    SUPPORTED | COMPLETION_ONLY, NO_EFFECT.keys(), {**REFUSED, "add_special_tokens": (True,)}, _OF_ONE_ROUTE
)
