"""Slices from request to confirmed deletion, against the emulator."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from tpu.clock import SystemClock
from tpu.cloud import CloudError, ErrorKind, NodeRequest
from tpu.cloud.calls import CallPolicy
from tpu.cloud.google import GoogleTpuCloud, open_cloud
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.slices.condition import Condition, slice_condition
from tpu.slices.deletion import DeletionUnconfirmed, delete_slice
from tpu.slices.intent import node_request
from tpu.slices.labels import ownership_labels
from tpu.slices.provision import NoLongerWanted, NotReady, ReadySlice, check_offered, provision
from tpu.slices.request import SliceRequest

ZONE = "us-central2-b"
CLOCK = SystemClock()
SPOT = SliceRequest(
    zone=ZONE,
    accelerator_type="v4-8",
    labels=ownership_labels("test", "pytest"),
    metadata={"ssh-keys": "relay:ssh-ed25519 AAAA relay"},
    deadline_s=60,
)


class FastClock(SystemClock):
    """Runs two hundred times as fast as the machine's clock."""

    def monotonic(self) -> float:
        return 200 * super().monotonic()

    def time(self) -> float:
        return 200 * super().time()

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 200)


async def always() -> None:
    """The slice stays wanted."""


async def make(
    cloud: GoogleTpuCloud,
    name: str = "s1",
    said: list[str] | None = None,
    still_wanted: Callable[[], Awaitable[None]] = always,
    request: SliceRequest = SPOT,
    **changes: Any,
) -> ReadySlice:
    request = dataclasses.replace(request, **changes)
    report = said.append if said is not None else lambda line: None
    return await provision(cloud, request, name, CLOCK, report, still_wanted)


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110  (another process makes it true)
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"waited 30 s: {what}") from None


async def during(
    work: Coroutine[Any, Any, ReadySlice], emulator: Emulator, state: str
) -> asyncio.Task[ReadySlice]:
    """Start to make a slice, and return once the cloud shows its node in `state`."""
    task = asyncio.create_task(work)
    await until(lambda: any(n["state"] == state for n in emulator.nodes()) or task.done(), f"node {state}")
    return task


def nothing_is_left(emulator: Emulator) -> bool:
    return emulator.nodes() == [] and emulator.queued_resources() == []


