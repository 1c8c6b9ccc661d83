"""Whether a history ended as it must: finished with the right bits, or with a verdict that names what was done. Pure.

Strict: a verdict holds only if a trouble that was really made, on that very slice or in that very attempt, may bring
it about, and if its reason tells of that kind of trouble. Nothing may be done twice and nothing may be left.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deployments.bench.chaos.plan import History
from tpu.checkpoint.fence import Commit
from tpu.runs.event_log import RunEvent, undeleted


@dataclass(frozen=True)
class Injected:
    """A trouble that was really made at `time`, on a slice or (None) on all that happens then."""

    time: float
    fault: str
    slice: str | None = None
    told: str = ""


@dataclass(frozen=True)
class Outcome:
    """What is left of a history when its last flow has ended.

    `exit_code` is None if it did not end in time. `wrong_bits` says where parameters or losses differ from those of a
    training that nobody disturbed, as far as this one came. `left` names what lives on.
    """

    injected: Sequence[Injected]
    exit_code: int | None
    last_words: str
    events: Sequence[RunEvent]
    commits: Sequence[Commit]
    wrong_bits: Sequence[str]
    left: Sequence[str]


PREEMPTED, INFRASTRUCTURE, USER, FINISHED = "preempted", "infrastructure", "user failure", "finished"
_LOST = (
    r"was lost|the slice failed|hosts? cannot be reached|SSH connection|unreachable|Connection refused"
    r"|the connection broke"
)
_TAKEN = (
    r"took the slice|preemption notice|preempted|lost while nobody watched|, before the gang had started"
    r"|the (node|queued resource) is |no longer knows the slice"  # what the cloud says, told as it is
)
# Which verdicts a trouble may bring about, and how their reasons tell of it.
_EXPLAINS: Mapping[str, Sequence[tuple[str, str]]] = {
    "preempt": ((PREEMPTED, _TAKEN),),
    "odd-state": ((PREEMPTED, _TAKEN), (INFRASTRUCTURE, _LOST)),
    "kill-host": ((INFRASTRUCTURE, _LOST),),
    "hang-host": ((INFRASTRUCTURE, _LOST + "|no progress|did not answer"),),
    "drop-ssh": ((INFRASTRUCTURE, _LOST),),
    "kill-program": ((INFRASTRUCTURE, "SIGKILL|failed by each other"),),
    "kill-supervisor": ((INFRASTRUCTURE, "supervisor|" + _LOST),),
    "hang-program": ((INFRASTRUCTURE, "no progress"),),
    "program-error": ((USER, "on demand"),),
    "diverge": ((USER, "training diverged"),),
    "kill-flow": (
        (
            INFRASTRUCTURE,
            "the flow died before its gang had started|the gang was ended by us, and who ended it died|"
            "supervisor died while no flow was watching",
        ),
    ),
}


def judge(history: History, outcome: Outcome) -> list[str]:
    """What is wrong with how a history ended; empty if it holds."""
    return [
        *_ending(history, outcome),
        *_verdicts(history, outcome),
        *done_twice(outcome.events, sum(one.fault == "kill-flow" for one in outcome.injected)),
        *_lost_work(outcome),
        *(f"wrong bits: {wrong}" for wrong in outcome.wrong_bits),
        *(f"left behind: {left}" for left in outcome.left),
    ]


def _ending(history: History, outcome: Outcome) -> Iterator[str]:
    newest = max((commit.step for commit in outcome.commits), default=0)
    if outcome.exit_code is None:
        yield "it did not end in time"
    elif outcome.exit_code == 0:
        if newest != history.run.steps:
            yield f"it ended well at step {newest} of {history.run.steps}"
    elif (wrong := _dishonest(history, outcome)) is not None:
        yield wrong


def _dishonest(history: History, outcome: Outcome) -> str | None:
    """Why a run may not have given up as it did; None if it told the truth."""
    wanted = {
        "no-quota": r"Limit: 0 in region",
        "no-capacity": r"NotReady|no more capacity|not ready within",
    }.get(history.doom or "")
    if wanted is not None:
        told = re.search(wanted, outcome.last_words)
        return None if told else f"it gave up without naming {history.doom}: {_tail(outcome.last_words)}"
    ends = _ends(outcome.events)
    if not ends:
        return f"it gave up before any attempt: {_tail(outcome.last_words)}"
    last = ends[-1].detail
    if last["reason"] not in outcome.last_words:
        return (
            f"its last verdict ({last['reason']}) is not what it said at its end: {_tail(outcome.last_words)}"
        )
    count = Counter(end.detail["verdict"] for end in ends)[last["verdict"]]
    budget = history.run.budget
    allowed = {USER: budget.user_failure, INFRASTRUCTURE: budget.infrastructure}.get(last["verdict"])
    if "training diverged" in last["reason"]:
        return None
    if allowed is None or count <= allowed:
        return f"it gave up after {count} times {last['verdict']}, of which it may have {allowed}"
    return None


def _verdicts(history: History, outcome: Outcome) -> Iterator[str]:
    for end in _ends(outcome.events):
        verdict, reason = end.detail["verdict"], end.detail["reason"]
        if verdict == FINISHED:
            continue
        causes = [
            *_made_on(end.detail["slice"], end.time, outcome.injected),
            *_by_itself(history, end.detail["attempt"]),
        ]
        pairs = [pair for cause in causes for pair in _EXPLAINS.get(cause, ())]
        if not any(verdict == kind and re.search(words, reason) for kind, words in pairs):
            made = ", ".join(dict.fromkeys(causes)) or "nothing"
            yield f"attempt {end.detail['attempt']}: {verdict}, {reason!r}; what was done to it: {made}"


def _made_on(slice_name: str, until: float, injected: Iterable[Injected]) -> list[str]:
    return [i.fault for i in injected if i.time <= until and i.slice in (None, slice_name)]


def _by_itself(history: History, attempt: int | None) -> list[str]:
    """What the program does of itself in an attempt."""
    variables = history.run.variables
    fault = variables.get("NUMPY_FAIL")
    if fault is None or attempt is None or variables.get("NUMPY_FAIL_ATTEMPT", str(attempt)) != str(attempt):
        return []
    kind = fault.partition("@")[0]
    return [{"nan": "diverge", "nanstate": "diverge", "hang": "hang-program"}.get(kind, "program-error")]


def done_twice(events: Sequence[RunEvent], deaths: int) -> Iterator[str]:
    """What a run tells more than once, or begins and never ends. `deaths`: how many flows of it were killed."""
    for kind, what in (
        ("slice-intended", "slice"),
        ("attempt-started", "attempt"),
        ("attempt-ended", "attempt"),
    ):
        seen = Counter(e.detail[what] for e in events if e.kind == kind and e.detail[what] is not None)
        yield from (f"{kind} {count} times of {name}" for name, count in seen.items() if count > 1)
    started = {e.detail["attempt"] for e in events if e.kind == "attempt-started"}
    ended = {e.detail["attempt"] for e in _ends(events)} - {None}
    if started != ended:
        yield f"attempts {sorted(started)} started and {sorted(ended)} ended"
    # Who dies right after it has taken a number never used it.
    if started and max(started) - len(started) > deaths:
        yield f"attempts are not numbered one by one: {sorted(started)}"
    finished = sum(end.detail["verdict"] == FINISHED for end in _ends(events))
    if finished > 1:
        yield f"it finished {finished} times"
    yield from (f"the deletion of {name} is in no event" for name in undeleted(events))


def _lost_work(outcome: Outcome) -> Iterator[str]:
    """An attempt that began before the newest commit of an earlier one."""
    for event in outcome.events:
        if event.kind == "attempt-started":
            number, began = event.detail["attempt"], event.detail["resume"] or 0
            before = max((c.step for c in outcome.commits if c.attempt < number), default=0)
            if began < before:
                yield f"attempt {number} began at step {began}, and step {before} was committed"


def _ends(events: Sequence[RunEvent]) -> list[RunEvent]:
    return [event for event in events if event.kind == "attempt-ended"]


def _tail(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-3:])[-600:]
