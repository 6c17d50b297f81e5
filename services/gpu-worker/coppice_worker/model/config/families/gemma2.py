"""Gemma 2: soft caps, windows in every other layer, norms of what a part brings, weights of norms counted from 1."""

from __future__ import annotations

from coppice_worker.model.config.families.traits import Family, NormNames, Traits, read_activation, read_windows
from coppice_worker.model.config.keys import Keys

_NORMS = NormNames(
    attention="input_layernorm",
    attention_out="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
_DEFAULTS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def _read_traits(keys: Keys) -> Traits:
    if keys.values.get("use_bidirectional_attention"):
        raise keys.error("use_bidirectional_attention", "is not supported", "supported: causal attention")
    bias = keys.flag("attention_bias", default=False)
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        activation=read_activation(keys, "hidden_activation", "gelu_pytorch_tanh", "gelu_tanh"),
        windows=read_windows(keys, keys.int_or_none("sliding_window"), lambda layer: layer % 2 == 0),
        norm_names=_NORMS,
        norm_offset=1.0,
        query_scalar=keys.positive_float("query_pre_attn_scalar"),
        attention_soft_cap=keys.float_or_none("attn_logit_softcapping"),
        logit_soft_cap=keys.float_or_none("final_logit_softcapping"),
        scales_embedding=True,
    )


GEMMA2 = Family("gemma2", _DEFAULTS, _read_traits)
