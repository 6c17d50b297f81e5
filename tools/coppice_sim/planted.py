"""One request that something holds up, which is known as it was planted: does its history name it?

Each seed plants one of `PLANTS`, with sizes and a load beside it that the seed draws. What is found is what
`coppice why` would say: the main cause of the request's stages, or why it was refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from coppice.ids import DomainId
from coppice.messages.step import SamplingParams
from coppice.request_log.causes import main_cause, told
from coppice.request_log.stages import StageKind
from coppice_cache.core.base.settings import CoreSettings, DomainConfig, Mode
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.core.state.settings import TenantLimits
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.kv_honest import VOCABULARY, reference, salt_of_domain
from coppice_sim.nemesis import FaultProfile
from coppice_sim.settings import BLOCK_SIZE, TTL_MS, WorldSettings
from coppice_sim.traffic.workload import Ask
from coppice_sim.world import Scope, World

PROBE, OTHER, BYSTANDER = "amber", "birch", "hazel"
SETTLED_MS = 400  # all have registered by then
END_MS = 30_000
MAX_CONTEXT = 96


@dataclass(frozen=True, slots=True)
class Found:
    """`cause` and `blocker` as the history has them; `words` for a person."""

    plant: str
    is_named: bool
    cause: str
    blocker: str
    words: tuple[str, ...]


class Scene:
    """A calm world of one worker in which the test decides who sends what."""

    def __init__(self, seed: int, *, num_blocks: int, max_running: int = 8, chunk: int = 16) -> None:
        self.rng = rng = Random(f"planted {seed}")
        domains = tuple(DomainConfig(DomainId(name), Mode.PRIVATE) for name in (PROBE, OTHER, BYSTANDER))
        sizes = WorldSettings(
            index=CoreSettings(
                seal_key=b"key of the simulation",
                domains=domains,
                session_ttl_ms=TTL_MS,
                worker_ttl_ms=TTL_MS,
                heartbeat_ms=100,
                flight_tokens_min=8,
                flight_wait_ms=500,
                reclaim_grace_ms=200,
            ),
            domains=(PROBE, OTHER, BYSTANDER),
            num_workers=1,
            num_blocks=num_blocks,
            max_schedulers=1,
            max_context=MAX_CONTEXT,
            step_ms=rng.choice((2.0, 5.0, 8.0)),
            max_step_tokens=chunk * 2,
            arrival_ms=1e9,
        )
        nobody = frozenset(sizes.domains)
        scope = Scope(
            tiers=False,
            demands=False,
            reloads=False,
            absent=nobody,
            max_running=max_running,
            check_every=0,
            sizes=sizes,
        )
        self.world = World(seed, FaultProfile.none(), scope)
        self.wait(SETTLED_MS)

    def ask(self, tenant: str, tokens: list[int], wanted: int) -> Ask:
        """Sent now. What it computes is checked as in every run."""
        workload = self.world.workload
        host = self.world.cluster.schedulers["s0"]
        seed, packed = self.rng.randrange(1 << 62), np.array(tokens, "<u4").tobytes()
        request = Request(
            request_id=f"r{len(workload.asks)}",
            tenant=tenant,
            domain=DomainId(tenant),
            tokens=packed,
            sampling=SamplingParams(temperature=0.0, seed=seed),
            max_new_tokens=wanted,
            arrived_ns=host.now_ns,
            number=len(workload.asks),
        )
        expected = reference(packed, wanted, seed=seed, salt=salt_of_domain(tenant), vocabulary=VOCABULARY)
        asked = Ask(request, host, expected, tokens + expected, len(tokens))
        workload.enter(asked)
        return asked

    def prompt(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def wait(self, ms: float) -> None:
        until_ns = self.world.timeline.now_ns + int(ms * MS)
        while self.world.timeline.now_ns < until_ns:
            self.world.step()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_ns = self.world.timeline.now_ns + END_MS * MS
        while not holds() and self.world.timeline.now_ns < deadline_ns:
            self.world.step()

    def bystanders(self) -> None:
        """Short requests of somebody else, or none."""
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            self.ask(BYSTANDER, self.prompt(self.rng.randrange(2, 6)), self.rng.randrange(1, 3))

    def limit(self, tenant: str, limits: TenantLimits) -> None:
        life = self.world.cluster.schedulers["s0"].core._life
        life.settings = replace(life.settings, tenants={**life.settings.tenants, tenant: limits})

    def num_sent(self, ask: Ask) -> int:
        return len(ask.tokens)


Plant = Callable[[int], tuple[Scene, Ask, frozenset[str], str]]  # with the causes that name it, and the blocker


def behind_a_tenant(seed: int) -> tuple[Scene, Ask, frozenset[str], str]:
    """Every slot is another request's of the tenant."""
    scene = Scene(seed, num_blocks=200, max_running=4)
    for _ in range(4 + scene.rng.randrange(4)):
        scene.ask(PROBE, scene.prompt(scene.rng.randrange(4, 12)), scene.rng.randrange(30, 60))
    scene.wait(scene.rng.randrange(5, 60))
    return scene, scene.ask(PROBE, scene.prompt(6), 2), frozenset({"no_slot", "queued"}), PROBE


