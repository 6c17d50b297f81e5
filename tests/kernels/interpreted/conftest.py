"""Fresh tensors hold NaN and the largest integers: a kernel that reads what nobody wrote shows it each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_tensors() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # else `fill_uninitialized_memory` does nothing
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
