"""Our index beside those of SGLang, vLLM and Dynamo: the same work, in one run, in turns, medians.

    python -m benchmarks.peers.index --site FOLDER [--json] [--quick]

FOLDER holds their wheels unpacked (benchmarks/README.md says how); they are never installed beside us. A peer that is
not there is left out with a word. Block size 16; sequences of 2,048 tokens behind 64 shared prefixes of 1,024.

The same work:
    lookup   the longest cached prefix of a prompt of 2,064 tokens, of which 2,048 are cached, is found, held, let go.
             Ours: walk, pin, unpin, new place in the order of eviction. Dynamo holds nothing: its match alone.
             Dynamo and vLLM get hashes of the blocks, computed before; ours and SGLang get tokens.
    store    a sequence whose prefix is there already becomes findable: 64 new blocks. Ours is the whole op Publish:
             walk, hang up, states in the ledger, seals, answer. `coppice_seals` is the sealing of the same blocks,
             since peers hash elsewhere or not at all; the ratio `store` leaves it out, `store_with_seals` does not.
    evict    the coldest of N leaves of one block goes.
`coppice_acquire_release` is for scale: both ops around a lookup, with grant, lease and answer.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.peers.index_adapters import Coppice, DynamoRadixTree, Peer, SGLangPython, SGLangRust, VLLMBlockPool
from benchmarks.peers.index_imports import PeerMissing
from coppice_bench.index.shape import BLOCK_SIZE, Shape, leaf_tokens, random_tokens
from coppice_bench.report import describe_run, note, print_report
from coppice_bench.timing import time_in_turns

LEAVES = (1_000, 10_000, 40_000)
OURS_ONLY_LEAVES = (100_000, 1_000_000)
SEQUENCES = 10_000
LOOKUPS = 1_024
STORES = 256
EVICTIONS = 64
_PACKAGES = {"sglang": "sglang", "vllm": "vllm", "dynamo": "ai_dynamo_runtime"}


def peers_in(site: Path, num_blocks: int) -> tuple[list[Peer], dict[str, str]]:
    """What can be compared, and why the rest cannot."""
    makers: dict[str, Callable[[], Peer]] = {
        SGLangPython.name: lambda: SGLangPython(site),
        SGLangRust.name: lambda: SGLangRust(site),
        VLLMBlockPool.name: lambda: VLLMBlockPool(site, num_blocks),
        DynamoRadixTree.name: lambda: DynamoRadixTree(site),
    }
    found: list[Peer] = []
    left_out = {}
    for name, make in makers.items():
        try:
            found.append(make())
        except (PeerMissing, ImportError) as missing:
            left_out[name] = str(missing)
            note(f"without {name}: {missing}")
    return found, left_out


def measure(site: Path, *, quick: bool) -> dict[str, Any]:
    shape = Shape(200 if quick else SEQUENCES)
    stores = 16 if quick else STORES
    num_blocks = (shape.num_sequences + stores + shape.num_prefixes + 8) * 2 * 64
    peers, left_out = peers_in(site, num_blocks)
    ours = Coppice(num_blocks)
    contenders = [ours, *peers]
    fill(contenders, shape)
    lookup_us = time_lookups(contenders, ours, shape, 32 if quick else LOOKUPS)
    store_us = time_stores(contenders, ours, shape, stores)
    del contenders, peers, ours
    gc.unfreeze()
    gc.collect()
    evict_us = time_evictions(site, (1_000,) if quick else LEAVES, () if quick else OURS_ONLY_LEAVES)
    return {
        "bench": "peers",
        "lookup_us": lookup_us,
        "store_us": store_us,
        "evict_us": evict_us,
        "vs": ratios(lookup_us, store_us, evict_us),
        "left_out": left_out,
        "peer_versions": versions(site),
        "shape": {"sequences": shape.num_sequences, "tokens": shape.sequence_tokens, "prefixes": shape.num_prefixes},
        **describe_run(),
    }


def fill(contenders: list[Peer], shape: Shape) -> None:
    note(f"filling {len(contenders)} structures with {shape.num_sequences} sequences")
    prefix_blocks = shape.prefix_tokens // BLOCK_SIZE
    prefixes, sequences = shape.prefixes(), shape.sequences()
    for contender in contenders:
        for prefix in prefixes:
            contender.add(prefix)
        for sequence in sequences:
            contender.add(sequence, prefix_blocks)
    gc.collect()
    gc.freeze()


def time_lookups(contenders: list[Peer], ours: Coppice, shape: Shape, rounds: int) -> dict[str, float]:
    note("lookups")
    source = random.Random(3)
    sequences = shape.sequences()
    prompts = [source.choice(sequences) + random_tokens(source, BLOCK_SIZE) for _ in range(rounds)]
    operations = {}
    for contender in contenders:
        prepared = [contender.prepare_lookup(prompt) for prompt in prompts]
        found = contender.matched_tokens(prepared[0])
        if found != shape.sequence_tokens:
            raise SystemExit(f"{contender.name} matched {found} tokens of {shape.sequence_tokens}")
        operations[contender.name] = _on(contender.lookup, prepared)
    operations["coppice_acquire_release"] = _on(ours.acquire_and_release, prompts)
    return time_in_turns(operations, rounds)


def time_stores(contenders: list[Peer], ours: Coppice, shape: Shape, rounds: int) -> dict[str, float]:
    note("stores")
    source = random.Random(4)
    prefixes, own_tokens = shape.prefixes(), shape.sequence_tokens - shape.prefix_tokens
    fresh = [prefixes[n % shape.num_prefixes] + random_tokens(source, own_tokens) for n in range(rounds)]
    prefix_blocks = shape.prefix_tokens // BLOCK_SIZE
    prepared = {c.name: [c.prepare_store(sequence, prefix_blocks) for sequence in fresh] for c in contenders}
    operations = {contender.name: _on(contender.store, prepared[contender.name]) for contender in contenders}
    operations["coppice_seals"] = _on(ours.seals, prepared[ours.name])
    times = time_in_turns(operations, rounds)
    for contender in contenders:
        for item in prepared[contender.name]:
            contender.finish_store(item)
    return times


def time_evictions(site: Path, leaves: tuple[int, ...], ours_only: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """By contender, then by number of leaves."""
    most = max((*leaves, *ours_only))
    peers, _ = peers_in(site, leaves[-1] + 1)
    contenders: list[Peer] = [Coppice(most + 1_000), *peers]
    times: dict[str, dict[int, float]] = {contender.name: {} for contender in contenders}
    grown = 0
    for number in (*leaves, *ours_only):
        if number in ours_only:
            contenders = contenders[:1]
        note(f"{number} leaves")
        for contender in contenders:
            for leaf in range(grown, number):
                contender.add(leaf_tokens(leaf + 1))
        grown = number
        gc.collect()
        operations = dict(_evictions(contenders))
        for name, time_us in time_in_turns(operations, EVICTIONS, turn=4).items():
            times[name][number] = time_us
    return {name: by_leaves for name, by_leaves in times.items() if by_leaves}


def _evictions(contenders: list[Peer]) -> Iterator[tuple[str, Callable[[int], object]]]:
    for contender in contenders:
        try:
            contender.evict_one()
        except PeerMissing as missing:
            note(f"no eviction of {contender.name}: {missing}")
            continue
        yield contender.name, lambda _, evict=contender.evict_one: evict()  # type: ignore[misc]


def ratios(
    lookup_us: dict[str, float], store_us: dict[str, float], evict_us: dict[str, dict[int, float]]
) -> dict[str, dict[str, float]]:
    """Their time over ours, by peer and operation."""
    ours_store = store_us["coppice"] - store_us["coppice_seals"]
    table: dict[str, dict[str, float]] = {}
    for name in lookup_us:
        if name.startswith("coppice"):
            continue
        row = table[name] = {
            "lookup": lookup_us[name] / lookup_us["coppice"],
            "store": store_us[name] / ours_store,
            "store_with_seals": store_us[name] / store_us["coppice"],
        }
        for leaves, time_us in evict_us.get(name, {}).items():
            row[f"evict_{leaves}"] = time_us / evict_us["coppice"][leaves]
    return table


def versions(site: Path) -> dict[str, str]:
    """Of the wheels that were unpacked there."""
    found = {}
    for distribution in metadata.distributions(path=[str(site)]):
        name = distribution.metadata["Name"]
        if name.replace("-", "_") in _PACKAGES.values():
            found[name] = distribution.version
    return found


def _on(method: Callable[[Any], object], arguments: list[Any]) -> Callable[[int], object]:
    return lambda number: method(arguments[number])


def main() -> int:
    parser = argparse.ArgumentParser(description="Our index beside those of SGLang, vLLM and Dynamo.")
    parser.add_argument("--site", type=Path, required=True, help="folder in which the peers' wheels are unpacked")
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, measures little")
    options = parser.parse_args()
    if not options.site.is_dir():
        parser.error(f"--site {options.site}: no such folder")
    sys.path.append(str(options.site))
    print_report(measure(options.site, quick=options.quick), as_json=options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
