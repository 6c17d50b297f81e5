"""A worker on two machines says token for token what one process says, also over TLS and between namespaces."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from coppice_worker.model.executor import TorchExecutor
from tests.e2e import test_host_tier as host_tier
from tests.e2e.stack import Service, Stack
from tests.e2e.test_ranks import check_exact
from tests.fakes.certificates import Authority
from tests.fakes.oracle import Oracle
from tests.fakes.ports import free_port
from tests.fakes.tools.namespaces import can_make_namespaces, connected
from tests.fakes.waiting import wait_for
from tests.fakes.worker.nodes import NUM_BLOCKS, Nodes, generated, model_flags, said, two_nodes

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    """What one process generates."""
    threads = torch.get_num_threads()
    try:
        return generated(TorchExecutor(checkpoint, num_blocks=NUM_BLOCKS, num_threads=1))
    finally:
        torch.set_num_threads(threads)


def check_generated(nodes: Nodes, alone: list[list[int]]) -> None:
    nodes.start()
    for service in (nodes.zero, nodes.one):
        assert service.process is not None
        assert service.process.wait(120) == 0, nodes.zero.log.read_text() + nodes.one.log.read_text()
    assert json.loads(nodes.zero.log.read_text().splitlines()[-1]) == alone
    assert len({token for tokens in alone for token in tokens[-12:]}) > 8, "few tokens prove nothing"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_on_two_loopback_addresses(checkpoint: Path, tmp_path: Path, alone: list[list[int]], num_ranks: int) -> None:
    driver = "tests.fakes.worker.nodes"
    with two_nodes(checkpoint, tmp_path, num_ranks=num_ranks, zero_module=driver) as nodes:
        check_generated(nodes, alone)


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces cannot be made here")
def test_in_two_namespaces(checkpoint: Path, tmp_path: Path, alone: list[list[int]]) -> None:
    with connected(2) as machines:
        zero, one = machines
        with two_nodes(
            checkpoint,
            tmp_path,
            host=zero.address,
            prefixes=(zero.prefix, one.prefix),
            flags=(["--insecure-network"], ["--insecure-network"]),
            zero_module="tests.fakes.worker.nodes",
        ) as nodes:
            check_generated(nodes, alone)
        assert said(nodes.zero, rf"node 1 \({one.address}\) is here")


@contextmanager
def serving(stack: Stack, num_ranks: int, own: Sequence[str] = (), ones: Sequence[str] = ()) -> Iterator[Service]:
    """The stack with a worker on two nodes, and its node 1. `own`, `ones`: flags of node 0 and node 1 alone."""
    meet = f"--dist-init-addr=127.0.0.2:{free_port()}"
    flags = [*model_flags(stack.checkpoint, num_ranks), f"--num-blocks={stack.num_blocks}", meet]
    stack.worker_args += [*flags, *own]
    command = [sys.executable, "-m", "coppice_worker", *flags, "--node-rank=1", *ones]
    stack.services["node-1"] = one = Service("node-1", command, stack.folder / "node-1.log")
    with stack:
        yield one


def test_over_tls_it_serves_and_serves_again_in_its_next_life(checkpoint: Path, tmp_path: Path, oracle: Oracle) -> None:
    (tmp_path / "certs").mkdir()
    authority = Authority(tmp_path / "certs")
    stack = Stack(
        checkpoint,
        tmp_path,
        num_blocks=128,
        cache_args=[*authority.flags("cache", "cache-0"), "--session-ttl-ms=2000", "--worker-ttl-ms=2000"],
        scheduler_args=authority.flags("scheduler", "scheduler-0"),
    )
    of_zero, of_one = (authority.flags("worker", name) for name in ("worker-0", "worker-0-1"))
    with serving(stack, 4, of_zero, of_one) as one:
        check_exact(stack, oracle, 1)
        stack.services["worker-0"].kill()
        assert one.process is not None
        assert one.process.wait(60) == 1
        assert said(one, "CRITICAL .*node 0 is lost: the connection broke")
        one.start()  # as a supervisor does, before node 0 is there
        wait_for(lambda: said(one, "waiting for node 0 at 127.0.0.2"), "node 1 to say for whom it waits")
        stack.services["worker-0"].start()
        wait_for(lambda: len(re.findall("listens on", stack.services["worker-0"].log.read_text())) == 2, "it to load")
        stack.wait_ready()
        check_exact(stack, oracle, 2)
        stack.services.pop("node-1")  # ends with node 0
    assert one.process.wait(60) == 0


def test_what_runs_ends_when_all_nodes_are_told_to_end(checkpoint: Path, tmp_path: Path, oracle: Oracle) -> None:
    """As Kubernetes tells all pods of a group: twice for node 0, once by node 1, which counts as one."""
    stack = Stack(checkpoint, tmp_path, num_blocks=128)
    prompt = list(range(1, 40))
    with serving(stack, 2) as one, ThreadPoolExecutor(1) as pool:
        zero = stack.services["worker-0"]
        answer = pool.submit(stack.complete, prompt, 600)
        wait_for(lambda: stack.metric(stack.worker_http[0], "coppice_worker_tokens_computed_total") > 60, "tokens")
        one.signal(signal.SIGTERM)
        wait_for(lambda: said(zero, "node 1 .* was told to stop, and so is the worker"), "node 0 to hear of it")
        zero.signal(signal.SIGTERM)
        oracle.check(prompt, answer.result(60)["choices"][0]["token_ids"])
        for service in (zero, one):
            assert service.process is not None
            assert service.process.wait(60) == 0


def test_blocks_go_to_the_hosts_of_both_nodes_and_come_back(checkpoint: Path, tmp_path: Path, oracle: Oracle) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(host_tier.TENANTS)
    num_blocks = host_tier.NUM_BLOCKS
    stack = Stack(checkpoint, tmp_path, num_blocks=num_blocks, tenants=tenants, cache_args=host_tier.CACHE)
    host = ["--host-memory-mib=64"]
    with serving(stack, 2, host, host) as one:
        host_tier.go_round(stack, oracle)
        stack.services.pop("node-1")
    assert one.process is not None
    assert one.process.wait(60) == 0
