"""Google's own command line against the emulator: nodes and queued resources in v2 (GA) and v2alpha1 (alpha).

A call takes gcloud a second or two, most of it waiting: what can run at once does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.emulator.api import ZONE, api_of, node_name
from tpu.emulator import gcloud
from tpu.emulator.emulator import Emulator

pytestmark = pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed here")

V4 = ("--accelerator-type=v4-8", "--version=tpu-ubuntu2204-base")
V4_QUEUED = ("--accelerator-type=v4-8", "--runtime-version=tpu-ubuntu2204-base")

Done = subprocess.CompletedProcess[str]
Gcloud = Callable[..., Done]


@pytest.fixture
def run_gcloud(emulator: Emulator, tmp_path: Path) -> Gcloud:
    """Runs `gcloud [alpha] compute tpus …` with nothing but what `env --gcloud` says, and no user's settings."""
    environment = {
        **gcloud.environment(emulator.env),
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),  # where it makes an SSH key
        "CLOUDSDK_CONFIG": str(tmp_path / "config"),
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    }

    def run(track: str, command: str, *more: str, fails: bool = False) -> Done:
        words = [*track.split(), "compute", "tpus", *command.split(), f"--zone={ZONE}", *more]
        done = subprocess.run(["gcloud", *words], env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode != 0) == fails, done.stderr
        return done

    return run


def parsed(done: Done) -> Any:
    return json.loads(done.stdout)


def own(listed: list[Any], name: str) -> Any:
    [found] = [item for item in listed if item["name"].endswith(f"/{name}")]
    return found


def node_story(run_gcloud: Gcloud, emulator: Emulator, track: str) -> None:
    """A node of a track is created, listed, described and deleted."""
    name = f"node-{track or 'ga'}"
    how = "preemptible" if track else "spot"
    run_gcloud(track, f"tpu-vm create {name}", *V4, f"--{how}", "--labels=a=b", "--metadata=k=v")
    assert own(emulator.nodes(), name)["provisioning"] == how
    listed = parsed(run_gcloud(track, "tpu-vm list", "--format=json"))
    described = parsed(run_gcloud(track, f"tpu-vm describe {name}", "--format=json"))
    assert described == own(listed, name)
    assert (described["state"], described["schedulingConfig"][how]) == ("READY", True)
    assert (described["labels"], described["metadata"]) == ({"a": "b"}, {"k": "v"})
    run_gcloud(track, f"tpu-vm delete {name}")


def queued_story(run_gcloud: Gcloud, emulator: Emulator, track: str) -> None:
    """A queued resource of a track is created, listed, described and deleted."""
    name = f"queued-{track or 'ga'}"
    how = ("--provisioning-model=flex-start", "--max-run-duration=1h") if track else ("--spot",)
    run_gcloud(track, f"queued-resources create {name}", f"--node-id={name}", *V4_QUEUED, *how)
    emulator.wait_for(
        lambda: own(emulator.queued_resources(), name)["state"] == "ACTIVE", f"an ACTIVE {name}"
    )
    listed = parsed(run_gcloud(track, "queued-resources list", "--format=json"))
    described = parsed(run_gcloud(track, f"queued-resources describe {name}", "--format=json"))
    assert own(listed, name)["tpu"] == described["tpu"]
    assert described["state"]["state"] == "ACTIVE"
    assert described["tpu"]["nodeSpec"][0]["nodeId"] == name
    if track:
        assert described["provisioningModel"] == "FLEX_START"
        assert described["runDuration"]["maxRunDuration"] == "3600s"
    else:
        assert described["spot"] == {}
    run_gcloud(track, f"queued-resources delete {name}", "--force")


@pytest.mark.slow  # gcloud starts ten times; in short form: test_rest.py
def test_nodes_and_queued_resources_from_creation_to_deletion(run_gcloud: Gcloud, emulator: Emulator) -> None:
    with ThreadPoolExecutor() as pool:
        stories = [
            pool.submit(story, run_gcloud, emulator, track)
            for story in (node_story, queued_story)
            for track in ("", "alpha")
        ]
    for story in stories:
        story.result()
    assert emulator.nodes() == []
    assert emulator.queued_resources() == []


async def test_lists_in_pages(run_gcloud: Gcloud, emulator: Emulator) -> None:
    async with api_of(emulator) as api:
        for name in ("a", "b", "c"):
            await api.create_node(name)
    listed = parsed(run_gcloud("", "tpu-vm list", "--page-size=2", "--format=json"))
    assert [node["name"] for node in listed] == [node_name(name) for name in ("a", "b", "c")]
    assert "v4-8" in run_gcloud("", "accelerator-types list").stdout


def test_errors_are_told_as_gcloud_tells_them(run_gcloud: Gcloud, emulator: Emulator) -> None:
    assert "NOT_FOUND: Resource" in run_gcloud("", "tpu-vm describe n1", fails=True).stderr
    emulator.stockout(ZONE, "v4-8")
    assert "no more capacity in the zone" in run_gcloud("alpha", "tpu-vm create n1", *V4, fails=True).stderr
    emulator.set_quota(ZONE, "v4-8", 0)
    refused = run_gcloud("", "queued-resources create q1", "--node-id=q1", *V4_QUEUED, fails=True).stderr
    assert "has been exceeded. Limit: 0 in region us-central2" in refused


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="gcloud ssh needs OpenSSH, which is not here")
async def test_ssh_puts_its_key_on_the_node_and_gets_in(run_gcloud: Gcloud, emulator: Emulator) -> None:
    async with api_of(emulator) as api:
        await api.create_node("n1", metadata={"other": "kept"})
        await api.wait_node("n1", "READY")
        port = emulator.env["TPU_RELAY_SSH_PORT"]
        done = run_gcloud("", "tpu-vm ssh me@n1", "--command=echo $TPU_EMULATOR_HOST", "--", "-p", port)
        assert done.stdout.splitlines()[-1] == "n1-0"
        metadata = dict((await api.call("get_node", name=node_name("n1"))).metadata)
    assert metadata["ssh-keys"].strip().startswith("me:ssh-rsa AAAA")
    assert metadata["other"] == "kept"


def test_without_the_key_it_gets_nothing(run_gcloud: Gcloud, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong-token"
    wrong.write_text("not the key")
    refused = run_gcloud("", "tpu-vm list", f"--access-token-file={wrong}", fails=True).stderr
    assert "UNAUTHENTICATED" in refused
