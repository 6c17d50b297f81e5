"""Every field that a client may send with a response, and what we do about it: see FieldTable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coppice_scheduler.edge.http.field_table import FieldTable, Refusal

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
# What `include` may name.
LOGPROBS = "message.output_text.logprobs"
INCLUDE_NO_EFFECT: Mapping[str, str] = {
    "reasoning.encrypted_content": "reasoning is told as it is, and may be sent back so",
    "web_search_call.results": "no tool of a server runs here",
    "web_search_call.action.sources": "no tool of a server runs here",
    "file_search_call.results": "no tool of a server runs here",
    "code_interpreter_call.outputs": "no tool of a server runs here",
    "computer_call_output.output.image_url": "items are texts",
    "message.input_image.image_url": "items are texts",
}
INCLUDABLE = (LOGPROBS, *INCLUDE_NO_EFFECT)
_OFF: tuple[Any, ...] = (False,)
_EMPTY: tuple[Any, ...] = ([], {}, "")
_NOT_STORED = (
    "Answers are not stored: send the whole conversation as input instead, with all that was sent before, the items of "
    "output of each answer as they came, and what is new."
)
_NOT_BEHIND = "A response is computed while its caller waits: send stream: true to read it as it comes, or wait for it."
REFUSED: Mapping[str, Refusal] = {
    "previous_response_id": Refusal(_NOT_STORED, ("",)),
    "conversation": Refusal(_NOT_STORED),
    "background": Refusal(_NOT_BEHIND, _OFF),
    "background_options": Refusal(_NOT_BEHIND, _EMPTY),
    "image": Refusal("Answers are text.", _EMPTY),
    "truncation": Refusal("Nothing is cut off: shorten the conversation.", ("disabled", "auto")),
    "prompt": Refusal("Prompts are not stored: send the text as instructions and input."),
    "max_tool_calls": Refusal("No tool runs here: the program that runs them can count them."),
    "context_management": Refusal("Nothing is taken out of a conversation: shorten it before it is sent.", _EMPTY),
    "moderation": Refusal("Have the texts judged by a service for it."),
}

RESPONSES = FieldTable(SUPPORTED, NO_EFFECT.keys(), REFUSED)
