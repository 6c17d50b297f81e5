"""What a prompt finds on each worker, why not more, and who holds it: for people."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.ids import TOKEN_BYTES, DomainId, LeaseId, Namespace
from coppice.namespaces import salt_of
from coppice_cache.core.base.errors import MessageRefused, OpRefused
from coppice_cache.core.base.results import Explanation, StoppedBy
from coppice_cache.core.base.settings import DomainConfig, Mode
from coppice_cache.core.inspection.tree_pages import first_seal
from coppice_cache.core.ops.offload import match_below
from coppice_cache.core.ops.partial_copy import source_of
from coppice_cache.core.ops.waits import matchable_bytes
from coppice_cache.core.radix.tree import MatchPosition, Node, Tree, path, walk
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import Worker

LEASES_MAX = 64  # named in an answer
_LEASES_ASKED_MAX = 4_096
_NODES_MAX = 1_024  # of a path


def explain(state: State, domain: DomainId, namespace: Namespace | None, tokens: bytes) -> tuple[Explanation, ...]:
    """One for each worker and namespace; None: every namespace without a salt in which the domain has a tree there."""
    num_tokens = len(tokens) // TOKEN_BYTES
    if len(tokens) % TOKEN_BYTES or not 0 < num_tokens <= state.settings.tokens_max:
        most = state.settings.tokens_max
        raise MessageRefused(f"tokens have {len(tokens)} bytes; they must be packed u32, 1 to {most} of them")
    try:
        config = state.domains.config(domain)
    except OpRefused as refused:
        raise MessageRefused(str(refused)) from refused
    found: list[Explanation] = []
    for worker in state.workers.values():
        names = [namespace] if namespace is not None else _namespaces(worker, domain)
        found += [_explain(worker, config, name, tokens) for name in names or [worker.namespace]]
    return tuple(found)


def _namespaces(worker: Worker, domain: DomainId) -> list[Namespace]:
    names = (name for (owner, name), tree in worker.trees.items() if owner == domain and worker.is_current(tree))
    return sorted(name for name in names if not salt_of(name))


@dataclass(frozen=True, slots=True)
class _Case:
    worker: Worker
    tokens: bytes
    position: MatchPosition

    @property
    def end(self) -> int:
        """Bytes of the prompt that matched."""
        return self.position.num_blocks * self.worker.block_bytes

    @property
    def next_block(self) -> bytes:
        return self.tokens[self.end : self.end + self.worker.block_bytes]

    @property
    def goes_on(self) -> bool:
        """Whether anything is cached behind the end of the match."""
        return self.position.blocks_into < self.position.node.num_blocks or bool(self.position.node.children)


def _explain(worker: Worker, config: DomainConfig, namespace: Namespace, tokens: bytes) -> Explanation:
    tree = worker.find_tree(config.domain, namespace)
    if config.mode is Mode.DISABLED:
        why = f"nothing of {config.domain!r} is ever cached: it is a disabled domain."
        return Explanation(worker.worker_id, namespace, 0, StoppedBy.NO_TREE, why)
    if tree is None:
        why = f"nothing of {config.domain!r} is cached here in this namespace."
        return Explanation(
            worker.worker_id, namespace, 0, StoppedBy.NO_TREE, why + _below(worker, config, namespace, tokens, 0)
        )
    position = walk(tree, tokens, worker.block_bytes, matchable_bytes(tokens, worker.block_bytes))
    case = _Case(worker, tokens, position)
    partial, copied = _partial_tokens(case), _copied_tokens(case)
    pending = _pending_tokens(case)
    stopped_by = _stopped_by(case, partial, pending)
    count = position.num_blocks * worker.block_size
    sentence = _sentence(case, stopped_by, partial, copied, pending) + _below(
        worker, config, namespace, tokens, position.num_blocks
    )
    return Explanation(
        worker_id=worker.worker_id,
        namespace=namespace,
        num_cached_tokens=count,
        stopped_by=stopped_by,
        sentence=sentence,
        partial_tokens=partial,
        pending_tokens=pending,
        lease_ids=_holders(worker, position.node, tree),
        path=tuple(first_seal(worker, node) for node in path(position.node)[:_NODES_MAX]),
    )


def _partial_tokens(case: _Case) -> int:
    found = case.worker.child_orders.find(case.position, case.next_block, case.worker.block_bytes)
    return found.num_tokens if found is not None else 0


def _copied_tokens(case: _Case) -> int:
    found = source_of(case.worker, case.tokens, case.position)
    return found.num_tokens if found is not None else 0


def _pending_tokens(case: _Case) -> int:
    """What live leases will publish of the whole blocks that follow."""
    stop = matchable_bytes(case.tokens, case.worker.block_bytes)
    coming = case.worker.flights.coming(case.position, case.tokens, stop)
    return (coming.num_blocks - case.position.num_blocks) * case.worker.block_size if coming is not None else 0


def _stopped_by(case: _Case, partial: int, pending: int) -> StoppedBy:
    if not case.worker.is_open:
        return StoppedBy.NOT_OPEN
    if len(case.tokens) - case.end < case.worker.block_bytes:
        left = (len(case.tokens) - case.end) // TOKEN_BYTES
        return StoppedBy.PARTIAL_BLOCK if partial == left else StoppedBy.END_OF_PROMPT
    if len(case.tokens) - case.end == case.worker.block_bytes and partial == case.worker.block_size:
        return StoppedBy.LAST_TOKEN
    if pending:
        return StoppedBy.PENDING
    return StoppedBy.OTHER_TOKENS if case.goes_on else StoppedBy.NOTHING_CACHED


def _sentence(case: _Case, stopped_by: StoppedBy, partial: int, copied: int, pending: int) -> str:
    size, block = case.worker.block_size, case.position.num_blocks
    num_tokens = len(case.tokens) // TOKEN_BYTES
    left = num_tokens - block * size
    agree = f"{partial} of its {size} tokens agree" if partial else "not one of its tokens agrees at the beginning"
    use = f", {copied} are copied" if copied else ", too few to be copied" if partial else ""
    begin = f": {partial} of them begin a cached one{use}" if partial else ""
    why = {
        StoppedBy.NOT_OPEN: "the worker's ledger has not opened since the restart, so nothing is granted yet.",
        StoppedBy.END_OF_PROMPT: f"the last {left} fill no block of {size}{begin}.",
        StoppedBy.PARTIAL_BLOCK: f"the last {left} are the beginning of a cached block{use}.",
        StoppedBy.LAST_TOKEN: "the last block is cached too, but the last token is always computed.",
        StoppedBy.PENDING: f"a live lease is computing the next {pending}.",
        StoppedBy.OTHER_TOKENS: f"in block {block} other tokens are cached: {agree}{use}.",
        StoppedBy.NOTHING_CACHED: "nothing is cached behind them." if block else "nothing is cached.",
    }[stopped_by]
    return f"{block * size} of {num_tokens} tokens are cached; {why}"


def _below(worker: Worker, config: DomainConfig, namespace: Namespace, tokens: bytes, num_blocks: int) -> str:
    stop = matchable_bytes(tokens, worker.block_bytes)
    said = ""
    for name, tier in (("host", worker.host), ("disk", worker.disk)):
        found = match_below(tier, config.domain, namespace, tokens, stop)
        more = (found.num_blocks - num_blocks) * worker.block_size if found is not None else 0
        said += f" The {name} tier has {more} more." if more > 0 else ""
    return said


def _holders(worker: Worker, end: Node, tree: Tree) -> tuple[LeaseId, ...]:
    """Leases whose pin is at `end` or below it. A root holds nothing."""
    if end is tree or not end.guards:
        return ()
    held: list[LeaseId] = []
    for number, lease in enumerate(worker.leases.values()):
        if len(held) == LEASES_MAX or number == _LEASES_ASKED_MAX:
            break
        if lease.tree is tree and _is_below(lease.node, end):
            held.append(lease.lease_id)
    return tuple(held)


def _is_below(node: Node, end: Node) -> bool:
    at: Node | None = node
    while at is not None:
        if at is end:
            return True
        at = at.parent
    return False
