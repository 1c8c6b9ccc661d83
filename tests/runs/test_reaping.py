"""The reaper against the emulated cloud and bucket: what it deletes is gone, what it leaves is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from tpu.checkpoint import files, objects
from tpu.clock import SystemClock
from tpu.cloud import CloudError, ErrorKind, Node, NodeRequest, QueuedResource, QueuedResourceRequest
from tpu.cloud.calls import CallPolicy
from tpu.cloud.google import GoogleTpuCloud, open_cloud
from tpu.cloud.values import INTENT_LABEL
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.runs.event_log import EventLog, load_events, undeleted
from tpu.runs.reap_report import figures, headline, to_markdown
from tpu.runs.reaping import Reaped, Reaper, Scope
from tpu.runs.top_up import top_up
from tpu.slices import lease as leases
from tpu.slices.candidate import Candidate
from tpu.slices.labels import ownership_labels
from tpu.slices.lease import Holder, Lease, LeaseState
from tpu.slices.lease_book import GcsLeaseBook, Kept, update
from tpu.slices.pool_settings import PoolSettings

ZONE, OTHER = "us-central2-b", "us-west4-a"
CLOCK = SystemClock()
POOL = "default"
TTL_S = 1.2


class Project:
    """Slices in the emulated cloud and their leases, and reapers that come along."""

    def __init__(self, emulator: Emulator, cloud: GoogleTpuCloud) -> None:
        self.emulator = emulator
        self.cloud = cloud
        self.bucket = emulator.env["TPU_RELAY_BUCKET"]
        self.book = GcsLeaseBook(self.bucket)

    async def make(self, *names: str, labels: dict[str, str] | None = None, zone: str = ZONE) -> None:
        """Slices in the cloud, ready."""
        ours = ownership_labels(POOL, "pytest", bucket=self.bucket)
        kind = "v4-8" if zone == ZONE else "v5litepod-1"
        for name in names:
            node = NodeRequest(
                kind, "tpu-ubuntu2204-base" if zone == ZONE else "v2-alpha-tpuv5-lite", "spot",
                "0123" if labels is None else "", labels=ours if labels is None else labels,
            )  # fmt: skip
            await self.cloud.create_queued_resource(zone, name, QueuedResourceRequest(node))
        self.emulator.wait_for(lambda: set(names) <= set(self.ready()), f"{names} ready")

    def ready(self) -> list[str]:
        return [node["node"] for node in self.emulator.nodes() if node["state"] == "READY"]

    def there(self) -> set[str]:
        return {node["node"] for node in self.emulator.nodes()} | {
            one["name"].rpartition("/")[2] for one in self.emulator.queued_resources()
        }

    async def lease(self, name: str, holder: str | None = None, *, idle_s: float = 0.0) -> Lease:
        now = CLOCK.time()
        candidate = Candidate(ZONE, "v4-8", "spot", 2.0)
        taken = Holder(holder, f"uid-{holder}", (0, 1, 2, 3)) if holder else None
        lease = leases.ready(leases.intend(name, POOL, candidate, 4, "c", now - 999, taken), now - idle_s)
        await self.book.create(lease)
        return lease

    @contextlib.asynccontextmanager
    async def beating(self, name: str, run: str, every_s: float = 0.2) -> AsyncIterator[None]:
        """The run renews its lease for the block."""

        async def beat() -> None:
            while True:
                await update(self.book, POOL, name, lambda one: leases.renew(one, f"uid-{run}", 1, 0.0))
                await asyncio.sleep(every_s)

        task = asyncio.create_task(beat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def reaper(self, cloud: Any = None, book: Any = None, **scope: Any) -> Reaper:
        return Reaper(
            Scope(self.bucket, **scope), cloud or self.cloud, book or GcsLeaseBook(self.bucket), CLOCK,
            lambda _: None, ttl_s=TTL_S, delete_s=10,
        )  # fmt: skip

    async def reap(self, **how: Any) -> Reaped:
        return await self.reaper(**how).run()

    async def state(self, name: str) -> LeaseState:
        kept = await self.book.read(POOL, name)
        assert kept is not None
        return kept.lease.state


@pytest.fixture
async def project(emulator: Emulator) -> AsyncIterator[Project]:
    policy = CallPolicy(try_s=0.5, total_s=1.0)
    async with open_cloud(Connection.from_environment(emulator.env), policy=policy) as cloud:
        yield Project(emulator, cloud)


def deleted(reaped: Reaped) -> set[str]:
    return {one.deletion.sighting.name for one in reaped.outcomes if one.confirmed}


async def test_a_project_is_put_in_order(project: Project):
    await project.make("held", "silent", "idle", "orphan", "taken")
    await project.make("stranger", labels={"team": "other"})
    await project.lease("held", "alive")
    await project.lease("silent", "dead")
    await project.lease("idle", idle_s=60)
    await project.lease("taken", idle_s=60)
    await project.lease("vanished", idle_s=60)
    await asyncio.to_thread(project.emulator.preempt, "taken")
    async with project.beating("held", "alive"):
        dry = await project.reaper().run(dry_run=True)
        assert {one.sighting.name for one in dry.plan.deletions} == {"silent", "idle", "orphan", "taken"}
        assert project.there() == {"held", "silent", "idle", "orphan", "taken", "stranger"}
        assert await project.state("idle") is LeaseState.READY
        done = await project.reap()
    assert deleted(done) == {"silent", "idle", "orphan", "taken"}
    assert project.there() == {"held", "stranger"}
    for name in ("silent", "idle", "taken", "vanished"):
        assert await project.state(name) is LeaseState.GONE
    assert await project.state("held") is LeaseState.READY
    assert {one.name: one.reason for one in done.plan.left} == {"held": "held by alive"}
    told = figures(done)
    assert told["dollars_an_hour_saved"] == 4.0  # the preempted one cost nothing any more
    assert told["forgotten"] == ["vanished"]
    text = to_markdown(done)
    assert "4 slices deleted (saves $4.00 an hour, and 1 whose price is not known)" in text
    assert text.startswith("# Reaper: 4 slices deleted\n\n4 slices deleted (saves")
    orphan = (
        "- **orphan** in us-central2-b (spot v4-8, queued resource ACTIVE, node READY): no lease knows it; "
    )
    assert f"{orphan}price not known\n" in text
    assert "1 more in the project are not ours." in text
    assert "## Pools now\n\n- default: 1 slice, $2.00 an hour\n" in text
    # Once more: nothing is left to do.
    async with project.beating("held", "alive"):
        assert headline(await project.reap()) == "0 slices deleted; 1 slice of ours left alone"


async def test_two_reapers_at_once_do_no_harm(project: Project):
    names = ("a", "b", "c")
    await project.make(*names, "held")
    for name in names:
        await project.lease(name, "dead" if name == "a" else None, idle_s=60)
    await project.lease("held", "alive")
    async with project.beating("held", "alive"):
        both = await asyncio.gather(project.reap(), project.reap())
    assert project.there() == {"held"}
    assert set.union(*map(deleted, both)) == set(names)
    assert not any(one.trouble for done in both for one in done.outcomes)
    assert {await project.state(name) for name in names} == {LeaseState.GONE}


async def test_a_holder_that_wakes_up_at_the_last_moment_keeps_its_slice(project: Project):
    await project.make("s")
    await project.lease("s", "sleepy")

    class WakingBook(GcsLeaseBook):
        """The holder beats between the decision and the deed."""

        async def read(self, pool: str, slice: str) -> Kept | None:
            await update(project.book, pool, slice, lambda one: leases.renew(one, "uid-sleepy", 1, 0.0))
            return await super().read(pool, slice)

    done = await project.reap(book=WakingBook(project.bucket))
    assert [one.spared is not None for one in done.outcomes] == [True]
    assert project.ready() == ["s"]
    assert await project.state("s") is LeaseState.READY
    await project.cloud.delete_queued_resource(ZONE, "s")


async def test_V8_a_deletion_is_done_when_the_cloud_says_so_and_tried_again_by_the_next_pass(
    project: Project,
):
    await project.make("s")
    await project.lease("s", "dead")
    project.emulator.fail_next("DeleteQueuedResource", 14, "connection reset", times=20)
    reaper = project.reaper()
    reaper._delete_s = 2.0
    done = await reaper.run()
    (outcome,) = done.outcomes
    assert outcome.trouble is not None
    assert "not confirmed" in outcome.trouble
    assert "**Not confirmed, tried again next time**" in to_markdown(done)
    # Nobody can take it meanwhile.
    assert await project.state("s") is LeaseState.QUARANTINED
    assert project.there() == {"s"}
    assert deleted(await project.reap()) == {"s"}
    assert project.there() == set()
    assert await project.state("s") is LeaseState.GONE


async def test_V3_quota_that_our_own_dead_use_up_is_free_again_after_a_pass(project: Project):
    project.emulator.set_quota(ZONE, "v4-8", 1)
    await project.make("dead")
    await project.lease("dead", "dead-run")
    await asyncio.to_thread(project.emulator.preempt, "dead")
    with pytest.raises(CloudError) as refused:
        await project.make("next")
    assert refused.value.kind is ErrorKind.QUOTA_EXHAUSTED
    assert deleted(await project.reap()) == {"dead"}
    await project.make("next")
    await project.cloud.delete_queued_resource(ZONE, "next")


async def test_plain_nodes_of_a_zone_without_queues_are_put_in_order(project: Project):
    project.emulator.set_queues(ZONE, False)
    labels = ownership_labels(POOL, "pytest", bucket=project.bucket)
    node = NodeRequest("v4-8", "tpu-ubuntu2204-base", "spot", "0123", labels=labels)
    await project.cloud.create_node(ZONE, "plain", node, 20.0)
    await project.lease("plain", idle_s=60)
    assert deleted(await project.reap()) == {"plain"}
    assert project.there() == set()


async def test_what_a_dead_run_had_costs_it_nothing_from_then_on(project: Project):
    await project.make("s")
    await project.lease("s", "dead")
    run_dir = f"{project.bucket}/runs/dead"
    log = EventLog(run_dir, 7, CLOCK.time)
    log.append("slice-leased", slice="s")
    log.append("slice-intended", slice="s")
    await project.reap()
    events = load_events(run_dir)
    assert [one.kind for one in events] == ["slice-leased", "slice-intended", "slice-deleted"]
    assert events[-1].detail["why"] == "by the reaper: dead holds it and is silent"
    assert undeleted(events) == []
    # Its next driver writes behind that.
    EventLog(run_dir, 8, CLOCK.time).append("driver-started")
    assert [one.kind for one in load_events(run_dir)][-2:] == ["slice-deleted", "driver-started"]


class HalfACloud:
    """The real client, but one zone does not answer, as when a region is down."""

    def __init__(self, cloud: GoogleTpuCloud, down: Iterable[str]) -> None:
        self._cloud = cloud
        self._down = set(down)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cloud, name)

    async def list_nodes(self, zone: str) -> list[Node]:
        self._check(zone)
        return await self._cloud.list_nodes(zone)

    async def list_queued_resources(self, zone: str) -> list[QueuedResource]:
        self._check(zone)
        return await self._cloud.list_queued_resources(zone)

    def _check(self, zone: str) -> None:
        if zone in self._down:
            raise CloudError(
                ErrorKind.UNAVAILABLE, 14, f"no answer from {zone}", wanted=f"list nodes in {zone}"
            )


async def test_where_a_zone_does_not_answer_the_others_are_put_in_order(project: Project):
    await project.make("here")
    await project.make("there", zone=OTHER)
    await project.lease("here", idle_s=60)
    elsewhere = leases.intend(
        "lost", POOL, Candidate(OTHER, "v5litepod-1", "spot", 1.0), 1, "c", CLOCK.time() - 999
    )
    await project.book.create(leases.ready(elsewhere, CLOCK.time() - 99))
    done = await project.reap(cloud=HalfACloud(project.cloud, ["-", OTHER]))
    assert deleted(done) == {"here"}
    assert project.there() == {"there"}
    assert any(f"{OTHER} could not be seen, and nothing in it is touched" in text for text in done.troubles)
    # A lease whose slice could not be looked for is not closed.
    assert await project.state("lost") is LeaseState.READY
    # All zones that are named are asked when the cloud does not answer for all at once.
    done = await project.reap(cloud=HalfACloud(project.cloud, ["-"]), zones=(OTHER,))
    assert deleted(done) == {"there"}
    with pytest.raises(CloudError, match="no answer"):
        await project.reap(cloud=HalfACloud(project.cloud, ["-", ZONE, OTHER]), zones=(ZONE,))


async def test_a_damaged_lease_is_said_and_the_rest_goes_on(project: Project):
    await project.make("odd", "idle")
    await project.lease("idle", idle_s=60)
    files.write(f"{project.bucket}/pools/{POOL}/slices/odd.json", b"{}")
    done = await project.reap()
    assert project.there() == {"odd"}
    assert deleted(done) == {"idle"}
    assert "## Left alone: please look" in to_markdown(done)
    assert any("odd" in text and "damaged" in text for text in done.troubles)
    await project.cloud.delete_queued_resource(ZONE, "odd")


async def test_settings_that_cannot_be_read_keep_free_slices(project: Project):
    await project.make("free")
    await project.lease("free", idle_s=60)
    objects.create_exclusive(f"{project.bucket}/pools/{POOL}/pool.json", b'{"idle_minutes": "x"}')
    done = await project.reap()
    assert project.there() == {"free"}
    assert any("settings of the pool default" in text for text in done.troubles)
    await project.cloud.delete_queued_resource(ZONE, "free")


async def test_a_pool_that_is_not_there_is_said(project: Project):
    done = await project.reap(pool="defualt")
    assert done.troubles == [f"there is no pool defualt in {project.bucket}; there are: none yet"]


async def test_a_pool_keeps_its_least_number(project: Project):
    await project.book.set_settings(
        POOL, lambda _: PoolSettings(min_slices=1, candidates=(Candidate(ZONE, "v4-8", "spot"),))
    )
    await project.make("a", "b")
    await project.lease("a", idle_s=60)
    await project.lease("b", idle_s=30)
    assert deleted(await project.reap()) == {"a"}
    await project.cloud.delete_queued_resource(ZONE, "b")


async def test_a_pool_that_lacks_slices_gets_them(project: Project):
    wanted = PoolSettings(min_slices=2, idle_minutes=60, candidates=(Candidate(ZONE, "v4-8", "spot", 1.0),))
    await project.book.set_settings(POOL, lambda _: wanted)
    connection = Connection.from_environment(project.emulator.env)

    async def ask() -> str | None:
        return await top_up(
            POOL, wanted, connection, project.cloud, project.book, CLOCK, lambda _: None, for_s=20
        )

    assert await ask() == "pool default: 0 of 2 slices, asked for 2 more"
    assert await ask() is None
    asked = {kept.lease.slice for kept in await project.book.list(POOL)}
    project.emulator.wait_for(lambda: set(project.ready()) == asked, "both to be ready")
    # The reaper leaves alone what the pool wants, and the next top-up replaces what was taken.
    assert (await project.reap()).plan.deletions == ()
    # Nobody watched them become ready: the reaper has put them into the pool.
    assert {kept.lease.state for kept in await project.book.list(POOL)} == {LeaseState.READY}
    await asyncio.to_thread(project.emulator.preempt, min(asked))
    assert deleted(await project.reap()) == {min(asked)}
    assert await ask() == "pool default: 1 of 2 slices, asked for 1 more"
    await project.book.set_settings(POOL, lambda _: PoolSettings())
    for kept in await project.book.list(POOL):
        await update(project.book, POOL, kept.lease.slice, lambda one: leases.quarantine(one, "over"))
    await project.reap()
    assert project.there() == set()


async def test_a_run_without_a_lease_keeps_its_slice_while_its_driver_beats(project: Project):
    labels = {**ownership_labels(POOL, "pytest", "r", project.bucket), INTENT_LABEL: "0123"}
    await project.make("s", labels=labels)
    url = f"{project.bucket}/runs/r/controller.json"

    def controller(beats: int) -> bytes:
        owner = {"flow_run": "f", "host": "elsewhere", "pid": 1, "started": "x"}
        return json.dumps({"owner": owner, "term": 1, "beats": beats, "released": False}).encode()

    generation = objects.create_exclusive(url, controller(0))

    async def beat() -> None:
        nonlocal generation
        for beats in range(1, 100):
            await asyncio.sleep(0.2)  # its rhythm
            generation = await asyncio.to_thread(objects.compare_and_set, url, controller(beats), generation)

    task = asyncio.create_task(beat())
    done = await project.reap()
    assert {one.name: one.reason for one in done.plan.left} == {
        "s": "its run r is driven by a process that lives"
    }
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert deleted(await project.reap()) == {"s"}
