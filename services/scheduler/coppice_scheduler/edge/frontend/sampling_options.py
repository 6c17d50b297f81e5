"""How tokens are to be chosen: a client's options, checked against their ranges, to SamplingParams."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping

import numpy as np
from msgspec.structs import replace

from coppice.messages.sampling import (
    BEAMS_MAX,
    BIAS,
    CHOICES_MAX,
    LENGTH_PENALTY,
    LOGPROBS_MAX,
    RANGES,
    Range,
)
from coppice.messages.step import SamplingParams
from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.beams.search import num_stop_tokens_max
from coppice_scheduler.edge.frontend.generation_spec import (
    MAX_LOGIT_BIASES,
    MAX_STOP_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    GenerationSpec,
)
from coppice_scheduler.edge.text.checkpoint_text import SamplingDefaults
from coppice_scheduler.edge.text.tokenizer import pack_tokens

_U64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_BIAS_DTYPE = np.dtype([("token", "<u4"), ("bias", "<f4")])


def seed_of_choice(seed: int, index: int) -> int:
    """The seed itself for the first choice, an unrelated one for each other (the finaliser of SplitMix64)."""
    if index == 0:
        return seed
    mixed = (seed + index * _GOLDEN_GAMMA) & _U64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _U64
    return mixed ^ (mixed >> 31)


def pack_bias(bias: Mapping[int, float]) -> bytes:
    """Token ids and what is added to their logits, as SamplingParams has them: pairs of u32 and f32."""
    return np.array(sorted(bias.items()), dtype=_BIAS_DTYPE).tobytes()


def sampling_of(
    spec: GenerationSpec, defaults: SamplingDefaults, eos_token_ids: Iterable[int], vocab_size: int
) -> SamplingParams:
    """Check all sampling options and fill in defaults. Raises ApiError. A call without a seed gets a random one."""
    _check_stops(spec, vocab_size)
    _check_counts(spec)
    ends = stop_tokens_of(spec, eos_token_ids)
    _check_beams(spec, ends)
    params = _shaped(spec, defaults)
    if spec.seed is not None and not -(2**63) <= spec.seed <= _U64:
        raise invalid("seed must be an integer of at most 64 bits", param="seed")
    return replace(
        params,
        seed=secrets.randbits(64) if spec.seed is None else spec.seed & _U64,
        logit_bias=_checked_bias(spec, vocab_size),
        min_tokens=spec.min_tokens,
        stop_token_ids=pack_tokens(sorted(ends)) if spec.min_tokens else b"",
        num_logprobs=0 if spec.num_logprobs is None and spec.tells_the_best else spec.num_logprobs,
        num_prompt_logprobs=spec.num_logprobs_of_prompt,
    )


def sampling_of_choice(
    sampling: SamplingParams, spec: GenerationSpec, index: int, choice: int, *, reports_prompt: bool
) -> SamplingParams:
    """With a seed of the client's, every prompt gets the same ones; without, no two answers share one."""
    return replace(
        sampling,
        seed=seed_of_choice(sampling.seed, choice if spec.seed is not None else index),
        num_prompt_logprobs=sampling.num_prompt_logprobs if reports_prompt else None,
    )


def stop_tokens_of(spec: GenerationSpec, eos_token_ids: Iterable[int]) -> frozenset[int]:
    ends = frozenset(spec.stop_token_ids)
    return ends if spec.ignore_eos else ends | frozenset(eos_token_ids)


def _shaped(spec: GenerationSpec, defaults: SamplingDefaults) -> SamplingParams:
    """The options that shape the distribution."""
    for name in RANGES:
        value = getattr(spec, name)
        if value is not None:
            _in_range(name, value, RANGES[name])
    temperature = defaults.temperature if spec.temperature is None else spec.temperature
    top_p = defaults.top_p if spec.top_p is None else spec.top_p
    top_k = defaults.top_k if spec.top_k is None else spec.top_k
    return SamplingParams(
        temperature=float(temperature),
        top_k=max(top_k, 0),
        top_p=float(top_p),
        min_p=spec.min_p,
        frequency_penalty=spec.frequency_penalty,
        presence_penalty=spec.presence_penalty,
        repetition_penalty=spec.repetition_penalty,
    )


