"""Plans and results <-> protobuf (the session between a scheduler and a worker)."""

from __future__ import annotations

from coppice.edge.frame_codec import BodyField, FrameCodec, MalformedFrame
from coppice.ids import LeaseId, SequenceId
from coppice.messages import step as m
from coppice_rpc.v1 import worker_pb2 as pb

_CODE_TO_WIRE = {code: pb.Refusal.Code.Value(code.name) for code in m.RefusalCode}
_CODE_FROM_WIRE: dict[int, m.RefusalCode] = {wire: code for code, wire in _CODE_TO_WIRE.items()}


def _start_to_wire(start: m.SequenceStart) -> pb.SequenceStart:
    sampling = start.sampling
    return pb.SequenceStart(
        sequence_id=start.sequence_id,
        lease_id=start.lease_id,
        tokens=start.tokens,
        num_computed_tokens=start.num_computed_tokens,
        shared=start.shared,
        shared_seals=start.shared_seals,
        owned=start.owned,
        sampling=pb.SamplingParams(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed
        ),
        traceparent=start.traceparent,
    )


def _start_from_wire(wire: pb.SequenceStart) -> m.SequenceStart:
    sampling = wire.sampling
    return m.SequenceStart(
        sequence_id=SequenceId(wire.sequence_id),
        lease_id=LeaseId(wire.lease_id),
        tokens=wire.tokens,
        num_computed_tokens=wire.num_computed_tokens,
        shared=wire.shared,
        shared_seals=wire.shared_seals,
        owned=wire.owned,
        sampling=m.SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed),
        traceparent=wire.traceparent,
    )


def plan_to_wire(plan: m.StepPlan) -> pb.StepPlan:
    return pb.StepPlan(
        step=plan.step,
        detach=plan.detach,
        sealed=plan.sealed,
        seals=plan.seals,
        zero=plan.zero,
        copy_src=plan.copy_src,
        copy_dst=plan.copy_dst,
        attach=[_start_to_wire(start) for start in plan.attach],
        grow=[pb.Growth(sequence_id=growth.sequence_id, owned=growth.owned) for growth in plan.grow],
        rows=plan.rows,
        row_tokens=plan.row_tokens,
        repeat_rows=plan.repeat_rows,
    )


def plan_from_wire(wire: pb.StepPlan) -> m.StepPlan:
    return m.StepPlan(
        step=wire.step,
        detach=wire.detach,
        sealed=wire.sealed,
        seals=wire.seals,
        zero=wire.zero,
        copy_src=wire.copy_src,
        copy_dst=wire.copy_dst,
        attach=tuple(_start_from_wire(start) for start in wire.attach),
        grow=tuple(m.Growth(SequenceId(growth.sequence_id), growth.owned) for growth in wire.grow),
        rows=wire.rows,
        row_tokens=wire.row_tokens,
        repeat_rows=wire.repeat_rows,
    )


def result_to_wire(result: m.StepResult) -> pb.StepResult:
    refusals = [
        pb.Refusal(sequence_id=refusal.sequence_id, code=_CODE_TO_WIRE[refusal.code], handle=refusal.handle)
        for refusal in result.refusals
    ]
    return pb.StepResult(
        step=result.step,
        sampled_ids=result.sampled_ids,
        sampled_tokens=result.sampled_tokens,
        refusals=refusals,
        num_tokens=result.num_tokens,
        duration_us=result.duration_us,
    )


def result_from_wire(wire: pb.StepResult) -> m.StepResult:
    refusals = tuple(
        m.Refusal(SequenceId(refusal.sequence_id), _refusal_code(refusal.code), refusal.handle)
        for refusal in wire.refusals
    )
    return m.StepResult(wire.step, wire.sampled_ids, wire.sampled_tokens, refusals, wire.num_tokens, wire.duration_us)


def _refusal_code(wire: int) -> m.RefusalCode:
    if wire not in _CODE_FROM_WIRE:
        raise MalformedFrame(f"unknown refusal code {wire}: the worker speaks a newer protocol")
    return _CODE_FROM_WIRE[wire]


PLAN_FRAMES = FrameCodec(pb.PlanFrame, (BodyField("plan", m.StepPlan, plan_to_wire, plan_from_wire),))
RESULT_FRAMES = FrameCodec(pb.ResultFrame, (BodyField("result", m.StepResult, result_to_wire, result_from_wire),))
