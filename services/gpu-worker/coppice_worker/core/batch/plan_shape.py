"""Is a plan well formed? Asked before anything of it is applied, so that a malformed one changes nothing."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from coppice.handles import HANDLE_BYTES
from coppice.ids import LEASE_ID_BYTES, TOKEN_BYTES, SequenceId
from coppice.messages.sampling_bounds import impossible_field
from coppice.messages.step import SequenceStart, StepPlan
from coppice.seals import SEAL_BYTES
from coppice_worker.core.batch.steps import MalformedPlanError


def check_shape(plan: StepPlan, live: Collection[SequenceId], block_size: int) -> None:
    """Raises MalformedPlanError. `live` are the attached sequences."""
    for name, packed, unit in (
        ("detach", plan.detach, 4),
        ("sealed", plan.sealed, HANDLE_BYTES),
        ("zero", plan.zero, HANDLE_BYTES),
        ("rows", plan.rows, 4),
    ):
        _require(len(packed) % unit == 0, plan, f"{name} has {len(packed)} bytes, no multiple of {unit}")
    _require(len(plan.seals) * HANDLE_BYTES == len(plan.sealed) * SEAL_BYTES, plan, "seals do not match sealed")
    _require(len(plan.row_tokens) == len(plan.rows), plan, "row_tokens does not match rows")
    _require(not (plan.repeat_rows and plan.rows), plan, "repeat_rows comes with rows")
    rows = np.frombuffer(plan.rows, "<u4")
    _require(len(np.unique(rows)) == len(rows), plan, "a sequence stands twice in rows")
    row_tokens = np.frombuffer(plan.row_tokens, "<u4")
    _require(bool(row_tokens.all()), plan, "a row computes no token")
    _require(plan.num_decode_steps > 0, plan, f"num_decode_steps is {plan.num_decode_steps}")
    one_each = plan.num_decode_steps == 1 or bool((row_tokens == 1).all())
    _require(one_each, plan, "a row of several decode steps computes several tokens at once")
    _check_starts(plan, live, block_size)
    for growth in plan.grow:
        _require(len(growth.owned) % HANDLE_BYTES == 0, plan, f"growth of sequence {growth.sequence_id} is cut")


def _check_starts(plan: StepPlan, live: Collection[SequenceId], block_size: int) -> None:
    detached = set(np.frombuffer(plan.detach, "<u4").tolist())
    seen: set[SequenceId] = set()
    for start in plan.attach:
        name = f"attach of sequence {start.sequence_id}"
        _require(start.sequence_id not in seen, plan, f"{name} stands twice")
        seen.add(start.sequence_id)
        attached = start.sequence_id in live and start.sequence_id not in detached
        _require(not attached, plan, f"{name}, which is attached already")
        _check_start(plan, start, name, block_size)


def _check_start(plan: StepPlan, start: SequenceStart, name: str, block_size: int) -> None:
    _require(len(start.lease_id) == LEASE_ID_BYTES, plan, f"{name}: lease id has {len(start.lease_id)} bytes")
    _require(0 <= start.sequence_id < 1 << 32, plan, f"{name}: the id does not fit 32 bits")
    count, cut = divmod(len(start.tokens), TOKEN_BYTES)
    _require(cut == 0 and count > 0, plan, f"{name}: tokens are missing or cut")
    _require(len(start.owned) % HANDLE_BYTES == 0, plan, f"{name}: owned handles are cut")
    _require(start.num_prompt_tokens <= count, plan, f"{name}: num_prompt_tokens is beyond its tokens")
    impossible = impossible_field(start.sampling)
    _require(not impossible, plan, f"{name}: sampling has an impossible {impossible}")
    shared, cut = divmod(len(start.shared), HANDLE_BYTES)
    _require(
        cut == 0 and len(start.shared_seals) == shared * SEAL_BYTES, plan, f"{name}: shared handles or seals are cut"
    )
    # Tokens beyond the shared blocks have KV only where a copy puts it, into blocks of its own.
    copied = start.num_computed_tokens - shared * block_size
    _require(copied >= 0 and start.num_computed_tokens <= count, plan, f"{name}: num_computed_tokens is out of range")
    sources, cut = divmod(len(start.copy_source), HANDLE_BYTES)
    _require(cut == 0 and len(start.copy_seal) == sources * SEAL_BYTES, plan, f"{name}: a copy's handle or seal is cut")
    is_copy = bool(start.copy_from) + sources
    _require(is_copy == bool(copied), plan, f"{name}: computed tokens without KV, a copy of nothing or of two")
    _require(not sources or copied <= block_size, plan, f"{name}: more is copied than a block has")
    _require(len(start.owned) >= -(-copied // block_size) * HANDLE_BYTES, plan, f"{name}: a copy has no block")


def _require(holds: bool, plan: StepPlan, problem: str) -> None:
    if not holds:
        raise MalformedPlanError(f"step {plan.step}: {problem}; nothing of the plan was applied")
