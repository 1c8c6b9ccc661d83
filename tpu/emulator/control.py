"""The HTTP control API: capacity, quota, delays, trouble and what there is, for tests and the command line.

`POST /<action>` with a JSON object of the action's arguments; `GET /status` for everything there is,
`GET /processes` for what lives on hosts.
Every request needs `Authorization: Bearer <key>`.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tpu.emulator import zones
from tpu.emulator.dispatch import method_names
from tpu.emulator.errors import ApiError, code_number
from tpu.emulator.faults import Faults
from tpu.emulator.host_fleet import Host, HostFleet
from tpu.emulator.project import Project, check_known_apis
from tpu.emulator.schedule import Schedule
from tpu.emulator.state import NodeRecord, QueuedRecord, World
from tpu.emulator.trouble import Trouble


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Nothing(_Arguments):
    pass


class SlicesIn(_Arguments):
    zone: str
    type: str
    slices: int | None = Field(None, ge=0)


class StockoutIn(_Arguments):
    zone: str
    type: str
    on: bool = True


class Seconds(_Arguments):
    seconds: float = Field(ge=0)


class PerMinute(_Arguments):
    per_minute: int = Field(ge=1)


class Queues(_Arguments):
    zone: str
    on: bool


class Repair(_Arguments):
    node: str
    seconds: float = Field(ge=0)
    zone: str | None = None
    maintenance: bool = False
    reboot: bool = True


class PreemptNode(_Arguments):
    node: str
    notice: bool = False
    zone: str | None = None
    state: str = "PREEMPTED"
    linger_s: float = Field(0.0, ge=0)


class PlanPreemptions(_Arguments):
    seed: int
    mean_s: float
    notice: Literal["never", "always", "alternate"] = "never"
    count: int | None = None


class OneHost(_Arguments):
    node: str
    index: int = Field(0, ge=0)
    zone: str | None = None


class NodeState(_Arguments):
    node: str
    state: str
    zone: str | None = None


class SetUp(_Arguments):
    """How the project is set up; what is left out is as in one that was made by the book."""

    apis_off: list[str] = []
    missing: list[str] = []
    os_login: bool = False
    ssh_from: list[str] = ["0.0.0.0/0"]
    private_access: bool = True
    clock_ahead_s: float = 0.0


class FailNext(_Arguments):
    method: str
    code: int | str
    message: str = "an internal error has occurred"
    times: int = Field(1, ge=1)
    after: bool = False


Wipe = Callable[[], Awaitable[None]]


class Control:
    """One method an action; `routes()` is the HTTP application over them."""

    def __init__(
        self, world: World, trouble: Trouble, faults: Faults, fleet: HostFleet, key: str, wipe: Wipe
    ) -> None:
        self._world = world
        self._trouble = trouble
        self._faults = faults
        self._fleet = fleet
        self._key = key
        self._wipe = wipe

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/status", self._status)
        app.router.add_get("/processes", self._processes)
        actions: dict[str, tuple[type[_Arguments], Callable[[Any], Awaitable[Any]]]] = {
            "capacity": (SlicesIn, self._number("capacity")),
            "quota": (SlicesIn, self._number("quota")),
            "reservation": (SlicesIn, self._number("reservation")),
            "stockout": (StockoutIn, self._stockout),
            "delay": (Seconds, self._seconds("provisioning_delay_s")),
            "delete-delay": (Seconds, self._seconds("delete_delay_s")),
            "notice-seconds": (Seconds, self._seconds("notice_s")),
            "creation-rate": (PerMinute, self._creation_rate),
            "life": (Seconds, self._seconds("preemptible_life_s")),
            "queues": (Queues, self._queues),
            "project": (SetUp, self._project),
            "preempt": (PreemptNode, self._preempt),
            "repair": (Repair, self._repair),
            "schedule": (PlanPreemptions, self._plan),
            "stop-schedule": (Nothing, self._stop_plan),
            "kill-host": (OneHost, self._to_host(lambda host: host.kill())),
            "hang-host": (OneHost, self._to_host(lambda host: host.hang())),
            "resume-host": (OneHost, self._to_host(lambda host: host.resume())),
            "kill-ssh": (OneHost, self._to_host(lambda host: host.kill_ssh())),
            "busy-chips": (OneHost, self._to_host(lambda host: host.busy_chips())),
            "node-state": (NodeState, self._node_state),
            "fail-next": (FailNext, self._fail_next),
            "reset": (Nothing, self._reset),
        }
        for action, (arguments, handler) in actions.items():
            app.router.add_post(f"/{action}", _parsed(arguments, handler))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "")
        if not hmac.compare_digest(sent.encode(), f"Bearer {self._key}".encode()):
            return web.json_response(
                {"error": "wrong or no key: send `Authorization: Bearer <TPU_RELAY_API_KEY>`"}, status=401
            )
        try:
            return await handler(request)
        except ValueError as error:  # refused arguments; TroubleRefused is one too
            return web.json_response({"error": str(error)}, status=400)

    # --- limits and delays --------------------------------------------------------------------------

    def _change(self, **settings: Any) -> None:
        self._world.settings = replace(self._world.settings, **settings)
        self._world.changed()

    def _number(self, table: str) -> Callable[[SlicesIn], Awaitable[None]]:
        async def change(wanted: SlicesIn) -> None:
            where = _where(wanted.zone, wanted.type)
            self._change(limits=self._world.settings.limits.with_number(table, where, wanted.slices))

        return change

    def _seconds(self, setting: str) -> Callable[[Seconds], Awaitable[None]]:
        async def change(wanted: Seconds) -> None:
            self._change(**{setting: wanted.seconds})

        return change

    async def _stockout(self, wanted: StockoutIn) -> None:
        where = _where(wanted.zone, wanted.type)
        self._change(limits=self._world.settings.limits.with_stockout(where, wanted.on))

    async def _creation_rate(self, wanted: PerMinute) -> None:
        self._change(limits=replace(self._world.settings.limits, creations_per_minute=wanted.per_minute))
        self._world.budget = None

    async def _queues(self, wanted: Queues) -> None:
        if wanted.zone not in zones.GENERATIONS:
            raise ValueError(f"unknown zone {wanted.zone!r}; known: {', '.join(zones.GENERATIONS)}")
        without = self._world.settings.without_queues
        self._change(without_queues=without - {wanted.zone} if wanted.on else without | {wanted.zone})

    async def _project(self, wanted: SetUp) -> None:
        check_known_apis(wanted.apis_off)
        project = Project(
            frozenset(wanted.apis_off),
            frozenset(wanted.missing),
            wanted.os_login,
            tuple(wanted.ssh_from),
            wanted.private_access,
            wanted.clock_ahead_s,
        )
        self._change(project=project)

    # --- trouble ------------------------------------------------------------------------------------

    async def _repair(self, wanted: Repair) -> None:
        await self._trouble.repair(
            wanted.node,
            wanted.seconds,
            zone=wanted.zone,
            maintenance=wanted.maintenance,
            reboot=wanted.reboot,
        )

    async def _preempt(self, wanted: PreemptNode) -> None:
        await self._trouble.preempt(
            wanted.node,
            notice=wanted.notice,
            zone=wanted.zone,
            state=wanted.state,
            linger_s=wanted.linger_s,
        )

    async def _plan(self, wanted: PlanPreemptions) -> None:
        self._trouble.start_schedule(Schedule(wanted.seed, wanted.mean_s, wanted.notice, wanted.count))

    async def _stop_plan(self, _: Nothing) -> None:
        self._trouble.stop_schedule()

    def _to_host(self, do: Callable[[Host], Awaitable[None]]) -> Callable[[OneHost], Awaitable[None]]:
        async def act(wanted: OneHost) -> None:
            await do(self._trouble.host(wanted.node, wanted.index, wanted.zone))

        return act

    async def _node_state(self, wanted: NodeState) -> None:
        self._trouble.set_node_state(wanted.node, wanted.state, wanted.zone)

    async def _fail_next(self, wanted: FailNext) -> None:
        known = method_names()
        if wanted.method != "*" and wanted.method not in known:
            raise ValueError(f"unknown method {wanted.method!r}; known: *, {', '.join(sorted(known))}")
        error = ApiError(code_number(wanted.code), wanted.message)
        self._faults.add(wanted.method, error, wanted.times, after=wanted.after)

    async def _reset(self, _: Nothing) -> None:
        await self._wipe()

    # --- what there is ------------------------------------------------------------------------------

    async def _status(self, _: web.Request) -> web.Response:
        nodes = [self._world.nodes[name] for name in sorted(self._world.nodes)]
        queued = [self._world.queued[name] for name in sorted(self._world.queued)]
        return web.json_response(
            {
                "nodes": [_node_view(node) for node in nodes],
                "queued_resources": [_queued_view(record) for record in queued],
                "preempted": self._world.preempted,
                "settings": _settings_view(self._world),
            }
        )

    async def _processes(self, _: web.Request) -> web.Response:
        return web.json_response({"processes": await self._fleet.processes()})


def _parsed(arguments: type[_Arguments], handler: Callable[[Any], Awaitable[Any]]) -> Any:
    async def serve(request: web.Request) -> web.Response:
        try:
            wanted = arguments.model_validate_json(await request.read() or b"{}")
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"
                for problem in error.errors()
            )
            raise ValueError(f"{request.path}: {problems}") from error
        await handler(wanted)
        return web.json_response({})

    return serve


def _where(zone: str, type_name: str) -> tuple[str, str]:
    """Check that there is such a place, so that a mistyped one does not pass for unlimited capacity."""
    if zone not in zones.GENERATIONS:
        raise ValueError(f"unknown zone {zone!r}; known: {', '.join(zones.GENERATIONS)}")
    offered = zones.accelerator_types(zone)
    if type_name not in offered:
        raise ValueError(f"{type_name!r} is not offered in {zone}; offered: {', '.join(offered)}")
    return zone, type_name


def _node_view(node: NodeRecord) -> dict[str, Any]:
    return {
        "name": node.name,
        "node": node.node_id,
        "zone": node.location.zone,
        "state": node.state,
        "accelerator_type": node.kind.name,
        "provisioning": node.provisioning,
        "queued_resource": node.queued,
        "labels": dict(node.message.labels),
        "preemption_announced": node.announced.is_set(),
        "hosts": [
            {"index": host.spec.index, "address": host.spec.address, "cpus": list(host.spec.cpus)}
            for host in node.hosts
        ],
    }


def _queued_view(record: QueuedRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "queued_resource": record.queued_id,
        "zone": record.location.zone,
        "state": record.state,
        "provisioning": record.ask.provisioning,
        "nodes": list(record.node_ids),
        "waits_for": record.waits_for,
        "error": record.message.state.failed_data.error.message,
    }


def _settings_view(world: World) -> dict[str, Any]:
    settings = world.settings
    limits = settings.limits
    flat = {
        table: {f"{zone}/{kind}": number for (zone, kind), number in getattr(limits, table).items()}
        for table in ("capacity", "quota", "reservation")
    }
    return {
        **flat,
        "stockouts": sorted(f"{zone}/{kind}" for zone, kind in limits.stockouts),
        "creations_per_minute": limits.creations_per_minute,
        "provisioning_delay_s": settings.provisioning_delay_s,
        "delete_delay_s": settings.delete_delay_s,
        "notice_s": settings.notice_s,
        "suspend_delay_s": settings.suspend_delay_s,
        "preemptible_life_s": settings.preemptible_life_s,
        "without_queues": sorted(settings.without_queues),
    }
