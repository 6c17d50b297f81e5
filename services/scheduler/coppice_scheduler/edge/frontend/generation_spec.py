"""What a client asks for, free of REST and gRPC: both make one of these, so that they cannot differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from coppice.messages.reuse import Reuse
from coppice_scheduler.edge.text.chat import ChatMessage, PromptEnd
from coppice_scheduler.edge.text.output_format import OutputFormat
from coppice_scheduler.edge.text.tools.tool import Tool, ToolUse

MAX_BODY_BYTES = 2 * 1024 * 1024  # one request, as JSON or protobuf
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
MAX_TEMPLATE_BYTES = 16 * 1024  # of all values for a chat template
MAX_RUNS = 128  # prompts x candidates of one call
MAX_PROMPT_LOGPROBS = 1 << 18  # tokens told of prompts in one answer, the likeliest in their places counted
MAX_STREAMED_PROMPT_LOGPROBS = 1 << 14  # likewise; a stream is written where all others wait
MAX_LOGIT_BIASES = 1024
MAX_CACHE_SALT = 256  # characters
MAX_TIMEOUT_S = 7 * 24 * 3600.0  # a longer one is none


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    tokens: bytes  # packed u32; ids are checked against the vocabulary later


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]
    template_values: Mapping[str, Any] = field(default_factory=dict)  # of the template's variables
    tools: tuple[Tool, ...] = ()
    end: PromptEnd = PromptEnd.ANSWER


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class Endpoint(Enum):
    """Where a call came in; gRPC has the first two."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """One call: one or several prompts under the same options. `None` = what the checkpoint or OpenAI has by default.

    Ranges are checked by `FrontDoor.open`, not here.
    """

    model: str
    prompts: tuple[Prompt, ...]
    n: int = 1  # choices of each prompt
    best_of: int | None = None  # answers that are computed for each, of which the `n` best are choices; None = `n`
    uses_beams: bool = False  # the `n` best of a beam search with `num_candidates` beams
    length_penalty: float = 1.0  # of the beam search
    max_tokens: int | None = None  # 0 only with `echo`
    fills_context: bool = False  # where fewer than `max_tokens` fit, these are taken
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1 = off
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # the stop string stays in the text
    skip_special_tokens: bool = True
    num_logprobs: int | None = None  # likeliest tokens to show beside the chosen one; None = none at all
    num_prompt_logprobs: int | None = None  # likeliest tokens to tell beside each of the prompt's; None = none at all
    echo: bool = False  # the text begins with the prompt
    priority: int = 0  # lower goes first
    timeout_s: float | None = None  # after it the answer is worth nothing
    reuse: Reuse = Reuse.UNKNOWN  # what the client says of the future of its prompts
    retain_ms: int = 0  # how long the prompt should stay cached; the operator's maximum counts
    output_format: OutputFormat | None = None  # that the answer must have
    tool_use: ToolUse | None = None  # of the tools of a chat; None without any
    cache_salt: str | None = None  # cached prefixes are shared with requests of the same salt alone
    streams: bool = True  # the client reads the answer as it comes
    endpoint: Endpoint = Endpoint.COMPLETIONS

    @property
    def num_candidates(self) -> int:
        """Answers that are computed for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def tells_the_best(self) -> bool:
        """Of several answers that were sampled."""
        return self.num_candidates > self.n and not self.uses_beams

    @property
    def num_logprobs_of_prompt(self) -> int | None:
        """Likeliest tokens that the worker has to report for each of the prompt's."""
        echoed = self.num_logprobs if self.echo else None
        asked = [number for number in (echoed, self.num_prompt_logprobs) if number is not None]
        return max(asked, default=None)

    def num_told(self, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Log-probabilities that all answers tell at most, the likeliest in their places counted.

        `num_prompt_tokens`: of all prompts; `num_output_tokens`: of one answer to each of them.
        """
        of_prompt, of_output = self.num_logprobs_of_prompt, self.num_logprobs
        told = 0 if of_prompt is None else num_prompt_tokens * (of_prompt + 1)
        told += 0 if of_output is None else num_output_tokens * (of_output + 1)
        return told * self.n

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompts[0], ChatPrompt) if self.prompts else False

    @property
    def goes_on(self) -> bool:
        """The answer goes on from the last message of a chat."""
        return any(isinstance(each, ChatPrompt) and each.end is PromptEnd.WITHIN_LAST_MESSAGE for each in self.prompts)

    @property
    def prompt_field(self) -> str:
        return "messages" if self.is_chat else "prompt"
