"""Names and labels that the API accepts, that are the same every time, and that never meet."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.slices.labels import CREATOR_LABEL, POOL_LABEL, intent_hash, is_ours, label_value, ownership_labels
from tpu.slices.names import slice_name
from tpu.slices.request import SliceRequest
from tpu.topology import UnknownAcceleratorType

VALID_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
VALID_VALUE = re.compile(r"[a-z0-9_-]{0,63}")

runs = st.text(max_size=120)
numbers = st.integers(0, 100_000)


@given(run=runs, attempt=numbers, part=numbers, again=numbers)
def test_every_name_is_valid(run: str, attempt: int, part: int, again: int) -> None:
    assert VALID_NAME.fullmatch(slice_name(run, attempt, "u1", part, again))


@given(run=runs, attempt=numbers, part=numbers, again=numbers)
def test_no_name_comes_twice(run: str, attempt: int, part: int, again: int) -> None:
    name = slice_name(run, attempt, "u1", part, again)
    assert name == slice_name(run, attempt, "u1", part, again)
    for other in (
        slice_name(run + "x", attempt, "u1", part, again),
        slice_name(run, attempt + 1, "u1", part, again),
        slice_name(run, attempt, "u2", part, again),
        slice_name(run, attempt, "u1", part + 1, again),
        slice_name(run, attempt, "u1", part, again + 1),
    ):
        assert other != name


def test_a_name_can_be_read() -> None:
    assert re.fullmatch(r"relay-icl-demo-3-[a-z2-7]{8}", slice_name("icl_demo", 3, "u1"))


@given(text=runs, other=runs)
def test_label_values_are_valid_and_keep_texts_apart(text: str, other: str) -> None:
    assert VALID_VALUE.fullmatch(label_value(text))
    if text != other:
        assert label_value(text) != label_value(other)


def test_a_valid_label_value_stays_as_it_is() -> None:
    assert label_value("default-pool_1") == "default-pool_1"


def test_labels_say_whose_a_slice_is() -> None:
    labels = {**ownership_labels("Pool A", "alice@host"), "relay-intent": "0123"}
    assert set(labels) == {POOL_LABEL, CREATOR_LABEL, "relay-intent"}
    assert is_ours(labels)
    assert is_ours(labels, "Pool A")
    assert not is_ours(labels, "pool b")
    assert not is_ours({"owner": "somebody"})


def test_the_intent_is_what_the_slice_is() -> None:
    request = SliceRequest(
        zone="us-central2-b", accelerator_type="v4-8", metadata={"ssh-keys": "k", "startup-script": "s"}
    )
    intent = intent_hash("s", request)
    assert intent != intent_hash("t", request)
    for change in (
        {"zone": "us-central2-a"},
        {"accelerator_type": "v4-16"},
        {"provisioning": "on-demand"},
        {"metadata": {"ssh-keys": "k", "startup-script": "other"}},
        {"external_ips": False},
    ):
        assert intent != intent_hash("s", dataclasses.replace(request, **change))


def test_another_machine_of_ours_has_the_same_intent() -> None:
    here = SliceRequest(
        zone="us-central2-b", accelerator_type="v4-8", metadata={"ssh-keys": "k"}, labels={CREATOR_LABEL: "a"}
    )
    there = dataclasses.replace(
        here, metadata={"ssh-keys": "other"}, labels={CREATOR_LABEL: "b"}, deadline_s=5
    )
    assert intent_hash("s", here) == intent_hash("s", there)


def test_a_request_is_checked_when_it_is_made() -> None:
    with pytest.raises(UnknownAcceleratorType):
        SliceRequest(zone="us-central2-b", accelerator_type="v4-9")
    with pytest.raises(ValueError, match="deadline_s"):
        SliceRequest(zone="us-central2-b", accelerator_type="v4-8", deadline_s=0)
