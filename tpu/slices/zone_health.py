"""How a zone has served us lately, and whether it is asked again now. Shared by all runs of the project. Pure.

A place is a zone with an accelerator type and a provisioning model. In a bad place the project as a whole asks
slower with each bad outcome, then pauses: one try at a time finds out whether it has become better. Quota that is
used up says nothing about a place; quota that the project has none of closes it until somebody opens it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from tpu.slices.candidate import Candidate

# Outcomes older than this count no more.
WINDOW_S = 3600.0
# A slice that dies so soon after it was ready was hardly had: the place churns.
EARLY_DEATH_S = 300.0
# Pauses between two tries in a bad place: they double with each bad outcome in a row, up to the longest.
FIRST_PAUSE_S, LONGEST_SLOW_S, LONGEST_PAUSE_S = 1.0, 32.0, 600.0
# From so many bad outcomes in a row on it is a halt, not slowness: 2 minutes at first.
HALT_FROM, FIRST_HALT_S = 7, 120.0
# While a try in a bad place has no answer yet, nobody else is let through for so long.
ANSWER_S = 60.0
# Of each place so many outcomes are kept: far more than decide anything.
KEPT = 64

Kind = Literal["stockout", "early death", "success"]
_PLURALS: Mapping[Kind, str] = {
    "stockout": "stockout(s)",
    "early death": "early death(s)",
    "success": "success(es) after them",
}
Place = tuple[str, str, str]


@dataclass(frozen=True)
class Outcome:
    """What became of a slice that was asked for at `asked`, at `at`, seconds since the epoch."""

    kind: Kind
    at: float
    asked: float


@dataclass(frozen=True)
class PlaceHealth:
    """What is known of one place.

    `tried` is when somebody was last let through while the place was bad. `no_quota` is the quota of which the
    project has none.
    """

    outcomes: tuple[Outcome, ...] = ()
    tried: float | None = None
    no_quota: str | None = None


@dataclass(frozen=True)
class Fine:
    """Ask at once."""


@dataclass(frozen=True)
class Slowed:
    """Ask again in `wait_s` seconds."""

    wait_s: float
    why: str


@dataclass(frozen=True)
class Paused:
    """Nobody asks before `until`, seconds since the epoch."""

    until: float
    why: str


@dataclass(frozen=True)
class Closed:
    """Never ask: the project has no quota; `quota` is its name."""

    quota: str


Permission = Fine | Slowed | Paused | Closed


def place_of(candidate: Candidate) -> Place:
    return (candidate.zone, candidate.accelerator_type, candidate.provisioning)


def noted(health: PlaceHealth, kind: Kind, asked: float, now: float) -> PlaceHealth:
    """The health after an outcome of what was asked for at `asked`. An early death takes back its own success.

    A bad answer to what was asked before the last bad answer adds nothing: a hundred slices that were asked for
    at once and refused at once are one stockout.
    """
    outcomes = [one for one in health.outcomes if now - one.at < WINDOW_S]
    if kind == "early death":
        outcomes = _without_success(outcomes, asked)
    last = _last_bad(outcomes)
    # Where nothing was bad a success tells nothing: most are not worth a write.
    tells = bad_in_a_row(outcomes) > 0 if kind == "success" else last is None or asked >= last.at
    if tells:
        outcomes.append(Outcome(kind, now, asked))
    tried = None if kind == "success" else health.tried
    return replace(health, outcomes=tuple(outcomes[-KEPT:]), tried=tried)


def permission(health: PlaceHealth, now: float) -> Permission:
    """Whether the place may be asked now."""
    if health.no_quota is not None:
        return Closed(health.no_quota)
    outcomes = [one for one in health.outcomes if now - one.at < WINDOW_S]
    bad = bad_in_a_row(outcomes)
    last = _last_bad(outcomes)
    if bad == 0 or last is None:
        return Fine()
    pause = min(pause_s(bad), _cycle_s(last))
    until = last.at + pause
    if health.tried is not None and health.tried > last.at:
        # Somebody's try is under way. Where there was no capacity its answer is waited for, if that is not for long.
        pause = max(pause, ANSWER_S) if last.kind == "stockout" else pause
        until = health.tried + pause
    if now >= until:
        return Fine()
    # A clock that was ahead of ours must not hold us for longer than a pause lasts.
    until = min(until, now + pause)
    why = f"{bad} bad outcome(s) in a row, lastly {_named(last)}"
    return Paused(until, why) if bad >= HALT_FROM else Slowed(until - now, why)


def let_through(health: PlaceHealth, now: float) -> tuple[PlaceHealth, Permission]:
    """The permission of one who would ask now. Of those who ask at once in a bad place, one is let through."""
    found = permission(health, now)
    if isinstance(found, Fine) and bad_in_a_row(health.outcomes) > 0:
        return replace(health, tried=now), found
    return health, found


def closed(health: PlaceHealth, quota: str) -> PlaceHealth:
    """The health of a place for which the project has none of this quota."""
    return replace(health, no_quota=quota)


def pause_s(bad: int) -> float:
    """Seconds between two tries after so many bad outcomes in a row."""
    if bad >= HALT_FROM:
        return min(LONGEST_PAUSE_S, FIRST_HALT_S * 2.0 ** min(bad - HALT_FROM, 32))
    return min(LONGEST_SLOW_S, FIRST_PAUSE_S * 2.0 ** (bad - 1))


def bad_in_a_row(outcomes: tuple[Outcome, ...] | list[Outcome]) -> int:
    """Bad outcomes since the last success that lasted."""
    count = 0
    for one in reversed(outcomes):
        if one.kind == "success":
            break
        count += 1
    return count


def _cycle_s(last: Outcome) -> float:
    """The longest pause that the last bad outcome is worth.

    Refusals cost nothing but calls, so they say nothing. But a slice that lived for a little had been waited for: to
    pause longer than twice its whole time, from being asked for to its death, loses more than another try.
    """
    return 2.0 * max(0.0, last.at - last.asked) if last.kind == "early death" else LONGEST_PAUSE_S


def summary(health: PlaceHealth, now: float) -> str:
    """What is remembered of the window, in a few words."""
    kinds = [one.kind for one in health.outcomes if now - one.at < WINDOW_S]
    counted = [f"{kinds.count(kind)} {name}" for kind, name in _PLURALS.items() if kind in kinds]
    return f"in the last {WINDOW_S / 60:.0f} minutes: {', '.join(counted) or 'nothing bad'}"


def _last_bad(outcomes: list[Outcome]) -> Outcome | None:
    return next((one for one in reversed(outcomes) if one.kind != "success"), None)


def _without_success(outcomes: list[Outcome], asked: float) -> list[Outcome]:
    """Take back the success of what was asked for then, by whoever noted the moment."""
    near = [i for i, one in enumerate(outcomes) if one.kind == "success" and abs(one.asked - asked) <= 60.0]
    if not near:
        return outcomes
    taken = min(near, key=lambda i: abs(outcomes[i].asked - asked))
    return outcomes[:taken] + outcomes[taken + 1 :]


def _named(last: Outcome) -> str:
    if last.kind == "stockout":
        return "no capacity"
    return f"a slice lost {last.at - last.asked:.0f} s after it was asked for"


@dataclass(frozen=True)
class ZoneHealth:
    """All places that something is known of."""

    places: Mapping[Place, PlaceHealth] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> PlaceHealth:
        return self.places.get(place_of(candidate), PlaceHealth())

    def having(self, candidate: Candidate, health: PlaceHealth) -> ZoneHealth:
        """This, with another health of one place. A place of which nothing is known is not written down."""
        if health == self.of(candidate):
            return self
        return ZoneHealth({**self.places, place_of(candidate): health})

    def opened(self, zone: str) -> ZoneHealth:
        """This, with nothing known of a zone: it is asked as if for the first time."""
        return ZoneHealth({place: health for place, health in self.places.items() if place[0] != zone})


def to_json(health: ZoneHealth) -> dict[str, Any]:
    return {
        "/".join(place): {
            "outcomes": [[one.kind, one.at, one.asked] for one in known.outcomes],
            "tried": known.tried,
            "no_quota": known.no_quota,
        }
        for place, known in health.places.items()
    }


def from_json(values: Any) -> ZoneHealth:
    """Raises ValueError, TypeError, KeyError or AttributeError if `values` is no zone health."""
    return ZoneHealth({_place(name): _place_health(known) for name, known in values.items()})


def _place(name: str) -> Place:
    zone, kind, provisioning = name.split("/")
    return (zone, kind, provisioning)


def _place_health(values: dict[str, Any]) -> PlaceHealth:
    outcomes = tuple(Outcome(_kind(kind), float(at), float(asked)) for kind, at, asked in values["outcomes"])
    tried = values["tried"]
    return PlaceHealth(outcomes, None if tried is None else float(tried), values["no_quota"])


def _kind(text: str) -> Kind:
    for kind in get_args(Kind):
        if text == kind:
            return kind
    raise ValueError(f"an outcome is one of {', '.join(get_args(Kind))}, found {text!r}")
