"""What the values of a request must be, so that nothing that is done with them later can fail.

Front doors check what clients send, and say so in words. This is asked once more where a request comes in, because a
value that does not fit an array or a message would fail in the middle of a plan, and a core that failed half-way is
good for nothing: the service would end, with the requests of everybody.
"""

from __future__ import annotations

from coppice.ids import TOKEN_BYTES
from coppice.messages.sampling_bounds import impossible_field
from coppice.namespaces import SALT_BYTES
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.core.state.slot_table import NO_TOKEN

_U32, _I63 = 1 << 32, 1 << 63


def out_of_bounds(request: Request) -> str:
    """Name of the first field that has an impossible value; empty when all fit."""
    fits = {
        "tokens": len(request.tokens) % TOKEN_BYTES == 0,
        "number": 0 <= request.number < _U32,
        "max_new_tokens": request.max_new_tokens < _I63,
        "stop_token_ids": all(0 <= token < NO_TOKEN for token in request.stop_token_ids),
        "salt": len(request.salt) in (0, SALT_BYTES),
        "retain_ms": 0 <= request.retain_ms < _U32,
        "resumed": _may_go_on(request),
    }
    impossible = next((name for name, is_fitting in fits.items() if not is_fitting), "")
    if impossible:
        return impossible
    impossible = impossible_field(request.sampling)
    return f"sampling.{impossible}" if impossible else ""


def _may_go_on(request: Request) -> bool:
    """There is a token left to compute of what was begun elsewhere."""
    resumed = request.resumed
    if resumed is None:
        return True
    num_sent, rest = divmod(len(resumed.sent), TOKEN_BYTES)
    num_tokens = len(request.tokens) // TOKEN_BYTES + num_sent
    return (
        rest == 0
        and (not num_sent or num_sent < request.max_new_tokens)
        and (0 <= resumed.num_logprob_positions <= num_tokens and resumed.num_moves > 0)
    )
