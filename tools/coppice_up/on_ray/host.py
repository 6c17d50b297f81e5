"""Places on nodes of a Ray cluster, and children there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coppice import __version__, compiled
from coppice.errors import UnavailableError
from coppice_up.host import ChildSpec, Needs, Place
from coppice_up.on_ray.agent import Agent, Ask, Refused, new_stack_name
from coppice_up.on_ray.cluster import (
    Bundle,
    connect,
    has_room,
    living_nodes,
    reason,
    what_is_asked,
    what_there_is,
    what_to_change,
)
from coppice_up.options import AUTO
from coppice_up.plan import FRONT

ROOM_S = 30.0  # for what others use now
PLACE_S = 1800.0  # a node may have to download the model
CLEAN_S = 10.0
_POLL_S = 0.2
# Settings of services that whoever starts the stack has in the environment; the rest of it is that of each node.
_SETTINGS = ("COPPICE_CACHE_", "COPPICE_WORKER_", "COPPICE_SCHEDULER_", "COPPICE_SEAL_KEY", compiled.VARIABLE)


class RayHost:
    """A `Host`. With `auto` the front group runs on this machine; else Ray chooses for all. Groups are spread.

    An actor for each child is restarted by Ray as often as it takes, since an agent alone holds nothing. When and how
    often its child is started is the supervisor's decision, as anywhere else.
    """

    def __init__(self, on: str, model: str = "", log_dir: Path | None = None) -> None:
        """Connects. Raises UnavailableError."""
        self._ray = connect(on)
        self._is_here = on == AUTO
        self._model = model
        self._log_dir = log_dir
        self._stack = new_stack_name()
        self._group: Any = None
        self._is_closed = False
        self._agents: dict[str, Any] = {}
        self._asks: dict[str, Ask] = {}
        self._places: dict[str, Place] = {}

    def place(self, needs: Sequence[Needs]) -> dict[str, Place]:
        groups = list(dict.fromkeys(each.group for each in needs))
        bundles = {name: self._bundle(name, needs) for name in groups}
        num_workers = len({each.group for each in needs if not each.leader} - {FRONT})
        self._reserve(bundles, num_workers)
        for each in needs:
            self._asks[each.name] = Ask(each, self._model, self._stack, self._log_dir, __version__)
            self._agents[each.name] = self._start_agent(each, groups.index(each.group))
        calls = {each.name: self._ask_place(each.name) for each in needs}
        self._places = {name: self._placed(name, call) for name, call in calls.items()}
        return dict(self._places)

    def start(self, spec: ChildSpec) -> Any:
        from coppice_up.on_ray.child import RayChild

        name = spec.name
        environment = {key: value for key, value in os.environ.items() if key.startswith(_SETTINGS)}
        return RayChild(self._agents[name], spec, self._places[name], lambda: self._ask_place(name), environment)

    def close(self, *, keep_logs: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        ray = self._ray
        with contextlib.suppress(Exception):  # a node may be gone, or the whole cluster
            ray.wait(
                [agent.clean.remote(keep_logs) for agent in self._agents.values()],
                num_returns=len(self._agents),
                timeout=CLEAN_S,
            )
        for agent in self._agents.values():
            with contextlib.suppress(Exception):
                ray.kill(agent)
        if self._group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)
        ray.shutdown()

    def _bundle(self, group: str, needs: Sequence[Needs]) -> Bundle:
        members = [each for each in needs if each.group == group]
        cpus, gpus = sum(each.cpus for each in members), sum(each.gpus for each in members)
        if group == FRONT and self._is_here:  # whoever runs it here has decided that there is room
            return Bundle(0, gpus, self._ray.util.get_node_ip_address())
        return Bundle(cpus, gpus)

    def _reserve(self, bundles: dict[str, Bundle], num_workers: int) -> None:
        """Have Ray keep room for all bundles: one for the front group, one for each node of each worker.

        Raises UnavailableError: at once where the cluster could not hold them if nobody else used it, and after
        ROOM_S where others do.
        """
        ray = self._ray
        front = bundles.get(FRONT, Bundle(0, 0))
        workers = [bundle for name, bundle in bundles.items() if name != FRONT]
        worker = workers[0] if workers else Bundle(0, 0)
        nodes_each = len(workers) // max(1, num_workers)
        asked = what_is_asked(front, worker, num_workers, nodes_each)
        nodes = living_nodes(ray)
        if not has_room(front, worker, len(workers), nodes):
            raise UnavailableError(
                f"the cluster is too small: asked for {asked}; it has {what_there_is(nodes)}",
                hint=what_to_change(worker, nodes_each),
            )
        resources = [bundle.resources() for bundle in bundles.values()]
        self._group = ray.util.placement_group(resources, strategy="SPREAD", name=self._stack)
        if not self._group.wait(ROOM_S):
            there_is = what_there_is(nodes, ray.available_resources())
            raise UnavailableError(
                f"no room within {ROOM_S:.0f} s: asked for {asked}; the cluster has {there_is}",
                hint="`ray status` says who uses the rest",
            )

    def _start_agent(self, needs: Needs, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {
            "num_cpus": 0 if needs.group == FRONT and self._is_here else needs.cpus,
            "num_gpus": needs.gpus,
            "max_restarts": -1,
            "scheduling_strategy": strategy,
        }
        return self._ray.remote(Agent).options(**options).remote()

    def _ask_place(self, name: str) -> Any:
        return self._agents[name].place.remote(self._asks[name])

    def _placed(self, name: str, call: Any) -> Place:
        """Raises UsageError and UnavailableError."""
        ray = self._ray
        deadline_s = time.monotonic() + PLACE_S
        while not ray.wait([call], timeout=_POLL_S)[0]:
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"no node has prepared {name} within {PLACE_S:.0f} s", hint="nothing was started"
                )
        try:
            answer: Place | Refused = ray.get(call)
        except ray.exceptions.RayError as error:
            why = reason(error)
            raise UnavailableError(
                f"a node cannot prepare {name}: {why}",
                hint="every node, the head as well, needs the same Python and coppice[up,ray]",
            ) from None
        if isinstance(answer, Refused):
            raise answer.error()
        return answer
