"""`coppice up --on ray://HEAD --nodes-per-worker 2`: a worker on two nodes loses either, and comes back whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.up.test_up_ray import Stream, Up, answers, check_exact, from_outside, nothing_is_left, prompts, started
from tests.fakes.tools import ray_cluster
from tests.fakes.tools.ray_cluster import RayCluster
from tests.fakes.waiting import wait_for

pytest.importorskip("ray", reason="needs coppice[ray]")
pytestmark = pytest.mark.long

NUM_TOKENS = 60
ON_TWO_NODES = ("--tensor-parallel", "2", "--nodes-per-worker", "2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster.started_in_short_folder(num_nodes=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return answers(prompts()[:8], NUM_TOKENS)


def check_answers(up: Up, expected: dict[str, list[int]]) -> None:
    check_exact([Stream(up, prompt, NUM_TOKENS) for prompt in expected], expected)


def wait_for_another_epoch(up: Up, before: int) -> int:
    wait_for(lambda: up.epochs().get("worker-0", before) != before, "the worker under a new epoch")
    wait_for(up.is_ready, "a planner with it")
    return up.epochs()["worker-0"]


def process_of_node_1(meets_at: str) -> int:
    """By the address that no other worker of this machine has."""
    asked = b"--node-rank\0001\0--dist-init-addr\0" + meets_at.encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if asked in entry.read_bytes():
                return int(entry.parent.name)
    raise AssertionError("node 1 does not run")


def test_a_worker_on_two_nodes_outlives_either(
    cluster: RayCluster, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    with started(cluster, tmp_path, *from_outside(cluster, tmp_path), *ON_TWO_NODES) as up:
        up.must_run()
        doomed = up.node_of("worker-0")
        assert len({up.node_of("scheduler"), doomed, up.node_of("worker-0-1")}) == 3
        check_answers(up, expected)
        epoch = up.epochs()["worker-0"]

        (node,) = (node for node in cluster.nodes if node.address == doomed)
        os.kill(cluster.raylet(node), signal.SIGKILL)
        epoch = wait_for_another_epoch(up, epoch)
        wait_for(lambda: up.node_of("worker-0") != doomed, "the worker on another node")
        moved = f"worker-0-1 is started again, since worker-0 runs on {up.node_of('worker-0')} now"
        assert up.output().count(moved) == 1
        check_answers(up, expected)

        os.kill(process_of_node_1(up.node_of("worker-0")), signal.SIGKILL)
        wait_for_another_epoch(up, epoch)
        check_answers(up, expected)
        assert up.output().count(moved) == 1, "the worker has come back where it was"
        assert up.stop(signal.SIGINT) == 0
        nothing_is_left(up)
