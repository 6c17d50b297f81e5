"""What the commands of `coppice cache` print: tables for people, or one JSON line."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Branches

from coppice_cli.epochs import start_of

_WIDTH_ELSEWHERE = 140  # of a pipe or a file
_WIDTH_OF_TREES = 1 << 16  # a namespace is printed whole, to be copied into --namespace; terminals wrap it
_NS_PER_S = 1e9
_BLOCK_TIMES = ("held", "leased", "cached", "draining", "guaranteed", "borrowed", "lent")
_SHORT = 12  # digits of a name in hexadecimal


def _console() -> Console:
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDTH_ELSEWHERE)


def _print_json(found: Any) -> None:
    print(json.dumps(found, separators=(",", ":")), flush=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)


def _share(found: Any) -> str:
    return f"{found['hit_tokens'] / found['query_tokens']:.1%}" if found["query_tokens"] else "-"


def show_stats(found: Any, *, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    console = _console()
    clients = f"{_count(found['sessions'], 'session')}, {_count(found['leases'], 'lease')}"
    _say(console, f"{start_of(found['cache_epoch'])} of the cache, {clients}")
    if not found["workers"]:
        _say(console, "no worker is registered")
        return
    workers = _table(
        *("worker", "state", "blocks", "free", "leased", "cached", "draining", "leases", "fences", "nodes"),
        *("host blocks", "cached there", "disk blocks", "cached there"),
    )
    for one in found["workers"]:
        counts = [one[f"{state}_blocks"] for state in ("free", "leased", "cached", "draining")]
        row = [one["num_blocks"], *counts, one["leases"], one["fences"], one["nodes"]]
        row += [
            one[name] for name in ("num_host_blocks", "host_cached_blocks", "num_disk_blocks", "disk_cached_blocks")
        ]
        ledger = "open" if one["open"] else "recovering"
        workers.add_row(one["worker_id"], "drains" if one["draining"] else ledger, *map(str, row))
    console.print()
    console.print(workers)
    domains = _table(
        *("domain", "worker", "leased", "cached", "pinned", "draining", "guarantee", "maximum", "leases"),
        *("hit share", "evicted"),
    )
    for one in [domain for worker in found["workers"] for domain in worker["domains"]]:
        names = ("leased", "cached", "pinned", "draining", "guarantee", "maximum")
        row = [*(one[f"{name}_blocks"] for name in names), one["leases"], _share(one), one["evicted_blocks"]]
        domains.add_row(one["domain"], one["worker_id"], *map(str, row))
    console.print()
    console.print(domains)


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"


def show_tree(found: Any, *, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    console = _console()
    console.width = _WIDTH_OF_TREES
    if not found["trees"]:
        _say(console, f"nothing of {found['domain']} is cached" + (" behind that page" if found["moved"] else ""))
    for tree in found["trees"]:
        title = Text(f"{found['domain']} on {tree['worker_id']}")
        title.append(f"  namespace {tree['namespace']}", style="dim")
        console.print(_branches(title, tree["nodes"]), soft_wrap=True)
    if found["moved"]:
        _say(console, "The place where the page before ended is gone: nodes may be missing or come twice.")
    if found["cut_by_depth"]:
        _say(console, "Nodes further down were left out: raise --depth.")
    if found["next_page_token"]:
        _say(console, f"There is more: --page-token {found['next_page_token']}")


def _branches(title: Text, nodes: list[Any]) -> Branches:
    top = Branches(title, guide_style="dim")
    by_depth = {0: top}
    for node in nodes:
        if node["depth"]:
            above = by_depth.get(node["depth"] - 1, top)  # a later page starts below what an earlier one has shown
            by_depth[node["depth"]] = above.add(_node(node))
    return top


def _node(node: Any) -> Text:
    first, count = node["first_block"], node["num_blocks"]
    label = Text(f"blocks {first}-{first + count - 1}" if count > 1 else f"block {first}")
    pins = f", pinned by {node['num_pins']}" if node["num_pins"] else ""
    children = f", {node['num_children']} children" if node["num_children"] > 1 else ""
    label.append(f"  {node['node'][:_SHORT]}  used {_age(node['idle_ms'])} ago{pins}{children}", style="dim")
    return label


def _age(idle_ms: int) -> str:
    seconds = idle_ms / 1_000
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.0f} h"


def show_explanations(found: Any, *, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    console = _console()
    if not found["workers"]:
        _say(console, "no worker is registered")
    for one in found["workers"]:
        _say(console, f"{one['worker_id']}: {one['sentence']}")
        if one["path"]:
            _say(console, "  path     " + " > ".join(name[:_SHORT] for name in one["path"]))
        if one["lease_ids"]:
            _say(console, "  held by  " + ", ".join(one["lease_ids"]))


def show_audit(found: Any, *, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    console = _console()
    if not found["holds"]:
        _say(console, f"BROKEN {found['evidence']}")
        return
    _say(
        console,
        f"All invariants hold: {found['blocks']} blocks, {found['nodes']} nodes and {found['leases']} leases in "
        f"{found['duration_ms']} ms, {found['slices']} slices of at most {found['longest_slice_us'] / 1e3:.1f} ms.",
    )


def show_flushed(found: Any, *, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    count = found["num_trees"]
    _say(_console(), f"Forgotten in {count} tree{'' if count == 1 else 's'}." if count else "Nothing of it was cached.")


def show_pinned(found: Any, num_tokens: int, *, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    where = (
        f" on {found['num_workers']} worker{'' if found['num_workers'] == 1 else 's'}" if found["num_tokens"] else ""
    )
    _say(_console(), f"Pinned {found['name']}: {found['num_tokens']} of {num_tokens} tokens are held now{where}.")


def show_unpinned(found: Any, *, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    _say(_console(), f"Let go of {found['name']}.")


def show_pins(found: Any, *, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    console = _console()
    if not found["pins"]:
        _say(console, "nothing is pinned")
        return
    table = _table("pin", "domain", "worker", "tokens held")
    for one in found["pins"]:
        table.add_row(one["name"], one["domain"], one["worker_id"] or "nowhere yet", str(one["num_tokens"]))
    console.print(table)


def show_statement(found: Any, *, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    console = _console()
    in_hours = found["elapsed_ns"] >= 3_600 * _NS_PER_S
    unit = "block-hours" if in_hours else "block-seconds"
    _say(
        console,
        f"{start_of(found['cache_epoch'])} of the cache, for {_age(found['elapsed_ns'] // 1_000_000)}, in {unit}",
    )
    if not found["totals"]:
        _say(console, "no worker was registered")
    for pool in found["totals"]:
        epochs = pool["num_epochs"]
        console.print()
        _say(console, f"{pool['tier']} blocks of {epochs} worker epoch{'' if epochs == 1 else 's'}")
        console.print(_statement_table(pool, _NS_PER_S * (3_600 if in_hours else 1)))


def _statement_table(pool: Any, unit_ns: float) -> Table:
    table = _table("domain", "of the pool", *_BLOCK_TIMES, "evicted", "displaced")
    whole = pool["pool_block_ns"]

    def add(name: str, held_ns: int, *columns: str) -> None:
        table.add_row(name, f"{held_ns / whole:.1%}" if whole else "-", _block_time(held_ns, unit_ns), *columns)

    for one in sorted(pool["domains"], key=lambda one: (-one["held_block_ns"], one["domain"])):
        times = [_block_time(one[f"{part}_block_ns"], unit_ns) for part in _BLOCK_TIMES[1:]]
        counts = (str(one["evicted_blocks"]), str(one["displaced_blocks"]))
        add(one["domain"] or "(others)", one["held_block_ns"], *times, *counts)
    if pool["unclaimed_block_ns"]:
        add("(unclaimed)", pool["unclaimed_block_ns"])
    add("(free)", pool["free_block_ns"])
    add("(all)", whole)
    return table


def _block_time(block_ns: int, unit_ns: float) -> str:
    return f"{block_ns / unit_ns:,.1f}" if block_ns else "0"
