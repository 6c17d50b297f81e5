"""Rotary positions, as config.json describes them.

    default    angles of position * theta ** (-2 i / D)
    linear     positions divided by `factor`
    llama3     long wavelengths stretched, short ones kept, between them a blend (Llama 3.1)
    yarn       the same with other bounds, and angles of another length (Peng et al. 2023, YaRN)
    dynamic    frequencies change where a sequence passes `max_position_embeddings`; none does here

Others are refused: `longrope` depends on how long a sequence becomes, so that what is cached would not fit it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from coppice_worker.model.config.keys import Keys

RopeKind = Literal["default", "linear", "llama3", "yarn"]

_SUPPORTED = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding; what a kind does not use has its default."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    # of llama3: wavelengths, as parts of the original context; of yarn: turns within it, and whether bounds are whole
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 0  # tokens
    truncate: bool = True
    length: float = 1.0  # of rotated heads, beside heads that are not rotated

    def describe(self) -> str:
        """One line that is equal exactly for equal settings, for namespaces and logs."""
        values = (self.kind, self.theta, self.factor, self.low_freq_factor, self.high_freq_factor)
        yarn = (self.truncate, self.length) if self.kind == "yarn" else ()
        return " ".join(map(str, (*values, self.original_max_context, *yarn)))


def read_rope(keys: Keys, max_context: int) -> RopeConfig:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`, which holds everything."""
    rope = keys.inside("rope_parameters" if keys.values.get("rope_parameters") is not None else "rope_scaling")
    for where in (keys, rope):
        share = where.values.get("partial_rotary_factor")
        if share not in (None, 1.0):
            raise where.error("partial_rotary_factor", f"{share!r} is not supported", "supported: 1.0")
    theta = rope.positive_float("rope_theta", keys.positive_float("rope_theta", 10000.0))
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in _SUPPORTED:
        raise rope.error("rope_type", f"{kind!r} is not supported", f"supported: {', '.join(_SUPPORTED)}")
    if kind in ("default", "dynamic"):
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", rope.positive_float("factor"))
    original = rope.positive_int("original_max_position_embeddings", max_context)
    return _read_llama3(rope, theta, original) if kind == "llama3" else _read_yarn(rope, theta, original, max_context)


def _read_llama3(rope: Keys, theta: float, original: int) -> RopeConfig:
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if low >= high:
        raise rope.error("low_freq_factor", f"{low} is not below high_freq_factor {high}", "correct the file")
    return RopeConfig(theta, "llama3", rope.positive_float("factor"), low, high, original)


def _read_yarn(rope: Keys, theta: float, original: int, max_context: int) -> RopeConfig:
    factor = rope.positive_float("factor", max_context / original)
    slow, fast = rope.positive_float("beta_slow", 1.0), rope.positive_float("beta_fast", 32.0)
    if slow >= fast:
        raise rope.error("beta_slow", f"{slow} is not below beta_fast {fast}", "correct the file")
    mscale, of_all = rope.float_or_none("mscale"), rope.float_or_none("mscale_all_dim")
    length = _yarn_length(factor, 1.0)
    if mscale and of_all:
        length = _yarn_length(factor, mscale) / _yarn_length(factor, of_all)
    length = rope.positive_float("attention_factor", length)
    truncate = rope.flag("truncate", default=True)
    return RopeConfig(theta, "yarn", factor, slow, fast, original, truncate, length)


def _yarn_length(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
