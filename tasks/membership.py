"""A slice's part in a run over several slices: one record in Prefect for each time that it takes part."""

from __future__ import annotations

import logging
from typing import Any

from prefect import State, task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.states import Crashed, Failed

from tasks.progress import Progress
from tpu.elastic.rules import FINISHED
from tpu.hosts.address import HostAddress
from tpu.runs.driver import AttemptEnded
from tpu.runs.over_slices import OverSlices, SlicePart
from tpu.runs.parts import slice_name
from tpu.slices.verdict import VerdictKind


@task(name="membership", task_run_name="{name}", cache_policy=NO_CACHE)
async def take_part(name: str, part: SlicePart) -> State[Any] | None:
    """Return once the run's last step is committed; the name tells the steps that this slice took part in.

    A slice that was lost is no failure of the run, which goes on without it: the state has the verdict's name.
    """
    try:
        await part.attempt(lambda: _name_this_task_run(part.title))
    except AttemptEnded as ended:
        kind = ended.verdict.kind
        _name_this_task_run(f"{part.title}, {kind.value}")
        part.last = ended
        state = Failed if kind is VerdictKind.USER_FAILURE else Crashed
        return state(name=kind.value.capitalize(), message=str(ended))
    except BaseException:
        _name_this_task_run(part.title)
        raise
    _name_this_task_run(part.title)
    return None


async def stint(part: SlicePart) -> AttemptEnded | None:
    """Take part once; how that ended, None if the run has come to its last step."""
    part.last = None
    # Prefect's annotation of return_state forgets that it is awaited.
    taking: Any = take_part(part.name, part, return_state=True)
    state: State[Any] = await taking
    if part.last is None:
        await state.aresult()
    return part.last


class Hearing:
    """Hears the gang of one slice and tells of the run what is new, and of the slice what is its own."""

    def __init__(
        self,
        number: int,
        run: OverSlices,
        progress: Progress,
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        self._name, self._run, self._progress, self._log = slice_name(number), run, progress, log
        self._own = Progress(run.record.config, log, f"{self._name} ")

    def on_log(self, host: HostAddress, line: str) -> None:
        self._own.on_log(host, line)

    def on_end(self) -> None:
        self._own.on_end()

    def on_event(self, host: HostAddress, record: dict[str, Any]) -> None:
        if host.index != 0:
            return
        match record["event"]:
            case "step":
                if record["step"] > self._run.stepped:
                    self._run.stepped = record["step"]
                    self._progress.on_event(host, record)
            case "commit":
                if record["step"] > self._run.committed:
                    self._progress.on_event(host, record)
                self._run.hear_commit(record["step"])
            case "restored":
                self._log.info("%s takes part from step %s on", self._name, record["step"])
            case "leads":
                self._log.info("%s saves the run's checkpoints, as attempt %s", self._name, record["attempt"])
            case "notice":
                self._log.warning("%s leaves: it has a preemption notice", self._name)
            case "bad":
                self._log.warning("%s is not used any more: %s", self._name, record["reason"])
            case "coordinates":
                self._log.info("%s is the coordinator", self._name)
            case "members":
                self._on_members(record)
            case "skipped" | "save_failed":
                self._log.warning("%s: %s", self._name, record["reason"])

    def _on_members(self, record: dict[str, Any]) -> None:
        match record["what"]:
            case "decided" if " is out at step " not in record["reason"]:
                self._log.info("members: %s", record["reason"])
            case "is out" if record["reason"] != FINISHED:
                self._log.warning(
                    "%s is out at step %s: %s", record["slice"], record["step"], record["reason"]
                )


def _name_this_task_run(name: str) -> None:
    if (context := TaskRunContext.get()) is not None:
        context.task_run.name = name
