"""Where a fork copies its first tokens from: another sequence of the same session, compared before it is read (I19).

    source   |p p p p|p p p p|p p g g|         the fork's tokens and domain are compared with the source's
    fork     |share  |share  |copy . |         a block that is full in part has no seal that could be asked for

A plan names the sequence, never its blocks, so it cannot name a block that nobody or somebody else uses.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from coppice.handles import HANDLE_BYTES, block_ids
from coppice.ids import SequenceId
from coppice.messages.step import SequenceStart, StepPlan
from coppice_worker.core.batch.step_batch import Int32
from coppice_worker.core.sequences import SequenceTable


def copy_sources(plan: StepPlan, table: SequenceTable, refused: Container[SequenceId]) -> dict[SequenceId, Int32]:
    """Block ids [C] that each fork of `plan` copies. A fork whose source is gone or differs is missing.

    Asked before anything of the plan is applied: it may detach a source, and the blocks are copied all the same. So a
    plan that opens one of them anew has lost the source.
    """
    forks = [start for start in plan.attach if start.copy_from]
    if not forks:
        return {}
    opened = block_ids(b"".join([start.owned for start in plan.attach] + [growth.owned for growth in plan.grow]))
    found: dict[SequenceId, Int32] = {}
    for fork in forks:
        slot = table.slot_of.get(fork.copy_from)
        if slot is None or fork.copy_from in refused or not has_its_prefix(table, slot, fork):
            continue
        first, end = len(fork.shared) // HANDLE_BYTES, -(-fork.num_computed_tokens // table.block_size)
        blocks = table.blocks(slot)[first:end].copy()
        if not np.isin(blocks, opened).any():
            found[fork.sequence_id] = blocks
    return found


def has_its_prefix(table: SequenceTable, slot: int, fork: SequenceStart) -> bool:
    """Whether the sequence in `slot` is of the fork's domain, and has computed all tokens that the fork does not."""
    count = fork.num_computed_tokens
    if table.domains[slot] != fork.domain or int(table.num_computed[slot]) < count:
        return False
    return np.array_equal(table.tokens[slot, :count], np.frombuffer(fork.tokens, "<u4", count))
