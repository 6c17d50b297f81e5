"""Prompts of made-up content and exact length: token ids, or words whose length in tokens was measured before.

A prompt is made of runs. Equal names of runs give equal content, within one measurement: everything is salted, so that
a second measurement finds nothing of the first one in the server's cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

FIRST_ID, LAST_ID = 16, 1_000  # ids that any model has and that are special in none
_WORDS = 512
_LETTERS = "aeinorst"


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of the served model. `words_per_token` is measured; 0 where ids are sent."""

    name: str
    context: int = 0  # 0 where the server does not say
    words_per_token: float = 0.0


class Content:
    """Runs of content by name."""

    def __init__(self, salt: int, model: Model, *, as_ids: bool) -> None:
        self._salt = salt
        self._model = model
        self._as_ids = as_ids
        letters = np.array(list(_LETTERS))[np.random.default_rng(0).integers(len(_LETTERS), size=(_WORDS, 5))]
        self._words = ["".join(word) for word in letters]

    def run(self, kind: int, number: int, num_tokens: int) -> Run:
        """`num_tokens` of content that only this kind and number has."""
        source = np.random.default_rng((self._salt, kind, number))
        if self._as_ids:
            return Run(tuple(source.integers(FIRST_ID, LAST_ID, num_tokens).tolist()))
        return Run(tuple(self._words[place] for place in source.integers(_WORDS, size=self._num_words(num_tokens))))

    def _num_words(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * (self._model.words_per_token or 1.0)))


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of a prompt: token ids or words."""

    pieces: tuple[int, ...] | tuple[str, ...]

    def __add__(self, other: Run) -> Run:
        return Run((*self.pieces, *other.pieces))

    @property
    def text(self) -> str:
        return " ".join(str(piece) for piece in self.pieces)

    @property
    def prompt(self) -> str | list[int]:
        """As the field `prompt` takes it."""
        return self.text if self.pieces and isinstance(self.pieces[0], str) else [int(piece) for piece in self.pieces]


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    text: str


class Bodies:
    """Request bodies of one API."""

    def __init__(self, model: str, api: str, temperature: float) -> None:
        self._is_chat = api == "chat"
        self.path = "/v1/chat/completions" if self._is_chat else "/v1/completions"
        self._common = {
            "model": model,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def single(self, run: Run, max_tokens: int) -> bytes:
        if self._is_chat:
            return self.conversation((Message("user", run.text),), max_tokens)
        return self._body(max_tokens, prompt=run.prompt)

    def conversation(self, messages: tuple[Message, ...], max_tokens: int) -> bytes:
        if self._is_chat:
            told = [{"role": message.role, "content": message.text} for message in messages]
            return self._body(max_tokens, messages=told)
        return self._body(max_tokens, prompt="\n".join(message.text for message in messages))

    def _body(self, max_tokens: int, **fields: Any) -> bytes:
        return json.dumps({**self._common, "max_tokens": max_tokens, **fields}, separators=(",", ":")).encode()
