"""config.json and generation_config.json of a checkpoint, read into one frozen value.

Two families share one decoder (RMS norm, rotary positions, grouped-query attention, gated SiLU MLP):

    LlamaForCausalLM     biases only where `attention_bias` / `mlp_bias` say so
    Qwen2ForCausalLM     bias on the query, key and value projections, none on the output projection

A setting that would change the numbers and is not supported is refused, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
_ROPE_KINDS = ("default", "linear", "llama3")

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `factor` counts for linear and llama3, the last three for llama3 only."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 0  # tokens

    def describe(self) -> str:
        """One line that is equal exactly for equal settings, for namespaces and logs."""
        values = (self.kind, self.theta, self.factor, self.low_freq_factor, self.high_freq_factor)
        return " ".join(map(str, (*values, self.original_max_context)))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and numerics of a decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int  # tokens, prompt and answer together
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]


def read_config(checkpoint_dir: Path) -> ModelConfig:
    """Reads the checkpoint's configuration. Raises CheckpointError, naming file and key."""
    keys = _Keys(checkpoint_dir / CONFIG_FILE)
    family = _read_family(keys)
    _refuse_unsupported(keys, family)
    num_heads = keys.positive_int("num_attention_heads")
    num_kv_heads = keys.positive_int("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise keys.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}", "correct the file"
        )
    hidden_size = keys.positive_int("hidden_size")
    head_dim = keys.positive_int("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise keys.error("head_dim", f"{head_dim} is odd", "rotary positions need an even head size")
    max_context = keys.positive_int("max_position_embeddings")
    attention_bias = keys.flag("attention_bias", default=family == "qwen2")
    return ModelConfig(
        family=family,
        vocab_size=keys.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.positive_int("intermediate_size"),
        num_layers=keys.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.positive_float("rms_norm_eps", 1e-6),
        max_context=max_context,
        tied_embeddings=keys.flag("tie_word_embeddings", default=False),
        qkv_bias=attention_bias,
        output_bias=attention_bias and family == "llama",
        mlp_bias=keys.flag("mlp_bias", default=False),
        rope=_read_rope(keys, max_context),
        eos_token_ids=_read_eos(keys, checkpoint_dir / GENERATION_CONFIG_FILE),
    )


class _Keys:
    """A JSON object with typed look-ups whose errors name the file and the key."""

    def __init__(self, file: Path, values: dict[str, Any] | None = None, inside: str = "") -> None:
        self.file = file
        self.values = _read_json_object(file) if values is None else values
        self._inside = inside

    def error(self, key: str, problem: str, advice: str) -> CheckpointError:
        return CheckpointError(self.file, f'"{self._inside}{key}": {problem}', advice)

    def inside(self, key: str) -> _Keys:
        value = self.values.get(key)
        if value is None:
            return _Keys(self.file, {}, f"{key}.")
        if not isinstance(value, dict):
            raise self.error(key, f"expected an object, found {value!r}", "correct the file")
        return _Keys(self.file, value, f"{key}.")

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(key, f"expected a positive whole number, found {value!r}", "correct the file")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, f"expected a positive number, found {value!r}", "correct the file")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {value!r}", "correct the file")
        return value

    def _present(self, key: str, default: float | None) -> Any:
        value = self.values.get(key)
        if value is None and default is None:
            raise self.error(key, "is missing", "copy the model's complete config.json beside its weights")
        return default if value is None else value


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(file, "no such file", "point at a folder with config.json and *.safetensors") from None
    except (OSError, ValueError) as cause:
        raise CheckpointError(file, f"cannot be read as JSON ({cause})", "download the file again") from cause
    if not isinstance(value, dict):
        raise CheckpointError(file, "holds no JSON object", "download the file again")
    return value


def _read_family(keys: _Keys) -> str:
    architectures = keys.values.get("architectures") or []
    supported = ", ".join(_FAMILIES)
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in _FAMILIES:
        raise keys.error("architectures", f"{architectures!r} is not supported", f"supported: one of {supported}")
    return _FAMILIES[architectures[0]]


def _refuse_unsupported(keys: _Keys, family: str) -> None:
    values = keys.values
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise keys.error("hidden_act", f"{activation!r} is not supported", 'supported: "silu"')
    if values.get("quantization_config") is not None:
        raise keys.error(
            "quantization_config", "quantised weights are not supported", "use float32, bfloat16 or float16 weights"
        )
    # Qwen2 files carry a window size that is out of use unless `use_sliding_window` says otherwise;
    # a family without that switch would use any window that is given.
    switched_on = values.get("use_sliding_window", family != "qwen2")
    window_is_used = switched_on and values.get("sliding_window") is not None
    layer_types = values.get("layer_types") or []
    if window_is_used:
        raise keys.error("sliding_window", f"{values['sliding_window']!r} is in use", "supported: full attention only")
    if any(layer_type != "full_attention" for layer_type in layer_types):
        raise keys.error("layer_types", f"{sorted(set(layer_types))!r}", 'supported: "full_attention" in every layer')
    for where in (keys, keys.inside("rope_parameters"), keys.inside("rope_scaling")):
        factor = where.values.get("partial_rotary_factor", 1.0)
        if factor != 1.0:
            raise where.error("partial_rotary_factor", f"{factor!r} is not supported", "supported: 1.0")


def _read_rope(keys: _Keys, max_context: int) -> RopeConfig:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`, which holds everything."""
    name = "rope_parameters" if keys.values.get("rope_parameters") is not None else "rope_scaling"
    rope = keys.inside(name)
    theta = rope.positive_float("rope_theta", keys.positive_float("rope_theta", 10000.0))
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise rope.error("rope_type", f"{kind!r} is not supported", f"supported: {', '.join(_ROPE_KINDS)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.positive_float("factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if low >= high:
        raise rope.error("low_freq_factor", f"{low} is not below high_freq_factor {high}", "correct the file")
    original = rope.positive_int("original_max_position_embeddings", max_context)
    return RopeConfig(theta, "llama3", factor, low, high, original)


def _read_eos(keys: _Keys, generation_file: Path) -> tuple[int, ...]:
    """The generation config's end tokens win, as they list all of them for chat models."""
    sources = [_Keys(generation_file)] if generation_file.exists() else []
    for source in [*sources, keys]:
        value = source.values.get("eos_token_id")
        if value is None:
            continue
        tokens = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise source.error("eos_token_id", f"expected a token id or a list of them, found {value!r}", "correct it")
        return tuple(tokens)
    return ()
