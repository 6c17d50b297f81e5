"""What operators ask of a service and tell it, whatever they came by: checked here, once for REST and gRPC.

Whoever reaches the cache's ports may ask, with TLS whoever has an operator's certificate. A browser may have one, so
what changes something (invalidate, pin, unpin) must not be reachable from a browser that was led here by a foreign
page: see `inspection_http`. What is an act says on its `Act` what it was about, for the audit log.
"""

from __future__ import annotations

from dataclasses import replace

from coppice.audit_log import Act
from coppice.ids import DomainId, Namespace, WorkerId
from coppice_cache.core.base.events import Tier
from coppice_cache.core.base.results import Explanation, IndexStats, PinView, TreeDump
from coppice_cache.core.base.statements import Statement
from coppice_cache.core.inspection.block_map import BlockMap
from coppice_cache.edge.service.auditor import AuditReport
from coppice_cache.edge.service.service import IndexService

DEPTH_DEFAULT, DEPTH_MAX = 8, 64
NODES_DEFAULT, NODES_MAX = 256, 4_096


class NotThere(Exception):
    """A domain or a worker that nobody knows. `code` says which."""

    def __init__(self, what: str, code: str) -> None:
        super().__init__(what)
        self.code = code


class Inspection:
    """Raises MessageRefused for what makes no sense, NotThere for who is unknown."""

    def __init__(self, service: IndexService) -> None:
        self._service = service

    @property
    def cache_epoch(self) -> int:
        return self._service.cache_epoch

    def now_ns(self) -> int:
        return self._service.now_ns()

    def stats(self) -> IndexStats:
        return self._service.stats()

    def statement(self, worker_id: str) -> Statement:
        """Of one worker's pools and without what has ended, or with an empty name of all that there was."""
        found = self._service.statement()
        if not worker_id:
            return found
        pools = tuple(pool for pool in found.pools if pool.worker_id == worker_id)
        if not pools:
            raise NotThere(f"no worker {worker_id!r} is registered", "worker_not_found")
        return replace(found, pools=pools, ended=())

    def block_map(self, worker_id: str, tier: Tier) -> BlockMap:
        with self._service.looking() as core:
            found = core.block_map(WorkerId(worker_id), tier)
        if found is None:
            what = f"no worker {worker_id!r} is registered"
            what += "" if tier is Tier.DEVICE else f" with a {tier.name.lower()} tier"
            raise NotThere(what, "worker_not_found")
        return found

    def tree(self, domain: str, worker_id: str, max_depth: int, limit: int, page_token: str) -> TreeDump:
        """An empty worker stands for all."""
        self._require_domain(domain)
        if worker_id and all(worker.worker_id != worker_id for worker in self._service.list_workers().workers):
            raise NotThere(f"no worker {worker_id!r} is registered", "worker_not_found")
        with self._service.looking() as core:
            return core.tree(
                DomainId(domain),
                max_depth=max_depth,
                limit=limit,
                page_token=page_token,
                worker_id=WorkerId(worker_id) if worker_id else None,
            )

    def explain(self, act: Act, domain: str, namespace: bytes, tokens: bytes) -> tuple[Explanation, ...]:
        """An empty namespace stands for all that the domain has trees in."""
        act.note(domain=domain, namespace=namespace.hex())
        self._require_domain(domain)
        with self._service.looking() as core:
            found = core.explain(DomainId(domain), Namespace(namespace) if namespace else None, tokens)
        act.note(count=len(found))
        return found

    def audit(self, act: Act) -> AuditReport:
        """Raises AuditRunning, AuditStopped."""
        found = self._service.auditor.run()
        act.note(holds=found.holds)
        return found

    def invalidate(self, act: Act, domain: str, namespace: bytes, tokens: bytes | None) -> int:
        """How many trees lost something that could be found. Empty names stand for all."""
        act.note(domain=domain, namespace=namespace.hex(), below_a_prefix=tokens is not None)
        if domain:
            self._require_domain(domain)
        with self._service.entered() as core:
            num_trees = core.invalidate(
                now_ns=self._service.now_ns(),
                domain=DomainId(domain) if domain else None,
                namespace=Namespace(namespace) if namespace else None,
                tokens=tokens,
            )
        act.note(count=num_trees)
        return num_trees

    def pin(self, act: Act, name: str, domain: str, namespace: bytes, tokens: bytes) -> tuple[int, int]:
        """Tokens that are held now on the worker that has most, and how many workers hold some.

        The domain need not be in use yet.
        """
        act.note(name=name, domain=domain, namespace=namespace.hex())
        with self._service.entered() as core:
            num_tokens = core.pin(name, DomainId(domain), Namespace(namespace), tokens, self._service.now_ns())
            num_workers = sum(view.name == name and view.num_tokens > 0 for view in core.pins())
        act.note(count=num_tokens)
        return num_tokens, num_workers

    def unpin(self, act: Act, name: str) -> bool:
        act.note(name=name)
        with self._service.entered() as core:
            was_pinned = core.unpin(name, self._service.now_ns())
        act.note(count=int(was_pinned))
        return was_pinned

    def pins(self) -> tuple[PinView, ...]:
        with self._service.looking() as core:
            return core.pins()

    def _require_domain(self, domain: str) -> None:
        """Known is what is configured, and what has blocks or trees."""
        with self._service.looking() as core:
            known = any(domain in worker.quotas.accounts for worker in core.state.workers.values())
        if not known and all(config.domain != domain for config in self._service.settings.domains):
            raise NotThere(f"no domain {domain!r} is configured or in use", "domain_not_found")
