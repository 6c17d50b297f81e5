"""Every rank does what rank 0 does, with the same arrays, and in the same order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from coppice_worker.core.batch.guides import Guided, UInt32
from coppice_worker.core.batch.step_batch import Int32, LogitChanges, PoolSpec, PromptTokens, StepBatch, StepOutput
from coppice_worker.parallel.commands import CopyBlocks, Demote, Promote, ZeroBlocks, encode, receive
from coppice_worker.parallel.errors import RankLost
from coppice_worker.parallel.executor import TensorParallelExecutor
from coppice_worker.parallel.follower import follow, follow_copies
from coppice_worker.parallel.tiers import Progress, SharedOutTiers
from tests.fakes.scheduler.step_driver import DrivenSequence, build_batch
from tests.fakes.waiting import WAIT_S

IDS = np.array([3, 1, 2], np.int32)
DECODES = build_batch([DrivenSequence([1, 2, 3], [4, 5], 2), DrivenSequence([5], [6, 7])], [1, 1], 16)


class Recorder:
    """An executor and tiers that write down what they are asked for, and wait for nothing."""

    pool = PoolSpec(num_blocks=8, block_size=16)
    bytes_per_block = 100

    def __init__(self) -> None:
        self.done: list[tuple[str, Any]] = []

    def zero_blocks(self, block_ids: Int32) -> None:
        self._note("zero", block_ids)

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        self._note("copy", src, dst)

    def execute(self, batch: StepBatch) -> StepOutput:
        self._note("execute", asdict(batch))
        return StepOutput(np.zeros(len(batch.sample.rows), np.int32))

    def demote(self, src: Int32, dst: Int32) -> None:
        self._note("demote", src, dst)

    def promote(self, src: Int32, dst: Int32) -> None:
        self._note("promote", src, dst)

    def _note(self, *what: Any) -> None:
        self.done.append(tuple(np.copy(part) if isinstance(part, np.ndarray) else part for part in what))


class AheadRecorder(Recorder):
    """Runs ahead wherever nobody asks for more than tokens. At most one step may be pending beside a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = 0

    def runs_ahead(self, batch: StepBatch) -> bool:
        return batch.prompt is None

    def launch(self, batch: StepBatch) -> Waiting:
        assert self.pending <= 1
        self.pending += 1
        self._note("launch", asdict(batch))
        return Waiting(self)

    def execute(self, batch: StepBatch) -> StepOutput:
        assert self.pending == 0
        return super().execute(batch)


class Waiting:
    def __init__(self, recorder: AheadRecorder) -> None:
        self._recorder = recorder

    def wait(self) -> StepOutput:
        self._recorder.pending -= 1
        return StepOutput(np.zeros(0, np.int32))


class Pair:
    """Rank 0 and rank 1, whose loop has ended when `end` returns."""

    def __init__(self, kind: type[Recorder]) -> None:
        self.first, self.second = kind(), kind()
        self.progress = Progress()
        ours, theirs = socket.socketpair()
        self.channel = ours
        self.executor = TensorParallelExecutor(self.first, {1: ours})
        self._thread = threading.Thread(target=follow, args=(self.second, theirs, self.progress))
        self._thread.start()

    def end(self) -> None:
        self.channel.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(Recorder)
    yield pair
    pair.end()


def test_commands_arrive_as_they_were() -> None:
    ours, theirs = socket.socketpair()
    longs, singles = IDS.astype(np.int64), IDS.astype(np.float32)
    changes = LogitChanges(singles, singles, singles, longs, longs, np.array([True, False]), longs, longs[:0], singles)
    batch = build_batch([DrivenSequence([1, 2, 3], [4]), DrivenSequence([5], [6], seed=2**63)], [3, 1], 16)
    prompt = PromptTokens(IDS, longs, longs, IDS, longs, longs)
    full = replace(batch, sample=replace(batch.sample, changes=changes), prompt=prompt, follows=True)
    for command in (
        ZeroBlocks(IDS),
        CopyBlocks(IDS, IDS[::-1]),
        batch,
        full,
        Demote(3, IDS, IDS),
        Promote(4, IDS, IDS),
    ):
        ours.sendall(encode(command))
        came = receive(theirs)
        assert type(came) is type(command)
        np.testing.assert_equal(asdict(came), asdict(command))
        assert encode(came) == encode(command), "types of numbers are part of it"
    ours.sendall(encode(batch))
    came = receive(theirs)
    assert isinstance(came, StepBatch)
    came.token_ids[0] = 1  # torch takes only what may be written to
    ours.close()
    assert receive(theirs) is None


