"""Block time of one pool: blocks times the nanoseconds for which they were held, guaranteed, borrowed, lent or free.

A number of blocks that changes by d1 at t1 and by d2 at t2 has, until t, the block time

    number * t - (d1 * t1 + d2 * t2)
                  '---- moment ----'

so a change costs one product and one sum, and between changes nothing runs. All of it is whole numbers: the block time
of all domains, of what nobody has claimed yet and of free blocks is that of the pool, exactly (I1).

    a block changes its state --> the account is touched, once --> time goes on, or somebody asks --> it is settled

    pool | unguaranteed          | guarantee of A          | guarantee of B     |
    held | borrowed by B ..................|      | A's     | B's                |
                                  '-- lent '-free-'

borrowed   what a domain holds beyond its guarantee
idle       what a domain does not hold of a guarantee that others may borrow; a strict domain has none
lent       the part of idle guarantees that is borrowed: all that is borrowed and does not fit into what nobody is
           guaranteed. Blocks have no place in a guarantee, so each lender has lent in proportion to what it had idle.
           `_share` is the block time lent per idle block since the pool began, in units of 2^-64 ns; with it a change
           costs the same with one lender or ten thousand. It is rounded down, so the sum over domains may be too low
           by some nanoseconds; nothing that is exact depends on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coppice.ids import DomainId
from coppice_cache.core.base.statements import OTHER_DOMAINS, DomainStatement, PoolTime

if TYPE_CHECKING:
    from coppice_cache.core.pool.quotas import Account

CLOSED_MAX = 4_096  # domains whose block time is kept by name after they were forgotten; further ones are one sum
STEP_NS = 1_000_000  # ops that come closer together count as if they came at once
_SHARE_BITS = 64


class CallTime:
    """When the call was made that the core is in. It never goes back: calls may come a little out of order.

    Before it goes on, whatever was touched since is counted, once, however often it has changed. So that many ops share
    that work, they may move time on in steps of a millisecond: a change then counts by so much too early at most.
    """

    __slots__ = ("_touched", "now_ns")

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns
        self._touched: list[tuple[BlockTime, Account]] = []

    def advance(self, now_ns: int) -> None:
        if now_ns > self.now_ns:
            self.settle()
            self.now_ns = now_ns

    def advance_in_steps(self, now_ns: int) -> None:
        if now_ns - self.now_ns >= STEP_NS:
            self.settle()
            self.now_ns = now_ns

    def touch(self, block_time: BlockTime, account: Account) -> None:
        """Blocks of this account change state. Only for one that is not marked as touched."""
        account.is_touched = True
        self._touched.append((block_time, account))

    def settle(self) -> None:
        """Count what was touched as it is now."""
        touched, self._touched = self._touched, []
        for block_time, account in touched:
            account.is_touched = False
            block_time.settle(account)


class DomainTime:
    """Of one account: its numbers of blocks when it was last settled, and their moments until then."""

    __slots__ = (
        "borrowed",
        "borrowed_moment",
        "cached",
        "cached_moment",
        "draining",
        "draining_moment",
        "guaranteed",
        "guaranteed_moment",
        "held",
        "held_moment",
        "idle",
        "lent",
        "lent_from",
        "may_borrow",
    )

    def __init__(self) -> None:
        self.held = self.held_moment = 0
        self.cached = self.cached_moment = 0
        self.draining = self.draining_moment = 0
        self.guaranteed = self.guaranteed_moment = 0
        self.borrowed = self.borrowed_moment = 0
        self.idle = 0
        self.lent = 0  # in units of 2^-64 ns, until the pool's share was `lent_from`
        self.lent_from = 0
        self.may_borrow = True  # False of what nobody has claimed: whose guarantee it is in is not known


class ClosedDomains:
    """Sums of what is over, of accounts that were forgotten or worker epochs that are dead. At most so many by name."""

    def __init__(self, domains_max: int = CLOSED_MAX) -> None:
        self.by_domain: dict[DomainId, DomainStatement] = {}
        self._domains_max = domains_max

    def add(self, found: DomainStatement) -> None:
        domain = found.domain
        if domain not in self.by_domain and len(self.by_domain) >= self._domains_max:
            domain = OTHER_DOMAINS
        before = self.by_domain.get(domain)
        self.by_domain[domain] = found.named(domain) if before is None else before.plus(found)


class BlockTime:
    """Of one pool, from its registration on. `counts` are the ledger's, by state."""

    __slots__ = (
        "_counts",
        "_free",
        "_rate",
        "_share",
        "_share_ns",
        "began_ns",
        "borrowed",
        "call_time",
        "closed",
        "free_moment",
        "idle",
        "num_blocks",
        "unguaranteed",
    )

    def __init__(self, counts: list[int], call_time: CallTime) -> None:
        self.call_time = call_time
        self.num_blocks = self.unguaranteed = self._free = sum(counts)
        self.began_ns = call_time.now_ns
        self.free_moment = self.num_blocks * self.began_ns
        self.borrowed = 0
        self.idle = 0
        self.closed = ClosedDomains()
        self._counts = counts
        self._share = 0
        self._share_ns = self.began_ns  # when `_share` was brought up to date
        self._rate = 0  # by which `_share` grows per nanosecond: of idle blocks, the part that is lent

    # changes

    def settle(self, account: Account) -> None:
        """From now on the account and the pool have so many blocks as the ledger says."""
        record, now_ns = account.time, self.call_time.now_ns
        free, cached, draining = self._counts[0], account.cached, account.draining
        held = account.leased + cached + draining
        if free != self._free:
            self.free_moment += (free - self._free) * now_ns
            self._free = free
        if cached != record.cached:
            record.cached_moment += (cached - record.cached) * now_ns
            record.cached = cached
        if draining != record.draining:
            record.draining_moment += (draining - record.draining) * now_ns
            record.draining = draining
        if held != record.held:
            record.held_moment += (held - record.held) * now_ns
            record.held = held
        borrowed = max(0, held - account.guarantee) if record.may_borrow else 0
        if borrowed != record.borrowed:
            record.borrowed_moment += (borrowed - record.borrowed) * now_ns
            self.borrowed += borrowed - record.borrowed
            record.borrowed = borrowed
        if self.idle or record.guaranteed:
            self._lend(account)

    def shares_changed(self, account: Account) -> None:
        """The domain is new here, or has another guarantee or mode."""
        record = account.time
        change = account.guarantee - record.guaranteed
        record.guaranteed += change
        record.guaranteed_moment += change * self.call_time.now_ns
        self.unguaranteed -= change
        self.settle(account)
        self._lend(account)

    def _lend(self, account: Account) -> None:
        """Bring the share up to now, and go on at the rate of the numbers as they are now."""
        record, now_ns = account.time, self.call_time.now_ns
        if self._rate:
            self._share += (now_ns - self._share_ns) * self._rate
        self._share_ns = now_ns
        idle = 0 if account.is_strict else max(0, record.guaranteed - record.held)
        if idle != record.idle:
            record.lent += record.idle * (self._share - record.lent_from)
            record.lent_from = self._share
            self.idle += idle - record.idle
            record.idle = idle
        lent = self.borrowed - self.unguaranteed
        if lent <= 0:
            self._rate = 0
        elif lent < self.idle:
            self._rate = (lent << _SHARE_BITS) // self.idle
        else:
            self._rate = 1 << _SHARE_BITS

    def close(self, account: Account) -> None:
        """The account is forgotten: it holds nothing and is guaranteed nothing."""
        assert account.held == account.time.guaranteed == 0
        self.settle(account)
        self.closed.add(self.of(account, self.call_time.now_ns))

    # questions

    def of(self, account: Account, now_ns: int) -> DomainStatement:
        """Until `now_ns`, which is not before the last call. Settle first."""
        record = account.time
        held = record.held * now_ns - record.held_moment
        cached = record.cached * now_ns - record.cached_moment
        draining = record.draining * now_ns - record.draining_moment
        share = self._share + (now_ns - self._share_ns) * self._rate
        lent = record.lent + record.idle * (share - record.lent_from)
        return DomainStatement(
            domain=account.config.domain,
            guaranteed_block_ns=record.guaranteed * now_ns - record.guaranteed_moment,
            leased_block_ns=held - cached - draining,
            cached_block_ns=cached,
            draining_block_ns=draining,
            borrowed_block_ns=record.borrowed * now_ns - record.borrowed_moment,
            lent_block_ns=(lent + (1 << _SHARE_BITS - 1)) >> _SHARE_BITS,
            evicted_blocks=account.evicted_blocks,
            displaced_blocks=account.displaced_blocks,
            displaced_others_blocks=account.displaced_others_blocks,
        )

    def pool(self, unknown: Account, now_ns: int) -> PoolTime:
        """`unknown` has the blocks of before a restart that nobody has claimed yet. Settle first."""
        return PoolTime(
            pool_block_ns=self.num_blocks * (now_ns - self.began_ns),
            free_block_ns=self._free * now_ns - self.free_moment,
            unclaimed_block_ns=self.of(unknown, now_ns).held_block_ns,
        )
