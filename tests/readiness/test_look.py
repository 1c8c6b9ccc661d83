"""A project that is ready, and one that lacks something: each lack is a line with what mends it, and hides no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.faults import FaultyGcs
from tests.deployments.gcloud_words import INSTALLED, unknown_words
from tpu.checkpoint import objects
from tpu.clock import SystemClock
from tpu.cloud.project import GoogleProject
from tpu.cloud.rest import RestApi
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.emulator.gcs import GcsServer
from tpu.readiness.caller import clock
from tpu.readiness.finding import Finding, State
from tpu.readiness.look import Wish, look
from tpu.slices.candidate import Candidate
from tpu.slices.request import SliceRequest

READY = Candidate("us-central2-b", "v4-8", "spot")
ACCOUNT = "123456789012-compute@developer.gserviceaccount.com"


@pytest.fixture
def connection(emulator: Emulator, tmp_path: Path) -> Connection:
    return dataclasses.replace(Connection.from_environment(emulator.env), home=tmp_path)


async def found(connection: Connection, candidate: Candidate = READY, **request: Any) -> list[Finding]:
    wanted = SliceRequest(candidate.zone, candidate.accelerator_type, candidate.provisioning, **request)
    return await look(connection, Wish((candidate,), wanted))


async def test_a_project_that_is_ready_has_no_lack_and_is_left_as_it_was(
    connection: Connection, emulator: Emulator
):
    findings = await found(connection)
    # One thing nobody can be asked, so it is not told to be right.
    (untold,) = [one for one in findings if one.state is not State.HOLDS]
    assert (untold.state, untold.text) == (State.UNKNOWN, "only a VM can see it; if it has none yet")
    assert "gcloud storage buckets add-iam-policy-binding gs://" in untold.mend
    assert [one.what for one in findings] == [
        "credentials", "SSH key", "bucket", "bucket's region", "settings", "Cloud TPU API in us-central2-b",
        "spot v4-8 in us-central2-b", "clock", "rights in the project", "service account of the VMs",
        untold.what,
        "quota for spot v4-8 in us-central2-b", "network", "OS Login", "firewall of default",
    ]  # fmt: skip
    assert objects.listing(f"{connection.bucket}/preflight") == []
    assert (emulator.nodes(), emulator.queued_resources()) == ([], [])


@dataclass(frozen=True)
class Lack:
    """How a project is set up, what is asked of it, and what is said of that: which condition, in which words."""

    what: str
    text: str
    mend: str = ""
    project: Mapping[str, Any] = field(default_factory=dict)
    connection: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    candidate: Candidate = READY
    quota: int | None = None


PROJECT = "relay-emulated"
SLICE = "spot v4-8 in us-central2-b"
ME = '"user:$(gcloud config get account)"'
LACKS = {
    "bucket-away": Lack(
        "bucket", "there is no bucket gs://not-there: create it",
        f"gcloud storage buckets create gs://not-there --project={PROJECT} --location=us-central2 "
        "--uniform-bucket-level-access",
        connection={"bucket": "gs://not-there"},
    ),
    "api-off": Lack(
        "Cloud TPU API in us-central2-b", f"it is off in {PROJECT}",
        f"gcloud services enable tpu.googleapis.com --project={PROJECT}",
        project={"apis_off": ["tpu.googleapis.com"]},
    ),
    "no-right-to-look": Lack(
        "Cloud TPU API in us-central2-b", "Permission 'tpu.nodes.list' denied",
        f"gcloud projects add-iam-policy-binding {PROJECT} --member={ME} --role=roles/tpu.admin",
        project={"missing": ["tpu.nodes.list"]},
    ),
    "no-right-to-create": Lack(
        "rights in the project", "no tpu.nodes.create",
        f"gcloud projects add-iam-policy-binding {PROJECT} --member={ME} --role=roles/tpu.admin",
        project={"missing": ["tpu.nodes.create"]},
    ),
    "zone": Lack(
        "Cloud TPU API in us-central9-z", "locations/us-central9-z",
        candidate=Candidate("us-central9-z", "v4-8", "spot"),
    ),
    "type": Lack(
        "spot v6e-8 in us-central2-b", "has no accelerator type v6e-8",
        "gcloud compute tpus tpu-vm accelerator-types list --zone=us-central2-b",
        candidate=Candidate("us-central2-b", "v6e-8", "spot"),
    ),
    "image": Lack(
        SLICE, "has no image no-such-image; it has tpu-",
        "gcloud compute tpus tpu-vm versions list --zone=us-central2-b",
        request={"runtime_version": "no-such-image"},
    ),
    "no-quota": Lack(
        f"quota for {SLICE}", "TPUV4sPreemptiblePerProjectPerRegionForTPUAPI is 0 in us-central2-b",
        f"gcloud beta quotas preferences create --service=tpu.googleapis.com --project={PROJECT} "
        "--quota-id=TPUV4sPreemptiblePerProjectPerRegionForTPUAPI --preferred-value=4 --dimensions=zone=us-central2-b",
        quota=0,
    ),
    "no-right-to-act-as": Lack(
        "service account of the VMs", f"no right to start VMs as {ACCOUNT}",
        f"gcloud iam service-accounts add-iam-policy-binding {ACCOUNT} --project={PROJECT} --member={ME} "
        "--role=roles/iam.serviceAccountUser",
        project={"missing": ["iam.serviceAccounts.actAs"]},
    ),
    "no-such-account": Lack(
        "service account of the VMs", "there is no nobody@x.iam.gserviceaccount.com",
        f"gcloud iam service-accounts create nobody --project={PROJECT}",
        request={"service_account": "nobody@x.iam.gserviceaccount.com"},
    ),
    "network": Lack(
        "network", "there is no network mine", "gcloud compute networks create mine", request={"network": "mine"}
    ),
    "port-closed": Lack(
        "firewall of default", "no rule lets TCP port",
        f"gcloud compute firewall-rules create relay-ssh --project={PROJECT} --network=default --direction=INGRESS "
        "--allow=tcp:",
        project={"ssh_from": ["10.0.0.0/8", "35.235.240.0/20"]},
    ),
    "port-closed-to-iap": Lack(
        "firewall of default", "by the route iap", "--source-ranges=35.235.240.0/20",
        project={"ssh_from": ["192.0.2.0/24"]}, connection={"ssh_route": "iap"},
    ),
    "no-right-to-iap": Lack(
        "rights in the project", "no iap.tunnelInstances.accessViaIAP", "--role=roles/iap.tunnelResourceAccessor",
        project={"missing": ["iap.tunnelInstances.accessViaIAP"]}, connection={"ssh_route": "iap"},
    ),
    "port-closed-inside": Lack(
        "firewall of default", "by the route internal", "--source-ranges=10.0.0.0/8",
        project={"ssh_from": ["192.0.2.0/24"]}, connection={"ssh_route": "internal"},
    ),
    "os-login": Lack(
        "OS Login", "hosts do not take the keys",
        f"gcloud compute project-info add-metadata --project={PROJECT} --metadata=enable-oslogin=FALSE",
        project={"os_login": True},
    ),
    "no-way-to-the-bucket": Lack(
        "Private Google Access of default in us-central2", "hosts without external addresses cannot reach the bucket",
        f"gcloud compute networks subnets update default --project={PROJECT} --region=us-central2 "
        "--enable-private-ip-google-access",
        project={"private_access": False}, connection={"ssh_route": "internal"}, request={"external_ips": False},
    ),
    "no-external-addresses": Lack(
        f"settings for {SLICE}", "slice.external_ips is false", request={"external_ips": False}
    ),
    "route": Lack(f"settings for {SLICE}", "jump", connection={"ssh_route": "jump:nobody"}),
    "grant": Lack(f"settings for {SLICE}", "the grant", connection={"grant": "v6e:us-east1-d:spot=64"}),
    "clock": Lack("clock", "behind Google's", "sudo timedatectl set-ntp true", project={"clock_ahead_s": 600}),
    "key": Lack("Cloud TPU API in us-central2-b", "rights of the credentials", connection={"api_key": "wrong"}),
    "address": Lack(
        "Cloud TPU API in us-central2-b", "cloud not reachable", connection={"api_endpoint": "127.0.0.1:9"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("lack", LACKS.values(), ids=LACKS.keys())
async def test_what_is_lacking_is_said_with_what_mends_it(
    connection: Connection, emulator: Emulator, lack: Lack
):
    emulator.set_project(**lack.project)
    if lack.quota is not None:
        emulator.set_quota(lack.candidate.zone, lack.candidate.accelerator_type, lack.quota)
    findings = await found(dataclasses.replace(connection, **lack.connection), lack.candidate, **lack.request)
    wrong = {one.what: one for one in findings if one.state is State.WRONG}
    assert lack.text in wrong[lack.what].text
    assert lack.mend in wrong[lack.what].mend
    assert "\n" not in str(wrong[lack.what])
    if INSTALLED and lack.mend.startswith("gcloud "):
        for command in wrong[lack.what].mend.split(" && "):
            assert unknown_words(command) == []
    # The others are looked at all the same.
    assert any(one.state is State.HOLDS for one in findings)


@pytest.mark.parametrize(
    ("path", "words"),
    [("/upload/", "objects cannot be written"), ("/o?", "no right to list")],
    ids=["read-only", "not-listed"],
)
async def test_a_bucket_without_rights_is_said_with_the_role(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, emulator: Emulator, path: str, words: str
):
    with FaultyGcs(emulator.env["STORAGE_EMULATOR_HOST"]) as storage:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage.url)
        storage.fail_always(403, path)
        (lack,) = [one for one in await found(connection) if one.state is State.WRONG]
    assert (lack.what, words in lack.text) == ("bucket", True)
    assert lack.mend == (
        f"gcloud storage buckets add-iam-policy-binding {connection.bucket} --member={ME} "
        "--role=roles/storage.objectAdmin"
    )


async def test_a_bucket_in_another_region_is_said_with_the_price(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    server = GcsServer(tmp_path / "gcs", tmp_path / "gcs.log", location="EUROPE-WEST4")
    try:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.start())
        (lack,) = [one for one in await found(connection) if one.state is State.WRONG]
    finally:
        server.stop()
    assert lack.what == "bucket's region"
    assert "the bucket is in europe-west4, and traffic to us-central2 costs about $" in lack.text


async def test_what_nobody_tells_is_no_mistake_but_is_said(connection: Connection, emulator: Emulator):
    others = ("compute", "cloudresourcemanager", "cloudquotas")
    emulator.set_project(apis_off=[f"{name}.googleapis.com" for name in others])
    findings = await found(connection)
    assert [one for one in findings if one.state is State.WRONG] == []
    mends = {one.mend for one in findings if one.state is State.UNKNOWN}
    assert mends == {f"gcloud services enable {name}.googleapis.com --project={PROJECT}" for name in others}


class WithoutDates(GoogleProject):
    """A proxy on the way leaves them out."""

    async def date_s(self) -> float | None:
        return None


async def test_a_clock_that_nothing_is_compared_with_is_not_told_to_go_right(connection: Connection):
    project = WithoutDates(RestApi(connection), connection.project)
    assert (await clock(project, connection.project, SystemClock())).state is State.UNKNOWN


async def test_without_credentials_the_rest_is_looked_at(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    findings = {one.what: one for one in await found(dataclasses.replace(connection, api_endpoint=None))}
    assert findings["credentials"].mend == "gcloud auth application-default login"
    assert findings["bucket"].state is State.HOLDS


async def test_a_key_that_others_may_read_is_said(connection: Connection):
    await found(connection)
    (connection.home / "id_ed25519").chmod(0o644)
    (lack,) = [one for one in await found(connection) if one.state is State.WRONG]
    assert (lack.what, "chmod 600" in lack.text) == ("SSH key", True)
