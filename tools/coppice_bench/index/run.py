"""`coppice bench index`: what the operations of the core cost, in time and in memory, beside its peers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from coppice.errors import UsageError
from coppice_bench.index import memory
from coppice_bench.index.shape import Shape
from coppice_bench.index.times import times_by_leaves, times_by_length
from coppice_bench.report import describe_run, note

LENGTHS = (512, 4_096, 32_768, 131_072)
LEAVES = (1_000, 100_000, 1_000_000)
SEQUENCES = 10_000
_ROUNDS = 2_000
_MEMORY = {"sequences": 4_000, "leaves": 250_000}
_QUICK_LENGTHS = (512, 4_096)
_QUICK_LEAVES = (100, 1_000)
_QUICK_SEQUENCES = 100
_QUICK_ROUNDS = 32
_QUICK_MEMORY = {"sequences": 100, "leaves": 5_000}
_CHECKOUT = Path(__file__).resolve().parents[3]


def run_index(*, quick: bool, peers: Path | None) -> dict[str, Any]:
    """Raises UsageError, CoppiceError."""
    if peers is not None and not peers.is_dir():
        raise UsageError(
            f"--peers {peers}: no such folder", hint="unpack the peers' wheels there: benchmarks/README.md"
        )
    shape = Shape(_QUICK_SEQUENCES if quick else SEQUENCES)
    lengths = _QUICK_LENGTHS if quick else LENGTHS
    by_length = times_by_length(lengths, shape, _QUICK_ROUNDS if quick else _ROUNDS)
    evict_us, pauses = times_by_leaves(_QUICK_LEAVES if quick else LEAVES)
    found = {}
    for each, number in (_QUICK_MEMORY if quick else _MEMORY).items():
        note(f"memory of {number} {each}")
        found[each] = memory.measured(each, number)["bytes_per_token"]
    return {
        "bench": "index",
        **by_length,
        "evict_us": evict_us,
        "bytes_per_token": found,
        "pause_ms": pauses,
        **_beside_peers(peers, quick=quick),
        "sequences": shape.num_sequences,
        **describe_run(),
    }


def _beside_peers(site: Path | None, *, quick: bool) -> dict[str, Any]:
    """Their time over ours, from a run of its own in which both take turns."""
    if site is None:
        return {"vs": {}, "vs_left_out": "no --peers FOLDER with their wheels unpacked; see benchmarks/README.md"}
    if not (_CHECKOUT / "benchmarks" / "peers" / "index.py").is_file():
        return {"vs": {}, "vs_left_out": "benchmarks/peers/index.py comes with a checkout, not with the package"}
    note("peers")
    command = [sys.executable, "-m", "benchmarks.peers.index", "--site", str(site.resolve()), "--json"]
    command += ["--quick"] if quick else []
    done = subprocess.run(command, cwd=_CHECKOUT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"vs": {}, "vs_left_out": f"benchmarks/peers/index.py ended with {done.returncode}; see above"}
    report = json.loads(done.stdout)
    kept = ("lookup_us", "store_us", "evict_us", "left_out", "peer_versions")
    return {"vs": report["vs"], "peers": {key: report[key] for key in kept}}
