"""Messages of the API as our values, states that we do not know included."""

from __future__ import annotations

import pytest
from google.cloud import tpu_v2alpha1 as api
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from tpu.cloud import Endpoint, ErrorKind, NodeHealth, NodeRequest, NodeState, QueuedResourceState, convert
from tpu.cloud.values import INTENT_LABEL, PREEMPTIBLE, QueuedResourceRequest

PARENT = "projects/p/locations/us-central2-b"


def test_every_state_of_the_api_has_a_name_of_ours() -> None:
    for theirs, ours in (
        (api.Node.State, NodeState),
        (api.Node.Health, NodeHealth),
        (api.QueuedResourceState.State, QueuedResourceState),
    ):
        for member in theirs:
            if not member.name.endswith("UNSPECIFIED"):
                assert ours(member.value).name == member.name


def test_a_state_that_is_not_known_is_unknown() -> None:
    assert NodeState(0) is NodeState.UNKNOWN
    assert NodeState(99) is NodeState.UNKNOWN
    assert NodeHealth(99) is NodeHealth.UNKNOWN
    assert QueuedResourceState(0) is QueuedResourceState.UNKNOWN
    assert QueuedResourceState(99) is QueuedResourceState.UNKNOWN


@pytest.mark.filterwarnings("ignore:Unrecognized")
def test_a_node_from_the_future_can_be_read() -> None:
    raw = api.Node.pb(api.Node(name=f"{PARENT}/nodes/n"))
    raw.state, raw.health = 42, 43
    found = convert.node(api.Node.wrap(raw))
    assert (found.state, found.health) == (NodeState.UNKNOWN, NodeHealth.UNKNOWN)


def test_a_node() -> None:
    found = convert.node(
        api.Node(
            name=f"{PARENT}/nodes/n",
            state=api.Node.State.READY,
            accelerator_type="v4-16",
            runtime_version="tpu-ubuntu2204-base",
            network_endpoints=[
                api.NetworkEndpoint(ip_address="10.0.0.1"),
                api.NetworkEndpoint(
                    ip_address="10.0.0.2", access_config=api.AccessConfig(external_ip="34.1.2.3")
                ),
            ],
            scheduling_config=api.SchedulingConfig(preemptible=True),
            queued_resource=f"{PARENT}/queuedResources/q",
            labels={"a": "b"},
        )
    )
    assert (found.name, found.zone, found.queued_resource) == ("n", "us-central2-b", "q")
    assert found.endpoints == (Endpoint("10.0.0.1", None), Endpoint("10.0.0.2", "34.1.2.3"))
    assert (found.spot, found.reserved) == (True, False)
    assert (found.health, found.created) == (NodeHealth.UNREPORTED, None)


def test_a_failed_queued_resource_says_why() -> None:
    state = api.QueuedResourceState(
        state=api.QueuedResourceState.State.FAILED,
        failed_data=api.QueuedResourceState.FailedData(
            error=status_pb2.Status(code=8, message='There is no more capacity in the zone "z"')
        ),
        state_initiator=api.QueuedResourceState.StateInitiator.SERVICE,
    )
    found = convert.queued_resource(api.QueuedResource(name=f"{PARENT}/queuedResources/q", state=state))
    assert found.failure is not None
    assert found.failure.kind is ErrorKind.STOCKOUT
    assert not found.by_user
    assert not found.spot


def test_details_of_an_error_are_read() -> None:
    detail = AnyMessage()
    detail.Pack(
        error_details_pb2.QuotaFailure(
            violations=[
                error_details_pb2.QuotaFailure.Violation(
                    subject="project:1", description="Quota 'X' exhausted. Limit 0 in zone z"
                )
            ]
        )
    )
    reason = AnyMessage()
    reason.Pack(error_details_pb2.ErrorInfo(reason="RATE_LIMIT_EXCEEDED"))
    other = AnyMessage()
    other.Pack(error_details_pb2.Help())
    status = status_pb2.Status(code=8, message="exhausted", details=[other, detail])
    assert convert.failure_of(status).kind is ErrorKind.NO_QUOTA
    status = status_pb2.Status(code=8, message="exhausted", details=[reason])
    assert convert.failure_of(status).kind is ErrorKind.RATE_LIMITED


@pytest.mark.parametrize("provisioning", ["spot", "preemptible", "on-demand", "reserved"])
def test_provisioning_models(provisioning: str) -> None:
    request = NodeRequest("v4-8", "image", provisioning, intent="i", service_account="a@b")  # type: ignore[arg-type]
    queued = convert.queued_resource_message(PARENT, "s", QueuedResourceRequest(request))
    assert ("spot" in queued) == (provisioning == "spot")
    assert ("best_effort" in queued) == (provisioning == "preemptible")
    assert convert.queued_resource(queued).spot == (provisioning in PREEMPTIBLE)
    assert queued.guaranteed.reserved == (provisioning == "reserved")
    spec = queued.tpu.node_spec[0]
    assert (spec.parent, spec.node_id, spec.node.labels[INTENT_LABEL]) == (PARENT, "s", "i")
    assert not spec.node.scheduling_config.spot
    plain = convert.node_message(request, queued=False)
    assert convert.node(plain).spot == (provisioning in PREEMPTIBLE)
    assert plain.scheduling_config.preemptible == (provisioning == "preemptible")
    assert plain.scheduling_config.spot == (provisioning == "spot")
    assert plain.scheduling_config.reserved == (provisioning == "reserved")
    assert plain.service_account.email == "a@b"


@pytest.mark.parametrize(
    ("provisioning", "max_run_s"), [("flex-start", None), ("flex-start", 8 * 86400), ("spot", 60)]
)
def test_a_maximal_run_time_belongs_to_flex_start_alone(provisioning: str, max_run_s: float | None) -> None:
    with pytest.raises(ValueError, match="max_run_s"):
        NodeRequest("v4-8", "image", provisioning, intent="i", max_run_s=max_run_s)  # type: ignore[arg-type]


def test_host_keys_of_a_partial_answer_are_not_guessed() -> None:
    answer = api.GuestAttributes(
        query_value=api.GuestAttributesValue(
            items=[
                api.GuestAttributesEntry(namespace="hostkeys", key="ssh-ed25519", value="AAAA"),
                api.GuestAttributesEntry(namespace="hostkeys", key="hostname", value="t1v-n-w-0"),
            ]
        )
    )
    assert convert.host_identities([answer], workers=2) == {}
    found = convert.host_identities([api.GuestAttributes(), answer], workers=2)
    assert list(found) == [1]
    assert (found[1].key, found[1].hostname) == ("ssh-ed25519 AAAA", "t1v-n-w-0")


def test_a_list_converts_again_what_has_changed_and_nothing_else() -> None:
    converted: list[str] = []

    def convert_one(message: object) -> object:
        node = api.Node.wrap(message)
        converted.append(f"{convert.short(node.name)} {node.state.name}")
        return convert.node(node)

    def listed(**states: str) -> list[object]:
        return [api.Node.pb(api.Node(name=f"{PARENT}/nodes/{n}", state=s)) for n, s in states.items()]

    known = convert.Remembered(convert_one)
    first = known.convert("here", listed(a="CREATING", b="READY"))
    second = known.convert("here", listed(a="READY", b="READY", c="READY"))
    assert converted == ["a CREATING", "b READY", "a READY", "c READY"]
    assert [node.state.name for node in second] == ["READY"] * 3
    assert second[1] is first[1]

    known.convert("elsewhere", listed(b="READY"))
    known.convert("here", [])
    known.convert("here", listed(b="READY"))
    assert converted[4:] == ["b READY", "b READY"]
