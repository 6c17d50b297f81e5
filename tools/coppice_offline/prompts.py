"""What a user gives as prompts, to packed tokens that can run. Everything is checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coppice.errors import UsageError
from coppice_offline.interface import checks
from coppice_offline.interface.errors import PromptError
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.frontend.admission import check_messages, opens_reasoning
from coppice_scheduler.edge.frontend.generation_spec import ChatPrompt
from coppice_scheduler.edge.http.field_table import Notes
from coppice_scheduler.edge.http.json_body import Fields
from coppice_scheduler.edge.openai.parsing.messages import messages_of
from coppice_scheduler.edge.openai.parsing.tools import tool_use_of, tools_of
from coppice_scheduler.edge.text.chat import ChatTemplate, PromptEnd
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText
from coppice_scheduler.edge.text.reasoning.formats import ReasoningFormat
from coppice_scheduler.edge.text.tokenizer import Tokenizer
from coppice_scheduler.edge.text.tools.tool import Tool, ToolUse
from coppice_worker.core.batch.step_batch import PoolSpec

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Read:
    """A prompt that can run."""

    text: str | None  # where there was one
    tokens: bytes  # packed u32
    opens_reasoning: bool | None = None  # the chat template ends within it; None of what is no chat
    goes_on: bool = False  # the answer goes on from the last message


class PromptReader:
    def __init__(
        self,
        text: CheckpointText,
        template: ChatTemplate,
        reasoning: ReasoningFormat | None,
        max_context: int,
        pool: PoolSpec,
        vocab_size: int,
    ) -> None:
        """`reasoning`: as the model writes it, if it does."""
        self._tokenizer = Tokenizer(text)
        self._template = template
        self._reasoning = reasoning
        self._max_tokens = min(max_context, pool.num_blocks * pool.block_size)
        self._vocab_size = vocab_size

    def read(self, prompts: Any) -> list[Read]:
        """One, or several: texts, token ids, or mappings with either. Raises PromptError."""
        if isinstance(prompts, str | Mapping):
            return [self._read_one("prompts", prompts)]
        if not _is_list(prompts):
            raise PromptError(f"prompts is a {type(prompts).__name__}; give a text, token ids, or a list of them")
        if len(prompts) and checks.is_integer(prompts[0]):
            return [self._read_one("prompts", prompts)]
        return [self._read_one(f"prompts[{place}]", prompt) for place, prompt in enumerate(prompts)]

    def read_one(self, prompt: Any) -> Read:
        """A text, token ids, or a mapping with either. Raises PromptError."""
        return self._read_one("prompt", prompt)

    def read_chats(self, messages: Any, tools: tuple[Tool, ...], template_values: Any, end: PromptEnd) -> list[Read]:
        """A conversation, or several. Raises PromptError."""
        if _is_list(messages) and len(messages) and not isinstance(messages[0], Mapping):
            return [
                self._read_chat(f"messages[{place}]", chat, tools, template_values, end)
                for place, chat in enumerate(messages)
            ]
        return [self.read_chat(messages, tools, template_values, end)]

    def read_chat(self, messages: Any, tools: tuple[Tool, ...], template_values: Any, end: PromptEnd) -> Read:
        """A conversation. Raises PromptError."""
        return self._read_chat("messages", messages, tools, template_values, end)

    def _read_one(self, name: str, prompt: Any) -> Read:
        if isinstance(prompt, Mapping):
            name, prompt = _of_mapping(name, prompt)
        if isinstance(prompt, str):
            return Read(prompt, self._fit(name, self._tokenizer.encode_now(prompt, add_special_tokens=True)))
        if not _is_list(prompt):
            raise PromptError(f"{name} is a {type(prompt).__name__}; a prompt is a text or a list of token ids")
        for token_id in prompt:
            if not checks.is_integer(token_id) or not 0 <= token_id < self._vocab_size:
                raise PromptError(
                    f"{name} has {token_id!r}, which is no token id; this model's are 0 to {self._vocab_size - 1}"
                )
        return Read(None, self._fit(name, np.array(prompt, "<u4").tobytes()))

    def _read_chat(self, name: str, chat: Any, tools: tuple[Tool, ...], template_values: Any, end: PromptEnd) -> Read:
        if not _is_list(chat) or not len(chat):
            raise PromptError(
                f"{name} must be a list of mappings with role and content"
                + (", or a list of such lists" if name == "messages" else "")
            )
        for place, message in enumerate(chat):
            if not isinstance(message, Mapping):
                raise PromptError(f"{name}[{place}] must be a mapping with role and content")
        if not isinstance(template_values, Mapping):
            raise PromptError(f"chat_template_kwargs is a {type(template_values).__name__}; it must be a mapping")
        try:
            body = Fields({"messages": [dict(message) for message in chat]})
            prompt = ChatPrompt(messages_of(body, Notes()), end=end)
            check_messages(prompt)
            text = self._template.render_now(prompt.messages, template_values, tools, end)
        except ApiError as error:
            where = "" if name == "messages" else f"{name}: "
            raise PromptError(f"{where}{error.message}") from error
        tokens = self._fit(name, self._tokenizer.encode_now(text, add_special_tokens=False))
        is_open = opens_reasoning(self._reasoning, prompt, text)
        return Read(text, tokens, is_open, end is PromptEnd.WITHIN_LAST_MESSAGE)

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


def read_tools(tools: Any, choice: Any, is_parallel: Any) -> ToolUse | None:
    """What a model may call, in OpenAI's form; None without tools. Raises UsageError."""
    told = [_plain(tool) for tool in tools] if _is_list(tools) else tools
    body = Fields({"tools": told or None, "tool_choice": _plain(choice), "parallel_tool_calls": is_parallel})
    notes = Notes()
    try:
        return tool_use_of(body, tools_of(body, notes), notes)
    except ApiError as error:
        raise UsageError(error.message) from None


def read_end(add_generation_prompt: Any, continue_final_message: Any) -> PromptEnd:
    """Where the prompts of chats end. Raises UsageError."""
    if add_generation_prompt is not None:
        checks.flag("add_generation_prompt", add_generation_prompt)
    checks.flag("continue_final_message", continue_final_message)
    try:
        return PromptEnd.asked(add_generation_prompt, continue_final_message)
    except ApiError as error:
        raise UsageError(error.message) from None


def _of_mapping(name: str, prompt: Mapping[Any, Any]) -> tuple[str, Any]:
    """What vLLM's users write: {"prompt": text} or {"prompt_token_ids": ids}. Raises PromptError."""
    match [*prompt.items()]:
        case [("prompt", str(text))]:
            return f"{name}.prompt", text
        case [("prompt_token_ids", ids)] if not isinstance(ids, str):
            return f"{name}.prompt_token_ids", ids
    raise PromptError(
        f"{name} is a mapping with {', '.join(map(repr, prompt)) or 'nothing'}; "
        "it must have prompt, a text, or prompt_token_ids, and nothing else"
    )


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes | bytearray | memoryview)
