"""Single flight: a prefix that a live lease is about to compute is not computed a second time by its own domain.

    tree      root --- [a b c]                   what is published so far
    leader               `- d e f g              its own blocks: what it will publish, from its prompt
    asker     a b c d e f x y                    matches [a b c]; d e f is on its way: Pending(3 blocks)

A flight stands under the node where its leader's pin is and the bytes of the block that the leader writes next. A
walk that ends at that node, whole, and goes on with that block has found it. Each publication of the leader moves the
pin, and the flight with it.

The one who waits holds nothing. It is woken when the leader has published all that they share, or has nothing more to
give. When the leader ends early one waiter is woken, and the others wait for it to become the leader: they are
`strays` under the key of the flight that is over, adopted by the next grant under that key, or woken when their time
is over and nobody came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coppice.ids import DomainId, LeaseId, Namespace, SchedulerEpoch
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.radix.tree import MatchPosition, Node, Tree, common_run

# Where the leader's pin is, and the block that comes next. A root stands by its name: an empty tree is forgotten with
# its last lease, while those who waited for that lease go on waiting.
TreeName = tuple[DomainId, Namespace]
FlightKey = tuple[Node | TreeName, bytes]
WaiterKey = tuple[SchedulerEpoch, LeaseId]


@dataclass(slots=True, eq=False)
class Waiter:
    """Somebody who was answered with Pending."""

    epoch: SchedulerEpoch
    lease_id: LeaseId
    num_blocks: int  # from the root, that it will share with the leader
    num_tokens: int  # that it was told to expect beyond its match, when it asked
    flight: Flight | None
    key: FlightKey
    wake_ns: int  # woken by then at the latest

    @property
    def name(self) -> WaiterKey:
        return self.epoch, self.lease_id


@dataclass(slots=True, eq=False)
class Flight:
    """One leader. `tokens` are its prompt, as its acquire named it, with `num_blocks` whole blocks to publish.

    `delivers` is asked before anybody waits: what was invalidated meanwhile, here or where a copy reads it, will not be
    found.
    """

    lease: Lease
    tokens: bytes
    num_blocks: int
    key: FlightKey
    delivers: Callable[[], bool]
    waiters: dict[WaiterKey, Waiter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Coming:
    """A flight that an asker could wait for, and how many blocks from the root they share."""

    flight: Flight
    num_blocks: int


class Flights:
    """All flights on one worker. Who is woken is appended to `woken`, which all workers share."""

    def __init__(self, block_bytes: int, woken: list[Waiter]) -> None:
        self._block_bytes = block_bytes
        self._woken = woken
        self._by_key: dict[FlightKey, list[Flight]] = {}
        self._by_lease: dict[int, Flight] = {}
        self._waiters: dict[WaiterKey, Waiter] = {}
        self._strays: dict[FlightKey, dict[WaiterKey, Waiter]] = {}

    def __len__(self) -> int:
        return len(self._by_lease)

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    # ---- leaders

    def start(self, lease: Lease, tokens: bytes, delivers: Callable[[], bool]) -> None:
        """The lease was granted and will publish the whole blocks of `tokens` that follow its match."""
        key = self._key(lease, tokens)
        if key is None:
            return
        flight = Flight(lease, tokens, len(tokens) // self._block_bytes, key, delivers)
        self._by_lease[lease.number] = flight
        self._by_key.setdefault(key, []).append(flight)
        for waiter in self._strays.pop(key, {}).values():
            self._attach(waiter, flight)

    def departs(self, lease: Lease, tokens: bytes) -> bool:
        """Whether these, which follow what it has settled, are others than it was expected to publish."""
        flight = self._by_lease.get(lease.number)
        if flight is None:
            return False
        start, end = lease.num_settled * self._block_bytes, flight.num_blocks * self._block_bytes
        if start + len(tokens) <= end:
            return not flight.tokens.startswith(tokens, start)
        return not tokens.startswith(flight.tokens[start:end])

    def num_blocks(self, lease: Lease) -> int:
        """Whole blocks of its prompt, where not all of them are settled; else 0."""
        flight = self._by_lease.get(lease.number)
        return 0 if flight is None else flight.num_blocks

    def tokens(self, lease: Lease, end: int) -> bytes:
        """Of the blocks of its prompt from those that it has settled up to `end`, of which there are `num_blocks`."""
        if end <= lease.num_settled:
            return b""
        return self._by_lease[lease.number].tokens[lease.num_settled * self._block_bytes : end * self._block_bytes]

    def advance(self, lease: Lease) -> None:
        """The leader published: its pin has moved."""
        flight = self._by_lease.get(lease.number)
        if flight is None:
            return
        self._unlist(flight)
        for waiter in [w for w in flight.waiters.values() if w.num_blocks <= lease.num_settled]:
            self._wake(waiter)
        key = self._key(lease, flight.tokens)
        if key is None:
            del self._by_lease[lease.number]
            for waiter in tuple(flight.waiters.values()):
                self._wake(waiter)
            return
        flight.key = key
        self._by_key.setdefault(key, []).append(flight)

    def end(self, lease: Lease) -> None:
        """The leader is over, or will publish nothing more. One of those who wait is woken."""
        flight = self._by_lease.pop(lease.number, None)
        if flight is None:
            return
        self._unlist(flight)
        waiting = tuple(flight.waiters.values())
        if not waiting:
            return
        self._wake(waiting[0])
        for waiter in waiting[1:]:
            waiter.flight, waiter.key = None, flight.key
            self._strays.setdefault(flight.key, {})[waiter.name] = waiter

    # ---- those who wait

    def coming(self, position: MatchPosition, tokens: bytes, stop: int) -> Coming | None:
        """The flight that goes furthest along `tokens[:stop]` (whole blocks, from the root) beyond a match's end."""
        start = position.num_blocks * self._block_bytes
        if position.blocks_into != position.node.num_blocks or start >= stop:
            return None
        best: Coming | None = None
        for flight in self._by_key.get((_place(position.node), tokens[start : start + self._block_bytes]), ()):
            if flight.lease.node is not position.node or not flight.delivers():
                continue  # in a tree of that name which was invalidated, or a copy of what was
            further = common_run(tokens, start, stop, flight.tokens[start:], self._block_bytes, least=1)
            shared = position.num_blocks + further
            if best is None or shared > best.num_blocks:
                best = Coming(flight, shared)
        return best

    def still_waits(self, epoch: SchedulerEpoch, lease_id: LeaseId, name: TreeName, tokens: bytes) -> Waiter | None:
        """Who asked for a prompt that goes on as this one does, and whose leader lives."""
        waiter = self._waiters.get((epoch, lease_id))
        if waiter is None or waiter.flight is None or not waiter.flight.delivers():
            return None
        flight = waiter.flight
        same = name == (flight.lease.account.config.domain, flight.lease.namespace)
        shared = flight.tokens[: waiter.num_blocks * self._block_bytes]
        return waiter if same and tokens.startswith(shared) else None

    def wait(self, epoch: SchedulerEpoch, lease_id: LeaseId, coming: Coming, num_tokens: int, wake_ns: int) -> None:
        """Remember who waits. Who waited before keeps its bound."""
        known = self._waiters.get((epoch, lease_id))
        if known is not None:
            wake_ns = min(wake_ns, known.wake_ns)
            self._detach(known)
        for woken in [woken for woken in self._woken if woken.name == (epoch, lease_id)]:
            self._woken.remove(woken)  # earlier in this call, and not told: it waits on, until its bound
            wake_ns = min(wake_ns, woken.wake_ns)
        waiter = Waiter(epoch, lease_id, coming.num_blocks, num_tokens, coming.flight, coming.flight.key, wake_ns)
        self._waiters[waiter.name] = waiter
        coming.flight.waiters[waiter.name] = waiter

    def bound_ns(self, epoch: SchedulerEpoch, lease_id: LeaseId) -> int | None:
        """When it is woken at the latest; None when it does not wait here."""
        waiter = self._waiters.get((epoch, lease_id))
        return None if waiter is None else waiter.wake_ns

    def forget(self, epoch: SchedulerEpoch, lease_id: LeaseId) -> None:
        """It asks again, or never will."""
        waiter = self._waiters.get((epoch, lease_id))
        if waiter is not None:
            self._detach(waiter)

    def tick(self, now_ns: int) -> set[int]:
        """Wake who waited long enough: the bound on waiting, whatever became of the leader. Returns for whom."""
        late = [waiter for waiter in self._waiters.values() if waiter.wake_ns <= now_ns]
        leaders = {waiter.flight.lease.number for waiter in late if waiter.flight is not None}
        for waiter in late:
            self._wake(waiter)
        return leaders

    def wake_all(self) -> None:
        """The worker is gone and all leaders with it, or it takes no new lease."""
        for waiter in tuple(self._waiters.values()):
            self._wake(waiter)

    # ---- books

    def _key(self, lease: Lease, tokens: bytes) -> FlightKey | None:
        """None when nothing of the prompt is left to publish."""
        start = lease.num_settled * self._block_bytes
        block = tokens[start : start + self._block_bytes]
        return (_place(lease.node), block) if len(block) == self._block_bytes else None

    def _unlist(self, flight: Flight) -> None:
        flights = self._by_key[flight.key]
        flights.remove(flight)
        if not flights:
            del self._by_key[flight.key]

    def _attach(self, waiter: Waiter, flight: Flight) -> None:
        waiter.flight = flight
        waiter.num_blocks = min(waiter.num_blocks, flight.num_blocks)
        flight.waiters[waiter.name] = waiter

    def _detach(self, waiter: Waiter) -> None:
        del self._waiters[waiter.name]
        if waiter.flight is not None:
            waiter.flight.waiters.pop(waiter.name, None)
            return
        strays = self._strays[waiter.key]
        strays.pop(waiter.name, None)
        if not strays:
            del self._strays[waiter.key]

    def _wake(self, waiter: Waiter) -> None:
        self._detach(waiter)
        self._woken.append(waiter)

    def leaders(self) -> tuple[int, ...]:
        """Numbers of the leases that somebody may wait for."""
        return tuple(self._by_lease)

    def check(self) -> tuple[WaiterKey, ...]:
        """Assert that the books agree with each other and with the leaders' pins; returns who waits."""
        listed = {id(flight) for flights in self._by_key.values() for flight in flights}
        assert listed == {id(flight) for flight in self._by_lease.values()}
        waiting = {id(waiter) for waiter in self._waiters.values()}
        found = [waiter for flight in self._by_lease.values() for waiter in flight.waiters.values()]
        found += [waiter for strays in self._strays.values() for waiter in strays.values()]
        assert waiting == {id(waiter) for waiter in found}, "somebody waits for nothing"
        assert len(found) == len(waiting)
        for flight in self._by_lease.values():
            assert flight.key == self._key(flight.lease, flight.tokens), "a flight is not where its leader's pin is"
        return tuple(self._waiters)


def _place(node: Node) -> Node | TreeName:
    return (node.domain, node.namespace) if isinstance(node, Tree) else node
