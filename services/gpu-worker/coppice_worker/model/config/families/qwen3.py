"""Qwen3: norms of single query and key heads, no biases unless the file says so; windows as Qwen2."""

from __future__ import annotations

from coppice_worker.model.config.families.qwen2 import WINDOW_DEFAULTS, read_upper_windows
from coppice_worker.model.config.families.traits import Family, Traits, read_activation
from coppice_worker.model.config.keys import Keys


def _read_traits(keys: Keys) -> Traits:
    bias = keys.flag("attention_bias", default=False)
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        activation=read_activation(keys, "hidden_act", "silu", "silu"),
        windows=read_upper_windows(keys),
        has_head_norms=True,
    )


QWEN3 = Family("qwen3", {"num_key_value_heads": 32, "head_dim": 128, **WINDOW_DEFAULTS}, _read_traits)
