"""Sums of tenants as arrays: a row for each tenant, by its number, and a column for each field of `TenantSums`.

           served             charged to limits       now
row t  |  prefill  outputs  |  requests  prompts  |  at work  wants  |
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coppice.messages.cell import TenantSums

Sums = NDArray[np.int64]  # [T, NUM_COLUMNS]

PREFILL, OUTPUTS, REQUESTS, PROMPTS, AT_WORK, WANTS = range(6)
NUM_COLUMNS = 6
NUM_GROWING = 4  # the first ones never fall


def no_sums(num_rows: int) -> Sums:
    return np.zeros((num_rows, NUM_COLUMNS), np.int64)


def with_rows(sums: Sums, num_rows: int) -> Sums:
    """Itself, or one with so many rows at least, the new ones zero."""
    if len(sums) >= num_rows:
        return sums
    grown = no_sums(max(num_rows, 2 * len(sums)))
    grown[: len(sums)] = sums
    return grown


def rows_of(tenants: tuple[TenantSums, ...]) -> Sums:
    """In their order."""
    rows = [
        (t.num_prefill_tokens, t.num_output_tokens, t.num_requests, t.num_prompt_tokens, t.num_at_work, t.wants)
        for t in tenants
    ]
    return np.array(rows, np.int64).reshape(len(rows), NUM_COLUMNS)


def tenant_sums(tenant: str, row: list[int]) -> TenantSums:
    prefill, outputs, requests, prompts, at_work, wants = row
    return TenantSums(tenant, prefill, outputs, requests, prompts, at_work, bool(wants))
