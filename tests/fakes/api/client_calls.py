"""What users of the OpenAI API do with its clients, against any server: a fake engine's or a whole stack's."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import openai

COMBINATIONS = list(product((False, True), ("chat", "completion"), (1, 3), (False, True)))  # stream, kind, n, logprobs
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about the forest."}]
PROMPT = "The forest is"


@dataclass
class Gathered:
    """One answer, whole or put together from its chunks."""

    text: str = ""
    reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)


def ask(
    client: openai.OpenAI, model: str, *, stream: bool, kind: str, n: int, logprobs: bool, **options: Any
) -> tuple[list[Gathered], Any]:
    """All answers in order, and the usage."""
    options = {"model": model, "n": n, "stream": stream, "max_tokens": 12, **options}
    if stream:
        options["stream_options"] = {"include_usage": True}
    call: Any
    if kind == "chat":
        call = client.chat.completions.create
        options |= {"messages": MESSAGES, **({"logprobs": True, "top_logprobs": 2} if logprobs else {})}
    else:
        call = client.completions.create
        options |= {"prompt": PROMPT, **({"logprobs": 2} if logprobs else {})}
    answer = call(**options)
    answers = [Gathered() for _ in range(n)]
    usage = None
    for part in answer if stream else (answer,):
        for choice in part.choices:
            _gather(answers[choice.index], choice, kind, stream)
        usage = part.usage or usage
    return answers, usage


def _gather(into: Gathered, choice: Any, kind: str, stream: bool) -> None:
    if kind == "chat":
        into.text += (choice.delta if stream else choice.message).content or ""
        entries = (choice.logprobs.content or []) if choice.logprobs else []
        into.tokens += [entry.token for entry in entries]
        into.logprobs += [entry.logprob for entry in entries]
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
    else:
        into.text += choice.text
        into.tokens += (choice.logprobs.tokens or []) if choice.logprobs else []
        into.logprobs += (choice.logprobs.token_logprobs or []) if choice.logprobs else []
    into.reason = choice.finish_reason or into.reason


def check(answers: list[Gathered], usage: Any, *, n: int, logprobs: bool) -> None:
    """What holds of every answer, whoever gave it."""
    assert len(answers) == n
    assert all(answer.reason in ("stop", "length") for answer in answers)
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens >= n
    assert usage.prompt_tokens_details.cached_tokens >= 0
    for answer in answers:
        assert bool(answer.tokens) == logprobs
        assert len(answer.tokens) == len(answer.logprobs)
        assert all(value is not None and value <= 0 for value in answer.logprobs)
        if logprobs and not any("�" in token for token in answer.tokens):
            assert "".join(answer.tokens) == answer.text
