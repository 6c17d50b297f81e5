"""How to continue prompts: what a user of `coppice.LLM` can ask for, checked when it is made."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from coppice.errors import UsageError
from coppice.grammar import GrammarError
from coppice.messages.sampling import BIAS, CHOICES_MAX, LOGPROBS_MAX, RANGES, Range
from coppice.messages.step import SamplingParams
from coppice_offline.interface import checks
from coppice_offline.interface.beam_search import BeamSearchOptions
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.frontend.sampling_options import pack_bias, seed_of_choice
from coppice_scheduler.edge.http.json_body import Fields
from coppice_scheduler.edge.openai.parsing.output_format import output_format_of
from coppice_scheduler.edge.text.output_format import OutputFormat, grammar_of
from coppice_scheduler.edge.text.tokenizer import pack_tokens

_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options of one prompt. None: what the checkpoint says, else OpenAI's default. Raises UsageError."""

    max_tokens: int | None = None  # None: 16 for a prompt; as many as the context holds for a chat
    n: int = 1  # continuations of each prompt
    best_of: int | None = None  # as many are computed, and the n likeliest of them are told; None: n
    temperature: float | None = None  # 0: the likeliest token, always
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: another one for every call
    stop: str | Sequence[str] | None = ()  # text that ends the output and is no part of it
    stop_token_ids: Collection[int] | None = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default_factory=lambda: MappingProxyType({}))
    logprobs: int | None = None  # likeliest tokens beside each chosen one; 0: the chosen one's alone
    prompt_logprobs: bool = False
    # The form of the output, as in the REST API: one of json (a schema), json_object, regex, choice, grammar.
    structured_outputs: Mapping[str, Any] | None = None
    output_format: OutputFormat | None = field(init=False, repr=False)  # of structured_outputs
    grammar: str = field(init=False, repr=False)  # of output_format; empty for any output

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                check = checks.integer if name in _INTEGERS else checks.number
                self._set(name, check(name, value, allowed))
        if self.num_candidates < self.n:
            raise checks.wrong("best_of", self.best_of, f"an integer from n, which is {self.n}, to {CHOICES_MAX}")
        for name in ("ignore_eos", "prompt_logprobs"):
            checks.flag(name, getattr(self, name))
        self._set("stop", checks.texts("stop", self.stop))
        self._set("stop_token_ids", checks.token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", MappingProxyType(checks.numbers_by_id("logit_bias", self.logit_bias, BIAS)))
        self._read_format()
        if self.grammar:
            self.check_free_end()

    def check_free_end(self) -> None:
        """Where a grammar says where the output ends, nothing else may. Raises UsageError."""
        if self.ignore_eos or self.min_tokens:
            raise UsageError(
                "structured_outputs say where the output ends; leave out ignore_eos and min_tokens",
                hint="so do tools that are strict or have to be called",
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _read_format(self) -> None:
        said = self.structured_outputs
        try:
            wanted = output_format_of(Fields({"structured_outputs": dict(said) if isinstance(said, Mapping) else said}))
            self._set("output_format", wanted)
            self._set("grammar", "" if wanted is None else grammar_of(wanted))
        except (ApiError, GrammarError) as error:
            raise UsageError(f"structured_outputs cannot be used: {error}") from None

    @property
    def num_candidates(self) -> int:
        """Continuations that are computed."""
        return self.n if self.best_of is None else self.best_of

    @property
    def tells_the_best(self) -> bool:
        """Of several that were sampled."""
        return self.num_candidates > self.n

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def biases(self) -> Mapping[int, float]:
        return self.logit_bias or {}


_RANGES: Mapping[str, Range] = {
    **RANGES,
    "max_tokens": Range(1, 1 << 31),
    **dict.fromkeys(("n", "best_of"), Range(1, CHOICES_MAX)),
    "seed": Range(-(1 << 63), _U64),
    "min_tokens": Range(0, 1 << 31),
    "logprobs": Range(0, LOGPROBS_MAX),
}
_INTEGERS = frozenset({"max_tokens", "n", "best_of", "top_k", "seed", "min_tokens", "logprobs"})
_MAY_BE_NONE = frozenset({"max_tokens", "best_of", "temperature", "top_p", "top_k", "seed", "logprobs"})


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the checkpoint says."""

    temperature: float
    top_p: float
    top_k: int
    eos_token_ids: frozenset[int]
    vocab_size: int


def stop_token_ids_of(options: SamplingOptions | BeamSearchOptions, defaults: Defaults) -> frozenset[int]:
    """Tokens that end the output. Raises UsageError."""
    named = frozenset(options.stop_token_ids or ())
    biased = options.biases if isinstance(options, SamplingOptions) else ()
    for token_id in (*named, *biased):
        if not 0 <= token_id < defaults.vocab_size:
            raise UsageError(f"token id {token_id} does not exist; this model's are 0 to {defaults.vocab_size - 1}")
    return named if options.ignore_eos else named | defaults.eos_token_ids


def sampling_of(options: SamplingOptions, defaults: Defaults) -> list[SamplingParams]:
    """One for each candidate: the first has the seed that was asked for. Raises UsageError."""
    num_logprobs = 0 if options.logprobs is None and options.tells_the_best else options.logprobs
    seed = secrets.randbits(64) if options.seed is None else options.seed & _U64
    stops = pack_tokens(sorted(stop_token_ids_of(options, defaults)))
    temperature = defaults.temperature if options.temperature is None else options.temperature
    top_p = defaults.top_p if options.top_p is None else options.top_p
    top_k = defaults.top_k if options.top_k is None else options.top_k
    return [
        SamplingParams(
            temperature=temperature,
            top_k=max(top_k, 0),
            top_p=top_p,
            seed=seed_of_choice(seed, index),
            min_p=options.min_p,
            frequency_penalty=options.frequency_penalty,
            presence_penalty=options.presence_penalty,
            repetition_penalty=options.repetition_penalty,
            logit_bias=pack_bias(options.biases),
            min_tokens=options.min_tokens,
            stop_token_ids=stops,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=(options.logprobs or 0) if options.prompt_logprobs else None,
            grammar=options.grammar,
        )
        for index in range(options.num_candidates)
    ]
