"""Services of two versions in one cell, upgraded and rolled back one by one: every invariant holds all the while."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from coppice.messages.index import OpBatch, WorkerInfo, Workers
from coppice.messages.ownership import Yielded
from coppice.messages.registration import Registered
from coppice.session.versions import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, SPOKEN
from coppice_sim.base.timeline import MS
from coppice_sim.base.versions import BEFORE, LATER_FIELDS, Builds, as_said, may_say
from coppice_sim.nemesis import FaultProfile
from coppice_sim.run import run
from coppice_sim.world import Scope, World
from scripts.cover_seeds import greedy_cover
from tests.fakes.messages import golden

STEPS = 2_000
SEEDS = (3, 7, 11)
HANDSHAKE = {"Hello"}  # the frames of sessions, which the link itself makes


@pytest.mark.wide
def test_every_invariant_holds_while_services_are_upgraded_and_rolled_back() -> None:
    sometimes: Counter[str] = Counter()
    for seed in SEEDS:
        report = run(seed, steps=STEPS, faults=FaultProfile.rolling())
        assert not report.broken, "\n".join((report.line, *report.history))
        sometimes += report.sometimes
    wanted = ("upgraded", "rolled back", "two schedulers alive", "session ended", "session re-attached", "fenced")
    assert [name for name in wanted if not sometimes[name]] == []


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("first", range(3_000, 3_200, 50))
def test_many_seeds_of_mixed_versions(first: int) -> None:
    for seed in range(first, first + 50):
        report = run(seed, steps=4_000, faults=FaultProfile.rolling())
        assert not report.broken, "\n".join((report.line, *report.history))


def test_a_scheduler_of_the_version_before_keeps_its_workers_and_uses_them_all() -> None:
    """It is never asked for one, so each goes on to be granted; who came later gets them when it is gone."""
    world = World(11, FaultProfile.none(), Scope(tiers=False, demands=False, check_every=0))
    cluster = world.cluster
    assert len(cluster.workers) == 2
    assert not cluster.builds.change("s0")
    cluster.crash("s0", down_ms=1)
    run_for(world, 1_500)
    cluster.start_scheduler("s1")
    run_for(world, 500)
    older, second = cluster.schedulers["s0"], cluster.schedulers["s1"]
    assert (older.speaks, second.speaks) == (BEFORE, SPOKEN)
    workers = cluster.cache.core.state.workers.values()
    assert [worker.owner for worker in workers] == [older.epoch] * 2
    assert not any(worker.yields for worker in workers)
    cluster.crash("s0", down_ms=60_000)
    run_for(world, 2_000)
    assert {worker.owner for worker in workers} == {second.epoch}


def run_for(world: World, num_ms: int) -> None:
    until_ns = world.timeline.now_ns + num_ms * MS
    while world.timeline.now_ns < until_ns:
        world.step()


def test_fields_that_the_version_before_does_not_have_are_those_of_its_files() -> None:
    before, _ = golden.shapes_of(PROTOCOL_VERSION_MIN)
    now, _ = golden.shapes_of(PROTOCOL_VERSION)
    later: dict[str, dict[str, Any]] = {
        name: {field: None for field in fields if field not in before[channel][name]}
        for channel, records in now.items()
        for name, fields in records.items()
        if name in before[channel] and name not in HANDSHAKE
    }
    assert {name: set(fields) for name, fields in later.items() if fields} == {
        kind.__name__: set(fields) for kind, fields in LATER_FIELDS.items()
    }
    for kind, fields in LATER_FIELDS.items():
        defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
        assert fields == {name: defaults[name] for name in fields}


def test_what_is_said_between_versions_lacks_what_the_older_one_does_not_have() -> None:
    info = golden.golden_values(golden.CODECS["index from server"])["Data(Workers)"].body.workers[0]
    listed = Workers(1, (msgspec.structs.replace(info, is_owned=False, yields=True),))  # type: ignore[arg-type]
    assert as_said(listed, PROTOCOL_VERSION) is listed
    (heard,) = as_said(listed, PROTOCOL_VERSION_MIN).workers
    assert isinstance(heard, WorkerInfo)
    assert (heard.is_owned, heard.yields) == (True, False)
    values = golden.golden_values(golden.CODECS["index from client"])
    (acquire,), (extend,) = (values[f"Data(OpBatch({name}))"].body.ops for name in ("Acquire", "Extend"))
    batch = OpBatch((msgspec.structs.replace(acquire, call_kind=3), extend))
    assert as_said(batch, PROTOCOL_VERSION_MIN).ops == (msgspec.structs.replace(acquire, call_kind=0), extend)
    registered = Registered(1, 1, owner=7)  # type: ignore[arg-type]
    assert as_said(registered, PROTOCOL_VERSION_MIN).owner == 0
    yielded = Yielded("w", 1)  # type: ignore[arg-type]
    assert may_say(yielded, PROTOCOL_VERSION)
    assert not may_say(yielded, PROTOCOL_VERSION_MIN)


def test_builds_change_back_and_forth() -> None:
    builds = Builds(1, mixed=False)
    assert builds.of("cache") == SPOKEN
    assert builds.are_ours
    assert not builds.change("cache")
    assert builds.of("cache") == BEFORE
    assert builds.change("cache")
    assert builds.are_ours
    mixed = Builds(1, mixed=True)
    assert {mixed.of(f"w{number}") for number in range(20)} == {BEFORE, SPOKEN}


def test_seeds_of_a_short_list_are_the_first_that_show_most() -> None:
    shown = {1: frozenset("ab"), 2: frozenset("abc"), 3: frozenset("d"), 4: frozenset("x")}
    assert greedy_cover(shown, frozenset("abcde"), ()) == [2, 3]
    assert greedy_cover(shown, frozenset("abcde"), [1]) == [1, 2, 3]
