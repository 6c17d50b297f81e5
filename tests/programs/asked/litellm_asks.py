"""`litellm` as a client: its providers `openai`, `hosted_vllm` and `anthropic`, for which only the base is ours."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import litellm

sys.path.insert(0, str(Path(__file__).parent))
from cases import case, print_all

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"}, "day": {"enum": ["today", "tomorrow"]}},
    "required": ["name", "day"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "City", "description": "The weather.", "parameters": CITY}}]
FORM = {"type": "json_schema", "json_schema": {"name": "City", "schema": CITY, "strict": True}}
USER: dict[str, Any] = {"role": "user", "content": "How is it?"}
PROVIDERS = ("openai", "hosted_vllm", "anthropic")
TURNS = 4


def asked(url: str, provider: str, **fields: Any) -> dict[str, Any]:
    base = url if provider == "anthropic" else f"{url}/v1"
    options = {"model": f"{provider}/tiny", "api_base": base, "api_key": "none", "num_retries": 0}
    fields = deepcopy(fields)  # litellm changes what it gets
    if provider == "hosted_vllm":  # it takes additionalProperties out of tools: the model has to end by itself
        fields.setdefault("logit_bias", {str(ord("}")): 9})
    # The Anthropic API has no seeds.
    sampling = {"temperature": 0} if provider == "anthropic" else {"temperature": 1.2, "seed": 3}
    return {**options, **sampling, "messages": [USER], "max_tokens": 900, **fields}


def of_each(url: str, ask: Any) -> dict[str, Any]:
    return {provider: ask(provider) for provider in PROVIDERS}


def calls_of(message: Any) -> list[list[str]]:
    return [[call.function.name, call.function.arguments] for call in message.tool_calls]


@case
def whole_and_streamed(url: str) -> Any:
    def ask(provider: str) -> Any:
        options = asked(url, provider, max_tokens=20, temperature=0)
        whole = litellm.completion(**options)
        pieces = list(litellm.completion(stream=True, **options))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        usage = whole.usage
        return {
            "whole": whole.choices[0].message.content,
            "streamed": text,
            "reasons": [whole.choices[0].finish_reason, pieces[-1].choices[0].finish_reason],
            "usage": [usage.prompt_tokens, usage.completion_tokens],
        }

    return of_each(url, ask)


@case
def tools_whole_and_streamed(url: str) -> Any:
    def ask(provider: str) -> Any:
        options = asked(url, provider, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        whole = litellm.completion(**options)
        built = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **options)), messages=[USER])
        return [calls_of(answer.choices[0].message) for answer in (whole, built)]

    return of_each(url, ask)


@case
def a_named_tool(url: str) -> Any:
    named = {"type": "function", "function": {"name": "City"}}
    return of_each(
        url,
        lambda provider: calls_of(
            litellm.completion(**asked(url, provider, tools=TOOLS, tool_choice=named)).choices[0].message
        ),
    )


@case
def an_agent(url: str) -> Any:
    """Its answers go back as they came, with a result each."""

    def ask(provider: str) -> Any:
        messages: list[Any] = [USER]
        cached = []
        for turn in range(TURNS):
            options = asked(url, provider, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
            answer = litellm.completion(**{**options, "messages": messages})
            message = answer.choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"rain {turn}"}
            messages += [message, result]
            cached.append([answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0])
        return cached

    return of_each(url, ask)


@case
def a_form(url: str) -> Any:
    return {
        provider: litellm.completion(**asked(url, provider, response_format=FORM)).choices[0].message.content
        for provider in PROVIDERS
    }


@case
def options_of_openai(url: str) -> Any:
    """Of the first two providers; the Anthropic API has none of them."""
    options = {"n": 2, "seed": 3, "stop": ["zz"], "user": "u", "logprobs": True, "top_logprobs": 2, "max_tokens": 9}
    answers = [litellm.completion(**asked(url, provider, **options)) for provider in PROVIDERS[:2]]
    return [[len(answer.choices), len(answer.choices[0].logprobs.content)] for answer in answers]


@case
def refusals(url: str) -> Any:
    def ask(provider: str) -> Any:
        try:
            litellm.completion(**asked(url, provider, messages=[{"role": "user", "content": "x" * 3_000}]))
        except litellm.BadRequestError as error:
            return [type(error).__name__, str(error)]
        return None

    return of_each(url, ask)


@case
def completions_and_responses(url: str) -> Any:
    where: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    text = litellm.text_completion(model="text-completion-openai/tiny", prompt="sorted", max_tokens=5, **where)
    events = litellm.responses(model="openai/tiny", input="hi", max_output_tokens=9, stream=True, **where)
    return [len(text.choices), text.usage.completion_tokens, [event.type for event in events][-1]]


if __name__ == "__main__":
    print_all(sys.argv[1])
