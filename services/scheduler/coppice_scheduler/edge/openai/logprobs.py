"""Log-probabilities in OpenAI's two shapes, and those of prompts in vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from coppice_scheduler.edge.text.detokenizer import TokenTexts
from coppice_scheduler.edge.text.logprobs import PromptLogprobs, TokenLogprob

Body = dict[str, Any]


def chat_logprobs(entries: Iterable[TokenLogprob], texts: TokenTexts, *, as_ids: bool) -> Body:
    return {"content": token_logprobs(entries, texts, as_ids=as_ids), "refusal": None}


def token_logprobs(entries: Iterable[TokenLogprob], texts: TokenTexts, *, as_ids: bool) -> list[Body]:
    """As chats and responses have them."""
    name = _namer(texts, as_ids)

    def shown(token_id: int, logprob: float | None) -> Body:
        return {"token": name(token_id), "logprob": logprob, "bytes": list(texts.bytes_of(token_id))}

    return [
        {**shown(entry.token_id, entry.logprob), "top_logprobs": [shown(*likely) for likely in entry.top]}
        for entry in entries
    ]


def completion_logprobs(entries: Iterable[TokenLogprob], texts: TokenTexts, *, as_ids: bool) -> Body:
    name = _namer(texts, as_ids)
    entries = tuple(entries)
    return {
        "text_offset": [entry.text_offset for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "tokens": [name(entry.token_id) for entry in entries],
        "top_logprobs": [_top(entry, name) for entry in entries],
    }


def _top(entry: TokenLogprob, name: Callable[[int], str]) -> dict[str, float] | None:
    """The likeliest tokens and the one that was chosen. Of those that look alike the likeliest is told."""
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        top.setdefault(name(token_id), logprob)
    return top


def _namer(texts: TokenTexts, as_ids: bool) -> Callable[[int], str]:
    return (lambda token_id: f"token_id:{token_id}") if as_ids else texts.text_of


def prompt_logprobs(prompt: PromptLogprobs, num_top: int, texts: TokenTexts) -> list[Body | None]:
    """For each token of the prompt, by token id: the token that is there, then the likeliest. The first has none.

    Ranks begin at 1. Raises ApiError.
    """
    return [_by_id(entry, texts) for entry in prompt.entries(num_top)]


def _by_id(entry: TokenLogprob, texts: TokenTexts) -> Body | None:
    if entry.logprob is None:
        return None
    told = [(entry.token_id, entry.logprob, entry.rank)]
    told += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)]
    shown: Body = {}
    for token_id, logprob, rank in told:
        text = texts.text_of(token_id)
        shown.setdefault(str(token_id), {"logprob": logprob, "rank": rank, "decoded_token": text})
    return shown
