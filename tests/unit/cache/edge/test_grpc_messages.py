"""Ops and answers in the words of the gRPC contract, field by field."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from coppice.ids import CacheEpoch, DomainId, LeaseId, Namespace, WorkerEpoch, WorkerId
from coppice.messages import index
from coppice.messages.index import (
    Acquire,
    Answer,
    Candidate,
    Distrusted,
    MatchHint,
    MatchHints,
    Release,
    Workers,
)
from coppice.messages.reuse import Reuse
from coppice_cache.edge.api.grpc_messages import UnknownValue, answer_to_wire, record_from_wire, wire_from_record
from coppice_rpc.v1 import cache_pb2 as pb
from tests.fakes.message_values import examples

LEASE = LeaseId(b"l" * 16)


def test_an_acquire_comes_with_all_its_fields() -> None:
    wire = pb.Acquire(
        lease_id=LEASE,
        domain="d",
        namespace=b"n",
        tokens=b"1234",
        reserve_tokens=9,
        candidates=[pb.Candidate(worker_id="v", load_cost=2), pb.Candidate(worker_id="w")],
        traceparent="t",
        reuse=pb.REUSE_UNLIKELY,
        may_wait=True,
        wants_copy=True,
        skip_match=True,
        call_kind=3,
    )
    assert {field.name for field, _ in wire.ListFields()} == {field.name for field in pb.Acquire.DESCRIPTOR.fields}
    candidates = (Candidate(WorkerId("v"), 2), Candidate(WorkerId("w"), 0))
    expected = Acquire(
        LEASE,
        DomainId("d"),
        Namespace(b"n"),
        b"1234",
        9,
        candidates,
        "t",
        Reuse.UNLIKELY,
        may_wait=True,
        wants_copy=True,
        skip_match=True,
        call_kind=3,
    )
    assert record_from_wire(Acquire, wire) == expected


def test_a_value_of_a_newer_version_is_refused() -> None:
    with pytest.raises(UnknownValue, match="reuse has the unknown value 77"):
        record_from_wire(Release, pb.Release(lease_id=LEASE, reuse=77))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [kind for kind in get_args(Answer) if kind is not Distrusted])
def test_every_answer_to_a_single_op_can_be_said(kind: Any) -> None:
    for answer in examples(kind):
        wire = answer_to_wire(answer)
        assert wire.lease_id == answer.lease_id
        said = getattr(wire, str(wire.WhichOneof("answer")))
        assert type(said).__name__ == kind.__name__
        for name in (field.name for field in said.DESCRIPTOR.fields if field.enum_type is None):
            assert getattr(said, name) == getattr(answer, name)


@pytest.mark.parametrize("reason", index.NoCapacityReason)
def test_reasons_keep_their_names(reason: index.NoCapacityReason) -> None:
    wire = answer_to_wire(index.NoCapacity(LEASE, reason, 5))
    assert pb.NoCapacity.Reason.Name(wire.no_capacity.reason) == reason.name


def test_what_repeats_is_told_in_full() -> None:
    hints = MatchHints(CacheEpoch(3), (MatchHint((WorkerId("a"), WorkerId("b")), (1, 2)), MatchHint((), ())))
    wire = wire_from_record(pb.MatchHints, hints)
    assert [(list(hint.worker_ids), list(hint.num_cached_tokens)) for hint in wire.hints] == [
        (["a", "b"], [1, 2]),
        ([], []),
    ]
    (workers,) = examples(Workers)
    (listed,) = wire_from_record(pb.Workers, workers).workers
    assert (listed.worker_epoch, listed.num_blocks, listed.open) == (WorkerEpoch(2), 4, True)