def _check_counts(spec: GenerationSpec) -> None:
    if not 1 <= spec.n <= CHOICES_MAX:
        raise invalid(f"n is {spec.n}; it must be from 1 to {CHOICES_MAX}", param="n")
    if not spec.n <= spec.num_candidates <= CHOICES_MAX:
        raise invalid(f"best_of is {spec.best_of}; it must be from n to {CHOICES_MAX}", param="best_of")
    for name, number in (
        ("top_logprobs" if spec.is_chat else "logprobs", spec.num_logprobs),
        ("prompt_logprobs", spec.num_prompt_logprobs),
    ):
        if number is not None and not 0 <= number <= LOGPROBS_MAX:
            raise invalid(f"{name} is {number}; it must be from 0 to {LOGPROBS_MAX}", param=name)
    if spec.max_tokens is not None and spec.max_tokens < (0 if spec.echo else 1):
        raise invalid(
            f"max_tokens is {spec.max_tokens}; it must be at least 1, or 0 with echo: true", param="max_tokens"
        )
    most = math.inf if spec.max_tokens is None else spec.max_tokens
    if not 0 <= spec.min_tokens <= min(most, 2**31 - 1):
        raise invalid(f"min_tokens is {spec.min_tokens}; it must be from 0 to max_tokens", param="min_tokens")
    if not -(2**31) <= spec.priority < 2**31:
        raise invalid("priority must be an integer of at most 32 bits", param="priority")


def _check_beams(spec: GenerationSpec, ends: frozenset[int]) -> None:
    """A beam search takes what is likeliest; nothing is sampled, and what an answer says is known at its end."""
    if not spec.uses_beams:
        if spec.length_penalty != 1:
            raise invalid("length_penalty is only for use_beam_search: true.", param="length_penalty")
        return
    name, width = ("n", spec.n) if spec.best_of is None else ("best_of", spec.best_of)
    if width > BEAMS_MAX:
        raise invalid(f"{name} is {width}; a beam search has at most {BEAMS_MAX} beams.", param=name)
    most = num_stop_tokens_max(width)
    if len(ends) > most:
        message = f"A search with {width} beams can have at most {most} stop tokens; it has {len(ends)}."
        raise invalid(message, param="stop_token_ids")
    _in_range("length_penalty", spec.length_penalty, LENGTH_PENALTY)
    has_no_place = {
        "temperature": spec.temperature,
        "top_p": spec.top_p not in (None, 1),
        "top_k": spec.top_k not in (None, 0, -1),
        "min_p": spec.min_p,
        "frequency_penalty": spec.frequency_penalty,
        "presence_penalty": spec.presence_penalty,
        "repetition_penalty": spec.repetition_penalty != 1,
        "logit_bias": spec.logit_bias,
        "min_tokens": spec.min_tokens,
        "stop": spec.stop,
        "logprobs": spec.num_logprobs is not None,
        "prompt_logprobs": spec.num_prompt_logprobs is not None,
        "echo": spec.echo,
        "tools": spec.tool_use,
        "response_format" if spec.output_format is None else spec.output_format.field: spec.output_format,
    }
    for name, is_given in has_no_place.items():
        if is_given:
            raise invalid(f"{name} has no place in a beam search; leave it out.", param=name)


def _check_stops(spec: GenerationSpec, vocab_size: int) -> None:
    if len(spec.stop) > MAX_STOPS:
        raise invalid(f"stop has {len(spec.stop)} strings; at most {MAX_STOPS} are taken", param="stop")
    for stop in spec.stop:
        if not stop:
            raise invalid("stop has an empty string", param="stop")
        if len(stop.encode("utf-8", "replace")) > MAX_STOP_BYTES:
            raise invalid(f"a stop string has more than {MAX_STOP_BYTES} bytes", param="stop")
    if len(spec.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
    for token_id in spec.stop_token_ids:
        _check_id("stop_token_ids", token_id, vocab_size)


def _checked_bias(spec: GenerationSpec, vocab_size: int) -> bytes:
    if len(spec.logit_bias) > MAX_LOGIT_BIASES:
        raise invalid(
            f"logit_bias has {len(spec.logit_bias)} entries; at most {MAX_LOGIT_BIASES} are taken", param="logit_bias"
        )
    for token_id, bias in spec.logit_bias.items():
        _check_id("logit_bias", token_id, vocab_size)
        _in_range("logit_bias", bias, BIAS)
    return pack_bias(spec.logit_bias)


def _check_id(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise invalid(f"{name} has {token_id}; token ids of this model are 0 to {vocab_size - 1}", param=name)


def _in_range(name: str, value: float, allowed: Range) -> None:
    if not allowed.holds(value):
        raise invalid(f"{name} is {value:g}; it must be {allowed}", param=name)
