"""Servers of the OpenAI API side by side: the same loads, in turns, the median of each.

    python -m benchmarks.peers.servers --peer coppice=http://127.0.0.1:8000 --peer vllm=http://127.0.0.1:8001 [--json]

Each peer is started by hand and serves the same checkpoint (`benchmarks/README.md` says how). With a process id,
`--peer NAME=URL@PID`, the processor time of that process and its children is told too: on a machine that does other
things besides, it says more than the clock of the wall.

    unshared   64 requests of 256 + 64 tokens, 32 at once
    shared     64 requests of 512 + 64 tokens, of which 448 are shared, 32 at once
    alone      4 requests of 256 + 64 tokens, one after another
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

from coppice_bench.processor_time import tree_time_s
from coppice_bench.report import describe_run, note, rounded
from coppice_bench.serve.options import ServeOptions
from coppice_bench.serve.side_by_side import prepared, run_load

LOADS: dict[str, dict[str, Any]] = {
    "unshared": {"requests": 64, "concurrency": 32, "input_tokens": 256, "output_tokens": 64},
    "shared": {
        "load": "prefix",
        "requests": 64,
        "concurrency": 32,
        "input_tokens": 512,
        "shared_tokens": 448,
        "output_tokens": 64,
    },
    "alone": {"requests": 4, "concurrency": 1, "input_tokens": 256, "output_tokens": 64},
}


class Peer:
    def __init__(self, text: str) -> None:
        self.name, _, rest = text.partition("=")
        self.url, _, pid = rest.partition("@")
        self.pid = int(pid) if pid else 0

    def cpu_s(self) -> float:
        """Processor time of the process and all below it, so far."""
        return tree_time_s(self.pid)


def measure(peer: Peer, load: dict[str, Any]) -> dict[str, float]:
    options = ServeOptions(url=peer.url, **load)
    part = prepared(options)
    cpu_before_s = peer.cpu_s()
    found, _ = run_load(part)
    if found["errors"]:
        raise SystemExit(f"{peer.name}: {found['errors']}")
    tokens = found["requests"] * found["output_tokens_mean"]
    return {
        "output_tok_s": found["output_tok_s"],
        "ttft_ms_p50": found["ttft_ms"]["p50"],
        "ttft_ms_p99": found["ttft_ms"]["p99"],
        "tpot_ms_p50": found["tpot_ms"]["p50"],
        "cached_share": found["cached_share"],
        "server_cpu_us_per_token": (peer.cpu_s() - cpu_before_s) * 1e6 / tokens,
    }


def compare(peers: list[Peer], rounds: int) -> list[dict[str, Any]]:
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(rounds + 1):
        for name, load in LOADS.items():
            for peer in peers:
                found = measure(peer, load)
                if number:  # the first round warms up
                    runs.setdefault((name, peer.name), []).append(found)
                note(f"{number} {name:10} {peer.name:10} " + json.dumps(rounded(found)))
    return [
        {
            "load": load,
            "peer": peer,
            "rounds": len(found),
            **{key: median(run[key] for run in found) for key in found[0]},
            "output_tok_s_best": max(run["output_tok_s"] for run in found),
        }
        for (load, peer), found in runs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", action="append", required=True, help="NAME=URL or NAME=URL@PID; several times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    chosen = parser.parse_args()
    cases = compare([Peer(text) for text in chosen.peer], chosen.rounds)
    report = rounded({"bench": "serve_peers", "cases": cases, **describe_run()})
    print(json.dumps(report, indent=None if chosen.json else 2))


if __name__ == "__main__":
    main()
