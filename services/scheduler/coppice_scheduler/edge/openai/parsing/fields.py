"""Every field that a client of the OpenAI API may send, and what we do about it: see FieldTable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coppice_scheduler.edge.http.field_table import FieldTable, Refusal

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
_CHATS_HAVE_TOOLS = "Tools are for chats: send the conversation to /v1/chat/completions."
_TEXT_ALONE = "Answers are text."
_NOTHING_IS_CUT = "Nothing is cut off: shorten the prompt; /tokenize counts its tokens."
_OF_CHATS = "It is for chats: the prompt of a completion is taken as it is."

REFUSED: Mapping[str, Refusal] = {
    "echo": Refusal("The prompt of a chat is not told again; completions have echo.", _OFF),
    "top_logprobs": Refusal("Completions take the number in logprobs.", (0,)),
    "allowed_token_ids": Refusal("structured_outputs says what an answer may be.", _EMPTY),
    "bad_words": Refusal("logit_bias of -100 keeps a token out.", _EMPTY),
    "logits_processors": Refusal("No code of a caller runs here; logit_bias changes single tokens.", _EMPTY),
    "suffix": Refusal("Write the prompt with the marks that the model has for filling in the middle.", ("",)),
    "tools": Refusal(_CHATS_HAVE_TOOLS, _EMPTY),
    "tool_choice": Refusal(_CHATS_HAVE_TOOLS, ("none", "auto")),
    "functions": Refusal("Chats take them as tools.", _EMPTY),
    "function_call": Refusal("Chats take it as tool_choice.", ("none", "auto")),
    "modalities": Refusal(_TEXT_ALONE, (["text"],)),
    "audio": Refusal(_TEXT_ALONE),
    "web_search_options": Refusal("Offer the search as one of the tools of a chat, run it, and send what it found."),
    "moderation": Refusal("Have the texts judged by a service for it."),
    "request_id": Refusal("Send the header x-request-id."),
    "truncate_prompt_tokens": Refusal(_NOTHING_IS_CUT),
    "truncation_side": Refusal(_NOTHING_IS_CUT),
    "spaces_between_special_tokens": Refusal("return_token_ids tells the tokens, to be written in any way.", (True,)),
    "return_prompt_text": Refusal("/detokenize makes a text of token ids; completions have echo.", _OFF),
    "detokenize": Refusal("return_token_ids tells the token ids beside the text.", (True,)),
    "add_generation_prompt": Refusal(_OF_CHATS, (True,)),
    "continue_final_message": Refusal(_OF_CHATS, _OFF),
    "chat_template": Refusal("Write the prompt with it, and send its token ids to /v1/completions."),
    "documents": Refusal("Write them into a message.", _EMPTY),
    "include_reasoning": Refusal("It is for chats: completions are told as the model wrote them.", (True,)),
    "thinking_token_budget": Refusal("max_tokens bounds reasoning and answer together."),
    "prompt_embeds": Refusal("Send a text or token ids."),
    "mm_processor_kwargs": Refusal("Prompts are text.", _EMPTY),
    "kv_transfer_params": Refusal("What is cached is found without it, on whichever worker it lies."),
}
# Routes differ in what they do without being asked.
ADDS_SPECIAL_TOKENS = "add_special_tokens"
CHAT_REFUSED: Mapping[str, Refusal] = {
    **REFUSED,
    ADDS_SPECIAL_TOKENS: Refusal("The template writes the special tokens of a chat.", _OFF),
}
COMPLETION_REFUSED: Mapping[str, Refusal] = {
    **REFUSED,
    ADDS_SPECIAL_TOKENS: Refusal("Send the token ids that /tokenize makes of the prompt without them.", (True,)),
}
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
STREAM_OPTIONS_REFUSED: Mapping[str, Refusal] = {
    "include_obfuscation": Refusal("Events are as long as their text; TLS hides the text alone.", _OFF),
}

CHAT = FieldTable(SUPPORTED | CHAT_ONLY, NO_EFFECT.keys(), CHAT_REFUSED, _OF_ONE_ROUTE)
COMPLETION = FieldTable(SUPPORTED | COMPLETION_ONLY, NO_EFFECT.keys(), COMPLETION_REFUSED, _OF_ONE_ROUTE)
