"""The automations on a real server: made once, renewed where something is new, and messages that arrive."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.notifications import SlackWebhook
from prefect.blocks.system import Secret
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client

from deployments.automations import MESSAGES, NoSuchBlock, apply, zombies
from tasks.events import Events
from tests.runs.histories import at
from tests.scenarios.conftest import Lab, our_automations
from tests.scenarios.prefect_record import events_of
from tests.scenarios.receiver import receiving
from tpu.runs.driver import AttemptEnded

ROOT = Path(__file__).parents[2]


def by_hand(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deployments.automations", *arguments], env=os.environ, cwd=ROOT, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


@pytest.mark.slow
async def test_they_are_made_once_and_renewed_where_something_is_new(lab: Lab, automations: None):
    assert len(await apply(dry_run=True)) == len(zombies())
    assert await our_automations() == []
    assert all(line.startswith("made ") for line in await apply())
    made = await our_automations()
    assert {one.name for one in made} == {one.name for one in zombies()}
    assert all(line.startswith("unchanged ") for line in await apply())
    async with get_client() as client:
        await client.pause_automation(made[0].id)
    told = await apply(silent_s=90)
    assert sorted(line.split()[0] for line in told) == ["renewed", "unchanged"]
    assert {one.id: (one.name, one.actions) for one in await our_automations()} == {
        one.id: (one.name, one.actions) for one in made
    }
    assert [one.enabled for one in await our_automations() if one.id == made[0].id] == [False]


async def test_a_wrong_block_is_one_sentence_and_changes_nothing(lab: Lab, automations: None):
    await Secret(value="no notification").save("mute", overwrite=True)  # type: ignore[misc]
    for block, words in (
        ("team", "name a block as TYPE/NAME, such as slack-webhook/team; found 'team'"),
        ("slack-webhook/nobody", "there is no block slack-webhook/nobody at http"),
        ("secret/mute", "the block secret/mute sends no messages"),
    ):
        with pytest.raises(NoSuchBlock, match=words):
            await apply([block])
    done = await asyncio.to_thread(by_hand, "--notify", "no-such-type/x")
    assert done.returncode == 1
    assert done.stdout.startswith("automations: there is no block no-such-type/x")
    assert len(done.stdout.splitlines()) == 1
    assert await our_automations() == []


async def test_messages_arrive_by_the_block_that_is_named(lab: Lab, automations: None):
    preempted = lab.numpy_run("messaged", steps=60, every=20, step_s=0.1)
    fails = lab.numpy_run("hopeless", steps=20, every=10, budget={"user_failure": 0},
                          variables={"NUMPY_FAIL": "exception@5"})  # fmt: skip
    with receiving() as receiver:
        slack = SlackWebhook(url=f"json://127.0.0.1:{receiver.port}/slack")  # type: ignore[arg-type]
        await slack.save("team", overwrite=True)  # type: ignore[misc]
        hook = Webhook(url=f"http://127.0.0.1:{receiver.port}/hook")  # type: ignore[arg-type]
        await hook.save("team", overwrite=True)  # type: ignore[misc]
        assert len(await apply(["slack-webhook/team", "webhook/team"])) == len(zombies()) + len(MESSAGES)

        async with lab.training(preempted) as task:
            for number in range(3):
                await lab.until(
                    lambda n=number: len(lab.events(preempted.name, "attempt-started")) > n
                    and lab.pids("numpy_trainer"),
                    "a gang", task,
                )  # fmt: skip
                await lab.preempt(preempted, notice=number == 0)
                await lab.until(lambda n=number: len(lab.verdicts(preempted.name)) > n, "the verdict", task)
        assert lab.verdicts(preempted.name).count("preempted") == 3
        with pytest.raises(AttemptEnded):
            await lab.train(fails)
        waits = [at(0, "no-capacity", hours=1.0, why=["spot v4-8 in us-central2-b: no more capacity"])]
        with Events(logging.getLogger(__name__)) as events:
            events.about("waits")
            events.heard(waits)

        wanted = [
            ("messaged: tpu.slice.preempted", "messaged: preemption 3: "),
            ("messaged: tpu.run.finished", "messaged: finished after "),
            ("hopeless: tpu.run.budget-reached", "hopeless: no further attempt: user failure: "),
            ("hopeless: tpu.run.failed", "hopeless: failed: user failure: "),
            ("waits: tpu.run.no-capacity", "waits: no slice for 1 h: spot v4-8 in us-central2-b: no more capacity"),
        ]  # fmt: skip

        def ours(path: str, field: str) -> list[dict[str, Any]]:
            """Runs of other tests send messages, too."""
            return [
                body
                for body in receiver.at(path)
                if body[field].startswith(("messaged:", "hopeless:", "waits:"))
            ]

        await lab.until(
            lambda: len(ours("/slack", "title")) >= len(wanted) <= len(ours("/hook", "text")), "all messages"
        )
        said = sorted((body["title"], body["message"]) for body in ours("/slack", "title"))
        assert [title for title, _ in said] == sorted(title for title, _ in wanted)
        for (_, message), (_, begin) in zip(said, sorted(wanted), strict=True):
            assert message.startswith(begin)
        assert sorted(body["text"] for body in ours("/hook", "text")) == sorted(
            message.splitlines()[0] for _, message in said
        )
        third = next(one for one in ours("/hook", "text") if one["event"] == "tpu.slice.preempted")
        assert third["payload"]["preemptions"] == 3
        assert len(await apply(["none"])) == len(zombies()) + len(MESSAGES)
        assert {one.name for one in await our_automations()} == {one.name for one in zombies()}
    await events_are_complete(lab)


async def events_are_complete(lab: Lab) -> None:
    """Of the run that was preempted three times: each slice from beginning to end, with what it is related to."""
    found = await events_of("messaged", "tpu.run.finished", "tpu.slice.deleted")
    names = [one.event for one in found]
    assert names.count("tpu.slice.ready") == names.count("tpu.slice.deleted") == 4
    assert names.count("tpu.slice.preempted") == names.count("tpu.run.resumed") == 3
    assert {one.payload["directory"] for one in found} == {lab.directory("messaged")}
    roles = {one.role: one.id for one in found[0].related}
    assert (names[0], roles["zone"]) == ("tpu.slice.ready", "tpu.zone.us-central2-b")
    assert roles["slice"] == f"tpu.slice.{found[0].payload['slice']}"
    assert {"flow-run", "flow"} <= set(roles)
