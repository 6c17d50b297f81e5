"""One request as it is kept: a line of JSON that is access log, usage record and answer to "why was it slow" in one.

    {"at":"2026-01-31T12:00:01.250Z","id":"job-7","tenant":"search","key":"ci","api":"POST /v1/chat/completions",
     "status":200,"end":"stop","tokens_in":812,"tokens_cached":768,"tokens_out":40,"queue_ms":3.1,"ttft_ms":41.0,
     "total_ms":390.2,"cause":"decode",...,"stages":[["queued",0.0,3.1,"",0],...]}

No text, no token and no key is in it: ids, counts, times, and names that the operator gave.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from coppice.request_log.causes import NS_PER_MS, main_cause
from coppice.request_log.stages import WAITING, Stage, StageKind

_DECIMALS = 3

StageRow = tuple[str, float, float, str, int]  # kind, milliseconds since the request came: start, end; blocker, amount
ChunkRow = tuple[float, float, int]  # milliseconds since the request came: start, end; tokens


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times are in milliseconds; a number that is not there is 0, a text empty."""

    at: str  # UTC, when it ended
    id: str  # `X-Request-Id` on the answer
    api: str  # method and route, or `gRPC` and the method
    status: int  # HTTP's; of gRPC the one that stands for its code
    end: str  # finish reasons, or the code of the error
    call: str = ""  # the answer's id, of a call that was opened
    tenant: str = ""  # empty: nobody that is known
    key: str = ""  # the name of its key
    model: str = ""
    client: str = ""  # address
    streams: bool = False
    num_answers: int = 0
    tokens_in: int = 0
    tokens_cached: int = 0  # of those in
    tokens_written: int = 0  # of those in, that it computed and made findable
    tokens_out: int = 0
    queue_ms: float = 0.0  # before it had memory
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    moves: int = 0  # times that it went on at another planner
    trace: str = ""  # id of its trace, in hexadecimal
    cause: str = ""  # what took longest: a `StageKind`
    blocker: str = ""  # who was in the way
    stages: tuple[StageRow, ...] = ()  # of the answer that ended last
    chunks: tuple[ChunkRow, ...] = ()


class Life(msgspec.Struct, frozen=True):
    """What a record tells of stages."""

    queue_ms: float
    cause: str
    blocker: str
    stages: tuple[StageRow, ...]


def life_of(stages: Sequence[Stage], arrived_ns: int) -> Life:
    cause = main_cause(stages)
    waited_ns = 0
    for stage in stages:
        if stage.kind in (StageKind.PREFILL, StageKind.DECODE):
            break
        waited_ns += stage.length_ns if stage.kind in WAITING else 0
    return Life(
        ms(waited_ns),
        cause.kind.value if cause is not None else "",
        cause.blocker if cause is not None else "",
        tuple(
            (
                stage.kind.value,
                ms(stage.start_ns - arrived_ns),
                ms(stage.end_ns - arrived_ns),
                stage.blocker,
                stage.amount,
            )
            for stage in stages
        ),
    )


def ms(ns: int) -> float:
    return round(ns / NS_PER_MS, _DECIMALS)


def stages_of(record: RequestRecord) -> list[Stage]:
    """The record's stages, in nanoseconds since the request came. Kinds of a newer version are left out."""
    found = []
    for kind, start_ms, end_ms, blocker, amount in record.stages:
        try:
            known = StageKind(kind)
        except ValueError:
            continue
        found.append(Stage(known, int(start_ms * NS_PER_MS), int(end_ms * NS_PER_MS), blocker, amount))
    return found


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(RequestRecord)


def encoded(record: RequestRecord) -> bytes:
    """One line, with its end."""
    return _ENCODER.encode(record) + b"\n"


def decoded(line: bytes) -> RequestRecord | None:
    """None: a line that was cut, or is of something else."""
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
