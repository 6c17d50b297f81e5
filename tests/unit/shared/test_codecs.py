"""Every message of every edge survives the wire, and what says nothing is refused."""

from __future__ import annotations

from typing import Any, get_args

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from coppice.edge import index_codec, registration_codec, step_codec
from coppice.edge.frame_codec import FrameCodec, MalformedFrame
from coppice.messages import index, registration, step
from coppice.session.frames import Data, Heartbeat, Hello, Reject, RejectCode, Welcome
from coppice_rpc.v1 import cache_pb2, worker_pb2

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
F32 = st.floats(width=32, allow_nan=False)
RAW = st.binary(max_size=40)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
LEASE = st.binary(min_size=16, max_size=16)


def many(element: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(element, max_size=3).map(tuple)


OPS: dict[type, st.SearchStrategy[Any]] = {
    index.Acquire: st.builds(
        index.Acquire,
        LEASE,
        TEXT,
        RAW,
        RAW,
        U64,
        many(st.builds(index.Candidate, TEXT, U64)),
        TEXT,
        st.sampled_from(index.Reuse),
        st.booleans(),
        st.booleans(),
    ),
    index.Extend: st.builds(index.Extend, LEASE, U64),
    index.Publish: st.builds(index.Publish, LEASE, U32, RAW),
    index.Release: st.builds(index.Release, LEASE, st.sampled_from(index.Reuse)),
    index.Abandon: st.builds(index.Abandon, LEASE),
    index.Distrust: st.builds(index.Distrust, LEASE, RAW),
    index.Retain: st.builds(index.Retain, LEASE, U64, U64, U32, U64),
}
ANSWERS: dict[type, st.SearchStrategy[Any]] = {
    index.Grant: st.builds(index.Grant, LEASE, TEXT, U64, U64, RAW, RAW, RAW, RAW, RAW, RAW, U64),
    index.Pending: st.builds(index.Pending, LEASE, U64, U32),
    index.Retained: st.builds(index.Retained, LEASE, U64),
    index.NoCapacity: st.builds(index.NoCapacity, LEASE, st.sampled_from(index.NoCapacityReason), U32),
    index.Extended: st.builds(index.Extended, LEASE, U32, RAW, RAW),
    index.Published: st.builds(index.Published, LEASE, U32, RAW, RAW),
    index.NotPublished: st.builds(index.NotPublished, LEASE, st.sampled_from(index.NotPublishedReason)),
    index.Released: st.builds(index.Released, LEASE),
    index.Distrusted: st.builds(index.Distrusted, LEASE),
    index.Gone: st.builds(index.Gone, LEASE),
    index.Invalid: st.builds(index.Invalid, LEASE, TEXT),
}
CLAIM = st.builds(index.LeaseClaim, LEASE, TEXT, RAW, TEXT, U64, RAW, RAW, RAW)
WORKER = st.builds(
    index.WorkerInfo, TEXT, U64, TEXT, U32, U32, RAW, TEXT, st.booleans(), U32, U32, U32, st.booleans(), U32
)
QUERY = st.builds(index.MatchQuery, TEXT, RAW, RAW)
HINT = st.builds(index.MatchHint, many(TEXT), many(U64))
FROM_CLIENT: dict[type, st.SearchStrategy[Any]] = {
    index.OpBatch: st.builds(index.OpBatch, many(st.one_of(*OPS.values()))),
    index.Reattach: st.builds(index.Reattach, many(CLAIM), many(st.builds(index.DeadWorker, TEXT, U64))),
    index.LeaseSet: st.builds(index.LeaseSet, many(LEASE)),
    index.MatchQueries: st.builds(index.MatchQueries, many(QUERY)),
}
TO_CLIENT: dict[type, st.SearchStrategy[Any]] = {
    index.AnswerBatch: st.builds(index.AnswerBatch, U32, many(st.one_of(*ANSWERS.values()))),
    index.Workers: st.builds(index.Workers, U32, many(WORKER)),
    index.Reattached: st.builds(index.Reattached, U32, many(LEASE), many(LEASE), many(U32)),
    index.LeaseDigest: st.builds(index.LeaseDigest, U64, U64),
    index.Wake: st.builds(index.Wake, U32, many(LEASE)),
    index.Reclaim: st.builds(index.Reclaim, U32, TEXT, TEXT, U32),
    index.MatchHints: st.builds(index.MatchHints, U32, many(HINT)),
}
FROM_WORKER: dict[type, st.SearchStrategy[Any]] = {
    registration.Register: st.builds(
        registration.Register,
        TEXT,
        U64,
        TEXT,
        U32,
        U32,
        RAW,
        TEXT,
        U32,
        RAW,
        RAW,
        many(U64),
        U32,
        U32,
        U32,
        st.booleans(),
        U32,
        RAW,
        RAW,
    ),
    registration.FenceAck: st.builds(registration.FenceAck, U64, U64, RAW, RAW, RAW, RAW),
    registration.Draining: st.builds(registration.Draining, U64),
    registration.CopiesDone: st.builds(registration.CopiesDone, U64, many(U64), many(U64)),
}
ORDER = st.builds(registration.CopyOrder, U64, st.sampled_from(registration.Direction), RAW, RAW, RAW)
TO_WORKER: dict[type, st.SearchStrategy[Any]] = {
    registration.Registered: st.builds(registration.Registered, U64, U32),
    registration.Fence: st.builds(registration.Fence, U64, U64, many(U64), U64, many(U64), many(LEASE), st.booleans()),
    registration.CopyOrders: st.builds(registration.CopyOrders, U64, many(ORDER)),
}
SAMPLING = st.builds(step.SamplingParams, F32, U32, F32, U64)
START = st.builds(step.SequenceStart, U32, LEASE, RAW, U32, RAW, RAW, RAW, SAMPLING, TEXT)
GROWTH = st.builds(step.Growth, U32, RAW)
REFUSAL = st.builds(step.Refusal, U32, st.sampled_from(step.RefusalCode), U64)
FROM_SCHEDULER: dict[type, st.SearchStrategy[Any]] = {
    step.StepPlan: st.builds(
        step.StepPlan, U64, RAW, RAW, RAW, RAW, RAW, RAW, many(START), many(GROWTH), RAW, RAW, st.booleans()
    ),
}
TO_SCHEDULER: dict[type, st.SearchStrategy[Any]] = {
    step.StepResult: st.builds(step.StepResult, U64, RAW, RAW, many(REFUSAL), U32, U64),
}
EDGES: list[tuple[str, FrameCodec[Any], Any, dict[type, st.SearchStrategy[Any]]]] = [
    ("client to cache", index_codec.CLIENT_FRAMES, index.FromClient, FROM_CLIENT),
    ("cache to client", index_codec.SERVER_FRAMES, index.ToClient, TO_CLIENT),
    ("worker to cache", registration_codec.WORKER_FRAMES, registration.FromWorker, FROM_WORKER),
    ("cache to worker", registration_codec.SERVER_FRAMES, registration.ToWorker, TO_WORKER),
    ("scheduler to worker", step_codec.PLAN_FRAMES, step.StepPlan, FROM_SCHEDULER),
    ("worker to scheduler", step_codec.RESULT_FRAMES, step.StepResult, TO_SCHEDULER),
]


def through_the_wire(codec: FrameCodec[Any], frame: Any) -> Any:
    return codec.decode(codec.encode(frame))


BODIES = [
    pytest.param(codec, strategy, id=f"{edge}: {kind.__name__}")
    for edge, codec, _, strategies in EDGES
    for kind, strategy in strategies.items()
]


@pytest.mark.parametrize(("codec", "strategy"), BODIES)
def test_a_body_comes_back_as_it_went(codec: FrameCodec[Any], strategy: st.SearchStrategy[Any]) -> None:
    @settings(max_examples=25, deadline=None, database=None)
    @given(connection=U64, number=st.integers(1, 2**64 - 1), ack=U64, body=strategy)
    def check(connection: int, number: int, ack: int, body: Any) -> None:
        frame = Data(connection, number, ack, body)
        assert through_the_wire(codec, frame) == frame

    check()


@pytest.mark.parametrize(("kinds", "union"), [(OPS, index.Op), (ANSWERS, index.Answer)])
def test_all_ops_and_answers_are_tried(kinds: dict[type, Any], union: Any) -> None:
    assert set(kinds) == set(get_args(union))


@pytest.mark.parametrize(("union", "strategies"), [edge[2:] for edge in EDGES], ids=[edge[0] for edge in EDGES])
def test_all_messages_of_an_edge_are_tried(union: Any, strategies: dict[type, Any]) -> None:
    assert set(strategies) == set(get_args(union) or (union,))


HELLO = Hello(b"k" * 16, 3, 2**63, 17, 2**40, "wörker", 1)
WELCOME = Welcome(3, 2**63, 2**40, 65_535, 12, True, 1)
CLIENTS = [index_codec.CLIENT_FRAMES, registration_codec.WORKER_FRAMES, step_codec.PLAN_FRAMES]
SERVERS = [index_codec.SERVER_FRAMES, registration_codec.SERVER_FRAMES, step_codec.RESULT_FRAMES]


@pytest.mark.parametrize("codec", CLIENTS)
def test_what_a_client_says_besides_bodies(codec: FrameCodec[Any]) -> None:
    for frame in (HELLO, Heartbeat(3, 9), Heartbeat(1, 0)):
        assert through_the_wire(codec, frame) == frame


@pytest.mark.parametrize("codec", SERVERS)
def test_what_a_server_says_besides_bodies(codec: FrameCodec[Any]) -> None:
    for frame in (WELCOME, Heartbeat(3, 9), *(Reject(code, f"because {code}") for code in RejectCode)):
        assert through_the_wire(codec, frame) == frame


def test_a_frame_that_says_nothing_is_malformed() -> None:
    with pytest.raises(MalformedFrame, match="handshake or a header"):
        index_codec.CLIENT_FRAMES.decode(b"")


def test_bytes_that_are_no_protobuf_are_malformed() -> None:
    with pytest.raises(MalformedFrame, match="3 bytes are no IndexClientFrame"):
        index_codec.CLIENT_FRAMES.decode(b"\xff\xff\xff")


def test_a_number_without_a_body_is_malformed() -> None:
    wire = cache_pb2.IndexClientFrame()
    wire.header.number = 4
    with pytest.raises(MalformedFrame, match="message 4 has no body"):
        index_codec.CLIENT_FRAMES.decode(wire.SerializeToString())


def test_an_op_without_a_kind_is_malformed() -> None:
    wire = cache_pb2.IndexClientFrame(ops=cache_pb2.OpBatch(ops=[cache_pb2.Op()]))
    wire.header.number = 1
    with pytest.raises(MalformedFrame, match="acquire, extend, publish"):
        index_codec.CLIENT_FRAMES.decode(wire.SerializeToString())


def test_an_answer_of_a_newer_protocol_is_malformed() -> None:
    wire = cache_pb2.IndexServerFrame(answers=cache_pb2.AnswerBatch(answers=[cache_pb2.Answer()]))
    wire.header.number = 1
    with pytest.raises(MalformedFrame, match="names no kind"):
        index_codec.SERVER_FRAMES.decode(wire.SerializeToString())
    wire.answers.answers[0].no_capacity.reason = 99  # type: ignore[assignment]
    with pytest.raises(MalformedFrame, match="99"):
        index_codec.SERVER_FRAMES.decode(wire.SerializeToString())


def test_a_refusal_of_a_newer_protocol_is_malformed() -> None:
    refusals = [worker_pb2.Refusal(sequence_id=1, code=77)]  # type: ignore[arg-type]
    wire = worker_pb2.ResultFrame(result=worker_pb2.StepResult(step=1, refusals=refusals))
    wire.header.number = 1
    with pytest.raises(MalformedFrame, match="77"):
        step_codec.RESULT_FRAMES.decode(wire.SerializeToString())


def test_a_rejection_of_a_newer_protocol_is_still_a_rejection() -> None:
    wire = cache_pb2.IndexServerFrame()
    wire.reject.code, wire.reject.message = 55, "too new"  # type: ignore[assignment]
    assert index_codec.SERVER_FRAMES.decode(wire.SerializeToString()) == Reject(RejectCode.INVALID, "too new")
