"""The id of a request: the client's `X-Request-Id`, where it sent one that can be used, else one of ours."""

from __future__ import annotations

import re
from dataclasses import dataclass
from uuid import uuid4

HEADER = "x-request-id"
_TAKEN = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)  # it ends in logs and spans


@dataclass(frozen=True, slots=True)
class RequestId:
    shown: str  # on the answer and in the log; a client may send the same one again
    unique: str  # begins with it; ids of calls are made of this one


def request_id_of(sent: str | None) -> RequestId:
    """`sent` is what the client sent; what is too long or has other characters does not count."""
    own = uuid4().hex
    if sent is None or not _TAKEN.fullmatch(sent):
        return RequestId(own, own)
    return RequestId(sent, f"{sent}-{own[:16]}")
