"""config.json and generation_config.json of a checkpoint, read into one frozen value.

All families share one decoder: RMS norms, rotary positions, grouped-query attention, a gated MLP. What they differ in
is in `families`. A setting that would change the numbers and is not supported is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coppice_worker.model.config.families import FAMILIES
from coppice_worker.model.config.families.traits import Family, Traits
from coppice_worker.model.config.keys import Keys, read_keys
from coppice_worker.model.config.rope_config import RopeConfig, read_rope

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
CONTEXT_MAX = 1 << 24  # tokens; what a worker remembers of a sequence grows with it


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
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    traits: Traits = Traits()

    @property
    def attention_scale(self) -> float:
        """Of scores."""
        return float((self.traits.query_scalar or self.head_dim) ** -0.5)


def read_config(checkpoint_dir: Path) -> ModelConfig:
    """Reads the checkpoint's configuration. Raises CheckpointError, naming file and key."""
    keys = read_keys(checkpoint_dir / CONFIG_FILE)
    family = _read_family(keys)
    keys = keys.with_defaults(family.defaults)
    if keys.values.get("quantization_config") is not None:
        raise keys.error(
            "quantization_config", "quantised weights are not supported", "use float32, bfloat16 or float16 weights"
        )
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
    rope = read_rope(keys, max_context)
    if rope.kind == "yarn":  # files say how far the model was trained, and how much further this leads
        max_context = max(max_context, int(rope.original_max_context * rope.factor))
    if max_context > CONTEXT_MAX:
        raise keys.error("max_position_embeddings", f"leads to {max_context}", f"at most {CONTEXT_MAX} are served")
    return ModelConfig(
        family=family.name,
        vocab_size=keys.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.positive_int("intermediate_size"),
        num_layers=keys.num_layers(),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.positive_float("rms_norm_eps", 1e-6),
        max_context=max_context,
        tied_embeddings=keys.flag("tie_word_embeddings", default=False),
        rope=rope,
        eos_token_ids=_read_eos(keys, checkpoint_dir / GENERATION_CONFIG_FILE),
        traits=family.read_traits(keys),
    )


def _read_family(keys: Keys) -> Family:
    architectures = keys.values.get("architectures") or []
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in tuple(FAMILIES):
        raise keys.error(
            "architectures", f"{architectures!r} is not supported", f"supported: one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[architectures[0]]


def _read_eos(keys: Keys, generation_file: Path) -> tuple[int, ...]:
    """The generation config's end tokens win, as they list all of them for chat models."""
    sources = [read_keys(generation_file)] if generation_file.exists() else []
    for source in [*sources, keys]:
        value = source.values.get("eos_token_id")
        if value is None:
            continue
        tokens = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise source.error("eos_token_id", f"expected a token id or a list of them, found {value!r}", "correct it")
        return tuple(tokens)
    return ()
