"""What families differ in; everything else is the decoder's, and the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coppice_worker.kernels.backend import Activation
from coppice_worker.model.config.keys import Keys

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class NormNames:
    """A layer's norms, as files name them; only some families have those of what attention and the MLP bring."""

    attention: str = "input_layernorm"
    attention_out: str | None = None
    mlp: str = "post_attention_layernorm"
    mlp_out: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The parts of a decoder that not every model has."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    windows: tuple[int | None, ...] = ()  # of attention, for each layer; empty: none anywhere
    has_head_norms: bool = False
    norm_names: NormNames = NormNames()
    norm_offset: float = 0.0  # is added to the weights of norms
    query_scalar: float | None = None  # scores are divided by its root, or by that of the head size
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    scales_embedding: bool = False  # by the root of the hidden size

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True, slots=True)
class Family:
    """How the config.json of a family is read."""

    name: str
    defaults: Mapping[str, Any]  # what `transformers` takes a key for that the file leaves out
    read_traits: Callable[[Keys], Traits]


def read_windows(keys: Keys, window: int | None, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: where `layer_types` says so, or, without that, where `slides(layer)`."""
    num_layers = keys.num_layers()
    types = keys.values.get("layer_types")
    if types is None:
        types = [_SLIDING if slides(layer) else _FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (_FULL, _SLIDING) for kind in types):
        raise keys.error(
            "layer_types", f"{types!r} is not supported", f'supported: "{_FULL}" or "{_SLIDING}" for each layer'
        )
    if _SLIDING in types and window is None:
        raise keys.error("sliding_window", "is not in use, but layers slide", "correct the file")
    return tuple(window if kind == _SLIDING else None for kind in types)


def read_activation(keys: Keys, key: str, supported: str, activation: Activation) -> Activation:
    """The one that a family is computed with."""
    found = keys.values.get(key) or supported
    if found != supported:
        raise keys.error(key, f"{found!r} is not supported", f'supported: "{supported}"')
    return activation
