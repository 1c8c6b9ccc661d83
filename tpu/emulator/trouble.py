"""Trouble on demand: preemptions now or by a plan, dead, hung and busy hosts, odd node states."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from tpu.clock import Clock
from tpu.emulator import messages
from tpu.emulator.capacity import PREEMPTIBLE
from tpu.emulator.host_fleet import Host
from tpu.emulator.nodes import Nodes
from tpu.emulator.schedule import Schedule, strikes
from tpu.emulator.state import NodeRecord, World

_log = logging.getLogger(__name__)

# What the API was seen to show for a preempted node; `gone`: it answers that there is none.
PREEMPTED_STATES = ("PREEMPTED", "TERMINATED", "STOPPED", "UNKNOWN", "gone")
# A node in these can still be preempted.
_LIVE = {"CREATING", "READY", "RESTARTING", "REIMAGING", "REPAIRING", "STARTING", "UNKNOWN"}


class TroubleRefused(ValueError):
    """The trouble asked for cannot be made; the message says why and what can."""


class Trouble:
    """Makes trouble for nodes found by their id."""

    def __init__(self, world: World, nodes: Nodes, clock: Clock) -> None:
        self._world = world
        self._nodes = nodes
        self._clock = clock
        self._schedule: asyncio.Task[None] | None = None

    def find(self, node_id: str, zone: str | None = None) -> NodeRecord:
        """Return the node of this id.

        Raises:
            TroubleRefused: there is none, or one in several zones.
        """
        found = [
            node
            for node in self._world.nodes.values()
            if node.node_id == node_id and zone in (None, node.location.zone)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise TroubleRefused(
                f"node {node_id!r} is in {', '.join(n.location.zone for n in found)}: name the zone"
            )
        known = ", ".join(sorted(node.node_id for node in self._world.nodes.values())) or "none at all"
        raise TroubleRefused(f"no node {node_id!r}{f' in {zone}' if zone else ''}; there are: {known}")

    def host(self, node_id: str, index: int, zone: str | None = None) -> Host:
        """Return one host of a node.

        Raises:
            TroubleRefused: no such node, or it has no such host now.
        """
        node = self.find(node_id, zone)
        for host in node.hosts:
            if host.spec.index == index:
                return host
        raise TroubleRefused(
            f"node {node_id} ({node.state}) has no host {index}; it has {[h.spec.index for h in node.hosts]}"
        )

    async def preempt(
        self,
        node_id: str,
        *,
        notice: bool = False,
        zone: str | None = None,
        state: str = "PREEMPTED",
        linger_s: float = 0.0,
    ) -> None:
        """Preempt a spot node. Returns when its hosts are dead, or with notice once that is given.

        Raises:
            TroubleRefused: no such node, not a spot node, or no longer alive.
        """
        if state not in PREEMPTED_STATES:
            raise TroubleRefused(
                f"unknown state {state!r} of a preempted node: {', '.join(PREEMPTED_STATES)}"
            )
        node = self.find(node_id, zone)
        if node.provisioning not in PREEMPTIBLE:
            raise TroubleRefused(
                f"node {node_id} is {node.provisioning}: only spot and preemptible nodes are preempted"
            )
        if node.state not in _LIVE:
            raise TroubleRefused(f"node {node_id} is {node.state} already")
        notice_s = self._world.settings.notice_s if notice else 0.0
        task = self._world.background.start(
            self._nodes.preempt(node, notice_s=notice_s, state=state, linger_s=linger_s)
        )
        if notice_s > 0:
            announced = asyncio.ensure_future(node.announced.wait())
            await asyncio.wait([announced, task], return_when=asyncio.FIRST_COMPLETED)
            announced.cancel()
        elif linger_s <= 0:
            await task

    async def repair(
        self,
        node_id: str,
        seconds: float,
        *,
        zone: str | None = None,
        maintenance: bool = False,
        reboot: bool = True,
    ) -> None:
        """Begin a repair, or maintenance, of an on-demand or reserved node; see Nodes.repair.

        Raises:
            TroubleRefused: no such node, of another kind, or not READY.
        """
        node = self.find(node_id, zone)
        if node.provisioning not in ("on-demand", "reserved"):
            raise TroubleRefused(
                f"node {node_id} is {node.provisioning}: only on-demand and reserved nodes are repaired, "
                "the others are lost"
            )
        maintained = node.message.health == messages.NodeHealth["UNHEALTHY_MAINTENANCE"]
        if node.state != "READY" or maintained:
            how = "under maintenance" if maintained else node.state
            raise TroubleRefused(f"node {node_id} is {how}: only READY nodes are repaired")
        self._world.background.start(
            self._nodes.repair(node, seconds, maintenance=maintenance, reboot=reboot)
        )
        await asyncio.sleep(0)  # it has begun when we return: the API shows it

    def set_node_state(self, node_id: str, state: str, zone: str | None = None) -> None:
        """Let the API show any state of a node; its hosts go on. `gone` removes what has no hosts.

        Raises:
            TroubleRefused: no such node or state.
        """
        node = self.find(node_id, zone)
        if state not in messages.NodeState.__members__:
            raise TroubleRefused(
                f"unknown node state {state!r}; known: {', '.join(messages.NodeState.__members__)}"
            )
        node.show(state)

    # --- by a plan ----------------------------------------------------------------------------------

    def start_schedule(self, schedule: Schedule) -> None:
        """Preempt spot nodes by the plan until it ends or is stopped; a plan under way is replaced."""
        self.stop_schedule()
        self._schedule = self._world.background.start(self._strike(schedule))

    def stop_schedule(self) -> None:
        if self._schedule is not None:
            self._schedule.cancel()
            self._schedule = None

    async def _strike(self, schedule: Schedule) -> None:
        for strike in strikes(schedule):
            await self._clock.sleep(strike.wait_s)
            target = await self._target(strike.pick)
            _log.info("the schedule preempts %s, notice: %s", target.name, strike.notice)
            await self.preempt(target.node_id, notice=strike.notice, zone=target.location.zone)

    async def _target(self, pick: Callable[[Sequence[str]], str | None]) -> NodeRecord:
        """Wait until a spot node is READY and not announced to go, and return the one picked."""
        while True:
            change = self._world.next_change()
            ready = [
                node.name
                for node in self._world.nodes.values()
                if node.provisioning in PREEMPTIBLE and node.state == "READY" and not node.announced.is_set()
            ]
            if (name := pick(ready)) is not None:
                return self._world.nodes[name]
            await change.wait()

    # --- reset --------------------------------------------------------------------------------------

    async def delete_everything(self) -> None:
        """Kill all hosts and forget all nodes and queued resources, at once and in whatever state."""
        self.stop_schedule()
        self._world.settings = replace(self._world.settings, delete_delay_s=0.0)
        for record in (*self._world.queued.values(), *self._world.nodes.values()):
            record.unwanted.set()
        boots = [n.making for n in self._world.nodes.values() if n.making is not None]
        if boots:
            await asyncio.wait(boots)  # a boot that is cut off could leave a host nobody knows
        await self._world.background.cancel_all()
        await asyncio.gather(*(self._nodes.remove(node) for node in list(self._world.nodes.values())))
        self._world.queued.clear()
        self._world.preempted.clear()
        self._world.changed()