def test_ranks_hear_which_rows_are_guided_and_nothing_of_the_guides() -> None:
    """Guides stay with rank 0: they could not be sent."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outputs = (IDS.astype(np.uint32),)
        guided = Guided(IDS[:1], (_Untold(),), outputs)
        batch = replace(DECODES, sample=replace(DECODES.sample, guided=guided))
        ours.sendall(encode(batch))
        came = receive(theirs)
        assert isinstance(came, StepBatch)
        assert came.sample.guided is not None
        assert came.sample.guided.rows.tolist() == IDS[:1].tolist()
        assert (came.sample.guided.guides, came.sample.guided.outputs) == ((), ())
        assert encode(came) == encode(batch)
        unguided = replace(came, sample=replace(came.sample, guided=None))
        np.testing.assert_equal(asdict(unguided), asdict(DECODES))


class _Untold:
    is_ready = True

    def fill(self, output: UInt32, words: UInt32) -> bool:
        raise AssertionError("whoever sends asks nothing")


def test_all_ranks_do_the_same_in_the_same_order(pair: Pair) -> None:
    grown = DECODES.block_tables.copy()
    grown[1, 1] = 9
    pair.executor.zero_blocks(IDS)
    pair.executor.execute(DECODES)
    pair.executor.copy_blocks(IDS, IDS[::-1])
    pair.executor.execute(replace(DECODES, block_tables=grown, changed_tables=np.array([1], np.int32)))
    pair.executor.execute(replace(DECODES, block_tables=grown, changed_tables=np.zeros(0, np.int32)))
    pair.executor.execute(DECODES)
    pair.end()
    np.testing.assert_equal(pair.second.done, pair.first.done)
    assert len(pair.second.done) == 6
    assert pair.progress.num_done == pair.executor.num_told == 6


def test_steps_run_ahead_on_every_rank() -> None:
    pair = Pair(AheadRecorder)
    first = pair.executor.launch(DECODES)
    second = pair.executor.launch(replace(DECODES, follows=True))
    first.wait()
    third = pair.executor.launch(replace(DECODES, follows=True))
    second.wait()
    third.wait()
    prompt = PromptTokens(
        IDS[:1], *(np.zeros(1, np.int64) for _ in range(2)), IDS[:1], IDS.astype(int), IDS.astype(int)
    )
    pair.executor.execute(replace(DECODES, prompt=prompt))
    pair.end()
    assert [name for name, _ in pair.second.done] == ["launch", "launch", "launch", "execute"]
    np.testing.assert_equal(pair.second.done, pair.first.done)


def test_a_plain_executor_is_not_run_ahead(pair: Pair) -> None:
    assert not pair.executor.runs_ahead(DECODES)


def test_copies_between_tiers_are_made_by_all_and_waited_for() -> None:
    first, second = Recorder(), Recorder()
    ours, theirs = socket.socketpair()
    progress = Progress()
    thread = threading.Thread(target=follow_copies, args=(second, theirs, progress))
    thread.start()
    tiers = SharedOutTiers(first, {1: ours}, lambda: 1)
    assert tiers.bytes_per_block == 200
    copying = threading.Thread(target=tiers.demote, args=(IDS, IDS[::-1]))
    copying.start()
    copying.join(0.05)
    assert copying.is_alive(), "rank 1 has not carried out what was said before"
    assert not second.done
    progress.count()
    copying.join(WAIT_S)
    tiers.promote(IDS[:1], IDS[1:2])
    ours.close()
    thread.join(WAIT_S)
    np.testing.assert_equal(second.done, [("demote", IDS, IDS[::-1]), ("promote", IDS[:1], IDS[1:2])])
    np.testing.assert_equal(second.done, first.done)


def test_a_rank_that_is_gone_is_named() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(RankLost, match="rank 3 has ended"):
        TensorParallelExecutor(Recorder(), {3: ours}).zero_blocks(IDS)
    with pytest.raises(RankLost, match="rank 3 has ended"):
        SharedOutTiers(Recorder(), {3: ours}, lambda: 0).demote(IDS, IDS)
