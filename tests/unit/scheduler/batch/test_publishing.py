"""When full blocks become findable: a prompt's at once, those behind it a few at a time, all of them at the end."""

from __future__ import annotations

import pytest

from coppice.messages.index import Acquire, OpBatch, Publish, Reclaim, Release
from coppice_scheduler.core.state.request import Effects
from coppice_scheduler.core.state.sequences import OUTPUT_BLOCKS_TOGETHER, Sequence, blocks_together
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import BLOCK, Bench, W, tokens_of

STOP = 5
PROMPT = 2 * BLOCK + 1
TOGETHER = OUTPUT_BLOCKS_TOGETHER * BLOCK  # tokens


class Listener(Bench):
    """Counts what was said of its one sequence, in the order in which it left."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        self.num_published = 0  # blocks
        self.is_released = False
        super().__init__(settings)

    def advance(self, after_ms: float = 0) -> Effects:
        effects = super().advance(after_ms)
        for op in (op for message in effects.to_index if isinstance(message, OpBatch) for op in message.ops):
            if isinstance(op, Publish):
                assert op.first_block == self.num_published
                assert not self.is_released
                self.num_published += op.num_named_blocks + len(op.tokens) // len(tokens_of(BLOCK))
            self.is_released |= isinstance(op, Release)
        return effects

    @property
    def sequence(self) -> Sequence:
        (sequence,) = self.core._life.workers[W].running.values()
        return sequence

    def decode(self, num_tokens: int, token: int = 9) -> None:
        """The first of them ends the prefill."""
        for _ in range(num_tokens):
            self.result({1: token})
            self.settle()

    def end(self) -> None:
        """All that is in flight comes back."""
        while self.plans:
            self.result({1: 9})
            self.settle()


def decoding(num_output: int) -> Listener:
    listener = Listener()
    listener.submit("r", PROMPT, max_new=40, stop_token_ids=frozenset({STOP}))
    listener.settle()
    listener.decode(num_output)
    return listener


def test_a_prompt_at_once_and_its_output_a_few_blocks_at_a_time() -> None:
    listener = decoding(1)
    said = {listener.num_published}
    for _ in range(2 * TOGETHER):
        num_full = listener.sequence.num_computed // BLOCK
        assert 0 <= num_full - listener.num_published < OUTPUT_BLOCKS_TOGETHER
        listener.decode(1)
        said.add(listener.num_published)
    assert said == {2, 2 + OUTPUT_BLOCKS_TOGETHER, 2 + 2 * OUTPUT_BLOCKS_TOGETHER}


def test_nothing_waits_for_more_than_so_many_tokens() -> None:
    assert [blocks_together(size) for size in (1, 16, 32, 64, 1024)] == [4, 4, 2, 1, 1]


# Computed tokens: the prompt's, and one less than the output's.
FULL = [(2, 2), (3, 2), (4, 3), (11, 4), (TOGETHER + 3, 6), (TOGETHER + 4, 7)]


@pytest.mark.parametrize(("num_output", "num_full"), FULL)
@pytest.mark.parametrize("ending", ["cancel", "stop", "length", "preempt"])
def test_all_that_is_full_is_published_before_the_release(ending: str, num_output: int, num_full: int) -> None:
    listener = decoding(num_output if ending in ("cancel", "preempt") else num_output - 1)
    if ending == "cancel":
        listener.cancel("r")
    elif ending == "stop":
        listener.decode(1, STOP)
    elif ending == "length":
        listener.core._life.requests["r"].max_output_tokens = num_output
        listener.sequence.table.num_max[listener.sequence.slot] = PROMPT + num_output
        listener.decode(1)
    else:
        listener.core.index_message(Reclaim(listener.cache_epoch, W, listener.sequence.lease.domain, 1), 0)
        listener.advance()
    assert listener.num_published == num_full
    if ending != "preempt":
        listener.end()
        assert listener.is_released
        assert listener.num_published == num_full, "what a step computed behind the end is nobody's"


def test_what_is_computed_again_is_prefill() -> None:
    """After a preemption the output so far is published as it is computed."""
    listener = decoding(TOGETHER)
    listener.core.index_message(Reclaim(listener.cache_epoch, W, listener.sequence.lease.domain, 1), 0)
    listener.advance()
    while not listener.ops(Acquire):
        listener.result({1: 9})
    listener.num_published, listener.is_released = 0, False
    listener.settle()
    while listener.sequence.num_computed < PROMPT + TOGETHER:
        listener.result({2: 9})
    assert listener.num_published == (PROMPT + TOGETHER) // BLOCK
