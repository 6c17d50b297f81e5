"""Traces of prompts in Mooncake's format: one JSON object per line, plain or gzip.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one per block of the prompt]}

Equal ids mean equal prompts up to there. Only `hash_ids` is required. The block size is the trace's own: the power of
two that agrees with all lengths, 512 in the traces of kvcache-ai/Mooncake (`FAST25-release/traces`).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coppice.errors import UsageError
from coppice.messages.reuse import Outcome

_HINT = "a line of Mooncake's format has hash_ids, and mostly timestamp, input_length and output_length"
_BLOCK_SIZES = tuple(1 << power for power in range(4, 13))
_ID_BITS = 63


@dataclass(frozen=True, slots=True)
class Request:
    at_ms: int
    input_tokens: int  # 0 when the trace does not say
    hash_ids: tuple[int, ...]
    call_kind: int = 0  # 0 when the trace does not say
    outcome: Outcome = Outcome.UNKNOWN


@dataclass(frozen=True, slots=True)
class Trace:
    """In order of time. `block_size` is 0 when the lengths agree with none."""

    requests: tuple[Request, ...]
    block_size: int

    @property
    def num_blocks(self) -> int:
        return sum(len(request.hash_ids) for request in self.requests)

    def ends_in_part(self, request: Request) -> bool:
        """Whether the last block of the prompt is not full."""
        return bool(self.block_size and request.input_tokens % self.block_size)


def read_trace(path: Path) -> Trace:
    """Raises UsageError that names the file and the line."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            found = list(_parse_all(path, lines))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UsageError(f"--trace {path} cannot be read: {error}", hint="a JSON-lines file, plain or gzip") from error
    if not any(request.hash_ids for request in found):
        raise UsageError(f"--trace {path} has no requests with blocks", hint=_HINT)
    found.sort(key=lambda request: request.at_ms)
    return Trace(tuple(found), _block_size(found))


def _parse_all(path: Path, lines: Iterator[str] | Any) -> Iterator[Request]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _parse(line, f"{path}:{number}")


def _parse(line: str, where: str) -> Request:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON: {error}", hint=_HINT) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("hash_ids"), list):
        raise UsageError(f"{where}: no list of hash_ids", hint=_HINT)
    hash_ids = fields["hash_ids"]
    if not all(isinstance(number, int) and not number >> _ID_BITS for number in hash_ids):
        raise UsageError(f"{where}: a hash id is no whole number from 0 to 2^{_ID_BITS}", hint=_HINT)
    timestamp, length = fields.get("timestamp", 0), fields.get("input_length", 0)
    if not isinstance(timestamp, int | float) or not isinstance(length, int) or length < 0:
        raise UsageError(f"{where}: timestamp or input_length is no number from 0", hint=_HINT)
    return Request(int(timestamp), length, tuple(hash_ids))


def _block_size(requests: list[Request]) -> int:
    told = [request for request in requests if request.input_tokens and request.hash_ids]
    for size in _BLOCK_SIZES if told else ():
        if all(-(-request.input_tokens // size) == len(request.hash_ids) for request in told):
            return size
    return 0