def pool_held(seed: int) -> tuple[Scene, Ask, frozenset[str], str]:
    """One long request holds most of the pool; it is the oldest, so it never gives way."""
    num_blocks = 24
    scene = Scene(seed, num_blocks=num_blocks)
    held = scene.ask(OTHER, scene.prompt(60), 30)
    scene.until(lambda: scene.num_sent(held) > 0)
    scene.wait(scene.rng.randrange(20))
    needed = (num_blocks - 15) * BLOCK_SIZE + scene.rng.randrange(4, 16)
    return scene, scene.ask(PROBE, scene.prompt(needed), 1), frozenset({"pool_full"}), OTHER


def flight(seed: int) -> tuple[Scene, Ask, frozenset[str], str]:
    """Another request computes the same prompt."""
    scene = Scene(seed, num_blocks=100, chunk=4)
    prompt = scene.prompt(scene.rng.randrange(60, 90))
    scene.ask(PROBE, prompt, 2)
    scene.bystanders()
    scene.wait(scene.rng.randrange(3))
    return scene, scene.ask(PROBE, prompt, 1), frozenset({"prefix"}), ""


def preemption(seed: int) -> tuple[Scene, Ask, frozenset[str], str]:
    """Two grow until there is no block, and the later one gives way."""
    scene = Scene(seed, num_blocks=22)
    scene.ask(OTHER, scene.prompt(8), 80)
    scene.wait(2)
    return scene, scene.ask(PROBE, scene.prompt(scene.rng.randrange(20, 28)), 40), frozenset({"preempted"}), "pool"


def restart(seed: int) -> tuple[Scene, Ask, frozenset[str], str]:
    """Its worker dies under it."""
    scene = Scene(seed, num_blocks=100)
    probe = scene.ask(PROBE, scene.prompt(12), 40)
    scene.bystanders()
    scene.until(lambda: scene.num_sent(probe) > scene.rng.randrange(3, 20))
    scene.world.cluster.crash("w0", down_ms=scene.rng.choice((200, 500, 2_000)))
    return scene, probe, frozenset({"restarted"}), "worker_lost"


def rate_limit(seed: int) -> tuple[Scene, Ask, frozenset[str], str]:
    """Its tenant has used up its minute."""
    scene = Scene(seed, num_blocks=100)
    allowed = scene.rng.randrange(1, 5)
    scene.limit(PROBE, TenantLimits(requests_per_minute=allowed))
    for _ in range(allowed):
        scene.ask(PROBE, scene.prompt(4), 1)
    scene.bystanders()
    return scene, scene.ask(PROBE, scene.prompt(4), 1), frozenset({"tenant_rate"}), ""


def slow_step(seed: int) -> tuple[Scene, Ask, frozenset[str], str]:
    """The worker stands still in a step."""
    scene = Scene(seed, num_blocks=100)
    probe = scene.ask(PROBE, scene.prompt(12), 30)
    scene.bystanders()
    scene.until(lambda: scene.num_sent(probe) > 8)
    worker = scene.world.cluster.workers["w0"]
    scene.until(lambda: worker.outstanding is not None)
    worker.pause()
    scene.wait(scene.rng.randrange(300, 800))
    worker.go_on()
    return scene, probe, frozenset({"slow_step"}), "w0"


PLANTS: dict[str, Plant] = {
    plant.__name__: plant for plant in (behind_a_tenant, pool_held, flight, preemption, restart, rate_limit, slow_step)
}


def planted(seed: int) -> Found:
    """What is found of the one that this seed plants."""
    name = [*PLANTS][seed % len(PLANTS)]
    scene, probe, causes, blocker = PLANTS[name](seed)
    scene.until(lambda: bool(probe.outcome))
    if probe.refusal is not None:
        reason = probe.refusal.reason.value
        return Found(name, reason in causes, reason, "", (probe.refusal.message,))
    stages = probe.last.stages if probe.last is not None else ()
    cause = main_cause(stages)
    if cause is None:
        return Found(name, False, "", "", ())
    named = cause.kind.value in causes and (cause.blocker == blocker or cause.kind is StageKind.QUEUED)
    return Found(name, named, cause.kind.value, cause.blocker, tuple(told(stages)))
