"""The driver that benchmarks of the host's time put in a device's place: it compiles, and computes nothing."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.kernels.stand_in_driver import stand_in_driver

# mypy: disable-error-code="no-untyped-def, untyped-decorator"


@triton.jit
def fill_kernel(out_ptr, value, COUNT: tl.constexpr):  # noqa: N803
    tl.store(out_ptr + tl.arange(0, COUNT), value)


def test_a_launch_ends_before_the_driver() -> None:
    out = torch.zeros(16)
    with stand_in_driver():
        compiled = fill_kernel[(1,)](out, 1.0, COUNT=16)
    assert "sm_90" in compiled.asm["ptx"]
    assert not out.any()


def test_without_it_there_is_no_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with stand_in_driver():
        pass
    with pytest.raises(RuntimeError, match="active drivers"):
        fill_kernel[(1,)](torch.zeros(16), 1.0, COUNT=16)
