"""What happens in one history: a run and its troubles, a function of the seed alone. Pure."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tpu.runs.config import RunConfig, parse_run_config

Fault = Literal[
    "preempt",
    "odd-state",
    "kill-host",
    "hang-host",
    "drop-ssh",
    "kill-program",
    "kill-supervisor",
    "hang-program",
    "program-error",
    "diverge",
    "kill-flow",
    "rival-flow",
    "api-error",
    "lost-answer",
    "stockout",
]
# What a run's history says, or a commit that is new; the strike follows the next one of its kind.
Moment = Literal[
    "slice-intended", "slice-ready", "sync-started", "attempt-started", "attempt-ended", "commit"
]
Doom = Literal["program-error", "diverge", "infrastructure", "no-quota", "no-capacity"]

Place = tuple[str, str]
# Where there is room, and two places where no slice is ever had: by quota, by stockout.
PLACES: tuple[Place, ...] = (
    ("us-central2-b", "v4-8"),
    ("us-central2-b", "v4-16"),
    ("us-west4-a", "v5litepod-4"),
    ("us-east5-b", "v6e-4"),
)
WITHOUT_QUOTA: Place = ("us-central1-a", "v5litepod-4")
WITHOUT_CAPACITY: Place = ("us-east5-a", "v6e-4")

PREEMPTED_STATES = ("PREEMPTED", "TERMINATED", "STOPPED", "UNKNOWN", "gone")
ODD_STATES = ("REPAIRING", "RESTARTING", "REIMAGING", "HIDDEN", "STOPPING")
CREATE, DELETE = "CreateQueuedResource", "DeleteQueuedResource"
READS = ("GetQueuedResource", "GetNode", "GetGuestAttributes")
STOCKOUT_TEXT = "There is no more capacity in the zone; you can try in another zone"
# Answers that a cloud gives on a bad day, and of which none means that a request was wrong.
API_ERRORS = (
    ("UNAVAILABLE", "The service is currently unavailable."),
    ("INTERNAL", "an internal error has occurred"),
    ("DEADLINE_EXCEEDED", "Deadline exceeded"),
)
# Long enough for the start of a program on a busy machine, short enough to wait for.
PROGRESS_S = 30.0
# A run that finds no capacity gives up after this.
NO_CAPACITY_S = 8.0


@dataclass(frozen=True)
class Strike:
    """One trouble, `delay_s` after the next `moment`."""

    fault: Fault
    moment: Moment
    delay_s: float
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class History:
    """A run, what strikes it from outside, and whether it cannot end well."""

    seed: int
    run: RunConfig
    strikes: tuple[Strike, ...]
    doom: Doom | None = None

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(strike.fault for strike in self.strikes)


# How often each comes, in proportion.
_WEIGHTS: Mapping[Fault, int] = {
    "preempt": 9,
    "kill-flow": 7,
    "api-error": 4,
    "lost-answer": 3,
    "odd-state": 2,
    "kill-host": 3,
    "kill-program": 3,
    "kill-supervisor": 2,
    "drop-ssh": 3,
    "hang-host": 2,
    "stockout": 2,
    "rival-flow": 1,
}
_MOMENTS: Mapping[Fault, Sequence[Moment]] = {
    "preempt": ("slice-intended", "slice-ready", "sync-started", "attempt-started", "commit", "commit"),
    "odd-state": ("slice-ready", "attempt-started", "commit"),
    "kill-host": ("sync-started", "attempt-started", "commit", "commit"),
    "hang-host": ("attempt-started", "commit"),
    "drop-ssh": ("sync-started", "attempt-started", "commit"),
    "kill-program": ("attempt-started", "commit", "commit"),
    "kill-supervisor": ("attempt-started", "commit"),
    "kill-flow": (
        "slice-intended", "slice-ready", "sync-started", "attempt-started", "commit", "commit", "attempt-ended",
    ),
    "rival-flow": ("attempt-started", "commit"),
    "api-error": ("slice-intended", "slice-ready", "attempt-started", "commit", "attempt-ended"),
    "lost-answer": ("slice-intended", "attempt-started", "commit", "attempt-ended"),
    "stockout": ("attempt-started", "commit"),
}  # fmt: skip
MOST_STRIKES = 5


def make_history(seed: int) -> History:
    """The history of a seed: the same for ever, so that one that failed can be played again."""
    chance = random.Random(seed)
    doom: Doom | None = (
        chance.choice(("program-error", "diverge", "infrastructure", "no-quota", "no-capacity"))
        if chance.random() < 0.15
        else None
    )
    count = chance.randint(1, MOST_STRIKES)
    strikes = [_strike(chance, fault) for fault in _choose(chance, count)]
    if doom == "infrastructure":
        strikes = [s for s in strikes if s.fault in ("preempt", "kill-flow", "api-error")][:2]
        strikes.insert(chance.randrange(len(strikes) + 1), Strike("kill-host", "commit", 0.1, {"host": 0}))
    if doom in ("no-quota", "no-capacity"):
        strikes = [strike for strike in strikes if strike.fault == "kill-flow"][:1]
    return History(seed, _run(chance, seed, len(strikes), doom), tuple(strikes), doom)


def _choose(chance: random.Random, count: int) -> list[Fault]:
    faults = list(_WEIGHTS)
    return chance.choices(faults, [_WEIGHTS[fault] for fault in faults], k=count)


def _strike(chance: random.Random, fault: Fault) -> Strike:
    moment = chance.choice(_MOMENTS[fault])
    delay_s = round(chance.choice((0.0, chance.uniform(0, 0.5), chance.uniform(0, 2.0))), 3)
    return Strike(fault, moment, delay_s, _detail(chance, fault))


def _detail(chance: random.Random, fault: Fault) -> dict[str, Any]:
    match fault:
        case "preempt":
            notice = chance.random() < 0.35
            linger_s = chance.choice((0.0, 0.0, 2.0)) if not notice else 0.0
            return {"state": chance.choice(PREEMPTED_STATES), "notice": notice, "linger_s": linger_s}
        case "odd-state":
            return {"state": chance.choice(ODD_STATES)}
        case "kill-host" | "hang-host" | "drop-ssh" | "kill-program" | "kill-supervisor":
            return {"host": chance.randrange(4)}  # of as many as there are
        case "kill-flow":
            return {"pause_s": round(chance.uniform(0, 2.0), 3)}
        case "stockout":
            return {"seconds": round(chance.uniform(0.5, 4.0), 3)}
        case "api-error":
            code, message = chance.choice(API_ERRORS)
            methods = (CREATE, DELETE, *READS, "*")
            if chance.random() < 0.25:
                return {"method": CREATE, "code": "RESOURCE_EXHAUSTED", "message": STOCKOUT_TEXT, "times": 1}
            return {"method": chance.choice(methods), "code": code, "message": message,
                    "times": chance.randint(1, 4)}  # fmt: skip
        case "lost-answer":
            code, message = chance.choice(API_ERRORS)
            return {"method": chance.choice((CREATE, DELETE)), "code": code, "message": message, "times": 1}
        case _:
            return {}


def _run(chance: random.Random, seed: int, strikes: int, doom: Doom | None) -> RunConfig:
    zone, kind = chance.choices(PLACES, (5, 3, 2, 2))[0]
    budget: dict[str, int] = {}
    if doom == "no-quota":
        zone, kind = WITHOUT_QUOTA
    if doom == "no-capacity":
        zone, kind = WITHOUT_CAPACITY
    if doom == "infrastructure":
        budget = {"infrastructure": 0}
    # The more is to strike it, the longer it has to last.
    steps, every = chance.randint(40, 90) + 10 * strikes, chance.randint(8, 30)
    variables = {"NUMPY_STEP_SECONDS": str(round(chance.uniform(0.03, 0.1), 3))}
    variables |= _program_trouble(chance, steps, doom)
    if doom == "program-error":
        budget = {"user_failure": chance.randint(0, 1)}
    return parse_run_config(
        {
            "name": f"chaos-{seed:04}",  # none is part of another
            "command": [sys.executable, "-m", "tests.trainers.numpy_trainer"],
            "contract": True,
            "seed": seed,
            "steps": steps,
            "checkpoints": {"every": every},
            "variables": variables,
            "evaluate": "never",
            "slice": {
                "zone": zone,
                "accelerator_type": kind,
                "ready_minutes": (NO_CAPACITY_S if doom == "no-capacity" else 600) / 60,
            },
            "budget": budget,
            "progress_minutes": PROGRESS_S / 60,
            "grace_seconds": 10,
        }
    )


def _program_trouble(chance: random.Random, steps: int, doom: Doom | None) -> dict[str, str]:
    """What the program does to itself: in every attempt if it is the run's doom, else now and then in the first."""
    step = chance.randrange(2, steps)
    if doom == "program-error":
        return {
            "NUMPY_FAIL": chance.choice((f"exception@{step}", f"exit:{chance.choice((1, 3, 134))}@{step}"))
        }
    if doom == "diverge":
        return {"NUMPY_FAIL": f"{chance.choice(('nan', 'nanstate'))}@{step}"}
    if chance.random() < 0.15 and doom is None:
        return {"NUMPY_FAIL": chance.choice((f"exception@{step}", f"hang@{step}")), "NUMPY_FAIL_ATTEMPT": "1"}
    return {}
