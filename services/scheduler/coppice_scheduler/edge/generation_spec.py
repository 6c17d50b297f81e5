"""What a client asks for, free of REST and gRPC: both make one of these, so that they cannot differ."""

from __future__ import annotations

from dataclasses import dataclass

from coppice_scheduler.edge.chat import ChatMessage

MAX_BODY_BYTES = 2 * 1024 * 1024  # one request, as JSON or protobuf
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant")
MAX_TEMPERATURE = 2.0
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    tokens: bytes  # packed u32; ids are checked against the vocabulary later


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """One call: one or several prompts under the same options. `None` = what the checkpoint or OpenAI has by default.

    Ranges are checked by `FrontDoor.open`, not here.
    """

    model: str
    prompts: tuple[Prompt, ...]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1 = off
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompts[0], ChatPrompt) if self.prompts else False

    @property
    def prompt_field(self) -> str:
        return "messages" if self.is_chat else "prompt"
