"""Inspection over REST: statements, trees, explanations, audits, invalidations, pins. For operators, not for tenants.

`guard.py` decides which requests come here.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from coppice.audit_log import Act
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.events import Tier
from coppice_cache.core.base.results import Explanation, TreeDump
from coppice_cache.core.inspection.block_map import BlockMap
from coppice_cache.core.state.state import NS_PER_MS
from coppice_cache.edge.api.inspection import DEPTH_DEFAULT, DEPTH_MAX, NODES_DEFAULT, NODES_MAX, Inspection, NotThere
from coppice_cache.edge.api.statement_json import statement_json
from coppice_cache.edge.service.auditor import Auditor, AuditRunning, AuditStopped

TOKENS_MAX = 1 << 20

ErrorResponse = Callable[[int, str, str], JSONResponse]
Token = Annotated[int, Field(ge=0, lt=1 << 32)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=TOKENS_MAX)]
Hex = Annotated[str, Field(pattern="^([0-9a-fA-F]{2})*$", max_length=8_192)]


ACT = "coppice.act"  # of a request's scope, put there for whatever is no mere question


def _act_of(request: Request) -> Act:
    act = request.scope[ACT]
    assert isinstance(act, Act)
    return act


CurrentAct = Annotated[Act, Depends(_act_of)]


class _Body(BaseModel):
    # Strict: else `everything: "yes"` and `tokens: [true]` would be taken.
    model_config = ConfigDict(extra="forbid", strict=True)


class ExplainBody(_Body):
    """A prompt as its tokens; the cache has no tokenizer."""

    domain: str
    tokens: Tokens
    namespace: Hex = ""


class InvalidateBody(_Body):
    """What is to be forgotten: everything, a domain, a namespace, both, or what follows a prefix in one tree."""

    domain: str = ""
    namespace: Hex = ""
    tokens: Tokens | None = None
    everything: bool = False


class PinBody(_Body):
    domain: str
    namespace: Hex
    tokens: Tokens


def add_inspection(app: FastAPI, inspection: Inspection, auditor: Auditor, error: ErrorResponse) -> None:
    """`error` makes a response from status, message and code."""
    _add_questions(app, inspection)
    _add_audit(app, inspection, auditor)
    _add_changes(app, inspection)
    _add_errors(app, error)


def _add_questions(app: FastAPI, inspection: Inspection) -> None:
    @app.get("/v1/stats")
    def stats() -> dict[str, Any]:
        return asdict(inspection.stats())

    @app.get("/v1/statements")
    def statements(worker_id: str = "") -> dict[str, Any]:
        return statement_json(inspection.statement(worker_id))

    @app.get("/v1/blocks")
    def blocks(worker: str, tier: Literal["device", "host", "disk"] = "device") -> JSONResponse:
        found = inspection.block_map(worker, Tier[tier.upper()])
        return JSONResponse(_blocks_json(found, inspection.cache_epoch))

    @app.get("/v1/domains/{domain:path}/tree")
    def tree(
        domain: str,
        max_depth: Annotated[int, Query(ge=0, le=DEPTH_MAX)] = DEPTH_DEFAULT,
        limit: Annotated[int, Query(ge=1, le=NODES_MAX)] = NODES_DEFAULT,
        page_token: str = "",
        worker_id: str = "",
    ) -> dict[str, Any]:
        return _tree_json(inspection.tree(domain, worker_id, max_depth, limit, page_token), inspection.now_ns())

    @app.post("/v1/explain")
    def explain(body: ExplainBody, act: CurrentAct) -> dict[str, Any]:
        found = inspection.explain(act, body.domain, bytes.fromhex(body.namespace), _packed(body.tokens))
        return {"cache_epoch": inspection.cache_epoch, "workers": [_explanation_json(entry) for entry in found]}

    @app.get("/v1/pins")
    def pins() -> dict[str, Any]:
        views = [{**asdict(view), "namespace": view.namespace.hex()} for view in inspection.pins()]
        return {"pins": views}


def _add_audit(app: FastAPI, inspection: Inspection, auditor: Auditor) -> None:
    @app.post("/v1/audit")
    def audit(act: CurrentAct) -> JSONResponse:
        found = inspection.audit(act)
        return JSONResponse(asdict(found), 200 if found.holds else 500)

    @app.get("/v1/audit")
    def audit_status() -> dict[str, Any]:
        return auditor.status()


def _add_changes(app: FastAPI, inspection: Inspection) -> None:
    @app.post("/v1/invalidate")
    def invalidate(body: InvalidateBody, act: CurrentAct) -> dict[str, Any]:
        if not (body.domain or body.namespace or body.everything):
            raise MessageRefused("name a domain or a namespace, or say everything: true")
        if body.everything and (body.domain or body.namespace or body.tokens):
            raise MessageRefused("everything leaves nothing to name: leave domain, namespace and tokens out")
        tokens = _packed(body.tokens) if body.tokens is not None else None
        return {"num_trees": inspection.invalidate(act, body.domain, bytes.fromhex(body.namespace), tokens)}

    @app.put("/v1/pins/{name:path}")
    def pin(name: str, body: PinBody, act: CurrentAct) -> dict[str, Any]:
        num_tokens, num_workers = inspection.pin(
            act, name, body.domain, bytes.fromhex(body.namespace), _packed(body.tokens)
        )
        return {"name": name, "num_tokens": num_tokens, "num_workers": num_workers}

    @app.delete("/v1/pins/{name:path}")
    def unpin(name: str, act: CurrentAct) -> dict[str, Any]:
        if not inspection.unpin(act, name):
            raise NotThere(f"there is no pin {name!r}", "pin_not_found")
        return {"name": name, "was_pinned": True}


def _add_errors(app: FastAPI, response: ErrorResponse) -> None:
    answers: dict[type[Exception], Callable[[Any], JSONResponse]] = {
        MessageRefused: lambda error: response(400, str(error), "refused"),
        NotThere: lambda error: response(404, str(error), error.code),
        AuditRunning: lambda error: response(409, str(error), "audit_running"),
        AuditStopped: lambda error: response(503, str(error), "stopping"),
    }

    def handler(answer: Callable[[Any], JSONResponse]) -> Callable[[Request, Exception], Any]:
        async def handle(request: Request, error: Exception) -> JSONResponse:
            return answer(error)

        return handle

    for kind, answer in answers.items():
        app.add_exception_handler(kind, handler(answer))


def _packed(tokens: list[int]) -> bytes:
    return np.array(tokens, "<u4").tobytes()


_RUN_BYTES, _CELL_BYTES = 6, 2  # in base64 they become a third more


def _blocks_json(found: BlockMap, cache_epoch: int) -> dict[str, Any]:
    """Cells in base64, as u16 (little-endian) of each block or of each run, whichever is shorter."""
    fields = {name: getattr(found, name) for name in _OF_A_MAP}
    fields["domains"] = [asdict(domain) for domain in found.domains]
    lengths, cells = found.runs()
    if len(cells) * _RUN_BYTES > found.num_blocks * _CELL_BYTES:
        return {"cache_epoch": cache_epoch, **fields, "run_lengths": None, "cells": _base64(found.cells(), "<u2")}
    return {
        "cache_epoch": cache_epoch,
        **fields,
        "run_lengths": _base64(lengths, "<u4"),
        "cells": _base64(cells, "<u2"),
    }


_OF_A_MAP = (
    *("worker_id", "worker_epoch", "block_size", "num_blocks", "open", "fences", "num_promoting", "num_demoting"),
    *("total_fences", "total_promoted", "total_demoted"),
)


def _base64(values: np.ndarray[Any, Any], form: str) -> str:
    return b64encode(values.astype(form).tobytes()).decode()


def _tree_json(dump: TreeDump, now_ns: int) -> dict[str, Any]:
    trees = []
    for view in dump.trees:
        nodes = []
        for node in view.nodes:
            fields = asdict(node)
            idle_ns = now_ns - fields.pop("last_use_ns") if node.depth else 0
            nodes.append({**fields, "idle_ms": max(0, idle_ns) // NS_PER_MS})
        trees.append({"worker_id": view.worker_id, "namespace": view.namespace.hex(), "nodes": nodes})
    return {
        "domain": dump.domain,
        "truncated": dump.truncated,
        "cut_by_depth": dump.cut_by_depth,
        "moved": dump.moved,
        "next_page_token": dump.next_page_token,
        "trees": trees,
    }


def _explanation_json(found: Explanation) -> dict[str, Any]:
    return {
        **asdict(found),
        "namespace": found.namespace.hex(),
        "stopped_by": found.stopped_by.value,
        "lease_ids": [lease_id.hex() for lease_id in found.lease_ids],
    }
