"""What both processes of `coppice bench rpc` agree on."""

from __future__ import annotations

BLOCK_SIZE = 16  # tokens
BARE_SERVICE = "coppice_bench.Bare"
BARE_METHOD = "Echo"
_SIZE_BYTES = 4


def bare_request(num_bytes: int, answer_bytes: int) -> bytes:
    """`num_bytes` bytes that ask for an answer of `answer_bytes`."""
    return answer_bytes.to_bytes(_SIZE_BYTES, "little") + bytes(max(0, num_bytes - _SIZE_BYTES))


def bare_answer_bytes(request: bytes) -> int:
    return int.from_bytes(request[:_SIZE_BYTES], "little")
