"""A worker that computes nothing and remembers everything: which prefix each slot of each block holds.

A token is a function of (all tokens before it, seed), read back through the block table, so a wrong block, a missing
write or a skipped token shows up as another token, or as an assertion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from coppice.handles import block_of, generation_of
from coppice.ids import LeaseId, SequenceId, WorkerEpoch, WorkerId
from coppice.messages.step import Refusal, RefusalCode, SequenceStart, StepPlan, StepResult

VOCABULARY = 50


def u32(packed: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(packed, dtype="<u4")]


def u64(packed: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(packed, dtype="<u8")]


def chain(previous: int, token: int) -> int:
    return crc32(token.to_bytes(4, "little"), previous)


def next_token(link: int, seed: int) -> int:
    """The token after a prefix with this chain value."""
    return crc32(seed.to_bytes(8, "little"), link) % VOCABULARY


def reference(prompt: list[int], seed: int, max_new: int, stops: frozenset[int]) -> tuple[list[int], bool]:
    """What a request must output, and whether it ends by a stop token."""
    link = 0
    for token in prompt:
        link = chain(link, token)
    output: list[int] = []
    while len(output) < max_new:
        token = next_token(link, seed)
        if token in stops:
            return output, True
        output.append(token)
        link = chain(link, token)
    return output, False


@dataclass(eq=False)
class Resident:
    """One attached sequence."""

    lease_id: LeaseId
    tokens: list[int]
    computed: int
    blocks: list[int]  # block ids
    num_shared: int
    seed: int
    domain: str
    refusal: RefusalCode | None = None


@dataclass(eq=False)
class FakeWorker:
    worker_id: WorkerId
    epoch: WorkerEpoch
    num_blocks: int
    block_size: int
    last_step: int = 0
    residents: dict[SequenceId, Resident] = field(default_factory=dict)
    last_rows: list[int] = field(default_factory=list)
    generations: dict[int, int] = field(default_factory=dict)
    seals: dict[int, bytes] = field(default_factory=dict)  # by block, of its present generation
    slots: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, offset) -> chain value
    refuse_next: list[RefusalCode] = field(default_factory=list)  # planted: for the next attaches
    refused: list[RefusalCode] = field(default_factory=list)  # those that were not planted
    by_lease: dict[LeaseId, Resident] = field(default_factory=dict)  # the last sequence of each lease
    fenced: set[LeaseId] = field(default_factory=set)  # fenced before their attach arrived
    num_repeats: int = 0
    num_copies: int = 0
    step_us: int = 0  # that it says a step takes
    most_steps: int = 0  # of one plan

    def uses(self, lease_id: LeaseId) -> bool:
        return any(r.lease_id == lease_id and r.refusal is None for r in self.residents.values())

    def fence(self, lease_id: LeaseId) -> None:
        for resident in self.residents.values():
            if resident.lease_id == lease_id:
                resident.refusal = RefusalCode.FENCED

    def apply(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.last_step + 1, "a gap in steps"
        self.last_step = plan.step
        refusals: list[Refusal] = []
        sources = {start.sequence_id: self.residents.get(start.copy_from) for start in plan.attach}
        for sequence_id in u32(plan.detach):
            assert self.residents.pop(SequenceId(sequence_id), None) is not None, "detached what is not attached"
        for position, handle in enumerate(u64(plan.sealed)):
            if self.generations.get(block_of(handle)) == generation_of(handle):
                self.seals[block_of(handle)] = plan.seals[position * 16 : position * 16 + 16]
        for start in plan.attach:
            self._attach(start, sources[start.sequence_id], refusals)
        for growth in plan.grow:
            resident = self.residents[growth.sequence_id]
            if resident.refusal is not None:
                continue
            resident.blocks += [self._open(handle, resident) for handle in u64(growth.owned)]
        rows, counts = u32(plan.rows), u32(plan.row_tokens)
        if plan.repeat_rows:
            self.num_repeats += 1
            rows, counts = self.last_rows, [1] * len(self.last_rows)
        self.last_rows = rows
        assert len(set(rows)) == len(rows)
        assert plan.num_decode_steps == 1 or counts == [1] * len(rows), "a prefill in a plan of several decode steps"
        self.most_steps = max(self.most_steps, plan.num_decode_steps)
        sampled: dict[int, int] = {}
        tokens: list[int] = []
        for _ in range(plan.num_decode_steps):
            sampled = {}
            for sequence_id, count in zip(rows, counts, strict=True):
                token = self._compute(SequenceId(sequence_id), count, refusals)
                if token is not None:
                    sampled[sequence_id] = token
            assert plan.num_decode_steps == 1 or len(sampled) + len(refusals) >= len(rows), "a row that did not sample"
            tokens += sampled.values()
        return StepResult(
            step=plan.step,
            sampled_ids=np.array(list(sampled), dtype="<u4").tobytes(),
            sampled_tokens=np.array(tokens, dtype="<u4").tobytes(),
            refusals=tuple(refusals),
            num_tokens=sum(counts) * plan.num_decode_steps,
            duration_us=self.step_us * plan.num_decode_steps,
        )

    def _attach(self, start: SequenceStart, source: Resident | None, refusals: list[Refusal]) -> None:
        assert start.sequence_id not in self.residents
        shared, owned = u64(start.shared), u64(start.owned)
        resident = Resident(
            start.lease_id,
            u32(start.tokens),
            start.num_computed_tokens,
            [int(block_of(handle)) for handle in shared + owned],
            len(shared),
            start.sampling.seed,
            start.domain,
        )
        num_copied = -(-start.num_computed_tokens // self.block_size) - len(shared)
        assert 0 <= num_copied <= len(owned)
        assert bool(num_copied) == bool(start.copy_from), "computed tokens without KV"
        code, planted = self._verdict(start, shared, owned)
        if code is None and start.copy_from and (source is None or source.refusal is not None):
            code = RefusalCode.LOST_SOURCE
        if code is not None:
            if not planted:
                self.refused.append(code)
            resident.refusal = code
            refusals.append(Refusal(start.sequence_id, code, 0))
        else:
            for handle in owned:
                self._open(handle, resident)
            if start.copy_from and source is not None:
                self._copy(source, resident, len(shared), num_copied)
        self.residents[start.sequence_id] = self.by_lease[start.lease_id] = resident

    def _copy(self, source: Resident, target: Resident, first: int, count: int) -> None:
        assert source.domain == target.domain, "copied from another domain (I19)"
        assert source.computed >= target.computed
        assert source.tokens[: target.computed] == target.tokens[: target.computed], "copied other tokens (I19)"
        self.num_copies += count
        for place in range(first, first + count):
            assert source.blocks[place] not in target.blocks, "a copy onto itself"
            for offset in range(self.block_size):
                if (source.blocks[place], offset) in self.slots:
                    self.slots[target.blocks[place], offset] = self.slots[source.blocks[place], offset]

    def _verdict(self, start: SequenceStart, shared: list[int], owned: list[int]) -> tuple[RefusalCode | None, bool]:
        if start.lease_id in self.fenced:
            return RefusalCode.FENCED, True
        if self.refuse_next:
            return self.refuse_next.pop(), True
        for position, handle in enumerate(shared):
            if self.generations.get(block_of(handle)) != generation_of(handle):
                return RefusalCode.STALE, False
            if self.seals.get(block_of(handle)) != start.shared_seals[position * 16 : position * 16 + 16]:
                return RefusalCode.WRONG_SEAL, False
        used = {block for resident in self.residents.values() if not resident.refusal for block in resident.blocks}
        for handle in owned:
            if block_of(handle) in used or generation_of(handle) <= self.generations.get(block_of(handle), -1):
                return RefusalCode.DOUBLE_GRANT, False
        return None, False

    def _open(self, handle: int, owner: Resident) -> int:
        block = int(block_of(handle))
        users = [r for r in self.residents.values() if r is not owner and not r.refusal and block in r.blocks]
        assert not users, "a block was granted while a sequence uses it"
        self.generations[block] = generation_of(handle)
        self.seals.pop(block, None)
        for offset in range(self.block_size):
            self.slots.pop((block, offset), None)
        return block

    def _compute(self, sequence_id: SequenceId, count: int, refusals: list[Refusal]) -> int | None:
        resident = self.residents[sequence_id]
        if resident.refusal is not None:
            if not any(refusal.sequence_id == sequence_id for refusal in refusals):
                refusals.append(Refusal(sequence_id, resident.refusal, 0))
            return None
        assert count >= 1
        assert resident.computed + count <= len(resident.tokens), "computed past the tokens that are known"
        assert resident.computed + count <= len(resident.blocks) * self.block_size, "a row without a block (I6)"
        link = self._read(resident)
        for position in range(resident.computed, resident.computed + count):
            assert position >= resident.num_shared * self.block_size, "wrote a shared block (I7)"
            link = chain(link, resident.tokens[position])
            self.slots[(resident.blocks[position // self.block_size], position % self.block_size)] = link
        resident.computed += count
        if resident.computed < len(resident.tokens):
            return None
        token = next_token(link, resident.seed)
        resident.tokens.append(token)
        return token

    def _read(self, resident: Resident) -> int:
        """The chain value of what is computed, checked slot by slot (I12)."""
        link = 0
        for position in range(resident.computed):
            link = chain(link, resident.tokens[position])
            slot = (resident.blocks[position // self.block_size], position % self.block_size)
            assert self.slots.get(slot) == link, f"position {position} reads another sequence's KV (I12)"
        return link
