"""One request's record as lines of text: a bar for each stage of its life, and for each chunk of its prompt.

      +0.0 ms     3.0 ms  front door          |..                            |  read, checked, tokenised
      +3.0 ms   412.0 ms  pool full           |  ........                    |  search held 412 blocks
    +415.0 ms    80.0 ms  prefill             |          ####                |  worker-0, 812 tokens
    +415.0 ms    40.0 ms    chunk of 512      |          ##                  |
    +495.0 ms   305.0 ms  decode              |              ================|  worker-0

A dot waits, `#` computes the prompt, `=` generates, `!` is an event without length. Stages follow one another without
a gap. The front door's own are the first and the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WAITS, PREFILLS, DECODES, HAPPENS = ".", "#", "=", "!"
CHUNKS_SHOWN = 32
_NAME = 20  # columns
_BAR_MIN = 20
_LETTERS = {"prefill": PREFILLS, "decode": DECODES, "slow_step": DECODES}
_DOOR = ("read, checked, tokenised", "text, and its end to the client")  # as the first stage, and later
_PREEMPTIONS = {
    "pool": "no block was free for those that ran",
    "domain": "its domain held its maximum",
    "guarantee": "a guarantee asked its blocks back",
    "slot": "its tenant held more slots than its share",
    "alone": "it held blocks twice",
    "yielded": "its worker went to another scheduler",
}


def lines_of(record: dict[str, Any], width: int) -> list[str]:
    """`record` as GET /requests/ID has it. Lines may be longer than `width` by what they say behind the bar."""
    stages = [tuple(stage) for stage in record.get("stages", ())]
    total_ms = max([record.get("total_ms", 0.0), *(stage[2] for stage in stages)])
    if not stages:
        return ["no stages: it ended before it was queued, or its planner was lost"]
    bar = max(_BAR_MIN, width - 70)
    lines = []
    chunks = list(record.get("chunks", ()))
    for number, (kind, start_ms, end_ms, blocker, amount) in enumerate(stages):
        letter = _LETTERS.get(kind, WAITS) if end_ms > start_ms else HAPPENS
        said = _DOOR[number > 0] if kind == "front_door" else _said(kind, blocker, amount)
        lines.append(_line(kind.replace("_", " "), start_ms, end_ms, total_ms, bar, letter, said))
        if kind == "prefill":
            computed = [chunk for chunk in chunks if chunk[0] < end_ms]
            chunks = chunks[len(computed) :]
            lines += _chunk_lines(computed, total_ms, bar)
    return lines


def _chunk_lines(chunks: Sequence[Sequence[Any]], total_ms: float, bar: int) -> list[str]:
    lines = [
        _line(f"  chunk of {tokens}", start_ms, end_ms, total_ms, bar, PREFILLS, "")
        for start_ms, end_ms, tokens in chunks[:CHUNKS_SHOWN]
    ]
    if len(chunks) > CHUNKS_SHOWN:
        lines.append(f"{'':26}  and {len(chunks) - CHUNKS_SHOWN} more chunks")
    return lines


def _line(name: str, start_ms: float, end_ms: float, total_ms: float, bar: int, letter: str, said: str) -> str:
    length = "" if letter == HAPPENS else _time(end_ms - start_ms)
    drawn = _bar(start_ms, end_ms, total_ms, bar, letter)
    return f"{'+' + _time(start_ms):>11} {length:>11}  {name:{_NAME}} |{drawn}|  {said}".rstrip()


def _bar(start_ms: float, end_ms: float, total_ms: float, cells: int, letter: str) -> str:
    """Whatever happened has one cell at least."""
    scale = cells / total_ms if total_ms > 0 else 0.0
    first = min(int(start_ms * scale), cells - 1)
    count = min(max(1, round(end_ms * scale) - first), cells - first)
    return (" " * first + letter * count).ljust(cells)


def _time(ms: float) -> str:
    return f"{ms / 1000:.2f} s" if ms >= 10_000 else f"{ms:.1f} ms"


def _said(kind: str, blocker: str, amount: int) -> str:
    """What its blocker and amount mean: `coppice.request_log.stages`. Of a kind of a newer version: as they are."""
    match kind:
        case "queued":
            return f"behind {amount} of its own tenant" if amount else ""
        case "no_slot":
            return f"{blocker or 'nobody'} held {amount} running slots"
        case "pool_full":
            return f"{blocker} held {amount} blocks" if blocker else ""
        case "asked_back":
            return f"{amount} blocks of {blocker}"
        case "prefix":
            return f"another request computed {amount} shared tokens"
        case "prefill":
            return f"{blocker}, {amount} tokens"
        case "slow_step":
            return f"{blocker}, should have taken {_time(amount / 1000)}"
        case "preempted":
            return _PREEMPTIONS.get(blocker, blocker)
        case "omitted":
            return f"{amount} stages" if amount else ""
    return " ".join([blocker] * bool(blocker) + [str(amount)] * bool(amount))
