"""Every field that a client of the Anthropic API may send with a message, and what we do about it: see FieldTable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coppice_scheduler.edge.http.field_table import FieldTable, Refusal

PROMPT = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"}
)
CACHE_CONTROL = "cache_control"
_OWN = frozenset({"seed", "cache_salt", "priority", "timeout"})  # additions of ours, as in the OpenAI API

# Any value is taken.
NO_EFFECT = {
    "metadata": "labels of the caller's own",
    "service_tier": "there is one",
    "inference_geo": "the model computes where it stands",
    "speed": "there is one",
    "context_management": "nothing is taken out of a conversation; it must fit as it is",
    "diagnostics": "nothing is told of earlier messages",
    "user_profile_id": "names the caller's user",
    "workspace_id": "the key says whose a call is",
    "billing_policy": "nothing is billed",
}
_EMPTY: tuple[Any, ...] = ([], {}, "")
REFUSED: Mapping[str, Refusal] = {
    "container": Refusal("No code runs here: offer a tool that runs it.", _EMPTY),
    "mcp_servers": Refusal("Offer what they have as tools, and call them from the program that asks.", _EMPTY),
    "fallbacks": Refusal("There is one model: ask another server where this one refuses.", _EMPTY),
    "compaction": Refusal("Nothing is taken out of a conversation: shorten it before it is sent.", _EMPTY),
    "thread": Refusal("Conversations are not stored: send all messages.", _EMPTY),
    "fallback_credit_token": Refusal("Nothing is billed.", _EMPTY),
}

MESSAGES = FieldTable(
    PROMPT | _OWN | {"max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k", CACHE_CONTROL},
    NO_EFFECT.keys(),
    REFUSED,
)
# What counts tokens makes no answer, so nothing that would shape one has an effect.
COUNT = FieldTable(
    PROMPT | {CACHE_CONTROL},
    (MESSAGES.supported - PROMPT - {CACHE_CONTROL}) | NO_EFFECT.keys(),
    REFUSED,
)
