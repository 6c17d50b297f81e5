"""Real arrivals: chats in Mooncake's format, and the table of lengths that Azure publishes.

TIMESTAMP,ContextTokens,GeneratedTokens          (Azure/AzurePublicDataset, AzureLLMInferenceTrace_*.csv)
2023-11-16 18:17:03.9799600,4808,10
"""

from __future__ import annotations

import csv
import gzip
import itertools
import zlib
from datetime import datetime
from pathlib import Path

from coppice.errors import UsageError
from coppice_bench.arrivals import Arrival, read_arrivals

_EVERYTHING = 1 << 31
_HINT = "a table with TIMESTAMP, ContextTokens, GeneratedTokens"
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path, limit: int) -> list[Arrival]:
    """The first `limit` requests, all for 0, by time. `hash_ids` are empty where the trace says nothing of content.

    Raises UsageError that names the file and the line.
    """
    if ".csv" in path.suffixes:
        return _read_table(path, limit or _EVERYTHING)
    return read_arrivals(path, limit or _EVERYTHING)


def _read_table(path: Path, limit: int) -> list[Arrival]:
    try:
        packed = path.suffix == ".gz"
        with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as lines:
            rows = csv.DictReader(lines)
            if not set(_COLUMNS) <= set(rows.fieldnames or ()):
                raise UsageError(f"--trace {path}:1: has no columns {', '.join(_COLUMNS)}", hint=_HINT)
            found = [_arrival(row, f"--trace {path}:{rows.line_num}") for row in itertools.islice(rows, limit)]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise UsageError(f"--trace {path} cannot be read: {error}", hint=_HINT) from error
    if not found:
        raise UsageError(f"--trace {path} has no requests")
    first_ms = min(arrival.at_ms for arrival in found)
    moved = [Arrival(a.at_ms - first_ms, a.input_tokens, a.output_tokens, ()) for a in found]
    return sorted(moved, key=lambda arrival: arrival.at_ms)


def _arrival(row: dict[str, str], where: str) -> Arrival:
    try:
        # Seven digits after the point are more than Python reads.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        arrival = Arrival(
            round((at - datetime(1970, 1, 1)).total_seconds() * 1e3),
            int(row["ContextTokens"]),
            int(row["GeneratedTokens"]),
            (),
        )
    except (ValueError, TypeError) as error:
        raise UsageError(f"{where}: not a request: {error}", hint=_HINT) from error
    if arrival.input_tokens < 1 or arrival.output_tokens < 1:
        raise UsageError(f"{where}: lengths must be positive", hint=_HINT)
    return arrival
