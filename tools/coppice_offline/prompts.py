"""What a user gives as prompts, to packed tokens that can run. Everything is checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coppice_offline.errors import PromptError
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.text.chat import ChatMessage, ChatTemplate
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText
from coppice_scheduler.edge.text.tokenizer import Tokenizer
from coppice_worker.core.batch.step_batch import PoolSpec

Message = Mapping[str, str]
Read = tuple[str | None, bytes]  # the text, where there was one, and packed u32


class PromptReader:
    def __init__(self, text: CheckpointText, max_context: int, pool: PoolSpec, vocab_size: int) -> None:
        self._tokenizer = Tokenizer(text)
        self._template = ChatTemplate(text)
        self._max_tokens = min(max_context, pool.num_blocks * pool.block_size)
        self._vocab_size = vocab_size

    def read(self, prompts: Any) -> list[Read]:
        """A text, token ids, or several of them. Raises PromptError."""
        if isinstance(prompts, str):
            return [self._read_one("prompts", prompts)]
        if not isinstance(prompts, Sequence | np.ndarray):
            raise PromptError(f"prompts is a {type(prompts).__name__}; give a text, token ids, or a list of them")
        if len(prompts) and isinstance(prompts[0], int | np.integer):
            return [self._read_one("prompts", prompts)]
        return [self._read_one(f"prompts[{place}]", prompt) for place, prompt in enumerate(prompts)]

    def read_chats(self, messages: Any, template_values: Mapping[str, Any]) -> list[Read]:
        """A conversation, or several. Raises PromptError."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise PromptError("messages must be a list of mappings with role and content, or a list of such lists")
        if isinstance(messages[0], Mapping):
            return [self._read_chat("messages", messages, template_values)]
        return [self._read_chat(f"messages[{place}]", chat, template_values) for place, chat in enumerate(messages)]

    def _read_one(self, name: str, prompt: Any) -> Read:
        if isinstance(prompt, str):
            return prompt, self._fit(name, self._tokenizer.encode_now(prompt, add_special_tokens=True))
        if not isinstance(prompt, Sequence | np.ndarray):
            raise PromptError(f"{name} is a {type(prompt).__name__}; a prompt is a text or a list of token ids")
        for token_id in prompt:
            if not isinstance(token_id, int | np.integer) or not 0 <= token_id < self._vocab_size:
                raise PromptError(
                    f"{name} has {token_id!r}, which is no token id; this model's are 0 to {self._vocab_size - 1}"
                )
        return None, self._fit(name, np.array(prompt, "<u4").tobytes())

    def _read_chat(self, name: str, chat: Any, template_values: Mapping[str, Any]) -> Read:
        for place, message in enumerate(chat):
            parts = message if isinstance(message, Mapping) else {}
            if not isinstance(parts.get("role"), str) or not isinstance(parts.get("content"), str):
                raise PromptError(f"{name}[{place}] must be a mapping with role and content, both text")
        try:
            told = [
                ChatMessage(m["role"], m["content"], m.get("name"), m.get("reasoning_content") or m.get("reasoning"))
                for m in chat
            ]
            text = self._template.render_now(told, template_values)
        except ApiError as error:
            raise PromptError(f"{name}: {error.message}") from error
        return text, self._fit(name, self._tokenizer.encode_now(text, add_special_tokens=False))

    def _fit(self, name: str, tokens: bytes) -> bytes:
        count = len(tokens) // 4
        if not count:
            raise PromptError(f"{name} is empty", hint="a prompt needs a token to start from")
        if count >= self._max_tokens:
            raise PromptError(
                f"{name} has {count} tokens; with one to generate it exceeds {self._max_tokens}",
                hint="shorten it, or raise max_context and the KV memory if the model allows it",
            )
        return tokens
