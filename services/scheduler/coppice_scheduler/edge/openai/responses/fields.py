"""Every field that a client may send with a response, and what we do about it: see FieldTable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coppice_scheduler.edge.http.field_table import FieldTable

SUPPORTED = frozenset(
    {
        "model",
        "input",
        "instructions",
        "include",
        "top_logprobs",
        "max_output_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "text",
        "reasoning",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "metadata",
        "stream",
        "stream_options",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "cache_salt",
        "priority",
        "timeout",
    }
)
# Any value is taken.
NO_EFFECT: Mapping[str, str] = {
    "store": "answers are not kept, whatever it says",
    "user": "names the caller's user",
    "safety_identifier": "names the caller's user",
    "service_tier": "there is one",
    "client_metadata": "labels of the client's own",
}
_OFF: tuple[Any, ...] = (False,)
_EMPTY: tuple[Any, ...] = ([], {}, "")
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": ("",),
    "conversation": (),
    "background": _OFF,
    "background_options": _EMPTY,
    "image": _EMPTY,
    "truncation": ("disabled", "auto"),  # nothing is cut off: what is too long is refused
    "prompt": (),
    "max_tool_calls": (),
    "context_management": _EMPTY,
    "moderation": (),
}

RESPONSES = FieldTable(SUPPORTED, NO_EFFECT.keys(), REFUSED)
