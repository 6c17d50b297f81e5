"""Qwen2 and Qwen2.5: biases on query, key and value; windows, if switched on, in the upper layers."""

from __future__ import annotations

from coppice_worker.model.config.families.traits import Family, Traits, read_activation, read_windows
from coppice_worker.model.config.keys import Keys

WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}


def read_upper_windows(keys: Keys) -> tuple[int | None, ...]:
    """Files carry a window that is out of use unless `use_sliding_window` says otherwise."""
    window = keys.int_or_none("sliding_window") if keys.flag("use_sliding_window", default=False) else None
    first = keys.values["max_window_layers"]
    if isinstance(first, bool) or not isinstance(first, int):
        raise keys.error("max_window_layers", f"expected a whole number, found {first!r}", "correct the file")
    return read_windows(keys, window, lambda layer: window is not None and layer >= first)


def _read_traits(keys: Keys) -> Traits:
    activation = read_activation(keys, "hidden_act", "silu", "silu")
    return Traits(qkv_bias=True, activation=activation, windows=read_upper_windows(keys))


QWEN2 = Family("qwen2", {"num_key_value_heads": 32, **WINDOW_DEFAULTS}, _read_traits)
