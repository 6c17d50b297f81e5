"""Types of weights and of KV, by the names that settings and namespaces have for them."""

from __future__ import annotations

from typing import Literal

import torch

DtypeName = Literal["float32", "bfloat16", "float16"]
KvDtypeName = Literal["auto", "fp8"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NAMES = {**{dtype: name for name, dtype in DTYPES.items()}, torch.float8_e4m3fn: "fp8_e4m3"}  # of KV, in namespaces


def torch_dtype_of(name: str) -> torch.dtype:
    """Raises ValueError, naming the supported ones."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def kv_dtype_of(kv_dtype: str, dtype: str) -> torch.dtype:
    """What blocks hold. Raises ValueError, naming what is supported."""
    if kv_dtype not in ("auto", "fp8"):
        raise ValueError(f"KV dtype {kv_dtype!r} is not supported; supported: auto (the model's own), fp8")
    return torch.float8_e4m3fn if kv_dtype == "fp8" else torch_dtype_of(dtype)
