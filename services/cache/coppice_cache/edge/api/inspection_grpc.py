"""Inspection over gRPC: one function for each unary method of `PrefixIndexAdmin`. Raises what `Inspection` raises."""

from __future__ import annotations

from coppice.audit_log import Act
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.state.state import NS_PER_MS
from coppice_cache.edge.api.inspection import DEPTH_DEFAULT, DEPTH_MAX, NODES_DEFAULT, NODES_MAX, Inspection
from coppice_rpc.v1 import cache_admin_pb2 as pb


def dump_tree(inspection: Inspection, request: pb.DumpTreeRequest) -> pb.DumpTreeResponse:
    max_depth, limit = request.max_depth or DEPTH_DEFAULT, request.limit or NODES_DEFAULT
    if max_depth > DEPTH_MAX or limit > NODES_MAX:
        raise MessageRefused(f"max_depth is at most {DEPTH_MAX}, limit at most {NODES_MAX}")
    dump = inspection.tree(request.domain, request.worker_id, max_depth, limit, request.page_token)
    now_ns = inspection.now_ns()
    nodes = [
        pb.TreeNode(
            worker_id=view.worker_id,
            namespace=view.namespace,
            node=node.node,
            parent=node.parent,
            depth=node.depth,
            first_block=node.first_block,
            num_blocks=node.num_blocks,
            num_pins=node.num_pins,
            num_children=node.num_children,
            idle_ms=max(0, now_ns - node.last_use_ns) // NS_PER_MS if node.depth else 0,
        )
        for view in dump.trees
        for node in view.nodes
    ]
    return pb.DumpTreeResponse(
        cache_epoch=inspection.cache_epoch,
        nodes=nodes,
        next_page_token=dump.next_page_token,
        cut_by_depth=dump.cut_by_depth,
    )


def explain(inspection: Inspection, request: pb.ExplainRequest, act: Act) -> pb.ExplainResponse:
    found = inspection.explain(act, request.domain, request.namespace, request.tokens)
    workers = [
        pb.Explanation(
            worker_id=entry.worker_id,
            namespace=entry.namespace,
            num_cached_tokens=entry.num_cached_tokens,
            stopped_by=entry.stopped_by.value,
            sentence=entry.sentence,
            partial_tokens=entry.partial_tokens,
            pending_tokens=entry.pending_tokens,
            lease_ids=entry.lease_ids,
            path=entry.path,
        )
        for entry in found
    ]
    return pb.ExplainResponse(cache_epoch=inspection.cache_epoch, workers=workers)


def audit(inspection: Inspection, act: Act) -> pb.AuditResponse:
    found = inspection.audit(act)
    return pb.AuditResponse(
        holds=found.holds,
        invariant=found.invariant,
        evidence=found.evidence,
        blocks=found.blocks,
        nodes=found.nodes,
        leases=found.leases,
        duration_ms=found.duration_ms,
        longest_slice_us=found.longest_slice_us,
    )


def invalidate(inspection: Inspection, request: pb.InvalidateRequest, act: Act) -> pb.InvalidateResponse:
    """An empty request is refused: forgetting everything is asked for over REST, where it can be said in words."""
    if not request.domain and not request.namespace:
        raise MessageRefused("name a domain, a namespace or both")
    tokens = request.tokens or None
    return pb.InvalidateResponse(num_trees=inspection.invalidate(act, request.domain, request.namespace, tokens))


def pin(inspection: Inspection, request: pb.PinRequest, act: Act) -> pb.PinResponse:
    num_tokens, num_workers = inspection.pin(act, request.name, request.domain, request.namespace, request.tokens)
    return pb.PinResponse(num_tokens=num_tokens, num_workers=num_workers)


def unpin(inspection: Inspection, request: pb.UnpinRequest, act: Act) -> pb.UnpinResponse:
    return pb.UnpinResponse(was_pinned=inspection.unpin(act, request.name))


def list_pins(inspection: Inspection) -> pb.ListPinsResponse:
    pins = [
        pb.PinInfo(
            name=view.name,
            domain=view.domain,
            namespace=view.namespace,
            worker_id=view.worker_id,
            num_tokens=view.num_tokens,
        )
        for view in inspection.pins()
    ]
    return pb.ListPinsResponse(pins=pins)
