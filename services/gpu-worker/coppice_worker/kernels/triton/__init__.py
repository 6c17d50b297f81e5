"""Kernels in Triton. Import these modules only where Triton is installed; `TRITON_INTERPRET=1` runs them on a CPU."""
