"""A worker on two nodes lives and dies as a whole: whoever is lost, all end, and say who it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import Service
from tests.fakes.certificates import Authority
from tests.fakes.tools.namespaces import can_make_namespaces, connected
from tests.fakes.waiting import wait_for
from tests.fakes.worker.nodes import Nodes, said, two_nodes

pytestmark = pytest.mark.long
END_S = 60.0


def code(service: Service) -> int:
    assert service.process is not None
    return service.process.wait(END_S)


@pytest.fixture
def nodes(checkpoint: Path, tmp_path: Path) -> Iterator[Nodes]:
    """That compute together."""
    with two_nodes(checkpoint, tmp_path) as nodes:
        nodes.start()
        nodes.wait_serving()
        yield nodes


def check_both_ended(nodes: Nodes, zero_says: str, one_says: str) -> None:
    assert (code(nodes.zero), code(nodes.one)) == (1, 1)
    assert said(nodes.zero, f"CRITICAL .*{zero_says}"), nodes.zero.log.read_text()
    assert said(nodes.one, f"CRITICAL .*{one_says}"), nodes.one.log.read_text()


def test_a_rank_of_node_1_is_killed(nodes: Nodes) -> None:
    rank = nodes.rank_of_one()
    killed_s = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    check_both_ended(
        nodes, r"rank 1 of node 1 \(127.0.0.1\) is lost", rf"rank 1 \(process {rank}\) ended: killed by SIGKILL"
    )
    assert time.monotonic() - killed_s < 10, "silence would tell, too, but later"


def test_node_1_is_killed(nodes: Nodes) -> None:
    rank = nodes.rank_of_one()
    nodes.one.kill()
    assert code(nodes.zero) == 1
    assert said(nodes.zero, r"CRITICAL .*node 1 \(127.0.0.1\) is lost: the connection broke")
    wait_for(lambda: not Path(f"/proc/{rank}").exists(), "the end of its rank")


def test_node_0_is_killed(nodes: Nodes) -> None:
    rank = nodes.rank_of_one()
    nodes.zero.kill()
    assert code(nodes.one) == 1
    assert said(nodes.one, r"CRITICAL .*node 0 is lost: the connection broke")
    wait_for(lambda: not Path(f"/proc/{rank}").exists(), "the end of its rank")


def test_a_rank_ends_with_node_0_though_its_own_node_hangs(nodes: Nodes) -> None:
    rank = nodes.rank_of_one()
    assert nodes.one.process is not None
    os.kill(nodes.one.process.pid, signal.SIGSTOP)
    nodes.zero.kill()
    wait_for(lambda: said(nodes.one, "CRITICAL .*rank 1: rank 0 is lost: the connection broke"), "its word")
    wait_for(lambda: Path(f"/proc/{rank}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z", "its end")
    os.kill(nodes.one.process.pid, signal.SIGCONT)
    assert code(nodes.one) == 1


@pytest.mark.parametrize("told", ["zero", "one"])
def test_either_is_told_to_end(nodes: Nodes, told: str) -> None:
    getattr(nodes, told).signal(signal.SIGTERM)
    assert (code(nodes.zero), code(nodes.one)) == (0, 0)
    assert not said(nodes.zero, "CRITICAL|Traceback")
    assert not said(nodes.one, "CRITICAL|Traceback")


def test_a_rank_of_node_1_hangs(nodes: Nodes) -> None:
    rank = nodes.rank_of_one()
    os.kill(rank, signal.SIGSTOP)
    check_both_ended(nodes, r"rank 1 of node 1 \(127.0.0.1\) is lost: it said nothing for 1\d s", "node 0 is lost")
    wait_for(lambda: not Path(f"/proc/{rank}").exists(), "the end of the rank that hung")


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces cannot be made here")
def test_the_network_between_them_falls_silent(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    authority = Authority(tmp_path / "certs")
    flags = [authority.flags("worker", name) for name in ("worker-0", "worker-0-1")]
    with connected(2) as (zero, one):
        prefixes = (zero.prefix, one.prefix)
        with two_nodes(checkpoint, tmp_path, host=zero.address, prefixes=prefixes, flags=flags) as nodes:
            nodes.start()
            nodes.wait_serving()
            assert said(nodes.zero, "WARNING .*sums between nodes are not encrypted")
            one.cut_off()
            check_both_ended(nodes, "node 1.* is lost: it said nothing", "(node|rank) 0 .*is lost: it said nothing")


def test_a_node_that_is_first_waits_and_can_be_told_to_end(checkpoint: Path, tmp_path: Path) -> None:
    with two_nodes(checkpoint, tmp_path) as nodes:
        nodes.one.start()
        wait_for(lambda: said(nodes.one, f"waiting for node 0 at {nodes.address}: Connection refused"), "its word")
        nodes.one.signal(signal.SIGTERM)
        assert code(nodes.one) == 0


def test_node_0_alone_waits_and_can_be_told_to_end(checkpoint: Path, tmp_path: Path) -> None:
    with two_nodes(checkpoint, tmp_path) as nodes:
        nodes.zero.start()
        wait_for(lambda: said(nodes.zero, f"waiting for node 1 at {nodes.address}"), "its word")
        nodes.zero.signal(signal.SIGTERM)
        assert code(nodes.zero) == 0


def test_a_node_with_other_flags_ends_and_node_0_waits_on(checkpoint: Path, tmp_path: Path) -> None:
    with two_nodes(checkpoint, tmp_path, flags=([], ["--block-size=32"])) as nodes:
        nodes.start()
        assert code(nodes.one) == 2
        sentence = "--block-size is 16 at node 0 and 32 at node 1"
        assert said(nodes.one, sentence)
        wait_for(lambda: said(nodes.zero, f"refused, from 127.0.0.1: node 1: {sentence}"), "node 0's word")
        nodes.one.argv = [word for word in nodes.one.argv if word != "--block-size=32"]
        nodes.one.start()
        nodes.wait_serving()


def test_nodes_that_chose_other_kernels_do_not_compute_together(checkpoint: Path, tmp_path: Path) -> None:
    """Ranks would draw other tokens from the same logits."""
    without_compiler = ["env", "CXX=no-such-compiler"]
    with two_nodes(checkpoint, tmp_path, prefixes=([], without_compiler)) as nodes:
        nodes.start()
        assert (code(nodes.zero), code(nodes.one)) == (2, 1)
        assert said(nodes.zero, "the choice of kernels is NativeBackend.* at rank 0 and TorchBackend at rank 1")


def test_ranks_of_an_earlier_life_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Node 0 is started anew between a node's arrival and that of its ranks."""
    with two_nodes(checkpoint, tmp_path) as nodes:
        nodes.start()
        wait_for(lambda: said(nodes.zero, r"node 1 \(127.0.0.1\) is here"), "node 1 to be taken")
        rank = nodes.rank_of_one()
        os.kill(rank, signal.SIGSTOP)
        assert nodes.one.process is not None
        os.kill(nodes.one.process.pid, signal.SIGSTOP)  # so that it does not hear of the end
        nodes.zero.kill()
        said_before = nodes.zero.log.read_text()
        nodes.zero.start()
        wait_for(lambda: "waiting for node 1 at" in nodes.zero.log.read_text()[len(said_before) :], "its next life")
        os.kill(rank, signal.SIGCONT)
        wait_for(lambda: said(nodes.zero, "rank 1 of node 1 belongs to an earlier life"), "the refusal")
        os.kill(nodes.one.process.pid, signal.SIGCONT)
        assert code(nodes.one) == 1
        nodes.one.start()
        nodes.wait_serving()
