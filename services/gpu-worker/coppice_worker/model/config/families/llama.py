"""Llama 2 and 3, and what is built like them: biases only where the file says so."""

from __future__ import annotations

from coppice_worker.model.config.families.traits import Family, Traits, read_activation
from coppice_worker.model.config.keys import Keys


def _read_traits(keys: Keys) -> Traits:
    if keys.values.get("sliding_window") is not None:
        raise keys.error(
            "sliding_window", f"{keys.values['sliding_window']!r} is in use", "supported here: full attention only"
        )
    types = keys.values.get("layer_types") or []
    if any(kind != "full_attention" for kind in types):
        raise keys.error("layer_types", f"{types!r}", 'supported here: "full_attention" in every layer')
    bias = keys.flag("attention_bias", default=False)
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", default=False),
        activation=read_activation(keys, "hidden_act", "silu", "silu"),
    )


LLAMA = Family("llama", {}, _read_traits)
