"""What may be used at all: regions by what they cost, chips by what was granted. Tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.checkpoint import objects
from tpu.cloud import CloudError, ErrorKind
from tpu.cloud.google import GoogleTpuCloud
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.slices.candidate import Candidate
from tpu.slices.grant import EXAMPLE, GrantError, parse_grant
from tpu.slices.preflight import Traffic, preflight, settings_problems
from tpu.slices.regions import BucketHome, Crossing, bucket_home, crossing
from tpu.slices.request import SliceRequest

US, EU = bucket_home("US", ()), bucket_home("EU", ())
CENTRAL = bucket_home("US-CENTRAL1", ())
V4 = Candidate("us-central2-b", "v4-8", "spot")
V6E = Candidate("europe-west4-a", "v6e-8", "spot")
REQUEST = SliceRequest(V4.zone, V4.accelerator_type)
CONNECTION = Connection("p", "gs://b", home=Path("/nowhere"))
UNKNOWN_SIZE = Traffic(None, 10)


@pytest.mark.parametrize(
    ("location", "data_locations", "home"),
    [
        ("US", (), BucketHome("US", ())),
        ("us-central2", (), BucketHome("US-CENTRAL2", ("us-central2",))),
        ("NAM4", (), BucketHome("NAM4", ("us-central1", "us-east1"))),
        ("US", ("US-EAST1", "US-WEST1"), BucketHome("US", ("us-east1", "us-west1"))),
    ],
)
def test_where_a_bucket_is(location: str, data_locations: tuple[str, ...], home: BucketHome):
    assert bucket_home(location, data_locations) == home


@pytest.mark.parametrize(
    ("home", "region", "costs"),
    [
        (CENTRAL, "us-central1", None),
        (CENTRAL, "us-east5", Crossing(0.02, 0.02, True)),
        (CENTRAL, "northamerica-northeast1", Crossing(0.02, 0.02, True)),
        (CENTRAL, "europe-west4", Crossing(0.05, 0.05, True)),
        (CENTRAL, "asia-northeast1", Crossing(0.08, 0.08, True)),
        (CENTRAL, "australia-southeast1", Crossing(0.10, 0.10, True)),
        (CENTRAL, "southamerica-east1", Crossing(0.14, 0.14, True)),
        (CENTRAL, "moon-north1", Crossing(0.14, 0.14, True)),
        (bucket_home("ASIA-EAST1", ()), "asia-northeast1", Crossing(0.08, 0.08, True)),
        (bucket_home("NAM4", ()), "us-east1", None),
        (bucket_home("NAM4", ()), "us-east5", Crossing(0.02, 0.02, True)),
        (US, "us-central2", Crossing(0.02, 0.0, False)),
        (US, "europe-west4", Crossing(0.05, 0.05, True)),
        (US, "northamerica-northeast1", Crossing(0.02, 0.02, True)),
        (EU, "europe-west4", Crossing(0.02, 0.0, False)),
        (EU, "us-east1", Crossing(0.05, 0.05, True)),
        (bucket_home("ASIA", ()), "asia-northeast1", Crossing(0.02, 0.0, False)),
    ],
)
def test_V13_what_a_gigabyte_costs(home: BucketHome, region: str, costs: Crossing | None):
    assert crossing(home, region) == costs


def problems(
    *candidates: Candidate,
    home: BucketHome | None = US,
    allow: tuple[str, ...] = (),
    traffic: Traffic = UNKNOWN_SIZE,
    request: SliceRequest = REQUEST,
    programs: tuple[str, ...] = (),
    **connection: str,
) -> list[str]:
    changed = dataclasses.replace(CONNECTION, **connection)  # type: ignore[arg-type]
    found = settings_problems(
        candidates, request, changed, home, allow, traffic, lambda name: name if name in programs else None
    )
    assert all(kind is ErrorKind.BAD_REQUEST for kind, _ in found)
    return [text for _, text in found]


def test_V13_another_region_is_refused_with_its_price_unless_named():
    (refused,) = problems(V4, V6E)
    for part in (str(V6E), "bucket is in us", "$0.05 a GB", "slice.allow_regions=[europe-west4]"):
        assert part in refused
    assert problems(V4, V6E, allow=("europe-west4",)) == []
    assert problems(V4, V6E, allow=("europe-west1",)) == [refused]
    assert problems(V4) == []
    # Nobody may say where the bucket is: nothing is known against it.
    assert problems(V4, V6E, home=None) == []


def test_V13_with_the_size_of_a_checkpoint_the_whole_price_is_told():
    (refused,) = problems(V6E, traffic=Traffic(2.5, 20))
    assert "($0.125 for one of 2.5 GB, $2.5 for all 20)" in refused


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        (Candidate("us-central2-b", "v4-64", "spot"), None),
        (Candidate("us-central2-b", "v4-64", "on-demand"), None),
        (Candidate("us-central2-b", "v4-128", "spot"), "64 chips, and the grant (TPU_RELAY_GRANT) 32"),
        (Candidate("us-central2-b", "v4-8", "reserved"), "no such chips; it has 32 on-demand v4 chips in"),
        (Candidate("us-central1-a", "v4-8", "spot"), "no such chips"),
        (Candidate("us-east1-d", "v6e-64", "spot"), None),
        (Candidate("us-east1-d", "v5litepod-8", "spot"), "no such chips"),
    ],
)
def test_a_grant_covers_what_it_names(candidate: Candidate, why: str | None):
    found = parse_grant(EXAMPLE).why_not(candidate)
    assert found is None if why is None else found is not None and why in found
    (told,) = problems(candidate, grant=EXAMPLE) or [None]
    assert told == (f"{candidate}: {found}" if found else None)


def test_generations_of_a_grant_may_be_written_as_people_say_them():
    grant = parse_grant("V5e:us-west4-a:spot=16 ; trillium : us-east1-d : spot = 4, spot=4;")
    assert dict(grant.chips) == {
        ("v5litepod", "us-west4-a", "spot"): 16,
        ("v6e", "us-east1-d", "spot"): 8,
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("v4:us-central2-b", "not three parts"),
        ("v9:us-central2-b:spot=4", "'v9' is no TPU generation"),
        ("v4:us-central2-b:cheap=4", "'cheap' is none of spot"),
        ("v4:us-central2-b:spot", "no number of chips"),
        ("v4:us-central2-b:spot=0", "no number of chips"),
        ("v4:us-central2-b:spot=-3", "no number of chips"),
        (" ; ", "grants nothing"),
    ],
)
def test_a_grant_that_cannot_be_understood_is_one_error(text: str, why: str):
    with pytest.raises(GrantError, match=why) as caught:
        parse_grant(text)
    assert EXAMPLE in str(caught.value)
    assert problems(V4, grant=text) == [str(caught.value)]


@given(st.text(max_size=40))
def test_no_grant_ends_in_anything_but_a_grant_or_its_error(text: str):
    try:
        grant = parse_grant(text)
    except GrantError:
        return
    assert grant.chips


NO_ADDRESS = dataclasses.replace(REQUEST, external_ips=False)


@pytest.mark.parametrize(
    ("request_", "route", "programs", "why"),
    [
        (REQUEST, "external", (), None),
        (NO_ADDRESS, "external", (), "slice.external_ips is false"),
        (NO_ADDRESS, "internal", (), None),
        (NO_ADDRESS, "iap", ("gcloud",), None),
        (NO_ADDRESS, "iap", (), "gcloud, which is not on this machine"),
        (NO_ADDRESS, "jump:me@bastion:22", (), None),
        (NO_ADDRESS, "jump:bastion", (), "a jump is written jump:user@host:port"),
        (NO_ADDRESS, "nc %h %p", ("nc",), None),
        (REQUEST, "outside", (), "TPU_RELAY_SSH_ROUTE must be external"),
    ],
)
def test_V14_hosts_that_could_not_be_reached_are_refused_before_anything_is_made(
    request_: SliceRequest, route: str, programs: tuple[str, ...], why: str | None
):
    found = problems(V4, request=request_, ssh_route=route, programs=programs)
    if why is None:
        assert found == []
    else:
        assert [why in text for text in found] == [True]


def test_the_storage_service_is_asked_where_a_bucket_is(emulator: Emulator):
    location = objects.bucket_location(emulator.env["TPU_RELAY_BUCKET"])
    assert location is not None
    assert bucket_home(*location) == US


async def test_V11_all_that_is_wrong_is_one_error_and_nothing_is_made(
    cloud: GoogleTpuCloud, emulator: Emulator
):
    async def check(*candidates: Candidate, home: BucketHome | None = None) -> None:
        await preflight(cloud, candidates, REQUEST, CONNECTION, home, (), UNKNOWN_SIZE)

    await check(V4, V6E)
    with pytest.raises(CloudError) as caught:
        await check(
            Candidate("us-central2-z", "v4-8", "spot"), V4, Candidate("us-central2-b", "v6e-8", "spot")
        )
    assert caught.value.permanent
    assert "us-central2-z" in str(caught.value)
    assert "us-central2-b has no accelerator type v6e-8; it has v4-" in str(caught.value)
    # What the settings forbid nobody is asked about.
    emulator.fail_next("*", "INTERNAL", "must not be called", times=100)
    with pytest.raises(CloudError, match=r"allow_regions") as caught:
        await check(V6E, home=US)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
