"""What one tenant can do to another's time to the first token, with one key and all that a client can send.

    python -m benchmarks.attacks [--rounds 4] [--seconds 25] [--phases texts,ids] [--model FOLDER] [--json]
        [--victim '{"mode": "strict", "guarantee_share": 0.25, "max_share": 0.5}']

Two stacks are started, one that clients reach plainly and one that they reach over TLS, with a model of random weights
that takes 524,288 tokens (`benchmarks/serve_model.py`). The victim asks for a few tokens five times a second, as long
as each phase lasts. The attacker, a process of its own:

    calm     nothing
    fair     ordinary requests, 16 at once: its share of the chip, which is not an attack
    full     64 streams of four choices that are read: as many answers at once as a tenant may have, its share of the
             chip and of the memory where it takes all it may
    texts    1.9 MB of text to /tokenize, 8 at once, again and again
    ids      1.9 MB of token ids, 8 at once, again and again
    refused  wrong fields and prompts that are too long, 64 at once, again and again
    strangers  requests with a key that nobody has, 64 at once
    answers  64 calls for 128 answers each, at once, again and again
    bodies   150 bodies of 2 MB that lack their end
    unread   64 streams of four choices that are never read
    idle     10,000 connections that say nothing, or as many as the limit of open files allows
    grammars  long to compile, wide to follow or too deep, each another one, 8 at once
    wrong_grammars  schemas, regexes and grammars that are none, 64 at once
    grpc_silent  1,500 calls that never send their message
    grpc_flood   refused calls, bytes that are no message, texts to tokenise, 64 at once
    handshakes   over TLS: 10,000 connections that do not say hello
    hellos       over TLS: handshakes after which nothing is asked, 64 at once

Phases take turns, `calm` before each of them, so that whatever else the machine does meets all alike; those of TLS have
a `calm_tls` and a `fair_tls` at their door. Printed are the median and the 99th percentile of each in milliseconds, and
over the percentiles of `fair` and `full`, how many of the victim's requests failed, and what the attacker was told. An
attack that did not reach what it attacks (`phases.py`) is named under `missed`, and the exit code is 1. All of them run
on the same machine: the attacker runs at the lowest priority, so that it takes what the others leave of the processors.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.attacks.attacker import Target
from benchmarks.attacks.over_rest import CONTEXT
from benchmarks.attacks.phases import ATTACKS, CALM, FAIR, FULL, PHASES, PLAIN, TLS, missed
from benchmarks.attacks.victim import Seen, Victim
from benchmarks.serve_model import write_model
from coppice.errors import CoppiceError
from coppice_bench.report import describe_run, note, print_report, warn_if_busy
from coppice_bench.stack import Stack, StackOptions, running

CALM_SHARE = 0.2  # of a phase
SETTLE_S = 1.0  # what an attack left behind counts for it, for so long
WARM_UP_S = 3.0  # the first requests are slower
VICTIM, ATTACKER = "victim", "attacker"


class Battle:
    """Two doors, a victim at each, and what came of it so far."""

    def __init__(self, stacks: dict[str, Stack], keys: dict[str, str]) -> None:
        self._stacks = stacks
        self._key = keys[ATTACKER]
        self._victims = {door: Victim(stack, keys[VICTIM]) for door, stack in stacks.items()}
        self.seen = {name: Seen() for name in PHASES}
        self.told: dict[str, Counter[str]] = {name: Counter() for name in PHASES}

    async def run(self, phases: list[str], rounds: int, seconds: float) -> None:
        for victim in self._victims.values():
            await victim.ask_for(WARM_UP_S, Seen())
        for turn in range(rounds):
            for name in phases:
                note(f"round {turn + 1} of {rounds}: {name}")
                await self._phase(CALM[PHASES[name].door], seconds * CALM_SHARE)
                await self._phase(name, seconds)
        for victim in self._victims.values():
            await victim.close()

    async def _phase(self, name: str, seconds: float) -> None:
        door = PHASES[name].door
        command = [sys.executable, "-m", "benchmarks.attacks.attacker"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as attacker:
            assert attacker.stdin is not None
            assert attacker.stdout is not None
            attacker.stdin.write(Target.of(name, self._stacks[door], self._key).to_line())
            attacker.stdin.flush()
            await asyncio.to_thread(attacker.stdout.readline)
            await self._victims[door].ask_for(seconds, self.seen[name])
            attacker.stdin.close()
            said = await asyncio.to_thread(attacker.stdout.readline)
            attacker.kill()
        if not said:
            raise CoppiceError(f"the attacker of {name} ended; see above")
        self.told[name] += Counter(json.loads(said))
        await asyncio.sleep(SETTLE_S)

    def report(self, rounds: int) -> dict[str, Any]:
        phases: dict[str, Any] = {}
        for name, seen in self.seen.items():
            if not (seen.first_token_ms or seen.failures):
                continue
            shown = seen.summary() | {"told": dict(self.told[name])}
            for measures, told in ((FAIR, "p99_over_fair"), (FULL, "p99_over_full")):
                measure = measures.get(PHASES[name].door)
                p99_ms = self.seen[measure].summary().get("p99_ms") if measure else None
                if p99_ms and "p99_ms" in shown:
                    shown[told] = shown["p99_ms"] / p99_ms
            phases[name] = shown
        lacking = [lack for name in phases for lack in missed(name, self.told[name], rounds)]
        return {"phases": phases, "missed": lacking}


def measure(arguments: argparse.Namespace, phases: list[str]) -> dict[str, Any]:
    keys = {tenant: secrets.token_hex(16) for tenant in (VICTIM, ATTACKER)}
    digests = {tenant: hashlib.sha256(key.encode()).hexdigest() for tenant, key in keys.items()}
    listed = [{"id": id_, "api_key_sha256": digest} for id_, digest in digests.items()]
    listed[0] |= arguments.victim
    tenants = json.dumps({"tenants": listed})
    with ExitStack() as held:
        model = arguments.model
        if model is None:
            model = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="coppice-model-")))
            write_model(model, context=CONTEXT)
        note("the stacks start")
        stacks = {
            door: held.enter_context(running(StackOptions(model=model, tenants=tenants, public_tls=door == TLS)))
            for door in (PLAIN, TLS)
            if any(PHASES[name].door == door for name in phases)
        }
        battle = Battle(stacks, keys)
        asyncio.run(battle.run(phases, arguments.rounds, arguments.seconds))
        found = battle.report(arguments.rounds)
    sizes = {"seconds": arguments.seconds, "rounds": arguments.rounds, "victim": arguments.victim}
    return {**sizes, **describe_run(), **found}


def chosen_phases(text: str) -> list[str]:
    """Those that were named, in our order, each door's `fair` and `full` with them: they measure the others there."""
    names = text.split(",")
    unknown = [name for name in names if name not in ATTACKS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(ATTACKS)}")
    doors = {PHASES[name].door for name in names}
    measures = [measured[door] for measured in (FAIR, FULL) for door in doors & measured.keys()]
    return [name for name in ATTACKS if name in names or name in measures]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0, help="of a phase; shorter than 10 reach nothing")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--phases", type=chosen_phases, default=list(ATTACKS), help="which of them, with commas")
    parser.add_argument(
        "--victim", type=json.loads, default={}, metavar="JSON", help="what the tenants file says of it"
    )
    parser.add_argument("--model", type=Path, help=f"a checkpoint that takes {CONTEXT:,} tokens; default: a random one")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    warn_if_busy()
    try:
        report = measure(arguments, arguments.phases)
    except CoppiceError as error:
        note(error.line())
        return 1
    print_report(report, as_json=arguments.json)
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
