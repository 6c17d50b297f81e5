"""How much there may be in the JSON of one request. Parsed, `[[],[],...` takes 20 times its bytes, and no other thread
runs meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coppice_scheduler.edge.base.errors import invalid

MAX_CONTAINERS = 50_000  # lists and objects
MAX_MEMBERS = 50_000  # names with values, in all objects together: as many take some 10 ms of the interpreter


def check_json_size(texts: Sequence[bytes], what: str, param: str | None = None) -> None:
    """Of all texts together, before any is parsed. Raises ApiError."""
    if (
        sum(text.count(b"[") + text.count(b"{") for text in texts) <= MAX_CONTAINERS
        and sum(text.count(b":") for text in texts) <= MAX_MEMBERS
    ):
        return
    num_containers = num_members = 0
    for text in texts:
        bare = _outside_strings(text)
        num_containers += int(np.count_nonzero((bare == ord("[")) | (bare == ord("{"))))
        num_members += int(np.count_nonzero(bare == ord(":")))
    if num_containers > MAX_CONTAINERS:
        message = f"{what[0].upper()}{what[1:]} has more than {MAX_CONTAINERS} lists and objects."
        raise invalid(message, param=param, code="too_complex")
    if num_members > MAX_MEMBERS:
        message = f"The objects of {what} have more than {MAX_MEMBERS} names."
        raise invalid(message, param=param, code="too_complex")


def _outside_strings(raw: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of JSON that are in no string. Where `raw` is no JSON they may be others."""
    plain = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    return plain[~np.logical_xor.accumulate(plain == ord('"'))]
