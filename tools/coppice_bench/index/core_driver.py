"""Drives an `IndexCore` through its public API, one worker and one session, with leases that count up."""

from __future__ import annotations

from coppice.errors import CoppiceError
from coppice.ids import TOKEN_BYTES, CacheEpoch, DomainId, LeaseId, SchedulerEpoch
from coppice.messages.index import Acquire, Answer, Candidate, Grant, Op, Publish, Published, Release
from coppice_bench.rpc.client import NAMESPACE, WORKER, registration
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.index import IndexCore

DOMAIN = DomainId("bench")
_CANDIDATES = (Candidate(WORKER, 0),)
_KEY = b"k" * 32
_STEP_NS = 100_000  # about what an op takes over the wire


class CoreDriver:
    """A core as the service has it, with one open worker of `num_blocks` blocks. Time goes on with every op."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_bytes = block_size * TOKEN_BYTES
        self.now_ns = 1
        settings = CoreSettings(_KEY, default_domain=DomainConfig(DomainId("any")), record_events=True)
        self.core = IndexCore(settings, CacheEpoch(1), self.now_ns)
        self.core.receive_worker(WORKER, registration(num_blocks, block_size), self.now_ns)
        self.session = self.core.attach_client(SchedulerEpoch(0), self.now_ns)
        self.core.take_effects()
        self._num_leases = 0

    def next_lease(self) -> LeaseId:
        self._num_leases += 1
        return LeaseId(self._num_leases.to_bytes(16, "big"))

    def acquire_op(self, tokens: bytes, reserve_tokens: int = 0) -> Acquire:
        reserve_tokens = reserve_tokens or len(tokens) // TOKEN_BYTES
        return Acquire(self.next_lease(), DOMAIN, NAMESPACE, tokens, reserve_tokens, _CANDIDATES)

    def do(self, op: Op) -> Answer:
        self.now_ns += _STEP_NS
        return self.core.execute(self.session, op, self.now_ns)

    def match(self, tokens: bytes) -> int:
        """Tokens."""
        return self.core.match(DOMAIN, NAMESPACE, tokens, WORKER).num_cached_tokens

    def acquire(self, tokens: bytes, reserve_tokens: int = 0) -> LeaseId:
        """Raises CoppiceError when it is not granted: the benchmark asked for too much."""
        op = self.acquire_op(tokens, reserve_tokens)
        answer = self.do(op)
        if not isinstance(answer, Grant):
            raise CoppiceError(f"an acquire of {len(tokens) // TOKEN_BYTES} tokens was answered with {answer}")
        return op.lease_id

    def publish(self, lease_id: LeaseId, tokens: bytes) -> None:
        """All whole blocks of the sequence so far."""
        whole = len(tokens) // self.block_bytes * self.block_bytes
        answer = self.do(Publish(lease_id, 0, tokens[:whole]))
        if not isinstance(answer, Published):
            raise CoppiceError(f"a publication was answered with {answer}")

    def release(self, lease_id: LeaseId) -> None:
        """Takes the events of the ops before, too, as the service does after each."""
        self.do(Release(lease_id))
        self.core.take_events()

    def cache(self, tokens: bytes) -> None:
        """Findable and unpinned afterwards."""
        lease_id = self.acquire(tokens)
        self.publish(lease_id, tokens)
        self.release(lease_id)
