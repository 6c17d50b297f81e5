"""What a model thinks before it answers, apart from the answer.

    prompt ... assistant | <think> let me see </think> The answer.
                           '------ reasoning -------'

A model opens its reasoning with its first word, or the chat template has opened it already: then the answer begins
within it. Markers of other places are text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Sources: the chat templates of DeepSeek R1, QwQ and Qwen 3; of Magistral."""

    name: str
    opens: str
    closes: str

    def is_open_after(self, prompt: str) -> bool:
        """Whether a rendered prompt ends in an opening."""
        return prompt.rstrip().endswith(self.opens)

    def is_open_within(self, message: str) -> bool:
        """Whether an answer that goes on from this one is still reasoning."""
        return message.lstrip().startswith(self.opens) and self.closes not in message


THINK = ReasoningFormat("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {each.name: each for each in (THINK, MISTRAL_THINK)}
)
REASONING_MARKERS = tuple(text for each in REASONING_FORMATS.values() for text in (each.opens, each.closes))


def reasoning_of_template(template: str) -> ReasoningFormat | None:
    """By what a chat template writes; None where the model does not think aloud."""
    return next((each for each in REASONING_FORMATS.values() if each.opens in template), None)
