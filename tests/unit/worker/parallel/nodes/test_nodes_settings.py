"""What flags of a worker on several machines are refused, and what each rank gets of its machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coppice.errors import UsageError
from coppice.settings import parse_settings
from coppice_worker.edge.draining import StopRequests
from coppice_worker.edge.loading import resolve_settings
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.parallel.nodes.networks import interface_of
from coppice_worker.parallel.nodes.terms import difference, terms_of
from tests.fakes.checkpoints import write_tiny_checkpoint

MEET = "--dist-init-addr=127.0.0.2:29500"


def settings(*flags: str, **environ: str) -> WorkerSettings:
    return parse_settings(WorkerSettings, ["--model=none", *flags], environ, "python -m coppice_worker")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--nnodes=2", MEET, "--tensor-parallel=3"], "3 cannot be shared out evenly among --nnodes 2"),
        (["--nnodes=2", MEET], "1 cannot be shared out evenly among --nnodes 2"),
        (["--nnodes=2", MEET, "--tensor-parallel=2", "--node-rank=2"], "nodes of --nnodes 2 are counted from 0"),
        (["--node-rank=1"], "nodes of --nnodes 1 are counted from 0"),
        (["--nnodes=2", "--tensor-parallel=2"], "--nnodes 2 needs --dist-init-addr"),
        (["--dist-init-addr=node-0"], "'node-0' is no address"),
        (["--dist-init-addr=0.0.0.0:29500"], "nowhere that other nodes could go"),
        (["--dist-init-addr=10.0.0.1:0"], "nowhere that other nodes could go"),
    ],
)
def test_what_cannot_work_is_refused(flags: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        settings(*flags)


def test_flags_come_from_variables_too() -> None:
    found = settings(
        "--tensor-parallel=8",
        COPPICE_WORKER_NNODES="4",
        COPPICE_WORKER_NODE_RANK="2",
        COPPICE_WORKER_DIST_INIT_ADDR="node-0.workers:29500",
    )
    assert (found.ranks_per_node, found.ranks_here, found.device_of(5)) == (2, range(4, 6), 1)
    assert str(found.meets_at) == "node-0.workers:29500"


@pytest.mark.parametrize("node_rank", ["0", "1"])
def test_a_network_that_others_reach_needs_tls_or_consent(node_rank: str) -> None:
    flags = ["--nnodes=2", "--tensor-parallel=2", f"--node-rank={node_rank}"]
    away = "--dist-init-addr=192.0.2.1:29500"
    with pytest.raises(UsageError, match=r"--dist-init-addr 192\.0\.2\.1 can be reached from other machines"):
        settings(*flags, away).check_listening()
    settings(*flags, away, "--insecure-network").check_listening()
    settings(*flags, away, "--tls-cert=a", "--tls-key=b", "--tls-ca=c").check_listening()
    settings(*flags, MEET).check_listening()


def test_ranks_share_what_their_own_machine_has(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path)
    given: dict[str, Any] = {"model": str(checkpoint), "tensor_parallel": 2, "device": "cpu", "threads": 4}
    assert resolve_settings(WorkerSettings(**given)).threads == 2
    nodes = {"nnodes": 2, "dist_init_addr": "127.0.0.2:29500"}
    assert resolve_settings(WorkerSettings(**given, **nodes)).threads == 4


def test_terms_tell_models_and_flags_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = (write_tiny_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))

    def terms(**changes: Any) -> dict[str, str]:
        return terms_of(resolve_settings(WorkerSettings(**{"model": str(one), "device": "cpu", **changes})))

    def differs(**changes: Any) -> str:
        return difference(terms(), terms(**changes), "node 0", "node 1")

    assert differs() == ""
    assert differs(worker_id="other", threads=1, log_level="debug") == ""
    assert differs(model=str(other)).startswith("the checkpoint's digest is ")
    assert differs(dtype="bfloat16") == "--dtype is float32 at node 0 and bfloat16 at node 1"
    assert differs(num_blocks=5) == "--num-blocks is default at node 0 and 5 at node 1"
    assert "; 1 more differ" in differs(
        num_blocks=5, block_size=32, kv_dtype="fp8", max_sequences=3, max_step_tokens=64
    )


def test_a_term_that_nobody_can_read_is_shown_as_it_is() -> None:
    said = difference({"--dtype": "a"}, {"--dtype": "b\n2026 CRITICAL" + "x" * 100}, "node 0", "node 1")
    assert "\n" not in said
    assert len(said) < 200
    assert "not said at node 1" in difference({"--dtype": "a"}, {}, "node 0", "node 1")


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""


def test_a_stop_of_another_node_counts_as_no_second_one() -> None:
    stopping = StopRequests()
    stopping.ask_too()
    assert stopping.asked.is_set()
    stopping.ask()
    assert not stopping.cuts_within(0.0)
    stopping.ask_too()
    assert not stopping.cuts_within(0.0)
    stopping.ask()
    assert stopping.cuts_within(0.0)
