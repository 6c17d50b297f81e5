"""Ranks add up and join what each of them has, whatever its size; and hear of a rank that is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from coppice_worker.model.decoder.ranks import RankGroup
from coppice_worker.parallel import memory_group
from coppice_worker.parallel.errors import RankLost
from coppice_worker.parallel.torch_group import TorchGroup, store_in
from tests.fakes.waiting import wait_for
from tests.fakes.worker.ranks import WAIT_S, memory_groups, together


def share_of(rank: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check_group(group: RankGroup) -> None:
    """What any group does, several times in a row, with shares that each rank makes by its number."""
    for rows in (1, 7, 40):
        shares = [share_of(rank, rows, 6) for rank in range(group.size)]
        total = group.add_up(shares[group.rank].clone())
        torch.testing.assert_close(total, torch.stack(shares).sum(0))
        assert torch.equal(group.join_columns(shares[group.rank]), torch.cat(shares, dim=1))
        assert group.least(10 - group.rank) == 11 - group.size


@pytest.mark.parametrize("size", [2, 3])
def test_in_memory(size: int) -> None:
    together(memory_groups(size), check_group)


@pytest.mark.long
def test_through_torch(tmp_path: Path) -> None:
    """gloo stands in for NCCL, which needs GPUs."""
    command = [sys.executable, "-m", "tests.unit.worker.parallel.test_groups", str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for rank in ranks:
        _, error = rank.communicate(timeout=WAIT_S)
        assert rank.returncode == 0, error


def test_what_is_larger_than_a_slot_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_group, "SLOT_BYTES", 64)
    together(memory_groups(2), check_group)


def test_sums_of_narrow_numbers_are_rounded_once_and_alike() -> None:
    shares = [share_of(rank, 4, 100, torch.bfloat16) for rank in range(3)]
    sums = together(memory_groups(3), lambda group: group.add_up(shares[group.rank].clone()))
    exact = torch.stack(shares).float().sum(0).to(torch.bfloat16)
    for total in sums:
        assert torch.equal(total, exact)


def test_a_share_stays_until_all_have_read_it() -> None:
    first, second = memory_groups(2)
    is_ahead = threading.Event()

    def hurry() -> None:
        first.add_up(torch.ones(1, 1))
        is_ahead.set()
        first.add_up(torch.zeros(1, 1))

    hurrying = threading.Thread(target=hurry)
    hurrying.start()
    shares = second._exchange(torch.ones(1))
    assert is_ahead.wait(WAIT_S)
    wait_for(lambda: first.waits_for == 1, "the other's next share")
    assert shares.tolist() == [[1.0], [1.0]]
    second.add_up(torch.zeros(1, 1))
    hurrying.join(WAIT_S)
    assert not hurrying.is_alive()


def test_a_rank_that_leaves_is_named() -> None:
    groups = memory_groups(3)
    groups[2].close()
    with pytest.raises(RankLost, match="rank 2 has ended"):
        groups[0].add_up(torch.ones(1, 1))


def test_one_can_ask_who_is_waited_for() -> None:
    first, second = memory_groups(2)
    waiting = threading.Thread(target=lambda: first.add_up(torch.ones(1, 1)))
    assert first.waits_for is None
    waiting.start()
    wait_for(lambda: first.waits_for == 1, "somebody to be waited for")
    second.add_up(torch.ones(1, 1))
    waiting.join(WAIT_S)
    assert first.waits_for is None


if __name__ == "__main__":
    torch.set_num_threads(1)
    number = int(sys.argv[2])
    group = TorchGroup(number, 2, store_in(Path(sys.argv[1]), 2), "gloo", device=number)
    check_group(group)
    group.close()
