"""Checks of the Triton kernels in Triton's interpreter.

The interpreter must be chosen before Triton is first imported, so these run in a process of their own:
`tests/kernels/test_interpreted*.py` start it. By hand:

    TRITON_INTERPRET=1 python -m pytest -o python_files='check_*.py' tests/kernels/interpreted
"""
