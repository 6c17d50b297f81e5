"""Mistral: no biases, and a window in every layer unless it is null."""

from __future__ import annotations

from coppice_worker.model.config.families.traits import Family, Traits, read_activation, read_windows
from coppice_worker.model.config.keys import Keys


def _read_traits(keys: Keys) -> Traits:
    window = keys.int_or_none("sliding_window")
    windows = read_windows(keys, window, lambda _: window is not None)
    if any(each != window for each in windows):
        raise keys.error("layer_types", f"{keys.values['layer_types']!r}", "supported here: all layers alike")
    return Traits(activation=read_activation(keys, "hidden_act", "silu", "silu"), windows=windows)


MISTRAL = Family("mistral", {"num_key_value_heads": 8, "sliding_window": 4096}, _read_traits)
