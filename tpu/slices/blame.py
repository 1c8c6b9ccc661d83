"""Whether a program or the machine under it is to blame for failures, by where else the program got further. Pure.

The same steps give the same bits, so a step that was done on one slice does not fail on another by the program's own
fault. And a program that dies as early on every slice is at fault, whatever it did before. So it is looked at all
attempts since the run last got further than ever before: if all failures among them are on one slice, and some other
slice has gone beyond them, the slice is to blame, whatever the exit codes say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpu.slices.verdict import VerdictKind


@dataclass(frozen=True)
class Tried:
    """An attempt that has ended: where, how, which step it had done at last (0: none), and at which it began.

    `reached` is None if nobody knows: of a command that does not say, or an attempt that never started. `mistake`
    says that it ended with an error that no machine can bring about, such as a wrong name in the program.
    """

    slice: str
    kind: VerdictKind
    reached: int | None
    resumed: int = 0
    mistake: bool = False

    @property
    def failed_at_its_start(self) -> bool:
        """True if it failed before it had done a step, and might live elsewhere."""
        failed = self.kind is VerdictKind.USER_FAILURE and not self.mistake
        return failed and self.reached is not None and self.reached <= self.resumed


@dataclass(frozen=True)
class Suspicion:
    """Why a run is not to use a slice again. `proven`: nobody should; else it is only to be tried elsewhere."""

    why: str
    proven: bool


def as_charged(attempts: Sequence[Tried]) -> list[VerdictKind]:
    """Verdicts as budgets count them: a user failure for which a slice is to blame counts as infrastructure."""
    bad = _by_the_slice(attempts)
    return [VerdictKind.INFRASTRUCTURE if i in bad else one.kind for i, one in enumerate(attempts)]


def blamed(attempts: Sequence[Tried]) -> list[str]:
    """Slices that are to blame for failures; of some this is only found out when the run lives elsewhere."""
    return list(dict.fromkeys(attempts[i].slice for i in sorted(_by_the_slice(attempts))))


def _by_the_slice(attempts: Sequence[Tried]) -> set[int]:
    """Which failures a slice is to blame for."""
    bad: set[int] = set()
    for streak in _streaks(attempts):
        failed = [i for i in streak if attempts[i].kind is VerdictKind.USER_FAILURE]
        slices = {attempts[i].slice for i in failed}
        if len(slices) != 1 or not _got_further(attempts, failed, slices.pop()):
            continue
        bad.update(failed)
    return bad


def suspect(attempts: Sequence[Tried], allowed: int | None) -> Suspicion | None:
    """Why the slice of the newest attempt is not to be used again; None if nothing speaks against it.

    `allowed` is how many user failures the run may have. If all of them are spent on one slice without a single
    step, the last try is made on another one: it tells whose fault it is.
    """
    if not attempts or attempts[-1].kind is not VerdictKind.USER_FAILURE:
        return None
    newest, charged = attempts[-1], as_charged(attempts)
    if charged[-1] is VerdictKind.INFRASTRUCTURE:
        return Suspicion(f"the program fails on {newest.slice}, and got further on another slice", True)
    failed = [one for one, kind in zip(attempts, charged, strict=True) if kind is VerdictKind.USER_FAILURE]
    if len(failed) < 2 or len(failed) != allowed:
        return None
    if not all(one.failed_at_its_start and one.slice == newest.slice for one in failed):
        return None
    why = f"the program failed {len(failed)} times at its start on {newest.slice}; the last try is made elsewhere"
    return Suspicion(why, proven=False)


def _streaks(attempts: Sequence[Tried]) -> list[list[int]]:
    """Attempts that did not get further than those before, in groups between those that did.

    An attempt that got further than ever and failed there begins a group, if the next one fails on the same slice:
    once is no pattern.
    """
    streaks: list[list[int]] = [[]]
    furthest = 0
    for i, attempt in enumerate(attempts):
        if (attempt.reached or 0) <= furthest:
            streaks[-1].append(i)
            continue
        furthest = attempt.reached or 0
        following = attempts[i + 1] if i + 1 < len(attempts) else None
        again = following is not None and following.kind is VerdictKind.USER_FAILURE
        begins = again and following is not None and following.slice == attempt.slice
        streaks.append([i] if begins and attempt.kind is VerdictKind.USER_FAILURE else [])
    return streaks


def _got_further(attempts: Sequence[Tried], failed: Sequence[int], slice: str) -> bool:
    """Whether another slice has gone beyond every one of these failures, and this one never did after them."""
    deaths = [attempts[i].reached for i in failed]
    if not deaths or any(step is None for step in deaths):
        return False
    furthest = max(step for step in deaths if step is not None)
    beyond = [(i, one.slice) for i, one in enumerate(attempts) if (one.reached or 0) > furthest]
    # If it passed on the same slice later, it was chance, and chance is the program's.
    passed_later = any(other == slice and i > failed[0] for i, other in beyond)
    return not passed_later and any(other != slice for _, other in beyond)
