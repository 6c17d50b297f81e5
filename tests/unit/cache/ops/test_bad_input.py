"""Bad input, one line each: a typed error or the documented answer, and the state stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from coppice.ids import DomainId, LeaseId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import (
    Abandon,
    Acquire,
    Answer,
    Candidate,
    Distrust,
    Distrusted,
    Extend,
    Gone,
    Grant,
    Invalid,
    LeaseClaim,
    LeaseSet,
    MatchQueries,
    MatchQuery,
    NoCapacity,
    OpBatch,
    Publish,
    Reattach,
    Release,
    Released,
    Retain,
)
from coppice.messages.registration import CopiesDone, Draining, FenceAck, Register
from coppice_cache.core.base.errors import MessageRefused
from tests.unit.cache.stand import fingerprint
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, lease_id, registration, settings, tokens

LIMITS = {"ops_per_batch_max": 4, "leases_per_session_max": 6, "candidates_max": 3, "tokens_max": 1_000, "pins_max": 1}
HALF = DomainId("\ud800")  # half a character, as JSON can name it
LONG = b"n" * 10_000


def world() -> World:
    """One live lease that published two blocks of three, one that drains, one that is over, a pin; a host tier."""
    here = World(settings(**LIMITS))
    message = registration(num_blocks=32)
    here.register(replace(message, num_host_blocks=8, host_generations=bytes(64), host_seals=bytes(128)))
    here.session = here.attach()
    here.granted(1, tokens(12))
    here.publish(1, 0, tokens(8))
    here.granted(2, tokens(8, 100))
    here.do(Abandon(lease_id(2)))
    here.fill(3, tokens(8, 200))
    here.core.pin("system", ALICE, NAMESPACE, tokens(8, 200), here.now_ns)
    here.collect()
    return here


NEW = Acquire(lease_id(9), ALICE, NAMESPACE, tokens(8), 9, (Candidate(W, 0),))
OPS: dict[str, tuple[Any, type[Answer]]] = {
    "acquire: tokens are cut": (replace(NEW, tokens=tokens(8)[:-1]), Invalid),
    "acquire: no tokens": (replace(NEW, tokens=b""), Invalid),
    "acquire: reserves less than it has": (replace(NEW, reserve_tokens=7), Invalid),
    "acquire: reserves a negative number": (replace(NEW, reserve_tokens=-1), Invalid),
    "acquire: reserves beyond the limit": (replace(NEW, reserve_tokens=1_001), Invalid),
    "acquire: reserves 2**80": (replace(NEW, reserve_tokens=1 << 80), Invalid),
    "acquire: reserves more than the pool": (replace(NEW, reserve_tokens=1_000), NoCapacity),
    "acquire: lease id of 15 bytes": (replace(NEW, lease_id=LeaseId(bytes(15))), Invalid),
    "acquire: empty lease id": (replace(NEW, lease_id=LeaseId(b"")), Invalid),
    "acquire: empty domain": (replace(NEW, domain=DomainId("")), Invalid),
    "acquire: reserved domain": (replace(NEW, domain=DomainId("\0unknown")), Invalid),
    "acquire: half a character": (replace(NEW, domain=HALF), Invalid),
    "acquire: namespace of 10 kB": (replace(NEW, namespace=Namespace(LONG)), Invalid),
    "acquire: domain of 10 kB": (replace(NEW, domain=DomainId(LONG.decode())), Invalid),
    "acquire: no candidates": (replace(NEW, candidates=()), NoCapacity),
    "acquire: unknown candidate": (replace(NEW, candidates=(Candidate(WorkerId("x"), 0),)), NoCapacity),
    "acquire: four candidates": (replace(NEW, candidates=(Candidate(W, 0),) * 4), Invalid),
    "acquire: negative load": (replace(NEW, candidates=(Candidate(W, -1),)), Invalid),
    "acquire: known id, other domain": (replace(NEW, lease_id=lease_id(1), domain=DomainId("bob")), Invalid),
    "acquire: known id, other namespace": (replace(NEW, lease_id=lease_id(1), namespace=Namespace(b"")), Invalid),
    "acquire: an id that drains": (replace(NEW, lease_id=lease_id(2)), Gone),
    "extend: unknown lease": (Extend(lease_id(77), 9), Gone),
    "extend: a lease that is over": (Extend(lease_id(3), 9), Gone),
    "extend: a lease that drains": (Extend(lease_id(2), 9), Gone),
    "extend: negative": (Extend(lease_id(1), -5), Invalid),
    "extend: nothing": (Extend(lease_id(1), 0), Invalid),
    "extend: 2**80": (Extend(lease_id(1), 1 << 80), Invalid),
    "extend: more than the pool": (Extend(lease_id(1), 999), NoCapacity),
    "publish: unknown lease": (Publish(lease_id(77), 0, tokens(4)), Gone),
    "publish: a lease that drains": (Publish(lease_id(2), 0, tokens(4)), Gone),
    "publish: part of a block": (Publish(lease_id(1), 2, tokens(3)), Invalid),
    "publish: part of a token": (Publish(lease_id(1), 2, tokens(4)[:-1]), Invalid),
    "publish: nothing": (Publish(lease_id(1), 2, b""), Invalid),
    "publish: a gap": (Publish(lease_id(1), 3, tokens(4)), Invalid),
    "publish: negative block": (Publish(lease_id(1), -1, tokens(4)), Invalid),
    "publish: block 2**80": (Publish(lease_id(1), 1 << 80, tokens(4)), Invalid),
    "publish: more than it owns": (Publish(lease_id(1), 2, tokens(8)), Invalid),
    "publish: more than the limit": (Publish(lease_id(1), 2, tokens(1_004)), Invalid),
    "publish: other tokens again": (Publish(lease_id(1), 0, tokens(8, 500)), Invalid),
    "distrust: unknown lease": (Distrust(lease_id(77), bytes(8)), Distrusted),
    "distrust: handles are cut": (Distrust(lease_id(1), bytes(7)), Invalid),
    "distrust: handles of another path": (Distrust(lease_id(1), b"\xff" * 800), Distrusted),
    "release: unknown lease": (Release(lease_id(77)), Released),
    "release: a lease that drains": (Release(lease_id(2)), Released),
    "release: lease id of 17 bytes": (Release(LeaseId(bytes(17))), Invalid),
    "abandon: a lease that is over": (Abandon(lease_id(3)), Released),
    "retain: unknown lease": (Retain(lease_id(77), 0, 4, 1, 1), Gone),
    "retain: an empty range": (Retain(lease_id(1), 4, 4, 1, 1), Invalid),
    "retain: a negative range": (Retain(lease_id(1), -4, 4, 1, 1), Invalid),
    "retain: priority 101": (Retain(lease_id(1), 0, 4, 101, 1), Invalid),
    "retain: negative priority": (Retain(lease_id(1), 0, 4, -1, 1), Invalid),
}


@pytest.mark.parametrize(("op", "expected"), OPS.values(), ids=OPS)
def test_ops(op: Any, expected: type[Answer]) -> None:
    here = world()
    before = fingerprint(here.core)
    answer = here.do(op)
    assert isinstance(answer, expected), answer
    assert fingerprint(here.core) == before
    assert not isinstance(answer, Invalid) or len(answer.message) > 10


def test_a_candidate_named_twice_is_one_candidate() -> None:
    here = world()
    assert isinstance(here.do(replace(NEW, candidates=(Candidate(W, 0), Candidate(W, 5)))), Grant)
    assert here.core.stats().leases == 2


CLAIM = LeaseClaim(lease_id(50), ALICE, NAMESPACE, W, WorkerEpoch(1), b"", b"", b"")
QUERY = MatchQuery(ALICE, NAMESPACE, tokens(8))
MESSAGES: dict[str, Any] = {
    "batch of five": OpBatch((Release(lease_id(77)),) * 5),
    "five queries": MatchQueries((QUERY,) * 5),
    "a query that is cut": MatchQueries((QUERY, replace(QUERY, tokens=tokens(8)[:-1]))),
    "a query beyond the limit": MatchQueries((replace(QUERY, tokens=tokens(1_001)),)),
    "seven leases": LeaseSet((lease_id(1),) * 7),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_messages_of_clients(message: Any) -> None:
    here = world()
    before = fingerprint(here.core)
    with pytest.raises(MessageRefused):
        here.core.receive_client(here.session, message, here.now_ns)
    assert fingerprint(here.core) == before
    here.collect()


@pytest.mark.parametrize(
    "claim", [CLAIM, replace(CLAIM, owned=bytes(7)), replace(CLAIM, worker_id=WorkerId("x" * 9_000))]
)
@pytest.mark.parametrize("name", [LeaseId(b""), lease_id(1), lease_id(50)])
def test_claims_that_cannot_be_are_refused(claim: LeaseClaim, name: LeaseId) -> None:
    here = world()
    before = fingerprint(here.core)
    here.core.receive_client(here.session, Reattach((replace(claim, lease_id=name),)), here.now_ns)
    here.collect()
    assert fingerprint(here.core) == before


NEXT = replace(registration(WorkerId("v")), num_host_blocks=2, host_generations=bytes(16), host_seals=bytes(32))
REGISTRATIONS: dict[str, Register] = {
    "no blocks": replace(NEXT, num_blocks=0),
    "negative blocks": replace(NEXT, num_blocks=-1),
    "2**40 blocks": replace(NEXT, num_blocks=1 << 40),
    "short generations": replace(NEXT, generations=bytes(8 * 15)),
    "generations that are cut": replace(NEXT, generations=bytes(8 * 16 - 1)),
    "short seals": replace(NEXT, seals=bytes(16 * 15)),
    "a generation of 41 bits": replace(NEXT, generations=bytes(8 * 15) + (1 << 40).to_bytes(8, "little")),
    "block size 0": replace(NEXT, block_size=0),
    "block size 2**20": replace(NEXT, block_size=1 << 20),
    "another worker's name": replace(NEXT, worker_id=W),
    "no name": replace(NEXT, worker_id=WorkerId("")),
    "address of 10 kB": replace(NEXT, address=LONG.decode()),
    "namespace of 10 kB": replace(NEXT, namespace=Namespace(LONG)),
    "5,000 scheduler epochs": replace(NEXT, scheduler_epochs=tuple(SchedulerEpoch(n) for n in range(5_000))),
    "negative host blocks": replace(NEXT, num_host_blocks=-1),
    "host arrays without host blocks": replace(NEXT, num_host_blocks=0),
    "short host generations": replace(NEXT, host_generations=bytes(8)),
    "short host seals": replace(NEXT, host_seals=bytes(31)),
    "host seals alone": replace(NEXT, host_generations=b""),
    "a host generation of 41 bits": replace(NEXT, host_generations=bytes(8) + (1 << 40).to_bytes(8, "little")),
}


@pytest.mark.parametrize("message", REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_registrations(message: Register) -> None:
    here = world()
    before = fingerprint(here.core)
    with pytest.raises(MessageRefused):
        here.core.receive_worker(WorkerId("v"), message, here.now_ns)
    assert fingerprint(here.core) == before
    assert here.collect() == []


WORDS_OF_WORKERS: dict[str, Any] = {
    "an unknown fence": FenceAck(999, WorkerEpoch((1 << 32) + 1)),
    "a fence of another epoch": FenceAck(1, WorkerEpoch(5)),
    "copies that nobody ordered": CopiesDone(WorkerEpoch((1 << 32) + 1), (1, 2, -3), (1 << 70,)),
    "copies of another epoch": CopiesDone(WorkerEpoch(5), (1,)),
    "draining of another epoch": Draining(WorkerEpoch(5)),
}


@pytest.mark.parametrize("message", WORDS_OF_WORKERS.values(), ids=WORDS_OF_WORKERS)
@pytest.mark.parametrize("worker_id", [W, WorkerId("nobody"), WorkerId("")])
def test_words_of_workers_that_mean_nothing(message: Any, worker_id: WorkerId) -> None:
    here = world()
    before = fingerprint(here.core)
    here.core.receive_worker(worker_id, message, here.now_ns)
    here.collect()
    assert fingerprint(here.core) == before


OPERATORS: dict[str, Callable[[World], object]] = {
    "pin without a name": lambda w: w.core.pin("", ALICE, NAMESPACE, tokens(4), w.now_ns),
    "pin with a long name": lambda w: w.core.pin("p" * 129, ALICE, NAMESPACE, tokens(4), w.now_ns),
    "pin with half a character": lambda w: w.core.pin("\ud800", ALICE, NAMESPACE, tokens(4), w.now_ns),
    "pin of half a character's domain": lambda w: w.core.pin("p", HALF, NAMESPACE, tokens(4), w.now_ns),
    "pin of nothing": lambda w: w.core.pin("p", ALICE, NAMESPACE, b"", w.now_ns),
    "pin that is cut": lambda w: w.core.pin("p", ALICE, NAMESPACE, tokens(4)[:-1], w.now_ns),
    "pin that is too long": lambda w: w.core.pin("p", ALICE, NAMESPACE, tokens(1_001), w.now_ns),
    "pin too many": lambda w: w.core.pin("p", ALICE, NAMESPACE, tokens(4), w.now_ns),
    "pin of other tokens": lambda w: w.core.pin("system", ALICE, NAMESPACE, tokens(4), w.now_ns),
    "prefix without a domain": lambda w: w.core.invalidate(now_ns=0, namespace=NAMESPACE, tokens=tokens(4)),
    "prefix without a namespace": lambda w: w.core.invalidate(now_ns=0, domain=ALICE, tokens=tokens(4)),
    "prefix that is cut": lambda w: w.core.invalidate(now_ns=0, domain=ALICE, namespace=NAMESPACE, tokens=bytes(5)),
    "prefix of nothing": lambda w: w.core.invalidate(now_ns=0, domain=ALICE, namespace=NAMESPACE, tokens=b""),
    "half a domain": lambda w: w.core.invalidate(now_ns=0, domain=HALF),
}


@pytest.mark.parametrize("ask", OPERATORS.values(), ids=OPERATORS)
def test_operators(ask: Callable[[World], object]) -> None:
    here = world()
    before = fingerprint(here.core)
    with pytest.raises(MessageRefused):
        ask(here)
    assert fingerprint(here.core) == before
    here.collect()


@pytest.mark.parametrize("epoch", [2, 3, 0xFFFE])
def test_a_window_is_not_closed_with_generations_of_the_future(epoch: int) -> None:
    """They could never be granted again; the worker registers anew, and calls for a later incarnation."""
    here = World(epoch=2)
    old, future = (((number << 24) + 1).to_bytes(8, "little") * 4 for number in (1, epoch))
    here.register(registration(num_blocks=4, epoch=(1 << 32) + 1, highest=1, generations=old))
    here.tick(here.core.state.settings.session_ttl_ms)
    (fence,) = here.fences()
    before = fingerprint(here.core)
    with pytest.raises(MessageRefused):
        here.ack(fence, generations=future, seals=bytes(64))
    assert fingerprint(here.core) == before
    here.ack(fence, generations=old, seals=bytes(64))
    here.session = here.attach()
    assert isinstance(here.acquire(1, tokens(8)), Grant)
