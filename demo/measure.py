"""Bits per byte: what a model needs, on average, to write one byte of a text it has never seen.

Each held-out document is measured in one form, chosen by its hash in the shares that training draws them in, without
system lines. END after the text must be predicted too, and counts bits but no byte.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from demo.corpus import Document
from demo.formats import CHAT_SHARE, SIGNATURE_SHARE, answer, chat, question, signed
from demo.network import Llama
from demo.tokenizer import END_ID

OVERLAP_WORDS = 6


@dataclass(frozen=True, slots=True)
class Measured:
    """A document in the form it is measured in: `ids` are to be predicted, the last is END; only chat has an answer."""

    document: Document
    form: str
    ids: list[int]
    text_bytes: int
    answer_bytes: int
    answer_tokens: int


def measured(document: Document, tokenizer: Tokenizer) -> Measured:
    rng = random.Random(document.key)
    draw = rng.random()
    form, text, answered = "plain", document.text, ""
    if document.name and draw < CHAT_SHARE:
        answered = answer(document)
        form, text = "chat", chat(question(document, rng), answered)
    elif document.signature and draw < CHAT_SHARE + SIGNATURE_SHARE:
        form, text = "signature", signed(document)
    ids = [*tokenizer.encode(text).ids, END_ID]
    asked_tokens = len(tokenizer.encode(text[: len(text) - len(answered)]).ids) if answered else len(ids)
    return Measured(document, form, ids, len(text.encode()), len(answered.encode()), len(ids) - asked_tokens)


@torch.no_grad()
def model_bits(model: Llama, ids: Sequence[int]) -> list[float]:
    """Bits for each of `ids` after a leading END. Past the context, windows overlap by half; no token counts twice."""
    context = model.shape.context_tokens
    sequence = torch.tensor([END_ID, *ids])
    bits: list[float] = []
    start = 0
    while len(bits) < len(ids):
        window = sequence[start : start + context + 1]
        losses = F.cross_entropy(model(window[None, :-1])[0].float(), window[1:], reduction="none") / math.log(2)
        bits += losses[len(bits) - start :].tolist()
        start += context // 2
    return bits


def bits_per_byte(items: Sequence[Measured], bits: Sequence[Sequence[float]]) -> float:
    return sum(map(sum, bits)) / sum(item.text_bytes for item in items)


def answer_bits_per_byte(items: Sequence[Measured], bits: Sequence[Sequence[float]]) -> float:
    """Over the chat answers alone, each given its question."""
    pairs = [(item, spent) for item, spent in zip(items, bits, strict=True) if item.answer_tokens]
    spent_total = sum(sum(spent[-item.answer_tokens :]) for item, spent in pairs)
    return spent_total / sum(item.answer_bytes for item, _ in pairs)


def word_runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(len(words) - OVERLAP_WORDS + 1)}


def mostly_seen(items: Sequence[Measured], training: Iterable[Document]) -> list[bool]:
    """For each item, whether at least half of its runs of OVERLAP_WORDS words occur in the training text."""
    runs = [word_runs(item.document.text) for item in items]
    wanted = set().union(*runs)
    seen: set[tuple[str, ...]] = set()
    for document in training:
        seen |= wanted & word_runs(document.text)
    return [bool(own) and 2 * len(own & seen) >= len(own) for own in runs]
