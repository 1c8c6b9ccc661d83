"""Hosts that are a script in place of processes: they boot slowly, and hang or are preempted by a seeded plan."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from tpu.clock import Clock
from tpu.emulator.capacity import PREEMPTIBLE, Where
from tpu.emulator.fleet import show_addresses
from tpu.emulator.simulation_weather import History, HostWeather, PlaceWeather, set_stockout, stream
from tpu.emulator.state import NodeRecord, World

if TYPE_CHECKING:
    from tpu.emulator.nodes import Nodes

# A key that nobody has the other half of: there is nothing to log in to.
_HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


@dataclass(frozen=True)
class ScriptedAt:
    index: int
    address: str
    cpus: tuple[int, ...] = ()


class ScriptedHost:
    """One host. Its programs stand still from `hung_at` or `dead_at` on (monotonic seconds of the clock).

    `ssh_s` is how long it takes to let somebody in. `on_stop` is called when it hangs, and when it dies; at its death
    the connections to it end, while those to a hung one stay open.
    """

    __slots__ = ("_clock", "dead_at", "host_key_public", "hung_at", "noticed_at", "on_stop", "spec", "ssh_s")

    def __init__(self, spec: ScriptedAt, clock: Clock, ssh_s: float) -> None:
        self.spec = spec
        self.host_key_public = _HOST_KEY
        self.ssh_s = ssh_s
        self.hung_at: float | None = None
        self.dead_at: float | None = None
        self.noticed_at: float | None = None
        self.on_stop: list[Callable[[], None]] = []
        self._clock = clock

    @property
    def works(self) -> bool:
        return self.hung_at is None and self.dead_at is None

    async def kill(self) -> None:
        if self.dead_at is None:
            self.dead_at = self._clock.monotonic()
            self._stopped()

    async def hang(self) -> None:
        if self.works:
            self.hung_at = self._clock.monotonic()
            self._stopped()

    def _stopped(self) -> None:
        for call in tuple(self.on_stop):
            call()

    async def resume(self) -> None:
        self.hung_at = None

    async def kill_ssh(self) -> None: ...

    async def busy_chips(self) -> None: ...

    async def set_preempted(self, preempted: bool) -> None:
        self.noticed_at = self._clock.monotonic() if preempted else None

    async def set_attributes(self, attributes: dict[str, str]) -> None: ...


class ScriptedFleet:
    """Gives nodes scripted hosts, and lets fate have its way with them and with the places they are in."""

    def __init__(self, world: World, clock: Clock, weather: HostWeather, seed: int, history: History) -> None:
        self._world = world
        self._clock = clock
        self._weather = weather
        self._seed = seed
        self._history = history
        self._nodes: Nodes | None = None
        self._addresses = 0
        self._boots: Counter[str] = Counter()
        self._fates: dict[NodeRecord, asyncio.Task[None]] = {}

    def attach(self, nodes: Nodes) -> None:
        """Say who carries preemptions out; the two know each other."""
        self._nodes = nodes

    def give_addresses(self, node: NodeRecord) -> None:
        node.addresses = tuple(self._next_address() for _ in range(node.kind.hosts))
        show_addresses(node)

    async def boot(self, node: NodeRecord) -> None:
        # By number within the zone and not by name: whoever asks there next meets the same fate.
        zone = node.location.zone
        self._boots[zone] += 1
        luck = stream(self._seed, "host", zone, self._boots[zone])
        await self._clock.sleep(self._weather.boot.draw(luck))
        node.hosts = tuple(
            ScriptedHost(ScriptedAt(index, address), self._clock, self._weather.ssh.draw(luck))
            for index, address in enumerate(node.addresses)
        )
        node.host_keys = tuple(host.host_key_public for host in node.hosts)
        self._history.add("boot", node.name)
        self._fates[node] = self._world.background.start(self._fate(node, luck))

    async def _fate(self, node: NodeRecord, luck: Random) -> None:
        weather = self._weather
        mortal = weather.mean_life_s is not None and node.provisioning in PREEMPTIBLE
        life = luck.expovariate(1 / weather.mean_life_s) if mortal and weather.mean_life_s else float("inf")
        hang = luck.expovariate(1 / weather.mean_to_hang_s) if weather.mean_to_hang_s else float("inf")
        noticed, index = luck.random() < weather.notice_share, luck.randrange(node.kind.hosts)
        if hang < life:
            await self._clock.sleep(hang)
            await node.hosts[index].hang()
            self._history.add("hang", f"{node.name} host {index}")
        if life < float("inf"):
            await self._clock.sleep(life - min(hang, life) if hang < life else life)
            self.preempt(node, noticed)

    def preempt(self, node: NodeRecord, noticed: bool) -> None:
        """Let the cloud take a node away, with the notice that the world's settings give or without."""
        assert self._nodes is not None, "attach() comes first"
        self._history.add("preempt", node.name)
        notice_s = self._world.settings.notice_s if noticed else 0.0
        self._world.background.start(self._nodes.preempt(node, notice_s=notice_s))

    async def stockouts(self, where: Where, weather: PlaceWeather) -> None:
        """Let stockouts of one place come and go, without end; each takes some of its spot nodes away."""
        if weather.every_s is None:
            return
        luck, (zone, kind) = stream(self._seed, "place", *where), where
        while True:
            await self._clock.sleep(luck.expovariate(1 / weather.every_s))
            self._history.add("stockout", f"{kind} in {zone}")
            set_stockout(self._world, where, True)
            names = self._world.nodes.names(zone)
            for node in [self._world.nodes[name] for name in names if luck.random() < weather.takes_share]:
                if node.where == where and node.state == "READY" and node.provisioning in PREEMPTIBLE:
                    self.preempt(node, noticed=True)
            await self._clock.sleep(luck.expovariate(1 / weather.lasts_s))
            self._history.add("capacity", f"{kind} in {zone}")
            set_stockout(self._world, where, False)

    async def kill(self, node: NodeRecord) -> None:
        fate = self._fates.pop(node, None)
        if fate is not None:
            fate.cancel()
        if node.hosts:
            self._history.add("down", node.name)
        for host in node.hosts:
            await host.kill()
        node.hosts = ()
        node.has_hardware = False

    def free_addresses(self, node: NodeRecord) -> None:
        node.addresses = ()

    async def push_attributes(self, node: NodeRecord) -> None: ...

    async def processes(self) -> list[int]:
        return []

    def _next_address(self) -> str:
        self._addresses += 1
        number = self._addresses % (1 << 24)
        return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
