"""A worker on two nodes, as processes; and `python -m tests.fakes.worker.nodes FLAGS`, a node 0 that generates alone.

The latter prints the tokens of `PROMPTS`, greedily drawn, as JSON, and ends in order.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coppice.settings import parse_settings
from coppice.telemetry.logs import configure_logging
from coppice_worker.core.batch.step_batch import Executor
from coppice_worker.edge.draining import StopRequests
from coppice_worker.edge.loading import load, resolve_settings
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.parallel.nodes.leader import LeadingNode
from tests.e2e.stack import Service
from tests.fakes.ports import free_port
from tests.fakes.scheduler.step_driver import DrivenSequence, allot_blocks, run_to_length
from tests.fakes.waiting import wait_for

LENGTHS = (1, 5, 33, 90)
NUM_NEW = 12
NUM_BLOCKS = 64


def generated(executor: Executor) -> list[list[int]]:
    """Tokens of each prompt, its own first."""
    rng = np.random.default_rng(7)
    tables = allot_blocks([length + NUM_NEW for length in LENGTHS], 16, NUM_BLOCKS, rng)
    prompts = [[int(t) for t in rng.integers(0, 256, length)] for length in LENGTHS]
    sequences = [DrivenSequence(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    run_to_length(executor, sequences, [NUM_NEW] * len(sequences), chunk_max=40, rng=rng)
    return [[*sequence.tokens] for sequence in sequences]


def model_flags(checkpoint: Path, num_ranks: int = 2) -> list[str]:
    return [f"--model={checkpoint}", "--dtype=float32", "--device=cpu", f"--num-blocks={NUM_BLOCKS}",
            "--threads=1", f"--tensor-parallel={num_ranks}", "--nnodes=2"]  # fmt: skip


@dataclass
class Nodes:
    """`zero` and `one` are not started yet. `address`: where they meet."""

    address: str
    zero: Service
    one: Service

    def start(self) -> None:
        self.zero.start()
        self.one.start()

    def wait_serving(self) -> None:
        wait_for(lambda: "listens on" in self.zero.log.read_text(), "the worker to serve")

    def rank_of_one(self) -> int:
        """Process id of the rank of node 1, which starts it when node 0 has taken it."""
        assert self.one.process is not None
        children = Path(f"/proc/{self.one.process.pid}/task/{self.one.process.pid}/children")
        wait_for(lambda: bool(children.read_text()), "node 1 to start its rank")
        return int(children.read_text().split()[0])


@contextmanager
def two_nodes(
    checkpoint: Path,
    folder: Path,
    *,
    host: str = "127.0.0.2",
    num_ranks: int = 2,
    prefixes: Sequence[Sequence[str]] = ((), ()),
    flags: Sequence[Sequence[str]] = ((), ()),
    zero_module: str = "coppice_worker",
) -> Iterator[Nodes]:
    """Of a worker whose cache service is not there. `prefixes`, `flags`: of node 0 and node 1."""
    address = f"{host}:{free_port()}"
    common = [*model_flags(checkpoint, num_ranks), f"--dist-init-addr={address}"]
    ports = [f"--cache=127.0.0.1:{free_port()}", "--session-port=0", "--grpc-port=0", "--http-port=0"]
    commands = [
        [*prefixes[0], sys.executable, "-m", zero_module, *common, *ports, *flags[0]],
        [*prefixes[1], sys.executable, "-m", "coppice_worker", *common, "--node-rank=1", *flags[1]],
    ]
    zero, one = (Service(f"node-{n}", command, folder / f"node-{n}.log") for n, command in enumerate(commands))
    for service in (zero, one):
        service.log.touch()
    with ExitStack() as ending:
        for service in (zero, one):
            ending.callback(lambda service=service: service.kill() if service.is_running else None)
        yield Nodes(address, zero, one)


def said(service: Service, pattern: str) -> bool:
    return re.search(pattern, service.log.read_text()) is not None


def main() -> None:
    configure_logging("info")
    settings = resolve_settings(parse_settings(WorkerSettings, sys.argv[1:], {}, "node 0"))
    with LeadingNode(settings, None, StopRequests()) as ranks:
        loaded = load(settings, ranks.join())
        tokens = generated(ranks.lead(loaded).executor)
    print(json.dumps(tokens), flush=True)


if __name__ == "__main__":
    main()
