"""The ranks of one model as threads of this process: the real groups, channels and loops, without processes."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from coppice_worker.model.decoder.ranks import RankGroup
from coppice_worker.model.executor import TorchExecutor
from coppice_worker.parallel.executor import TensorParallelExecutor
from coppice_worker.parallel.follower import follow
from coppice_worker.parallel.memory_group import MemoryGroup, create_shared_memory
from coppice_worker.parallel.tiers import Progress
from tests.fakes.waiting import wait_for

E = TypeVar("E", bound=TorchExecutor)

WAIT_S = 60.0


def memory_groups(size: int) -> list[MemoryGroup]:
    """One for each rank. All sockets are closed with the groups."""
    memory = create_shared_memory(size)
    peers: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for a, b in itertools.combinations(range(size), 2):
        peers[a][b], peers[b][a] = socket.socketpair()
    groups = [MemoryGroup(rank, peers[rank], memory) for rank in range(size)]
    os.close(memory)
    return groups


@contextmanager
def shared_out(
    checkpoint: Path, size: int, kind: type[E] = TorchExecutor, **options: Any
) -> Iterator[tuple[TensorParallelExecutor, list[E]]]:
    """The executor of `size` ranks, and the ranks' own, which are made of these `options`."""
    groups = memory_groups(size)
    pairs = {rank: socket.socketpair() for rank in range(1, size)}
    executors: dict[int, E] = {}
    failures: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            executors[number] = kind(checkpoint, group=groups[number], **options)
            if number:
                follow(executors[number], pairs[number][1], Progress())
        except BaseException as error:
            failures.append(error)
            groups[number].close()
            for _, end in pairs.values():
                end.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(1, size)]
    for thread in threads:
        thread.start()
    rank(0)
    wait_for(lambda: failures or len(executors) == size, "all ranks", WAIT_S)
    if failures:
        raise failures[0]
    try:
        yield TensorParallelExecutor(executors[0], {n: ours for n, (ours, _) in pairs.items()}), _in_order(executors)
    finally:
        for ours, _ in pairs.values():
            ours.close()
        for thread in threads:
            thread.join(WAIT_S)
        for group in groups:
            group.close()
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


def together(groups: list[MemoryGroup], work: Callable[[RankGroup], Any]) -> list[Any]:
    """What `work` gives on every rank, all at the same time."""
    results: dict[int, Any] = {}

    def one(group: MemoryGroup) -> None:
        try:
            results[group.rank] = work(group)
        except BaseException as error:
            results[group.rank] = error
            group.close()

    threads = [threading.Thread(target=one, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[rank] for rank in range(len(groups))]


def _in_order(executors: dict[int, E]) -> list[E]:
    return [executors[rank] for rank in sorted(executors)]
