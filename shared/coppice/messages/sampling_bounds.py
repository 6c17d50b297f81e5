"""Which values of SamplingParams can be planned and computed.

The scheduler asks where a request comes in, the worker where a plan does. A worker ends its session with a scheduler
that sends it anything else, and with it the work of everybody: what the one admits, the other must take.
"""

from __future__ import annotations

import numpy as np

from coppice.ids import TOKEN_BYTES
from coppice.messages.sampling import BIAS, LIKELY_MAX, RANGES
from coppice.messages.step import SamplingParams

_U32, _U64 = 1 << 32, 1 << 64
_BIAS_BYTES = 2 * TOKEN_BYTES  # a token id, and an f32


def impossible_field(sampling: SamplingParams) -> str:
    """Name of the first field whose value cannot be planned or computed; empty when all can.

    The vocabulary is not looked at: front doors compare token ids with it.
    """
    fits = {name: allowed.holds(getattr(sampling, name)) for name, allowed in RANGES.items()} | {
        "top_k": 0 <= sampling.top_k <= RANGES["top_k"].high,  # -1 is a client's word alone
        "seed": 0 <= sampling.seed < _U64,
        "logit_bias": _is_possible_bias(sampling.logit_bias),
        "min_tokens": 0 <= sampling.min_tokens < _U32,
        "stop_token_ids": len(sampling.stop_token_ids) % TOKEN_BYTES == 0,
        "num_logprobs": 0 <= (sampling.num_logprobs or 0) <= LIKELY_MAX,
        "num_prompt_logprobs": 0 <= (sampling.num_prompt_logprobs or 0) <= LIKELY_MAX,
    }
    return next((name for name, is_fitting in fits.items() if not is_fitting), "")


def _is_possible_bias(packed: bytes) -> bool:
    """Of pairs as `SamplingParams.logit_bias` has them. A NaN is in no range."""
    if len(packed) % _BIAS_BYTES:
        return False
    bias = np.frombuffer(packed, "<f4")[1::2]
    return bool(((bias >= BIAS.low) & (bias <= BIAS.high)).all())
