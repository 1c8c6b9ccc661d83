"""The automations of tpu-relay, made or renewed by their names on any Prefect server or Prefect Cloud workspace.

Two find flow runs whose processes and worker are all dead: one that gives no sign of life for `--silent-seconds` is
marked Crashed, and a crashed one of a deployment tagged `tpu-relay-restart` is scheduled again, for whichever worker
comes first. The worker starts it up to `restarts` times (a field of the work pool), then leaves nothing of it.

The others send messages, and are made only when a block is named to send them by: a notification block such as
slack-webhook/team, ms-teams-webhook/…, discord-webhook/…, sendgrid-email/…, custom-webhook/…, or webhook/…
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypesOrUnknown, CallWebhook, ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from tpu.worker.fate import RESTARTED_BY_AUTOMATION, TAKEN_FOR_DEAD
from tpu.worker.worker import HEARTBEAT_S

PREFIX = "tpu-relay: "
# Of deployments: theirs is what we look after, and this of it is started again.
TAG, RESTART_TAG = "tpu-relay", "tpu-relay-restart"
# Six heartbeats of our worker. A server that is away for less is no reason to start anything again, and the gang
# trains on meanwhile.
SILENT_S = 180
# So long the preemptions of a run are counted together.
DAY = timedelta(days=1)


class NoSuchBlock(RuntimeError):
    """The block named for messages is not there or cannot send any; the message says what to do."""


@dataclass(frozen=True)
class Message:
    """An automation that sends a message: after so many of these events of one run within a day."""

    about: str
    events: frozenset[str]
    threshold: int = 1


MESSAGES = (
    Message("run finished", frozenset({"tpu.run.finished"})),
    Message("run failed", frozenset({"tpu.run.failed"})),
    Message("third preemption of a run within a day", frozenset({"tpu.slice.preempted"}), threshold=3),
    Message(
        "budget of a run",
        frozenset({"tpu.run.budget-reached", "tpu.run.max-cost-warned", "tpu.run.max-cost-reached"}),
    ),
    Message("no capacity for an hour", frozenset({"tpu.run.no-capacity"})),
)
# The sentence that comes with the event, and the way to the flow run's page, if the server knows its own address.
_BODY = "{{ event.payload.message }}{% if flow_run %}\n{{ flow_run | ui_url }}{% endif %}"
_JSON = (
    '{"event": {{ event.event | tojson }}, "occurred": {{ event.occurred.isoformat() | tojson }}, '
    '"payload": {{ event.payload | tojson }}, "text": {{ event.payload.message | tojson }}}'
)


def zombies(silent_s: int = SILENT_S) -> list[AutomationCore]:
    """The two that bring back what died with its worker."""
    life = "prefect.flow-run.*"
    return [
        AutomationCore(
            name=f"{PREFIX}a flow run without a sign of life has crashed",
            description=f"Its heartbeats come every {HEARTBEAT_S} s; none came for {silent_s} s.",
            trigger=EventTrigger(
                match={"prefect.resource.id": life}, match_related=_tagged(TAG), for_each={"prefect.resource.id"},
                # Also of one that was claimed by a worker which died before the flow began.
                after={f"prefect.flow-run.{name}" for name in ("heartbeat", "Pending", "Submitting", "Running")},
                expect={life}, posture=Posture.Proactive, threshold=1, within=timedelta(seconds=silent_s),
            ),
            actions=[_into(StateType.CRASHED, "Crashed", TAKEN_FOR_DEAD)],
        ),
        AutomationCore(
            name=f"{PREFIX}a flow run that crashed is started again",
            description=f"Flow runs tagged {RESTART_TAG}; the worker starts each up to `restarts` times.",
            trigger=EventTrigger(
                match={"prefect.resource.id": life}, match_related=_tagged(RESTART_TAG),
                for_each={"prefect.resource.id"},
                expect={"prefect.flow-run.Crashed"}, posture=Posture.Reactive, threshold=1, within=timedelta(0),
            ),
            actions=[_into(StateType.SCHEDULED, "AwaitingRetry", RESTARTED_BY_AUTOMATION)],
        ),
    ]  # fmt: skip


def _tagged(tag: str) -> ResourceSpecification:
    return ResourceSpecification(
        {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
    )


def _into(state: StateType, name: str, message: str) -> ActionTypesOrUnknown:
    return ChangeFlowRunState(state=state, name=name, message=message, force=False)


def messages(actions: Sequence[SendNotification | CallWebhook]) -> list[AutomationCore]:
    """Those that send messages, each by all of the actions."""
    return [
        AutomationCore(
            name=f"{PREFIX}message, {one.about}",
            description="Made by python -m deployments.automations --notify; --notify none removes it.",
            trigger=EventTrigger(
                match={"prefect.resource.id": "tpu.run.*"}, for_each={"prefect.resource.id"}, expect=set(one.events),
                posture=Posture.Reactive, threshold=one.threshold,
                within=DAY if one.threshold > 1 else timedelta(0),
            ),
            actions=list(actions),
        )
        for one in MESSAGES
    ]  # fmt: skip


async def action_of(client: PrefectClient, block: str) -> SendNotification | CallWebhook:
    """How a message is sent by a block, named `TYPE/NAME`.

    Raises:
        NoSuchBlock: there is none, or it sends no messages.
    """
    kind, _, name = block.partition("/")
    if not kind or not name:
        raise NoSuchBlock(f"name a block as TYPE/NAME, such as slack-webhook/team; found {block!r}")
    try:
        found = await client.read_block_document_by_name(name, kind, include_secrets=False)
    except ObjectNotFound:
        raise NoSuchBlock(
            f"there is no block {block} at {client.api_url}: make it in the UI under Blocks, or by its class in "
            "Python, then name it again"
        ) from None
    if kind == "webhook":
        return CallWebhook(block_document_id=found.id, payload=_JSON)
    schema = found.block_schema
    if schema is None or "notify" not in schema.capabilities:
        raise NoSuchBlock(
            f"the block {block} sends no messages: name a notification block such as slack-webhook/team, "
            "sendgrid-email/me or custom-webhook/mine, or one of the type webhook"
        )
    return SendNotification(
        block_document_id=found.id, subject="{{ event.resource.name }}: {{ event.event }}", body=_BODY
    )


async def apply(notify: Sequence[str] = (), silent_s: int = SILENT_S, dry_run: bool = False) -> list[str]:
    """Make or renew the automations on the server that is set; what was done to each, a line each.

    One that somebody has paused stays so. Messages are left as they are where `notify` names no block, and removed by
    the name `none`.

    Raises:
        NoSuchBlock: see `action_of`; nothing is changed then.
    """
    async with get_client() as client:
        wanted, unwanted = zombies(silent_s), list[str]()
        if list(notify) == ["none"]:
            unwanted = [one.name for one in messages([])]
        elif notify:
            wanted += messages([await action_of(client, block) for block in notify])
        return [
            *[await _put(client, one, dry_run) for one in wanted],
            *[line for name in unwanted for line in await _remove(client, name, dry_run)],
        ]


async def _put(client: PrefectClient, wanted: AutomationCore, dry_run: bool) -> str:
    known = await client.read_automations_by_name(wanted.name)
    if not known:
        if not dry_run:
            await client.create_automation(wanted)
        return f"made       {wanted.name}"
    paused = "" if any(one.enabled for one in known) else " (paused)"
    # One that is renewed forgets what it waits for, so this is done only where something is new.
    others = [one for one in known if _meant(one) != _meant(wanted)]
    for one in others:
        if not dry_run:
            # Every field is said: the client leaves out those that have their default, the type of an action too.
            said = wanted.model_dump(mode="json", exclude={"owner_resource"}) | {"enabled": one.enabled}
            await client.update_automation(one.id, AutomationCore.model_validate(said))
    return f"{'renewed  ' if others else 'unchanged'}  {wanted.name}{paused}"


def _meant(automation: AutomationCore) -> dict[str, Any]:
    return automation.model_dump(include={"description", "trigger", "actions"})


async def _remove(client: PrefectClient, name: str, dry_run: bool) -> list[str]:
    known = await client.read_automations_by_name(name)
    for one in known:
        if not dry_run:
            await client.delete_automation(one.id)
    return [f"removed    {name}"] if known else []


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deployments.automations", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The server is that of PREFECT_API_URL (and PREFECT_API_KEY) or of your Prefect profile.",
    )  # fmt: skip
    parser.add_argument("--notify", action="append", default=[], metavar="TYPE/NAME",
                        help="send messages by this block; may be given more than once; `none` ends them")  # fmt: skip
    parser.add_argument("--silent-seconds", type=int, default=SILENT_S, metavar="N",
                        help=f"how long a flow run may give no sign of life ({SILENT_S}; 10 is the least)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would be made; change nothing")
    arguments = parser.parse_args()
    if arguments.silent_seconds < 10:
        parser.error(f"--silent-seconds must be 10 or more, found {arguments.silent_seconds}")
    try:
        print("\n".join(asyncio.run(apply(arguments.notify, arguments.silent_seconds, arguments.dry_run))))
    except NoSuchBlock as error:
        sys.exit(f"automations: {error}")


if __name__ == "__main__":
    main()
