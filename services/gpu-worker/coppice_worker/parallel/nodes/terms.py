"""What the nodes of a worker must have in common, as texts by name; and the sentence that names what differs.

All ranks draw their tokens by themselves from the same logits. So what decides about a token's last bit is a term, too:
builds, kernels, the instructions of the processor.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from coppice import __version__
from coppice_worker.edge.loading import Loaded, dtype_of
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.model.loader import checkpoint_digest

Terms = Mapping[str, str]
_FLAGS = (
    *("tensor_parallel", "nnodes", "kv_dtype", "kernels", "num_blocks", "kv_memory_mib", "host_memory_mib"),
    *("block_size", "max_sequences", "max_step_tokens", "cuda_graphs"),
)
_AUTO = "default"
VALUE_CHARACTERS_MAX = 64
NAMED_MAX = 4  # differences in one sentence


def terms_of(settings: WorkerSettings) -> dict[str, str]:
    """Before anything is loaded. Settings come from `resolve_settings`. Raises CheckpointError."""
    flags = {f"--{name.replace('_', '-')}": getattr(settings, name) for name in _FLAGS}
    return {
        "the build of Coppice": __version__,
        "the version of torch": torch.__version__,
        "the checkpoint's digest": checkpoint_digest(Path(settings.model)),
        "--dtype": dtype_of(settings),
        "--device": settings.device,
        "the processor": _processor(settings),
        **{name: _AUTO if value is None else str(value) for name, value in flags.items()},
    }


def facts_of(loaded: Loaded) -> dict[str, str]:
    """And of a rank whose share is loaded."""
    return {
        "the number of blocks": str(loaded.executor.pool.num_blocks),
        "the number of blocks on the host": str(0 if loaded.host is None else len(loaded.host.blocks)),
        "the choice of kernels": loaded.executor.kernels_name,
        "the kind of KV": repr(loaded.executor.namespace),
    }


def read_facts(raw: bytes) -> dict[str, str]:
    """Those of another rank. Raises ValueError."""
    facts = json.loads(raw)
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        raise ValueError("these are no facts of a rank")
    return facts


def difference(ours: Terms, theirs: Terms, we: str, they: str) -> str:
    """What differs, as one sentence; empty when nothing does."""
    if theirs.keys() - ours.keys():
        return f"{they} names terms that {we} does not know: the nodes have different builds"
    names = [name for name in ours if ours[name] != theirs.get(name)]
    said = [f"{name} is {_value(ours, name)} at {we} and {_value(theirs, name)} at {they}" for name in names]
    if not said:
        return ""
    more = f"; {len(said) - NAMED_MAX} more differ" if len(said) > NAMED_MAX else ""
    return "; ".join(said[:NAMED_MAX]) + more


def _value(terms: Terms, name: str) -> str:
    value = terms.get(name, "not said")[:VALUE_CHARACTERS_MAX]
    return value if value.isprintable() else repr(value)  # whoever it is may say anything


def _processor(settings: WorkerSettings) -> str:
    if settings.device == "cuda":
        return torch.cuda.get_device_name(0)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
