"""`coppice bench rpc`: what acquiring from the index costs over moving the same bytes.

A process of its own serves the cache service and two echoes (`server`); this one asks them in turns. The echo
speaks the session protocol with the same codecs and answers with a grant of the same size, so the ratio is what the
core, its lock and its effects add. `bare` moves the same bytes over a stream of gRPC alone. `ratio` and
`ratio_to_grpc` are the worst of the prompts of 512 and 4,096 tokens, cold and warm; every case is listed. `links` has
TCP, a Unix socket and gRPC alone, back to back and after pauses.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from typing import Any

from coppice.errors import CoppiceError
from coppice.handles import HANDLE_BYTES
from coppice.ids import TOKEN_BYTES, DomainId, LeaseId
from coppice.messages.index import Acquire, Answer, Candidate, Grant, Publish, Published, Release
from coppice.seals import SEAL_BYTES
from coppice_bench.report import describe_run, note
from coppice_bench.rpc.client import NAMESPACE, WORKER, BareStream, RegisteredWorker, TimedSession
from coppice_bench.rpc.links import measure_links
from coppice_bench.rpc.processes import serving
from coppice_bench.rpc.wire import BLOCK_SIZE, bare_request

DOMAIN = DomainId("bench")
LENGTHS = (512, 4_096, 32_768)
JUDGED_UP_TO = 4_096  # tokens: the ratio is about these
SEQUENCES = 1_000  # of 512 tokens, so that the tree is not empty
ROUNDS = 300
QUICK_ROUNDS = 10
_POOL_BLOCKS = 65_536
_TURN = 5  # calls of one contender before the next
_FRAME_BYTES = 96  # about what ids and numbers take beside tokens and handles
_US = 1_000


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of one length: `cold`, of which nothing is cached, or all but the last block."""

    num_tokens: int
    is_warm: bool

    @property
    def num_shared(self) -> int:
        return self.num_tokens // BLOCK_SIZE - 1 if self.is_warm else 0

    @property
    def answer_bytes(self) -> int:
        owned = self.num_tokens // BLOCK_SIZE - self.num_shared
        return self.num_shared * (HANDLE_BYTES + SEAL_BYTES) + owned * HANDLE_BYTES + _FRAME_BYTES


class _Prompts:
    """Packed tokens that nobody asked for before."""

    def __init__(self) -> None:
        self._random = random.Random(7)
        self._count = 0

    def fresh(self, num_tokens: int) -> bytes:
        return self._random.randbytes(num_tokens * TOKEN_BYTES)

    def lease_id(self) -> LeaseId:
        self._count += 1
        return LeaseId(self._count.to_bytes(16, "big"))


def run_rpc(*, quick: bool) -> dict[str, Any]:
    """Raises CoppiceError."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with (
        serving("coppice_bench.rpc.server") as ports,
        RegisteredWorker(ports["session"], _POOL_BLOCKS),
        TimedSession(ports["session"]) as index,
        TimedSession(ports["echo"]) as echo,
        BareStream(ports["bare"]) as bare,
    ):
        index.wait_open_worker()
        prompts = _Prompts()
        note("filling the tree")
        for _ in range(QUICK_ROUNDS if quick else SEQUENCES):
            _cache(index, prompts, prompts.fresh(512))
        cases = []
        for num_tokens in LENGTHS:
            for is_warm in (False, True):
                case = Case(num_tokens, is_warm)
                note(f"{num_tokens} tokens, {'warm' if is_warm else 'cold'}")
                cases.append(_measure(case, index, echo, bare, prompts, rounds))
    judged = [case for case in cases if case["tokens"] <= JUDGED_UP_TO]
    ratios = {
        "ratio": max(case["ratio"] for case in judged),
        "ratio_to_grpc": max(case["acquire_us"] / case["bare_us"] for case in judged),
    }
    return {
        "bench": "rpc",
        **ratios,
        "cases": cases,
        "links": measure_links(quick=quick),
        "rounds": rounds,
        **describe_run(),
    }


def _measure(
    case: Case, index: TimedSession, echo: TimedSession, bare: BareStream, prompts: _Prompts, rounds: int
) -> dict[str, Any]:
    """One row: medians in µs of the three contenders, taken in turns."""
    known = prompts.fresh(case.num_tokens)
    if case.is_warm:
        _cache(index, prompts, known)
    taken: dict[str, list[int]] = {"acquire": [], "echo": [], "bare": []}
    request = bare_request(case.num_tokens * TOKEN_BYTES + _FRAME_BYTES, case.answer_bytes)
    for _ in range(0, rounds, _TURN):
        for name, session in (("acquire", index), ("echo", echo)):
            for _ in range(_TURN):
                op = _acquire(case, prompts, known if case.is_warm else prompts.fresh(case.num_tokens))
                duration_ns, answers = session.ask(op)
                _check(case, answers[0])
                taken[name].append(duration_ns)
                session.ask(Release(op.lease_id))
        taken["bare"] += [bare.ask(request) for _ in range(_TURN)]
    times = {f"{name}_us": median(durations) / _US for name, durations in taken.items()}
    temperature = "warm" if case.is_warm else "cold"
    return {"tokens": case.num_tokens, "cache": temperature, "ratio": times["acquire_us"] / times["echo_us"], **times}


def _acquire(case: Case, prompts: _Prompts, tokens: bytes) -> Acquire:
    """The core ignores the load of an only candidate; the echo takes it for the number of shared blocks."""
    candidates = (Candidate(WORKER, case.num_shared),)
    return Acquire(prompts.lease_id(), DOMAIN, NAMESPACE, tokens, case.num_tokens, candidates)


def _check(case: Case, answer: Answer) -> None:
    """Both contenders must have done what is being compared."""
    if not isinstance(answer, Grant):
        raise CoppiceError(f"an acquire of {case.num_tokens} tokens was answered with {answer}")
    sizes = len(answer.shared), len(answer.owned)
    total = case.num_tokens // BLOCK_SIZE
    wanted = case.num_shared * HANDLE_BYTES, (total - case.num_shared) * HANDLE_BYTES
    if sizes != wanted:
        raise CoppiceError(f"an acquire of {case.num_tokens} tokens granted {sizes} bytes of handles, not {wanted}")


def _cache(index: TimedSession, prompts: _Prompts, tokens: bytes) -> None:
    """Make these tokens cached."""
    lease = prompts.lease_id()
    num_tokens = len(tokens) // TOKEN_BYTES
    candidates = (Candidate(WORKER, 0),)
    acquire = Acquire(lease, DOMAIN, NAMESPACE, tokens, num_tokens, candidates)
    published = index.ask(acquire, Publish(lease, 0, tokens), Release(lease))[1][1]
    if not isinstance(published, Published):
        raise CoppiceError(f"{num_tokens} tokens could not be published: {published}")
