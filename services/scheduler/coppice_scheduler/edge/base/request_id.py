"""The id of a request: the client's `X-Request-Id`, where it sent one that can be used, else one of ours.

shown    "job-7", which other calls may have, too
unique   "job-7-1f..."; the answer's id is "chatcmpl-job-7-1f...", or begins as its API has it
names    "job-7" and "*-job-7-1f...": what a tenant may say when it means the call
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from uuid import uuid4

HEADER = "x-request-id"
ASKED_CHARS_MAX = 90  # "chatcmpl-", a client's id, "-", 16 digits
_TAKEN = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)  # it ends in logs and spans


_OF_ANSWER = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)([A-Za-z0-9._:-]{1,81})", re.ASCII)


@dataclass(frozen=True, slots=True)
class RequestId:
    shown: str  # on the answer and in the log; a client may send the same one again
    unique: str  # begins with it; ids of calls are made of this one

    @property
    def names(self) -> tuple[str, ...]:
        return (self.shown, _name_of(self.unique))


def request_id_of(sent: str | None) -> RequestId:
    """`sent` is what the client sent; what is too long or has other characters does not count."""
    own = uuid4().hex
    if sent is None or not _TAKEN.fullmatch(sent):
        return RequestId(own, own)
    return RequestId(sent, f"{sent}-{own[:16]}")


def names_meant(asked: str) -> tuple[str, ...]:
    """The names of calls that `asked` may be: an `X-Request-Id`, the id of an answer, or either; none otherwise."""
    names = [asked] if _TAKEN.fullmatch(asked) else []
    of_answer = _OF_ANSWER.fullmatch(asked)
    return (*names, _name_of(of_answer[1])) if of_answer else tuple(names)


def _name_of(unique: str) -> str:
    """The star stands for what the id of an answer begins with; no client's id has one."""
    return f"*-{unique}"
