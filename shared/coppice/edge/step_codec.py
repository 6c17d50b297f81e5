"""Plans and results <-> protobuf (the session between a scheduler and a worker)."""

from __future__ import annotations

from coppice.edge.frame_codec import BodyField, Edge, FrameCodec, MalformedFrame
from coppice.ids import LeaseId, SequenceId
from coppice.messages import step as m
from coppice_rpc.v1 import worker_pb2 as pb

_CODE_TO_WIRE = {code: pb.Refusal.Code.Value(code.name) for code in m.RefusalCode}
_CODE_FROM_WIRE: dict[int, m.RefusalCode] = {wire: code for code, wire in _CODE_TO_WIRE.items()}


def _sampling_to_wire(sampling: m.SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        num_logprobs=sampling.num_logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def _sampling_from_wire(wire: pb.SamplingParams) -> m.SamplingParams:
    return m.SamplingParams(
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        seed=wire.seed,
        min_p=wire.min_p,
        frequency_penalty=wire.frequency_penalty,
        presence_penalty=wire.presence_penalty,
        repetition_penalty=wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0,
        logit_bias=wire.logit_bias,
        min_tokens=wire.min_tokens,
        stop_token_ids=wire.stop_token_ids,
        num_logprobs=wire.num_logprobs if wire.HasField("num_logprobs") else None,
        prompt_logprobs=wire.prompt_logprobs,
    )


def _start_to_wire(start: m.SequenceStart) -> pb.SequenceStart:
    return pb.SequenceStart(
        sequence_id=start.sequence_id,
        lease_id=start.lease_id,
        tokens=start.tokens,
        num_computed_tokens=start.num_computed_tokens,
        shared=start.shared,
        shared_seals=start.shared_seals,
        owned=start.owned,
        sampling=_sampling_to_wire(start.sampling),
        traceparent=start.traceparent,
        num_prompt_tokens=start.num_prompt_tokens,
    )


def _start_from_wire(wire: pb.SequenceStart) -> m.SequenceStart:
    return m.SequenceStart(
        sequence_id=SequenceId(wire.sequence_id),
        lease_id=LeaseId(wire.lease_id),
        tokens=wire.tokens,
        num_computed_tokens=wire.num_computed_tokens,
        shared=wire.shared,
        shared_seals=wire.shared_seals,
        owned=wire.owned,
        sampling=_sampling_from_wire(wire.sampling),
        traceparent=wire.traceparent,
        num_prompt_tokens=wire.num_prompt_tokens,
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
        num_decode_steps=plan.num_decode_steps,
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
        num_decode_steps=max(1, wire.num_decode_steps),
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
        logprobs=[
            pb.TokenLogprobs(
                sequence_id=found.sequence_id,
                first_position=found.first_position,
                num_top=found.num_top,
                chosen=found.chosen,
                top_ids=found.top_ids,
                top=found.top,
            )
            for found in result.logprobs
        ],
    )


def result_from_wire(wire: pb.StepResult) -> m.StepResult:
    refusals = tuple(
        m.Refusal(SequenceId(refusal.sequence_id), _refusal_code(refusal.code), refusal.handle)
        for refusal in wire.refusals
    )
    return m.StepResult(
        step=wire.step,
        sampled_ids=wire.sampled_ids,
        sampled_tokens=wire.sampled_tokens,
        refusals=refusals,
        num_tokens=wire.num_tokens,
        duration_us=wire.duration_us,
        logprobs=tuple(
            m.TokenLogprobs(
                sequence_id=SequenceId(found.sequence_id),
                first_position=found.first_position,
                num_top=found.num_top,
                chosen=found.chosen,
                top_ids=found.top_ids,
                top=found.top,
            )
            for found in wire.logprobs
        ),
    )


def _refusal_code(wire: int) -> m.RefusalCode:
    if wire not in _CODE_FROM_WIRE:
        raise MalformedFrame(f"unknown refusal code {wire}: the worker speaks a newer protocol")
    return _CODE_FROM_WIRE[wire]


PLAN_FRAMES = FrameCodec(pb.PlanFrame, (BodyField("plan", m.StepPlan, plan_to_wire, plan_from_wire),))
RESULT_FRAMES = FrameCodec(pb.ResultFrame, (BodyField("result", m.StepResult, result_to_wire, result_from_wire),))

EDGE = Edge("steps", PLAN_FRAMES, RESULT_FRAMES)
