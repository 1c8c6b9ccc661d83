"""The judge of histories is strict: each way to end wrong is found, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deployments.bench.chaos.judge import Injected, Outcome, judge
from deployments.bench.chaos.plan import History, make_history
from tests.slices.test_life import ACTIVE, a_node
from tpu.checkpoint.fence import Commit
from tpu.cloud import NodeState, QueuedResourceState
from tpu.hosts.errors import HostUnreachable
from tpu.runs.event_log import RunEvent
from tpu.slices.condition import Look, view

RUN = make_history(3).run.model_copy(update={"name": "chaos-0", "steps": 20, "variables": {}})
CALM = History(0, RUN, ())


def event(time: float, kind: str, **detail: Any) -> RunEvent:
    return RunEvent(time, kind, detail)


def ended(time: float, attempt: int, slice_name: str, verdict: str, reason: str) -> RunEvent:
    return event(time, "attempt-ended", attempt=attempt, slice=slice_name, verdict=verdict, reason=reason)


def of_slice(name: str, intended: float, deleted: float) -> tuple[RunEvent, RunEvent]:
    return event(intended, "slice-intended", slice=name), event(deleted, "slice-deleted", slice=name)


LOST = "the cloud took the slice: the node is PREEMPTED"
STARTED_1 = event(2, "attempt-started", attempt=1, slice="one", resume=None)
STARTED_2 = event(6, "attempt-started", attempt=2, slice="two", resume=10)
PREEMPTED_ONCE = Outcome(
    injected=[Injected(4, "preempt", "one")],
    exit_code=0,
    last_words="done",
    events=[
        *of_slice("one", 1, 5), STARTED_1, ended(4.5, 1, "one", "preempted", LOST),
        *of_slice("two", 5.5, 9), STARTED_2, ended(8, 2, "two", "finished", "the last step is committed"),
    ],
    commits=[Commit(10, 1, ""), Commit(20, 2, "")],
    wrong_bits=[],
    left=[],
)  # fmt: skip


def but(**changes: Any) -> Outcome:
    return replace(PREEMPTED_ONCE, **changes)


def without(wanted: RunEvent, *others: RunEvent) -> list[RunEvent]:
    return [other for other in PREEMPTED_ONCE.events if other is not wanted] + list(others)


def test_a_run_that_was_preempted_and_finished_holds():
    assert judge(CALM, PREEMPTED_ONCE) == []


def test_whatever_the_cloud_says_of_a_preempted_slice_is_understood():
    queues = [None, *(replace(ACTIVE, state=state) for state in QueuedResourceState)]
    nodes = [None, *(a_node(state) for state in NodeState)]
    seen = [view(Look(queued, node, spot=True, was_ready=True)) for queued in queues for node in nodes]
    said = {one.reason for one in seen if one.lost and one.preempted}
    assert {"the node is PREEMPTED", "the queued resource is SUSPENDED"} < said
    for reason in said:
        end = ended(4.5, 1, "one", "preempted", reason)
        events = [end if one.detail.get("verdict") == "preempted" else one for one in PREEMPTED_ONCE.events]
        assert judge(CALM, but(events=events)) == [], reason


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (but(exit_code=None), "did not end in time"),
        (but(commits=[Commit(10, 1, "")]), "ended well at step 10 of 20"),
        (but(wrong_bits=["w0 at step 20"]), "wrong bits: w0"),
        (but(left=["node x (READY)"]), "left behind: node x"),
        # Nobody struck that slice, or something else did, or after it had ended.
        (but(injected=[]), "what was done to it: nothing"),
        (but(injected=[Injected(4, "preempt", "two")]), "what was done to it: nothing"),
        (but(injected=[Injected(4.6, "preempt", "one")]), "what was done to it: nothing"),
        (but(injected=[Injected(4, "kill-host", "one")]), "what was done to it: kill-host"),
        (but(injected=[Injected(4, "api-error")]), "what was done to it: api-error"),
        # What happens twice, or is never closed.
        (but(events=[*PREEMPTED_ONCE.events, STARTED_2]), "attempt-started 2 times of 2"),
        (but(events=[*PREEMPTED_ONCE.events, event(7, "slice-intended", slice="two")]), "slice-intended 2 times"),
        (but(events=[*PREEMPTED_ONCE.events, event(7, "slice-intended", slice="3")]), "deletion of 3 is in no event"),
        (but(events=without(STARTED_2)), "attempts [1] started and [1, 2] ended"),
        (but(events=without(STARTED_2, event(6, "attempt-started", attempt=2, slice="two", resume=0))),
         "began at step 0, and step 10 was committed"),
        # It gave up though it could go on.
        (but(exit_code=1, last_words="finished"), "is not what it said"),
        (but(exit_code=1, last_words="the last step is committed"), "gave up after 1 times finished"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(outcome: Outcome, complaint: str):
    complaints = judge(CALM, outcome)
    assert any(complaint in one for one in complaints), complaints


def given_up(verdict: str, reason: str, fault: str | None) -> Outcome:
    return Outcome(
        injected=[Injected(3, fault, "one")] if fault else [],
        exit_code=1,
        last_words=f"AttemptEnded: {verdict}: {reason}",
        events=[*of_slice("one", 1, 9), STARTED_1, ended(4, 1, "one", verdict, reason)],
        commits=[],
        wrong_bits=[],
        left=[],
    )


def with_budget(**budget: int) -> History:
    return History(
        0, RUN.model_copy(update={"budget": RUN.budget.model_copy(update=budget)}), (), "infrastructure"
    )


def test_giving_up_is_honest_only_if_the_budget_is_spent_on_what_was_made():
    killed = given_up("infrastructure", "w0 was lost: refused", "kill-host")
    assert judge(with_budget(infrastructure=0), killed) == []
    assert judge(with_budget(infrastructure=1), killed) != []
    assert judge(with_budget(infrastructure=0), given_up("infrastructure", "w0 was lost", None)) != []


@pytest.mark.parametrize("reason", ["w0 was lost: refused", "w0: the connection broke while a command ran"])
def test_a_connection_that_broke_is_what_dropped_ssh_looks_like(reason: str):
    dropped = with_budget(infrastructure=0)
    assert judge(dropped, given_up("infrastructure", reason, "drop-ssh")) == []
    assert judge(dropped, given_up("infrastructure", reason, "stockout")) != []


def test_a_program_is_blamed_only_with_its_own_words():
    fails = RUN.model_copy(update={"variables": {"NUMPY_FAIL": "exception@5"},
                                   "budget": RUN.budget.model_copy(update={"user_failure": 0})})  # fmt: skip
    doomed = History(0, fails, (), "program-error")
    assert (
        judge(doomed, given_up("user failure", "w0: exit code 1: RuntimeError: failed on demand", None)) == []
    )
    assert judge(doomed, given_up("user failure", "w0: exit code 1: No module named 'tests'", None)) != []


def test_a_run_without_a_slice_names_what_it_lacks():
    doomed = History(0, RUN, (), "no-quota")
    nothing = Outcome(
        [], 1, "CloudError: Quota limit 'X' has been exceeded. Limit: 0 in region r", [], [], [], []
    )
    assert judge(doomed, nothing) == []
    assert judge(doomed, replace(nothing, last_words="RuntimeError")) != []


def test_a_number_may_be_missing_only_where_a_flow_was_killed():
    first = ended(4, 2, "one", "finished", "the last step is committed")
    outcome = but(
        events=[
            *of_slice("one", 1, 5),
            event(2, "attempt-started", attempt=2, slice="one", resume=None),
            first,
        ],
        commits=[Commit(20, 2, "")],
    )
    killed = replace(outcome, injected=[Injected(1.5, "kill-flow")])
    assert judge(CALM, killed) == []
    assert judge(CALM, outcome) == ["attempts are not numbered one by one: [2]"]


def test_a_host_that_hangs_before_anybody_reached_it_is_one_that_did_not_answer():
    reason = str(HostUnreachable({"one-w0": "SSH did not answer"}))
    assert judge(with_budget(infrastructure=0), given_up("infrastructure", reason, "hang-host")) == []
    assert judge(with_budget(infrastructure=0), given_up("infrastructure", reason, "kill-program")) != []
