"""What a front door has sent to a planner whose first token has not come: what that load is, and what will be cached.

    sent --> counted here --the planner says its load--> counted there --first token, or its end--> forgotten

A prompt that is being computed is in no index yet. Others with the same beginning that come meanwhile go where it is,
if what stands there is not more than they save: else each planner would compute the beginning once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from coppice_scheduler.core.state.request import Request
from coppice_scheduler.edge.ipc.door_messages import Turn
from coppice_scheduler.edge.text.tokenizer import TOKEN_DTYPE

BEGIN_TOKENS = 64  # of a prompt; those that share fewer are strangers
COMPARED_MAX = 4  # prompts of one beginning, the latest ones


def beginning(request: Request) -> bytes:
    """The same for prompts with the same first tokens, of one domain and salt."""
    return request.domain.encode() + request.salt + request.tokens[: BEGIN_TOKENS * TOKEN_DTYPE.itemsize]


@dataclass(slots=True)
class Underway:
    """`num_tokens`: to compute, of what is not counted in the planner's own word."""

    num_tokens: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)  # by request id
    _sent: dict[int, Request] = field(default_factory=dict)  # by number
    _tokens: dict[int, int] = field(default_factory=dict)  # by number: its part of `num_tokens`
    _alike: dict[bytes, dict[int, None]] = field(default_factory=dict)  # numbers by beginning, in order

    def add(self, request: Request, num_tokens: int) -> None:
        """`num_tokens`: to compute before its first one."""
        self._numbers[request.request_id] = request.number
        self._sent[request.number] = request
        if not request.num_places:  # a call has its steps computed, which come later
            self._alike.setdefault(beginning(request), {})[request.number] = None
        self._tokens[request.number] = num_tokens
        self.num_tokens += num_tokens

    def counted(self) -> None:
        """The planner has said what stands there: that is in it."""
        self._tokens.clear()
        self.num_tokens = 0

    def began(self, turn: Turn) -> None:
        """What has its first tokens, or its end, is known to the index."""
        if not self._sent:
            return
        for batch in turn.tokens:
            for number in self._sent.keys() & set(np.frombuffer(batch.numbers, TOKEN_DTYPE).tolist()):
                self._forget(number)
        for output in turn.outputs:
            if output.tokens or output.finish is not None:
                self.ended(output.request_id)

    def ended(self, request_id: str) -> None:
        """It will compute nothing any more."""
        number = self._numbers.get(request_id)
        if number is not None:
            self._forget(number)

    def clear(self) -> None:
        for each in (self._numbers, self._sent, self._tokens, self._alike):
            each.clear()
        self.num_tokens = 0

    def matched(self, request: Request) -> int:
        """Tokens that it shares with one of these from the first on."""
        latest = list(self._alike.get(beginning(request), ()))[-COMPARED_MAX:]
        return max((_num_shared(self._sent[number].tokens, request.tokens) for number in latest), default=0)

    def _forget(self, number: int) -> None:
        request = self._sent.pop(number)
        del self._numbers[request.request_id]
        self.num_tokens -= self._tokens.pop(number, 0)
        begin = beginning(request)
        alike = self._alike.get(begin, {})
        alike.pop(number, None)
        if not alike:
            self._alike.pop(begin, None)


def _num_shared(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other)) // TOKEN_DTYPE.itemsize
    differ = np.frombuffer(one, TOKEN_DTYPE, length) != np.frombuffer(other, TOKEN_DTYPE, length)
    return int(differ.argmax()) if differ.any() else length
