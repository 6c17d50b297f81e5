"""What a prompt finds where another one was served before it."""

from __future__ import annotations

LEAST_SHARE = 8  # of a block that is copied


def cached_tokens(num_common: int, *, num_written: int, block: int = 16) -> int:
    """Of `num_common` first tokens: whole blocks, and what there is of the next one, where that was filled by the
    `num_written` tokens of the other prompt and its answer; of a part no less than an eighth of a block."""
    whole = num_common // block * block
    is_filled = whole + block <= num_written
    return num_common if is_filled and (num_common - whole) * LEAST_SHARE >= block else whole
