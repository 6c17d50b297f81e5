"""Answers in OpenAI's shape. Token ids stand where vLLM puts them (`return_token_ids`):

    completion          choices[i].prompt_token_ids, choices[i].token_ids
    completion stream   the first chunk of each choice has prompt_token_ids, every chunk token_ids
    chat                prompt_token_ids beside choices, choices[i].token_ids
    chat stream         the first role chunk has prompt_token_ids beside choices, every later chunk token_ids

Log-probabilities of prompts stand there, too (`prompt_logprobs`), in whole answers: beside the choices of a chat, in
each choice of completions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.frontend.calls import Call
from coppice_scheduler.edge.http.sse import DONE, event
from coppice_scheduler.edge.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from coppice_scheduler.edge.openai.parsing.messages import REASONING
from coppice_scheduler.edge.openai.parsing.schema import Presentation
from coppice_scheduler.edge.text.detokenizer import TokenTexts
from coppice_scheduler.edge.text.logprobs import EchoedLogprobs, PromptLogprobs, TokenLogprob
from coppice_scheduler.edge.text.text_stream import NO_USAGE, Delta, Ending, Usage
from coppice_scheduler.edge.text.tokenizer import TOKEN_DTYPE, unpack_tokens
from coppice_scheduler.edge.text.tools.call_parser import CallDelta, joined_calls
from coppice_scheduler.edge.text.tools.tool import ToolCall

Body = dict[str, Any]


def model_body(model: ModelInfo) -> Body:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "coppice",
        "max_model_len": model.max_context,
    }


def usage_body(usage: Usage) -> Body:
    body: Body = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.written_tokens,
        },
    }
    if usage.reasoning_tokens:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


@dataclass(slots=True)
class Shape:
    """How one call is told: chat or completion, whole or in chunks."""

    call: Call
    model: str
    created: int
    is_chat: bool
    presentation: Presentation
    texts: TokenTexts
    has_logprobs: bool = False
    num_prompt_logprobs: int | None = None
    _answers: list[Answer] = field(default_factory=list)  # of what is told whole
    _begun: set[int] = field(default_factory=set)  # answers of which a chunk was sent
    _usage: Usage = NO_USAGE  # of all that have ended
    _num_told: Counter[int] = field(default_factory=Counter)  # tokens of each answer

    @property
    def num_answers(self) -> int:
        return len(self.call.prompts) * self.call.num_choices

    def _frame(self, kind: str, choices: list[Body]) -> Body:
        return {
            "id": self.call.call_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _prompt_ids(self, index: int) -> list[int]:
        return unpack_tokens(self.call.prompts[index // self.call.num_choices].tokens)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Body | None:
        if not self.has_logprobs:
            return None
        show = chat_logprobs if self.is_chat else completion_logprobs
        return show(entries, self.texts, as_ids=self.presentation.tokens_as_ids)

    def _reasoning(self, text: str) -> Body:
        """Under its older and its newer name; programs read one or the other."""
        return dict.fromkeys(REASONING, text) if self.presentation.include_reasoning else {}

    # --- a stream -------------------------------------------------------------------------------------------------

    def opening(self) -> Iterator[bytes]:
        if self.is_chat:
            for index in range(self.num_answers):
                yield event(self._role_chunk(index))

    def events_of(self, delta: Delta) -> Iterator[bytes]:
        self._num_told[delta.index] += len(delta.tokens) // TOKEN_DTYPE.itemsize
        self._usage += delta.ending.usage if delta.ending is not None else NO_USAGE
        shows = delta.text or delta.reasoning or delta.calls or delta.logprobs or delta.echoed or delta.ending
        if shows or self.presentation.return_token_ids:
            yield event(self._delta_chunk(delta, is_first=delta.index not in self._begun))
            self._begun.add(delta.index)

    def closing(self) -> Iterator[bytes]:
        if self.presentation.include_usage:
            # Last of a stream that asked for it: no choices.
            yield event(self._chunk([], usage_body(self._usage)))
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())

    # --- chunks ---------------------------------------------------------------------------------------------------

    def _chunk(self, choices: list[Body], usage: Body | None) -> Body:
        chunk = self._frame("chat.completion.chunk" if self.is_chat else "text_completion", choices)
        if self.presentation.include_usage or self.presentation.usage_so_far:
            chunk["usage"] = usage
        return chunk

    def _usage_so_far(self, index: int) -> Body | None:
        """Of this answer and its prompt; what was cached is known at the end."""
        if not self.presentation.usage_so_far:
            return None
        prompt, num_told = self.call.prompts[index // self.call.num_choices], self._num_told[index]
        num_prompt = prompt.num_prompt_tokens
        return {"prompt_tokens": num_prompt, "completion_tokens": num_told, "total_tokens": num_prompt + num_told}

    def _role_chunk(self, index: int) -> Body:
        """First of an answer in a chat stream."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._chunk([choice], self._usage_so_far(index))
        if self.presentation.return_token_ids and index == 0:
            chunk["prompt_token_ids"] = self._prompt_ids(0)
        return chunk

    def _delta_chunk(self, delta: Delta, *, is_first: bool) -> Body:
        choice: Body = {"index": delta.index}
        if self.is_chat:
            choice["delta"] = {"content": delta.text} if delta.text else {}
            if delta.reasoning:
                choice["delta"].update(self._reasoning(delta.reasoning))
            if delta.calls:
                choice["delta"]["tool_calls"] = [_call_piece(call) for call in delta.calls]
        else:
            choice["text"] = delta.text
        logprobs = delta.all_logprobs
        choice["logprobs"] = self._logprobs(logprobs) if logprobs else None
        choice["finish_reason"] = delta.ending.reason if delta.ending else None
        if delta.ending is not None:
            choice["stop_reason"] = delta.ending.stop
        if self.presentation.return_token_ids:
            choice["token_ids"] = unpack_tokens(delta.tokens)
            if is_first and not self.is_chat:
                choice["prompt_token_ids"] = self._prompt_ids(delta.index)
        return self._chunk([choice], self._usage_so_far(delta.index))

    # --- whole ----------------------------------------------------------------------------------------------------

    def gather(self, delta: Delta) -> None:
        if not self._answers:
            self._answers = [Answer() for _ in range(self.num_answers)]
        self._answers[delta.index].add(delta)

    def whole(self) -> Body:
        usage = sum((answer.usage for answer in self._answers), NO_USAGE)
        choices = [self._choice(index, answer) for index, answer in enumerate(self._answers)]
        body = self._frame("chat.completion" if self.is_chat else "text_completion", choices)
        body["usage"] = usage_body(usage)
        if self.is_chat and self.presentation.return_token_ids:
            body["prompt_token_ids"] = self._prompt_ids(0)
        if self.is_chat:
            body.update(self._prompt_logprobs(0))
        return body

    def _prompt_logprobs(self, index: int) -> Body:
        """Where they are asked for: those of the prompt of this answer, whose first answer has them."""
        prompt = self._answers[index - index % self.call.num_choices].prompt
        if prompt is None or self.num_prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(prompt, self.num_prompt_logprobs, self.texts)}

    def _choice(self, index: int, answer: Answer) -> Body:
        text = "".join(answer.texts)
        choice: Body = {"index": index}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            if answer.reasoning:
                choice["message"].update(self._reasoning("".join(answer.reasoning)))
            if answer.calls:
                choice["message"].update(
                    content=text or None, tool_calls=[_call(call) for call in joined_calls(answer.calls)]
                )
        else:
            choice["text"] = text
        echoed = answer.echoed.entries() if answer.echoed is not None else ()
        choice["logprobs"] = self._logprobs((*echoed, *answer.logprobs))
        choice["finish_reason"] = answer.ending.reason if answer.ending else None
        choice["stop_reason"] = answer.ending.stop if answer.ending else None
        if not self.is_chat:
            choice.update(self._prompt_logprobs(index))
        if self.presentation.return_token_ids:
            choice["token_ids"] = unpack_tokens(b"".join(answer.tokens))
            if not self.is_chat:
                choice["prompt_token_ids"] = self._prompt_ids(index)
        return choice


@dataclass(slots=True)
class Answer:
    """What one answer got, gathered."""

    texts: list[str] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)  # their pieces
    ending: Ending | None = None
    prompt: PromptLogprobs | None = None
    echoed: EchoedLogprobs | None = None

    def add(self, delta: Delta) -> None:
        self.prompt = self.prompt or delta.prompt
        self.echoed = self.echoed or delta.echoed
        self.texts.append(delta.text)
        self.tokens.append(delta.tokens)
        self.logprobs += delta.logprobs
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        self.calls += delta.calls
        self.ending = delta.ending

    @property
    def usage(self) -> Usage:
        return self.ending.usage if self.ending is not None else NO_USAGE


def _call_piece(piece: CallDelta) -> Body:
    function: Body = {"arguments": piece.arguments}
    if not piece.name:
        return {"index": piece.index, "function": function}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": {"name": piece.name, **function}}


def _call(call: ToolCall) -> Body:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
