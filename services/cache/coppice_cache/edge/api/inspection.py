"""What operators ask of a service and tell it, whatever they came by: checked here, once for REST and gRPC.

Whoever reaches the cache's ports may ask: they are internal, like those of Redis. The ports have no credentials, so
what changes something (invalidate, pin, unpin) must not be reachable from a browser that was led here by a foreign
page: see `inspection_http`.
"""

from __future__ import annotations

from coppice.ids import DomainId, Namespace, WorkerId
from coppice_cache.core.base.results import Explanation, IndexStats, PinView, TreeDump
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

    def explain(self, domain: str, namespace: bytes, tokens: bytes) -> tuple[Explanation, ...]:
        """An empty namespace stands for all that the domain has trees in."""
        self._require_domain(domain)
        with self._service.looking() as core:
            return core.explain(DomainId(domain), Namespace(namespace) if namespace else None, tokens)

    def audit(self) -> AuditReport:
        """Raises AuditRunning, AuditStopped."""
        return self._service.auditor.run()

    def invalidate(self, domain: str, namespace: bytes, tokens: bytes | None) -> int:
        """How many trees lost something that could be found. Empty names stand for all."""
        if domain:
            self._require_domain(domain)
        with self._service.entered() as core:
            return core.invalidate(
                now_ns=self._service.now_ns(),
                domain=DomainId(domain) if domain else None,
                namespace=Namespace(namespace) if namespace else None,
                tokens=tokens,
            )

    def pin(self, name: str, domain: str, namespace: bytes, tokens: bytes) -> tuple[int, int]:
        """Tokens that are held now on the worker that has most, and how many workers hold some.

        The domain need not be in use yet.
        """
        with self._service.entered() as core:
            num_tokens = core.pin(name, DomainId(domain), Namespace(namespace), tokens, self._service.now_ns())
            num_workers = sum(view.name == name and view.num_tokens > 0 for view in core.pins())
        return num_tokens, num_workers

    def unpin(self, name: str) -> bool:
        with self._service.entered() as core:
            return core.unpin(name, self._service.now_ns())

    def pins(self) -> tuple[PinView, ...]:
        with self._service.looking() as core:
            return core.pins()

    def _require_domain(self, domain: str) -> None:
        """Known is what is configured, and what has blocks or trees."""
        with self._service.looking() as core:
            known = any(domain in worker.quotas.accounts for worker in core.state.workers.values())
        if not known and all(config.domain != domain for config in self._service.settings.domains):
            raise NotThere(f"no domain {domain!r} is configured or in use", "domain_not_found")
