"""Prompts that were being computed when workers were lost: the second time, they are refused for a while.

    lost once           tried again, as anything is
    lost again          refused for `quarantine_ms` after that loss; what waits with this prompt ends, too
    passed the place where it was lost, or completed
                        forgotten: it kills nobody
    nothing for so long forgotten

Whoever was in a lost worker's plans without a result is suspected, the innocent beside the guilty: which of them it was
cannot be seen from here. A prompt is known by a digest of its tenant and its tokens, so no tenant can have another's
prompts refused by sending them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from coppice_scheduler.core.state.request import Request

LOSSES_MAX = 2  # of workers, with one prompt
PROMPTS_MAX = 4096
_NS_PER_MS = 1_000_000


@dataclass(slots=True)
class _Suspect:
    losses: int
    last_ns: int
    reach: int  # tokens that it would have had if the lost steps had been done: with these, it has passed them


class InWork(NamedTuple):
    """A request that had a row in a plan without a result."""

    request: Request
    num_tokens: int  # that it has, prompt and output
    reach: int  # that it would have had if its plans had been done


class Quarantine:
    """Costs a digest for each request only while some prompt is suspected."""

    def __init__(self, quarantine_ms: int) -> None:
        self._time_ns = quarantine_ms * _NS_PER_MS
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()  # by digest, the latest loss last

    def __len__(self) -> int:
        return len(self._suspects)

    def lost(self, in_work: Iterable[InWork], now_ns: int) -> bool:
        """One worker was lost while it computed these. Whether some of their prompts are refused from now on."""
        self._forget_old(now_ns)
        is_refused = False
        for digest, (num_tokens, reach) in _farthest(in_work).items() if self._time_ns else ():
            suspect = self._suspects.setdefault(digest, _Suspect(0, now_ns, reach))
            has_passed = suspect.losses and num_tokens >= suspect.reach
            suspect.losses = 1 if has_passed else suspect.losses + 1
            suspect.last_ns = now_ns
            suspect.reach = reach
            self._suspects.move_to_end(digest)
            is_refused |= suspect.losses >= LOSSES_MAX
        while len(self._suspects) > PROMPTS_MAX:
            self._suspects.popitem(last=False)
        return is_refused

    def completed(self, request: Request) -> None:
        if self._suspects:
            self._suspects.pop(_digest(request), None)

    def left_ms(self, request: Request, now_ns: int) -> int:
        """For how long it is still refused; 0: it is not."""
        self._forget_old(now_ns)
        suspect = self._suspects.get(_digest(request)) if self._suspects else None
        if suspect is None or suspect.losses < LOSSES_MAX:
            return 0
        return -(-(suspect.last_ns + self._time_ns - now_ns) // _NS_PER_MS)

    def _forget_old(self, now_ns: int) -> None:
        while self._suspects and next(iter(self._suspects.values())).last_ns + self._time_ns <= now_ns:
            self._suspects.popitem(last=False)


def words(left_ms: int) -> str:
    """What the client is told."""
    return (
        f"{LOSSES_MAX} workers were lost while they computed this prompt; it is refused for {-(-left_ms // 1000)} s "
        "so that it cannot be the reason for more"
    )


def _farthest(in_work: Iterable[InWork]) -> dict[bytes, tuple[int, int]]:
    """Of each prompt, by digest: the most tokens, and the farthest reach. Several may be answers to the same."""
    found: dict[bytes, tuple[int, int]] = {}
    for request, num_tokens, reach in in_work:
        digest = _digest(request)
        most, farthest = found.get(digest, (0, 0))
        found[digest] = max(most, num_tokens), max(farthest, reach)
    return found


def _digest(request: Request) -> bytes:
    name = request.tenant.encode("utf-8", "surrogatepass")
    digest = blake2b(len(name).to_bytes(4, "little") + name, digest_size=16)
    digest.update(request.tokens)
    return digest.digest()
