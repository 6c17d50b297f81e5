"""Sequences with grammars: what guides are asked, who waits for one, and what a guide that knows no token means."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from coppice.ids import SchedulerEpoch
from coppice.messages.registration import Fence
from coppice.messages.step import SamplingParams, SequenceStart, StepPlan, StepResult
from coppice_sim.hosts.kv_honest import VOCABULARY, KvHonest
from coppice_worker.core.batch.guides import Guided, Masks, UInt32, fill_masks
from coppice_worker.core.batch.step_batch import StepBatch, StepOutput
from coppice_worker.core.batch.steps import Replayed, SchedulerAccepted
from tests.fakes.worker.worker_plans import (
    EPOCH,
    applied,
    codes,
    compute,
    grow,
    h,
    handles,
    lease,
    ready_core,
    run,
    settings,
    start,
    u32,
)

PROMPTS = {1: 5, 2: 3, 3: 8, 4: 4}  # sequence -> tokens


class Counting:
    """After n tokens of output only the token `first` + n may come. From `breaks_at` tokens on it knows none."""

    def __init__(self, first: int = 0, breaks_at: int = VOCABULARY, is_ready: bool = True) -> None:
        self.first, self.breaks_at, self.is_ready = first, breaks_at, is_ready
        self.asked: list[list[int]] = []

    def fill(self, output: UInt32, words: UInt32) -> bool:
        assert self.is_ready, "asked too early"
        self.asked.append(output.tolist())
        words[:] = 0
        token = self.first + len(output)
        words[token // 32] = 1 << token % 32
        return len(output) < self.breaks_at


class Obeying(KvHonest):
    """Guided rows take what their guides allow; the others know nothing of it."""

    def execute(self, batch: StepBatch) -> StepOutput:
        output = super().execute(batch)
        if batch.sample.guided is None:
            return output
        masks = fill_masks(batch.sample.guided, VOCABULARY)
        tokens, good = output.tokens.copy(), ~masks.broken
        tokens[masks.rows[good]] = np.argmin(masks.forbidden[good], axis=1)
        return replace(output, tokens=tokens, broken=None if good.all() else masks.rows[masks.broken])


class Stack:
    """A core and an executor; block 4n and those after it are sequence n's, at most 4."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str, str]] = []
        self.guides: list[Counting] = []
        self.core = ready_core(settings(num_blocks=32), self.open)
        self.executor = Obeying(self.core.settings.pool)
        self._step = 0

    def open(self, domain: str, grammar: str, request_id: str) -> Counting:
        self.opened.append((domain, grammar, request_id))
        self.guides.append(Counting(**json.loads(grammar)))
        return self.guides[-1]

    def plan(self, **fields: object) -> StepResult:
        self._step += 1
        return compute(self.core, self.executor, StepPlan(self._step, **fields))  # type: ignore[arg-type]

    def begin(self, *starts: SequenceStart) -> StepResult:
        """Attaches them, and computes all of their tokens."""
        counts = [len(begun.tokens) // 4 - begun.num_computed_tokens for begun in starts]
        return self.plan(attach=starts, rows=u32(*[begun.sequence_id for begun in starts]), row_tokens=u32(*counts))


def plain(number: int, generation: int = 1) -> SequenceStart:
    blocks = handles(*[h(4 * number + block, generation) for block in range(4)])
    return start(number, PROMPTS[number], blocks)


def guided(number: int, generation: int = 1, **fields: int) -> SequenceStart:
    """With a `Counting` of these fields; without any, its tokens begin at 100 times the number."""
    sampling = SamplingParams(temperature=0.0, grammar=json.dumps(fields or {"first": 100 * number}))
    return msgspec.structs.replace(plain(number, generation), sampling=sampling)


def tokens_of(result: StepResult) -> dict[int, list[int]]:
    ids = np.frombuffer(result.sampled_ids, "<u4")
    table = np.frombuffer(result.sampled_tokens, "<u4").reshape(-1, max(1, len(ids)))
    return {int(sequence): table[:, column].tolist() for column, sequence in enumerate(ids)}


def unguided(num_steps: int, *numbers: int) -> list[dict[int, list[int]]]:
    """What these sequences sample without any guided mate: with their prompts, and in a plan of `num_steps`."""
    stack = Stack()
    first = tokens_of(stack.begin(*map(plain, numbers)))
    return [first, tokens_of(stack.plan(repeat_rows=True, num_decode_steps=num_steps))]


# --- what guides are asked


def test_whoever_wants_a_grammar_gets_a_guide_of_its_own_for_its_domain() -> None:
    stack = Stack()
    starts = [guided(1), plain(2), guided(3, first=7), guided(4, first=7)]
    stack.begin(
        *[
            msgspec.structs.replace(begun, domain=f"d{begun.sequence_id % 2}", request_id=f"r{begun.sequence_id}")
            for begun in starts
        ]
    )
    assert stack.opened == [
        ("d1", '{"first": 100}', "r1"),
        ("d1", '{"first": 7}', "r3"),
        ("d0", '{"first": 7}', "r4"),
    ]
    assert len(set(map(id, stack.guides))) == 3


def test_guides_are_asked_with_the_output_and_never_with_the_prompt() -> None:
    stack = Stack()
    results = [stack.begin(guided(1), plain(2), guided(3))]
    results.append(stack.plan(rows=u32(3, 2, 1), row_tokens=u32(1, 1, 1)))
    results.append(stack.plan(repeat_rows=True))
    results.append(stack.plan(rows=u32(1), row_tokens=u32(1)))
    assert [tokens_of(result).get(1) for result in results] == [[100], [101], [102], [103]]
    assert [tokens_of(result).get(3) for result in results] == [[300], [301], [302], None]
    assert stack.guides[0].asked == [[], [100], [100, 101], [100, 101, 102]]
    assert stack.guides[1].asked == [[], [300], [300, 301]]


def test_a_resumed_sequence_brings_the_output_that_it_had() -> None:
    stack = Stack()
    result = stack.begin(msgspec.structs.replace(guided(3), num_prompt_tokens=6))  # its tokens are 100 to 107
    assert tokens_of(result) == {3: [302]}
    stack.plan(repeat_rows=True, num_decode_steps=2)
    assert stack.guides[0].asked == [[106, 107], [106, 107, 302], [106, 107, 302, 303]]


@pytest.mark.parametrize("repeat", [False, True])
def test_several_decode_steps_of_a_plan_ask_with_a_growing_output(repeat: bool) -> None:
    stack = Stack()
    stack.begin(guided(1), plain(2))
    rows = {"repeat_rows": True} if repeat else {"rows": u32(1, 2), "row_tokens": u32(1, 1)}
    result = stack.plan(num_decode_steps=4, **rows)
    assert tokens_of(result) == {1: [101, 102, 103, 104], 2: unguided(4, 2)[1][2]}
    assert stack.guides[0].asked == [[100, 101, 102, 103][:count] for count in range(5)]


def test_rows_are_named_among_those_that_sample() -> None:
    """Sequence 3 is in the middle of its prompt."""
    stack = Stack()
    attach = (guided(3), plain(2), guided(1))
    result = stack.plan(attach=attach, rows=u32(3, 2, 1), row_tokens=u32(4, 3, 5))
    assert tokens_of(result) == {2: unguided(1, 2)[0][2], 1: [100]}
    assert stack.guides[0].asked == []
    assert tokens_of(stack.plan(rows=u32(3, 1), row_tokens=u32(4, 1))) == {3: [300], 1: [101]}


# --- guides that are not ready


def test_a_row_whose_guide_is_not_ready_waits_and_its_mates_do_not() -> None:
    stack = Stack()
    result = stack.begin(guided(1, first=100, is_ready=False), plain(2), guided(3))
    assert codes(result) == {1: "grammar_pending"}
    first, following = unguided(1, 2)
    assert tokens_of(result) == {2: first[2], 3: [300]}
    assert stack.guides[0].asked == []
    assert result.num_tokens == 3 + 8
    stack.guides[0].is_ready = True
    result = stack.plan(repeat_rows=True)
    assert codes(result) == {1: "grammar_pending"}, "until it is detached"
    assert tokens_of(result) == {2: following[2], 3: [301]}
    result = stack.plan(detach=u32(1), attach=(guided(4),), rows=u32(4), row_tokens=u32(4))
    assert (codes(result), tokens_of(result)) == ({}, {4: [400]})
    result = stack.begin(guided(1, generation=2))
    assert (codes(result), tokens_of(result)) == ({}, {1: [100]})


def test_a_chunk_that_samples_nothing_needs_no_guide() -> None:
    stack = Stack()
    waiting = guided(3, first=300, is_ready=False)
    result = stack.plan(attach=(waiting,), rows=u32(3), row_tokens=u32(5))
    assert (codes(result), result.num_tokens) == ({}, 5)
    result = stack.plan(rows=u32(3), row_tokens=u32(2))
    assert (codes(result), result.num_tokens) == ({}, 2)
    stack.guides[0].is_ready = True
    assert tokens_of(stack.plan(rows=u32(3), row_tokens=u32(1))) == {3: [300]}


def test_a_chunk_that_samples_waits_although_the_chunks_before_it_did_not() -> None:
    stack = Stack()
    stack.plan(attach=(guided(3, first=300, is_ready=False),), rows=u32(3), row_tokens=u32(5))
    result = stack.plan(rows=u32(3), row_tokens=u32(3))
    assert (codes(result), result.num_tokens, tokens_of(result)) == ({3: "grammar_pending"}, 0, {})


def test_a_row_waits_in_a_plan_of_several_steps_and_its_mates_do_not() -> None:
    stack = Stack()
    stack.begin(plain(2), guided(4))
    stack.plan(attach=(guided(1, is_ready=False),), rows=u32(1), row_tokens=u32(4))
    result = stack.plan(rows=u32(1, 2, 4), row_tokens=u32(1, 1, 1), num_decode_steps=3)
    assert codes(result) == {1: "grammar_pending"}
    assert tokens_of(result) == {2: unguided(3, 2)[1][2], 4: [401, 402, 403]}


# --- guides that know no token any more


@pytest.mark.parametrize(("num_steps", "breaks_at"), [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_a_broken_row_gives_no_token_and_its_mates_give_theirs(num_steps: int, breaks_at: int) -> None:
    stack = Stack()
    stack.begin(plain(2), guided(1, first=100, breaks_at=breaks_at), guided(3), plain(4))
    before = stack.core.stats()
    result = stack.plan(repeat_rows=True, num_decode_steps=num_steps)
    alone = unguided(num_steps, 2, 4)[1]
    assert codes(result) == {1: "grammar"}
    assert result.sampled_ids == u32(2, 3, 4)
    assert tokens_of(result) == {2: alone[2], 3: [301, 302, 303][:num_steps], 4: alone[4]}
    stats = stack.core.stats()
    assert stats.tokens_sampled - before.tokens_sampled == 3 * num_steps
    assert sum(stats.refusals.values()) - sum(before.refusals.values()) == 1


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_broken_row_computes_nothing_until_it_is_detached(repeat: bool, num_steps: int) -> None:
    stack = Stack()
    stack.begin(plain(2), guided(1, first=100, breaks_at=1))
    assert codes(stack.plan(repeat_rows=True)) == {1: "grammar"}
    num_asked = len(stack.guides[0].asked)
    rows = {"repeat_rows": True} if repeat else {"rows": u32(1, 2), "row_tokens": u32(1, 1)}
    result = stack.plan(num_decode_steps=num_steps, **rows)
    assert (codes(result), list(tokens_of(result)), result.num_tokens) == ({1: "grammar"}, [2], num_steps)
    assert len(stack.guides[0].asked) == num_asked
    assert codes(stack.plan(grow=(grow(1, h(30)),))) == {1: "grammar"}
    assert codes(stack.plan(detach=u32(1))) == {}
    assert tokens_of(stack.begin(guided(1, generation=2))) == {1: [100]}


def test_a_row_that_breaks_at_its_first_token_is_refused_beside_others_that_wait() -> None:
    stack = Stack()
    result = stack.begin(guided(1, breaks_at=0), guided(3, is_ready=False))
    assert codes(result) == {1: "grammar", 3: "grammar_pending"}
    assert tokens_of(result) == {}
    assert (result.sampled_ids, result.sampled_tokens) == (b"", b"")


def test_the_answer_to_a_plan_with_a_broken_row_is_repeated_as_it_was() -> None:
    stack = Stack()
    result = stack.begin(plain(2), guided(1, breaks_at=0))
    plan = StepPlan(1, attach=(plain(2),), rows=u32(2), row_tokens=u32(3))
    assert stack.core.apply(EPOCH, plan) == Replayed(result)
    assert codes(result) == {1: "grammar"}


# --- who can follow none, and who is gone


def test_a_worker_without_guides_refuses_grammars_and_serves_the_rest() -> None:
    core = ready_core(settings(num_blocks=32))
    attach = (guided(1), plain(2))
    executor = KvHonest(core.settings.pool)
    result = compute(core, executor, StepPlan(1, attach=attach, rows=u32(1, 2), row_tokens=u32(5, 3)))
    assert codes(result) == {1: "grammar"}
    assert tokens_of(result) == unguided(1, 2)[0]
    assert codes(compute(core, executor, StepPlan(2, repeat_rows=True))) == {1: "grammar"}
    taken = StepPlan(3, detach=u32(1), attach=(msgspec.structs.replace(plain(1), lease_id=lease(9)),))
    assert codes(compute(core, executor, taken)) == {}, "its blocks are nobody's"


@pytest.mark.parametrize("how", ["detached", "detached beside others", "fenced", "taken over"])
def test_the_guide_of_a_sequence_that_is_gone_is_dropped(how: str) -> None:
    stack = Stack()
    stack.begin(guided(1), guided(3), plain(2))
    stack.plan(repeat_rows=True, num_decode_steps=2)
    seen = weakref.ref(stack.guides.pop(0))
    gc.collect()
    assert seen() is not None, "it is at work"
    match how:
        case "detached":
            stack.plan(detach=u32(1))
        case "detached beside others":
            stack.plan(detach=u32(1), rows=u32(3, 2), row_tokens=u32(1, 1))
        case "fenced":
            stack.core.fence(Fence(1, stack.core.worker_epoch, lease_ids=(lease(1),)))
            stack.plan(rows=u32(2), row_tokens=u32(1))
        case _:
            stack.core.attach_scheduler(SchedulerEpoch(8))
    gc.collect()
    assert seen() is None


def test_the_next_sequence_in_its_place_is_not_guided() -> None:
    stack = Stack()
    stack.begin(guided(1))
    result = stack.plan(detach=u32(1), attach=(plain(2),), rows=u32(2), row_tokens=u32(3))
    assert tokens_of(result) == unguided(1, 2)[0]


def test_a_takeover_forgets_what_broke() -> None:
    stack = Stack()
    stack.begin(guided(1, first=100, breaks_at=1))
    step = applied(stack.core, StepPlan(2, repeat_rows=True))
    assert isinstance(stack.core.attach_scheduler(SchedulerEpoch(8)), SchedulerAccepted)
    assert step.batch is not None
    output = stack.executor.execute(step.batch)
    assert output.broken is not None
    assert codes(stack.core.complete(step, output)) == {}
    begun = msgspec.structs.replace(guided(1, generation=2), lease_id=lease(5))
    plan = StepPlan(1, attach=(begun,), rows=u32(1), row_tokens=u32(5))
    assert codes(run(stack.core, plan, SchedulerEpoch(8))) == {}


# --- masks


class Allowing:
    """These tokens, whatever came before. Bits beyond the vocabulary are set, too."""

    is_ready = True

    def __init__(self, tokens: Iterable[int], vocab_size: int, is_broken: bool = False) -> None:
        self.tokens, self.vocab_size, self.is_broken = list(tokens), vocab_size, is_broken

    def fill(self, output: UInt32, words: UInt32) -> bool:
        bits = np.ones(32 * len(words), np.uint8)
        bits[: self.vocab_size] = 0
        bits[self.tokens] = 1
        words[:] = np.packbits(bits, bitorder="little").view("<u4")
        return not self.is_broken


def masks_of(vocab_size: int, *guides: Allowing) -> Masks:
    rows = np.arange(2, 2 + len(guides), dtype=np.int32)
    masks = fill_masks(Guided(rows, guides, (np.zeros(0, np.uint32),) * len(guides)), vocab_size)
    assert masks.rows.tolist() == rows.tolist()
    assert masks.forbidden.shape == (len(guides), vocab_size)
    return masks


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 320])
def test_masks_forbid_all_but_what_guides_allow(vocab_size: int) -> None:
    allowed = [{0}, {vocab_size - 1}, set(range(0, vocab_size, 3)), set(range(vocab_size)), set[int]()]
    masks = masks_of(vocab_size, *[Allowing(tokens, vocab_size) for tokens in allowed])
    assert [set(np.flatnonzero(~row).tolist()) for row in masks.forbidden] == allowed
    assert not masks.broken.any()


def test_nothing_is_forbidden_where_a_guide_is_broken() -> None:
    masks = masks_of(45, Allowing([3], 45), Allowing([4], 45, is_broken=True), Allowing([44], 45))
    assert masks.broken.tolist() == [False, True, False]
    assert (~masks.forbidden).sum(axis=1).tolist() == [1, 45, 1]


def test_ranks_that_follow_have_rows_without_guides_and_mask_none() -> None:
    masks = fill_masks(Guided(np.array([1, 4], np.int32)), 45)
    assert (len(masks.rows), masks.forbidden.shape, len(masks.broken)) == (0, (0, 45), 0)
