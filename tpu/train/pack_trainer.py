"""The built-in JAX trainer for a pack: `python -m tpu.train.pack_trainer`, several runs in one process on one chip.

Each run keeps its own segment contract: its attempt, checkpoints and metrics. The process is the gang of the pack,
which has none of these: when it is started again, each lane resumes from where its run is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tpu.runtime.events import EventLog
from tpu.runtime.notice import OneProcess
from tpu.runtime.plan import Plan
from tpu.runtime.segment import EXIT_NOTICED, Phase
from tpu.train.compile_cache import (
    FETCH_DEADLINE_S,
    PUBLISH_DEADLINE_S,
    Background,
    CompileCache,
    cache_key,
    open_cache,
    use_cache,
)
from tpu.train.fingerprint import compile_facts, training_facts
from tpu.train.pack_lane import Lane
from tpu.train.packs import Member, PackError, in_common, members_of, most_tasks

if TYPE_CHECKING:
    from tpu.train.pack_step import PackData
    from tpu.train.step import CallResult, State


def main() -> None:
    """Train all members to their last steps, or until a preemption notice.

    Exits with 0 if no run is to go on, whatever has become of each, and with 75 if some are. Raises PackError and
    ValidationError for members that cannot be, DataChangedError, and what befalls all lanes at once.
    """
    plan = Plan.from_environment()
    if plan.num_processes > 1:
        raise PackError(f"a pack trains in one process, found {plan.num_processes}")
    with Pack(plan, members_of(plan.config())) as pack:
        pack.train()
    if any(lane.end == "left" for lane in pack.lanes):
        raise SystemExit(EXIT_NOTICED)


class Pack:
    """The lanes of one attempt, from its start to its end; a context manager."""

    def __init__(self, plan: Plan, members: list[Member]) -> None:
        self._plan = plan
        self._members = members
        self._events = EventLog(plan.events_path)
        self._rule = OneProcess()
        self._leaving = False
        self._committed = -1
        self._now: Phase | None = None
        self._phase("start")
        self._of_lane = {
            number: Lane(member, plan.events_path, self._facts_of(number), lambda _: self._leaving)
            for number, member in enumerate(members)
            if member.attempt is not None
        }

    @property
    def lanes(self) -> list[Lane]:
        return list(self._of_lane.values())

    @property
    def _live(self) -> dict[int, Lane]:
        return {number: lane for number, lane in self._of_lane.items() if lane.end is None}

    def __enter__(self) -> Pack:
        self._rule.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._live.values():
            lane.leave(error, "left")  # what befalls all of them is no fault of a run
        self._phase("other")
        self._rule.uninstall()
        self._events.close()

    def train(self) -> None:
        """Return when no lane trains any more."""
        cache = self._open_cache()
        fetching = Background("fetching compiled programs", cache.fetch)
        # Here and not above: these import JAX, and the checkpoints are fetched beside that.
        from tpu.train import pack_step
        from tpu.train.mesh import place, replicated
        from tpu.train.step import initial_state
        from tpu.train.workloads import Configuration, make_workload

        mesh = pack_step.lane_mesh()
        # Lanes at the end stay empty where the devices cannot share the members evenly.
        members = self._members + [self._members[-1]] * (-len(self._members) % mesh.size)
        trainings = [member.training for member in members]
        workloads = [make_workload(Configuration(one.training, one.data_sha256)) for one in members]
        states = [initial_state(workload) for workload in workloads]
        numbers, data = pack_step.numbers_of(trainings), pack_step.data_of(workloads)
        self._phase("compile")
        for lane in self.lanes:
            lane.phase("compile")
        fetching.wait(FETCH_DEADLINE_S)
        use_cache(cache)
        whole = pack_step.stacked(states)
        program = pack_step.lower_pack(trainings[0], workloads[0], mesh, whole, data, numbers).compile()
        publishing = Background("keeping compiled programs", cache.publish)

        self._phase("restore")
        for number, lane in self._of_lane.items():
            states[number] = lane.restore(states[number])
        by_lane = pack_step.lane_sharding(mesh)
        _say(f"{len(self._live)} of {len(members)} lanes train, on {mesh.size} device(s)")
        self._follow(
            program,
            place(pack_step.stacked(states), by_lane),
            pack_step.PackData(place(data.shared, replicated(mesh)), place(data.own, by_lane)),
            place(numbers, by_lane),
            len(members),
        )
        publishing.wait(PUBLISH_DEADLINE_S)
        cache.close()

    def _follow(self, program: Any, state: State, data: PackData, numbers: Any, width: int) -> None:
        from tpu.train.pack_step import call_arguments

        steps_per_call = self._members[0].training.steps_per_call
        before: CallResult | None = None
        while True:
            self._leaving = self._rule.stops(0, 0)
            for lane in self._live.values():
                lane.next_call(steps_per_call)
            if not (live := self._live):
                return
            self._phase("step")
            first, count = [0] * width, [0] * width
            for number, lane in live.items():
                first[number], count[number] = lane.step, lane.count
            state, result = program(state, data, numbers, *call_arguments(first, count))
            self._log(result)
            if before is not None:
                # At most one call ahead of the devices: a notice is then seen within a call's time.
                before.loss.block_until_ready()
            before = result
            self._leaving = self._rule.stops(0, 0)
            self._save(state)

    def _log(self, result: CallResult) -> None:
        """Log the log steps of each lane's call; waits for the devices only if there is one."""
        import numpy as np

        from tpu.train.step import logged_steps

        due = {
            number: steps
            for number, lane in self._live.items()
            if (steps := logged_steps(lane.member.training, lane.step, lane.count, lane.member.last_step))
        }
        if not due:
            return
        losses, norms = np.asarray(result.loss), np.asarray(result.gradient_norm)
        for number, steps in due.items():
            lane = self._of_lane[number]
            for s in steps:
                at = s - lane.step - 1, number
                lane.log(s, loss=losses[at], gradient_norm=norms[at])
        if live := self._live.values():
            self._events.write("step", step=min(lane.step + lane.count for lane in live))

    def _save(self, state: State) -> None:
        """Begin all saves that are due before waiting for one of them: their runs' commits are made side by side."""
        from tpu.train.pack_step import lane_of, on_host

        live = self._live
        due = [number for number, lane in live.items() if lane.due(self._leaving)]
        host: State = {}
        if due:
            self._phase("save")
            host = on_host(state)
        for number in due:
            live[number].save(lane_of(host, number))
        for number, lane in live.items():
            if lane.end is None:
                lane.checkpoint(lane_of(host, number))
        committed = min((lane.committed for lane in live.values()), default=0)
        if committed > self._committed:
            self._committed = committed
            self._events.write("commit", step=committed)

    def _phase(self, name: Phase) -> None:
        if name != self._now:
            self._now = name
            self._events.write("phase", phase=name)

    def _facts_of(self, lane: int) -> Callable[[], Mapping[str, str]]:
        """What the bits of a lane depend on besides those of a training alone."""
        most = most_tasks(self._members)
        place = f"lane {lane} of {len(self._members)}{f', up to {most} tasks' if most else ''}"
        return lambda: {**training_facts(), "pack": place}

    def _open_cache(self) -> CompileCache:
        """The compile cache for packs of so many trainings that are alike but for numbers."""
        members, (bucket, _, run) = self._members, self._plan.run_dir.partition("/runs/")
        program = [in_common(members[0].training), len(members), most_tasks(members), dict(compile_facts(1))]
        return open_cache(self._plan.compile_cache_dir, cache_key(program), run.replace("/", "-"), bucket)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