async def test_a_slice_of_two_hosts(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    said: list[str] = []
    ready = await make(cloud, said=said, accelerator_type="v4-16")
    assert (ready.name, ready.zone, ready.node.name) == ("s1", ZONE, "s1")
    assert [host.index for host in ready.hosts] == [0, 1]
    assert len({host.internal for host in ready.hosts}) == 2
    assert len({host.host_key for host in ready.hosts}) == 2
    assert all(host.host_key and host.host_key.startswith("ssh-ed25519 ") for host in ready.hosts)
    assert all(host.zone == ZONE and host.hostname for host in ready.hosts)
    assert emulator.nodes()[0]["labels"].keys() == {"relay-pool", "relay-creator", "relay-intent"}
    assert said[0] == "asking for spot v4-16 s1 in us-central2-b"
    assert said[-1].endswith("is ready")
    await delete_slice(cloud, ZONE, "s1", CLOCK, 30)
    assert nothing_is_left(emulator)


async def test_the_same_slice_is_found_again(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    first = await make(cloud)
    again = await make(cloud)
    assert again.node.uid == first.node.uid
    assert again.hosts == first.hosts
    assert len(emulator.nodes()) == 1


async def test_O1_a_flow_started_again_on_another_machine_finds_its_slice_and_gets_in(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    first = await make(cloud)
    again = await make(cloud, metadata={"ssh-keys": "relay:ssh-ed25519 BBBB other-machine"})
    assert again.node.uid == first.node.uid
    # Keys are there already, so nothing is written to the node a third time.
    emulator.fail_next("UpdateNode", "INTERNAL", "must not be called", times=100)
    await make(cloud, metadata={"ssh-keys": "relay:ssh-ed25519 BBBB other-machine"})


async def test_V4_a_live_slice_that_is_taken_up_is_not_deleted_when_the_cloud_does_not_answer(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    await make(cloud)
    emulator.fail_next("GetGuestAttributes", "NOT_FOUND", "no guest attributes", times=10_000)
    with pytest.raises(CloudError) as caught:
        await provision(cloud, SPOT, "s1", FastClock(), lambda line: None, always, keep=True)
    assert caught.value.kind is ErrorKind.TIMED_OUT
    assert [node["state"] for node in emulator.nodes()] == ["READY"]


async def test_a_name_that_somebody_else_has_is_left_alone(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    await make(cloud)
    with pytest.raises(CloudError) as caught:
        await make(cloud, accelerator_type="v4-16")
    assert caught.value.kind is ErrorKind.CONFLICT
    assert [node["state"] for node in emulator.nodes()] == ["READY"]


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED", "STOPPED", "UNKNOWN", "gone"])
async def test_P1_a_preempted_spot_slice_is_lost_whatever_it_shows(
    cloud: GoogleTpuCloud, emulator: Emulator, state: str
) -> None:
    await make(cloud)
    assert (await slice_condition(cloud, ZONE, "s1")).condition is Condition.READY_HEALTHY
    await asyncio.to_thread(emulator.preempt, "s1", state=state)
    seen = await slice_condition(cloud, ZONE, "s1")
    assert (seen.condition, seen.preempted) == (Condition.LOST, True)
    # It keeps its name and its quota until it is deleted; after that, another one can be made.
    await delete_slice(cloud, ZONE, "s1", CLOCK, 30)
    assert nothing_is_left(emulator)
    seen = await slice_condition(cloud, ZONE, "s1")
    assert (seen.condition, seen.gone) == (Condition.LOST, True)


@pytest.mark.parametrize("state", ["RESTARTING", "REPAIRING", "STOPPING", "TERMINATED", "HIDDEN", "UNKNOWN"])
async def test_P1_a_spot_node_in_any_other_state_is_lost(
    cloud: GoogleTpuCloud, emulator: Emulator, state: str
) -> None:
    await make(cloud)
    emulator.set_node_state("s1", state)
    seen = await slice_condition(cloud, ZONE, "s1")
    assert (seen.condition, seen.preempted) == (Condition.LOST, True)
    assert state in seen.reason


async def test_P10_an_on_demand_node_under_repair_is_not_lost(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    await make(cloud, provisioning="on-demand")
    emulator.set_node_state("s1", "REPAIRING")
    assert (await slice_condition(cloud, ZONE, "s1")).condition is Condition.RECOVERING
    emulator.set_node_state("s1", "READY")
    assert (await slice_condition(cloud, ZONE, "s1")).usable


async def test_a_cloud_that_cannot_be_asked_is_neither_dead_nor_alive(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    await make(cloud)
    connection = Connection.from_environment(emulator.env)
    emulator.fail_next("GetNode", "UNAVAILABLE", "the service is unavailable", times=1000)
    async with open_cloud(connection, policy=CallPolicy(try_s=0.2, total_s=0.5)) as impatient:
        seen = await slice_condition(impatient, ZONE, "s1")
    assert seen.condition is Condition.UNKNOWN
    assert not seen.usable
    assert not seen.lost


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED", "STOPPED", "gone"])
async def test_P2_preempted_while_being_made(cloud: GoogleTpuCloud, emulator: Emulator, state: str) -> None:
    emulator.set_delay(20)
    making = await during(make(cloud), emulator, "CREATING")
    await asyncio.to_thread(emulator.preempt, "s1", state=state)
    with pytest.raises(CloudError) as caught:
        await making
    assert caught.value.kind is ErrorKind.PREEMPTED
    assert caught.value.retryable
    assert nothing_is_left(emulator)
    # Made again it is one slice, not two.
    emulator.set_delay(0)
    await make(cloud, "s2")
    assert [node["node"] for node in emulator.nodes()] == ["s2"]


async def test_P2_the_creation_answers_that_it_was_preempted(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    message = "Cloud TPU received a bad request. update is not supported while in state PREEMPTED"
    emulator.fail_next("CreateQueuedResource", "INVALID_ARGUMENT", message, after=True)
    with pytest.raises(CloudError) as caught:
        await make(cloud)
    assert caught.value.kind is ErrorKind.PREEMPTED
    assert nothing_is_left(emulator)


async def test_V1_a_stockout_is_told_apart_and_leaves_nothing(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    emulator.stockout(ZONE, "v4-8")
    with pytest.raises(CloudError, match="no more capacity") as caught:
        await make(cloud)
    assert caught.value.kind is ErrorKind.STOCKOUT
    assert caught.value.retryable
    assert nothing_is_left(emulator)
    emulator.stockout(ZONE, "v4-8", on=False)
    await make(cloud, "s2")


async def test_V2_no_quota_names_the_quota_and_is_for_good(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    emulator.set_quota(ZONE, "v4-8", 0)
    with pytest.raises(CloudError) as caught:
        await make(cloud)
    assert caught.value.kind is ErrorKind.NO_QUOTA
    assert caught.value.quota is not None
    assert caught.value.quota in str(caught.value)
    assert not caught.value.retryable
    assert nothing_is_left(emulator)


async def test_quota_used_up_is_not_no_quota(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    emulator.set_quota(ZONE, "v4-8", 1)
    await make(cloud)
    with pytest.raises(CloudError) as caught:
        await make(cloud, "s2")
    assert caught.value.kind is ErrorKind.QUOTA_EXHAUSTED
    assert caught.value.retryable
    assert [node["node"] for node in emulator.nodes()] == ["s1"]


async def test_V4_a_slow_creation_is_waited_for(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    emulator.set_delay(1.5)
    said: list[str] = []
    await make(cloud, said=said)
    assert any("CREATING" in line or "being made" in line for line in said)


async def test_V4_the_users_deadline_ends_the_wait(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    emulator.set_capacity(ZONE, "v4-8", 0)
    with pytest.raises(NotReady, match="waiting for capacity") as caught:
        await make(cloud, deadline_s=0.5)
    assert caught.value.kind is ErrorKind.TIMED_OUT
    assert not caught.value.retryable
    assert nothing_is_left(emulator)


@pytest.mark.parametrize(
    "where", ["waiting for capacity", "CREATING"], ids=["in the queue", "while the node is made"]
)
async def test_V7_a_cancelled_creation_is_deleted_before_the_cancellation_returns(
    cloud: GoogleTpuCloud, emulator: Emulator, where: str
) -> None:
    if where == "CREATING":
        emulator.set_delay(30)
    else:
        emulator.set_capacity(ZONE, "v4-8", 0)
    emulator.set_delete_delay(0.5)
    said: list[str] = []
    making = asyncio.create_task(make(cloud, said=said))
    await until(lambda: any(where in line for line in said), where)
    making.cancel()
    await until(lambda: any("deleting" in line for line in said), "it is being deleted")
    making.cancel()  # an impatient second Ctrl-C does not leave the slice behind
    with pytest.raises(asyncio.CancelledError):
        await making
    assert nothing_is_left(emulator)


async def test_V7_cancelled_at_any_moment_nothing_is_left(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    emulator.set_delay(0.2)
    for number, moment_s in enumerate([0.0, 0.005, 0.02, 0.08, 0.2, 0.4]):
        making = asyncio.create_task(make(cloud, f"s{number}"))
        await asyncio.wait({making}, timeout=moment_s)
        making.cancel()
        try:
            await making
        except asyncio.CancelledError:
            assert nothing_is_left(emulator)
        else:
            await delete_slice(cloud, ZONE, f"s{number}", CLOCK, 30)


async def test_V8_deleted_is_what_the_cloud_says_is_gone(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    await make(cloud)
    emulator.set_delete_delay(1.0)
    deleting = asyncio.create_task(delete_slice(cloud, ZONE, "s1", CLOCK, 30))
    await until(lambda: emulator.nodes()[0]["state"] == "DELETING", "the deletion begins")
    assert not deleting.done()
    await deleting
    assert nothing_is_left(emulator)


async def test_V8_a_network_that_is_gone_does_not_make_it_deleted(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    await make(cloud)
    connection = Connection.from_environment(emulator.env)
    emulator.fail_next("DeleteQueuedResource", "UNAVAILABLE", "the service is unavailable", times=1000)
    async with open_cloud(connection, policy=CallPolicy(try_s=0.1, total_s=0.2)) as impatient:
        with pytest.raises(DeletionUnconfirmed, match="may still cost money"):
            await delete_slice(impatient, ZONE, "s1", CLOCK, 0.6)
    assert [node["state"] for node in emulator.nodes()] == ["READY"]


async def test_V8_passing_faults_only_delay_the_deletion(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    await make(cloud)
    emulator.fail_next("DeleteQueuedResource", "UNAVAILABLE", "the service is unavailable", times=2)
    emulator.fail_next("DeleteQueuedResource", "UNAVAILABLE", "the answer is lost", after=True)
    emulator.fail_next("GetQueuedResource", "UNAVAILABLE", "the service is unavailable", times=2)
    await delete_slice(cloud, ZONE, "s1", CLOCK, 30)
    assert nothing_is_left(emulator)


async def test_a_slice_that_is_not_there_is_deleted_at_once(cloud: GoogleTpuCloud) -> None:
    await delete_slice(cloud, ZONE, "never-made", CLOCK, 5)


async def test_a_plain_node_is_deleted_too(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    ready = await make(cloud)
    await delete_slice(cloud, ZONE, ready.name, CLOCK, 30)
    await cloud.create_node(ZONE, "n1", NodeRequest("v4-8", "tpu-ubuntu2204-base", "spot", "i"), 30)
    await delete_slice(cloud, ZONE, "n1", CLOCK, 30)
    assert nothing_is_left(emulator)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"accelerator_type": "v6e-8"}, ErrorKind.NOT_OFFERED, "v6e-8"),
        ({"zone": "us-central2-z"}, ErrorKind.PERMISSION, "us-central2-z"),
    ],
)
async def test_V11_a_wrong_type_or_zone_is_one_clear_error(
    cloud: GoogleTpuCloud, emulator: Emulator, changes: dict[str, str], kind: ErrorKind, message: str
) -> None:
    for refused in (
        check_offered(cloud, dataclasses.replace(SPOT, **changes)),  # type: ignore[arg-type]
        make(cloud, **changes),
    ):
        with pytest.raises(CloudError, match=message) as caught:
            await refused
        assert caught.value.kind is kind
        assert not caught.value.retryable
    assert nothing_is_left(emulator)


async def test_V11_an_unknown_image_is_told_before_anything_is_made(cloud: GoogleTpuCloud) -> None:
    await check_offered(cloud, SPOT)
    with pytest.raises(CloudError, match="tpu-ubuntu2204-base") as caught:
        await check_offered(cloud, dataclasses.replace(SPOT, runtime_version="tpu-windows"))
    assert caught.value.kind is ErrorKind.NOT_OFFERED


async def test_V12_deleted_by_hand_while_being_made(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    emulator.set_delay(30)
    making = await during(make(cloud), emulator, "CREATING")
    await cloud.delete_queued_resource(ZONE, "s1")
    with pytest.raises(CloudError) as caught:
        await making
    assert caught.value.kind is ErrorKind.DELETED
    assert nothing_is_left(emulator)


async def test_faults_while_waiting_only_delay(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    emulator.fail_next("CreateQueuedResource", "UNAVAILABLE", "the answer is lost", after=True)
    emulator.fail_next("GetQueuedResource", "UNAVAILABLE", "the service is unavailable", times=3)
    emulator.fail_next("GetNode", "INTERNAL", "an internal error has occurred", times=2)
    emulator.fail_next("GetGuestAttributes", "UNAVAILABLE", "the service is unavailable", times=2)
    await make(cloud)
    assert [node["state"] for node in emulator.nodes()] == ["READY"]


async def test_a_creation_of_unknown_outcome_is_looked_for_and_deleted(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    emulator.fail_next("CreateQueuedResource", "INTERNAL", "an internal error has occurred", after=True)
    with pytest.raises(CloudError) as caught:
        await make(cloud)
    assert caught.value.kind is ErrorKind.INTERNAL
    assert nothing_is_left(emulator)


async def test_V9_a_host_that_never_shows_its_key_is_not_trusted(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    emulator.fail_next("GetGuestAttributes", "NOT_FOUND", "no guest attributes", times=10_000)
    request = dataclasses.replace(SPOT, deadline_s=3600)
    with pytest.raises(CloudError, match="no guest attributes") as caught:
        await provision(cloud, request, "s1", FastClock(), lambda line: None, always)
    assert caught.value.kind is ErrorKind.TIMED_OUT
    assert caught.value.retryable
    assert nothing_is_left(emulator)


async def test_P2_preempted_between_ready_and_the_first_host_key(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    emulator.fail_next("GetGuestAttributes", "NOT_FOUND", "no guest attributes", times=10_000)
    making = await during(make(cloud), emulator, "READY")
    await asyncio.to_thread(emulator.preempt, "s1")
    with pytest.raises(CloudError) as caught:
        await making
    assert caught.value.kind is ErrorKind.PREEMPTED
    assert nothing_is_left(emulator)


async def test_a_slice_that_nobody_wants_any_more_is_deleted(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    wanted = True

    async def check() -> None:
        if not wanted:
            raise NoLongerWanted("the run was stopped")

    emulator.set_capacity(ZONE, "v4-8", 0)
    request = dataclasses.replace(SPOT, deadline_s=100_000)
    said: list[str] = []
    making = asyncio.create_task(provision(cloud, request, "s1", FastClock(), said.append, check))
    await until(lambda: any("waiting for capacity" in line for line in said), "it waits")
    wanted = False
    with pytest.raises(NoLongerWanted):
        await making
    assert "deleting spot v4-8 s1 in us-central2-b: the run was stopped" in said
    assert nothing_is_left(emulator)


async def test_C6_who_lost_the_right_to_act_leaves_everything_as_it_is(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    class NotOurs(Exception):
        pass

    ours = True

    async def check() -> None:
        if not ours:
            raise NotOurs

    emulator.set_delay(30)
    making = await during(make(cloud, still_wanted=check), emulator, "CREATING")
    ours = False
    await asyncio.to_thread(emulator.preempt, "s1")
    with pytest.raises(NotOurs):
        await making
    assert len(emulator.queued_resources()) == 1
    with pytest.raises(NotOurs):
        await make(cloud, "s2", still_wanted=check)
    assert len(emulator.queued_resources()) == 1


async def test_a_zone_without_queued_resources_gives_a_plain_node(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    emulator.set_queues(ZONE, False)
    emulator.set_delay(0.5)
    said: list[str] = []
    ready = await make(cloud, said=said)
    assert (ready.node.name, ready.node.queued_resource) == ("s1", None)
    assert any("CREATING" in line for line in said)
    assert emulator.queued_resources() == []
    assert (await slice_condition(cloud, ZONE, "s1")).usable
    again = await make(cloud)
    assert again.node.uid == ready.node.uid
    await delete_slice(cloud, ZONE, "s1", CLOCK, 30)
    assert nothing_is_left(emulator)


async def test_a_plain_node_that_cannot_be_made_leaves_nothing(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    emulator.set_queues(ZONE, False)
    emulator.stockout(ZONE, "v4-8")
    with pytest.raises(CloudError) as caught:
        await make(cloud)
    assert caught.value.kind is ErrorKind.STOCKOUT
    assert nothing_is_left(emulator)


async def test_P2_a_plain_node_preempted_while_being_made(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    emulator.set_queues(ZONE, False)
    emulator.set_delay(20)
    making = await during(make(cloud), emulator, "CREATING")
    await asyncio.to_thread(emulator.preempt, "s1")
    with pytest.raises(CloudError) as caught:
        await making
    assert caught.value.kind is ErrorKind.PREEMPTED
    assert nothing_is_left(emulator)


@pytest.mark.parametrize("moment_s", [0.0, 0.01, 0.3])
async def test_V7_a_cancelled_plain_node_is_deleted(
    cloud: GoogleTpuCloud, emulator: Emulator, moment_s: float
) -> None:
    emulator.set_queues(ZONE, False)
    emulator.set_delay(30)
    making = asyncio.create_task(make(cloud))
    await asyncio.wait({making}, timeout=moment_s)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert nothing_is_left(emulator)


async def test_one_who_has_another_zone_to_go_to_waits_in_the_queue_only_so_long(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    emulator.set_capacity(ZONE, "v4-8", 0)
    with pytest.raises(CloudError, match=r"no capacity within 0.4 s in the zone's queue") as caught:
        await provision(cloud, SPOT, "s1", CLOCK, lambda line: None, always, queue_patience_s=0.4)
    assert caught.value.kind is ErrorKind.STOCKOUT
    assert nothing_is_left(emulator)
    # Where there is capacity it may take as long as it takes.
    emulator.set_capacity(ZONE, "v4-8", None)
    emulator.set_delay(1.0)
    waits: list[str] = []
    await provision(
        cloud, SPOT, "s2", CLOCK, lambda line: None, always, queue_patience_s=0.1, waits_for=waits.append
    )
    assert any("CREATING" in reason for reason in waits)


async def test_a_flex_start_request_says_how_long_it_lives() -> None:
    request = dataclasses.replace(SPOT, provisioning="flex-start", max_run_s=7200)
    assert node_request("s1", request).max_run_s == 7200
    assert node_request("s1", SPOT).max_run_s is None
    assert not request.spot
    assert dataclasses.replace(SPOT, provisioning="preemptible").spot
