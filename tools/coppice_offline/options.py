"""How to continue prompts: what a user of `coppice.LLM` can ask for, checked when it is made."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from coppice.errors import UsageError
from coppice.grammar import GrammarError
from coppice.messages.sampling import BIAS, CHOICES_MAX, LOGPROBS_MAX, RANGES, Range
from coppice.messages.step import SamplingParams
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.frontend.sampling_options import pack_bias, seed_of_choice
from coppice_scheduler.edge.http.json_body import Fields
from coppice_scheduler.edge.openai.parsing.output_format import output_format_of
from coppice_scheduler.edge.text.output_format import grammar_of
from coppice_scheduler.edge.text.tokenizer import pack_tokens

_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options of one prompt. None: what the checkpoint says, else OpenAI's default. Raises UsageError."""

    max_tokens: int | None = None  # None: 16 for a prompt; as many as the context holds for a chat
    n: int = 1  # continuations of each prompt
    temperature: float | None = None  # 0: the likeliest token, always
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: another one for every call
    stop: str | Sequence[str] = ()  # text that ends the output and is no part of it
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    logprobs: int | None = None  # likeliest tokens beside each chosen one; 0: the chosen one's alone
    prompt_logprobs: bool = False
    # The form of the output, as in the REST API: one of json (a schema), json_object, regex, choice, grammar.
    structured_outputs: Mapping[str, Any] | None = None
    grammar: str = field(init=False, repr=False)  # of structured_outputs; empty for any output

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not allowed.holds(value):
                raise UsageError(f"{name} is {value!r}; it must be {allowed}")
        if any(not isinstance(stop, str) or not stop for stop in self.stops):
            raise UsageError("stop must be a text, or several, none of them empty")
        if any(not BIAS.holds(bias) for bias in self.logit_bias.values()):
            raise UsageError(f"a logit_bias must be {BIAS}")
        object.__setattr__(self, "grammar", self._grammar())
        if self.grammar and (self.ignore_eos or self.min_tokens):
            raise UsageError("structured_outputs say where the output ends; leave out ignore_eos and min_tokens")

    def _grammar(self) -> str:
        try:
            wanted = output_format_of(Fields({"structured_outputs": self.structured_outputs}))
            return "" if wanted is None else grammar_of(wanted)
        except (ApiError, GrammarError) as error:
            raise UsageError(f"structured_outputs cannot be used: {error}") from None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop)


_RANGES: Mapping[str, Range] = {
    **RANGES,
    "max_tokens": Range(1, 1 << 31),
    "n": Range(1, CHOICES_MAX),
    "seed": Range(-(1 << 63), _U64),
    "min_tokens": Range(0, 1 << 31),
    "logprobs": Range(0, LOGPROBS_MAX),
}


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the checkpoint says."""

    temperature: float
    top_p: float
    top_k: int
    eos_token_ids: frozenset[int]
    vocab_size: int


def stop_token_ids_of(options: SamplingOptions, defaults: Defaults) -> frozenset[int]:
    """Tokens that end the output. Raises UsageError."""
    named = frozenset(options.stop_token_ids)
    for token_id in (*named, *options.logit_bias):
        if not 0 <= token_id < defaults.vocab_size:
            raise UsageError(f"token id {token_id} does not exist; this model's are 0 to {defaults.vocab_size - 1}")
    return named if options.ignore_eos else named | defaults.eos_token_ids


def sampling_of(options: SamplingOptions, defaults: Defaults) -> list[SamplingParams]:
    """One for each of the n continuations: the first has the seed that was asked for. Raises UsageError."""
    seed = secrets.randbits(64) if options.seed is None else options.seed & _U64
    stops = pack_tokens(sorted(stop_token_ids_of(options, defaults)))
    temperature = defaults.temperature if options.temperature is None else options.temperature
    top_p = defaults.top_p if options.top_p is None else options.top_p
    top_k = defaults.top_k if options.top_k is None else options.top_k
    return [
        SamplingParams(
            temperature=float(temperature),
            top_k=max(top_k, 0),
            top_p=float(top_p),
            seed=seed_of_choice(seed, index),
            min_p=options.min_p,
            frequency_penalty=options.frequency_penalty,
            presence_penalty=options.presence_penalty,
            repetition_penalty=options.repetition_penalty,
            logit_bias=pack_bias(options.logit_bias),
            min_tokens=options.min_tokens,
            stop_token_ids=stops,
            num_logprobs=options.logprobs,
            num_prompt_logprobs=(options.logprobs or 0) if options.prompt_logprobs else None,
            grammar=options.grammar,
        )
        for index in range(options.n)
    ]
