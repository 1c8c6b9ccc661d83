"""Why an attempt ended: one verdict a gang, by the first cause, over the evidence of every host. Pure.

When one host goes, the others fail by it, and their exit codes and messages accuse the program. So the
evidence is weighed in the order in which causes can bring each other about: what a person wanted, what the
cloud did, what happened to chips and hosts, and only then the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from signal import SIGABRT, SIGBUS, SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals

from tpu.slices.condition import Condition, LifeView
from tpu.slices.log_clues import Clue, first_clue

# Exit code of a program that stopped itself after a preemption notice: EX_TEMPFAIL.
EXIT_PREEMPTED = 75
# Exit code of a program whose attempt may not write any more: the fence has moved on without it.
EXIT_FENCED_OUT = 76


class VerdictKind(Enum):
    """The five ways in which an attempt ends."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    INFRASTRUCTURE = "infrastructure"
    USER_FAILURE = "user failure"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class HostEvidence:
    """What is known of one host when the gang has ended.

    `exit_code` and `signal` are those of the training process, both None if it has not exited or nobody
    knows. `ended_by_us` is True if it exited after we ended the gang: that exit says nothing. `noticed`
    is True if its metadata server said that it is preempted. `lost` is why it cannot be reached or its
    supervisor is gone. `at_s` orders exits by the observer's own clock, since hosts' clocks differ.
    """

    host: str
    exit_code: int | None = None
    signal: int | None = None
    ended_by_us: bool = False
    noticed: bool = False
    lost: str | None = None
    at_s: float | None = None
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """All that is known when a gang has ended.

    `condition` is the cloud's word, asked after the end; None if nobody asked. `stop_wanted` is who or what asked for
    the stop, `life_over` which limit of the slice's life made us end the gang before it was reached, `evicted` to whom
    the gang had to leave its slice. `stalled` says
    which progress was missed, `diverged` where the loss stopped being a number. `finished` is True if the last step
    is known to be committed; None for a program that commits nothing, whose exit code 0 is its end.
    """

    hosts: tuple[HostEvidence, ...]
    condition: LifeView | None = None
    stop_wanted: str | None = None
    life_over: str | None = None
    evicted: str | None = None
    stalled: str | None = None
    diverged: str | None = None
    finished: bool | None = None

    @property
    def cloud(self) -> LifeView:
        """The cloud's word, UNKNOWN if nobody asked."""
        return self.condition or LifeView(Condition.UNKNOWN, "the cloud was not asked")


@dataclass(frozen=True)
class Verdict:
    """The kind, and the sentence that says why.

    `evidence` is what it was made from, a line a source. `host` is where it began, if it was a host.
    `final` is True if another attempt would end the same way whatever the budget allows. `slice_usable` is
    False if the slice must be replaced before another attempt; `slice_recovers` is True if it comes back by itself
    instead, and is worth waiting for.
    """

    kind: VerdictKind
    reason: str
    evidence: tuple[str, ...] = ()
    host: str | None = None
    final: bool = False
    slice_usable: bool = False
    slice_recovers: bool = False


def give_verdict(evidence: Evidence) -> Verdict:
    """The verdict on a gang that has ended."""
    rules = (
        _finished,
        _cancelled,
        _evicted,
        _preempted,
        _life_over,
        _slice_lost,
        _diverged,
        _chips_at_fault,
        _stalled,
        _host_lost,
        _killed,
    )
    for rule in rules:
        if (verdict := rule(evidence)) is not None:
            break
    else:
        verdict = _program_failed(evidence)
    return dataclasses.replace(verdict, evidence=_lines(evidence))


def needs_the_cloud(evidence: Evidence) -> bool:
    """True if the cloud's word could change the verdict, but is not known: ask again before judging."""
    unknown = evidence.cloud.condition is Condition.UNKNOWN
    return unknown and give_verdict(evidence).kind is VerdictKind.INFRASTRUCTURE


def _lines(evidence: Evidence) -> tuple[str, ...]:
    lines = [f"cloud: {evidence.cloud.condition.value}: {evidence.cloud.reason}"]
    for about, told in (
        ("stop", evidence.stop_wanted),
        ("life of the slice", evidence.life_over),
        ("progress", evidence.stalled),
        ("loss", evidence.diverged),
    ):
        if told is not None:
            lines.append(f"{about}: {told}")
    return (*lines, *(f"{host.host}: {_state_of(host)}" for host in evidence.hosts))


def _state_of(host: HostEvidence) -> str:
    told: list[str] = []
    if host.noticed:
        told.append("preemption notice")
    if host.lost is not None:
        told.append(f"lost ({host.lost})")
    if host.signal is not None or host.exit_code is not None:
        told.append("exit code 0" if host.exit_code == 0 else _said(host))
        if host.ended_by_us:
            told.append("ended by us")
    return ", ".join(told) or "running"


def _finished(evidence: Evidence) -> Verdict | None:
    usable = not evidence.cloud.lost
    if evidence.finished:
        return Verdict(VerdictKind.FINISHED, "the last step is committed", slice_usable=usable)
    # A program may exit with 0 because it was told to stop: by a person, by us, or by the preemption notice.
    told = evidence.stop_wanted or evidence.life_over or any(host.noticed for host in evidence.hosts)
    if evidence.finished is None and _all_succeeded(evidence) and not told:
        return Verdict(VerdictKind.FINISHED, "every host's program exited with 0", slice_usable=usable)
    return None


def _all_succeeded(evidence: Evidence) -> bool:
    return bool(evidence.hosts) and all(
        host.exit_code == 0 and not host.lost and not host.ended_by_us for host in evidence.hosts
    )


def _cancelled(evidence: Evidence) -> Verdict | None:
    if evidence.stop_wanted is None:
        return None
    usable = evidence.cloud.usable and not any(host.lost or host.noticed for host in evidence.hosts)
    return Verdict(VerdictKind.CANCELLED, f"stopped: {evidence.stop_wanted}", slice_usable=usable)


def _evicted(evidence: Evidence) -> Verdict | None:
    if evidence.evicted is None:
        return None
    return Verdict(VerdictKind.PREEMPTED, evidence.evicted, slice_usable=not evidence.cloud.lost)


def _preempted(evidence: Evidence) -> Verdict | None:
    if evidence.cloud.lost and evidence.cloud.preempted:
        return Verdict(VerdictKind.PREEMPTED, f"the cloud took the slice: {evidence.cloud.reason}")
    noticed = [host for host in evidence.hosts if host.noticed]
    if noticed:
        first = _first(noticed)
        how = "stopped after" if first.exit_code == EXIT_PREEMPTED else "got"
        return Verdict(VerdictKind.PREEMPTED, f"{first.host} {how} the preemption notice", host=first.host)
    return None


def _life_over(evidence: Evidence) -> Verdict | None:
    if evidence.life_over is None:
        return None
    return Verdict(VerdictKind.PREEMPTED, f"saved before the slice's life is over: {evidence.life_over}")


def _slice_lost(evidence: Evidence) -> Verdict | None:
    reason = f"the slice failed: {evidence.cloud.reason}"
    if evidence.cloud.lost:
        return Verdict(VerdictKind.INFRASTRUCTURE, reason)
    if evidence.cloud.condition is Condition.RECOVERING:
        return Verdict(VerdictKind.INFRASTRUCTURE, reason, slice_recovers=True)
    return None


def _diverged(evidence: Evidence) -> Verdict | None:
    if evidence.diverged is None:
        return None
    # The same steps give the same bits, so the next attempt would diverge at the same step.
    reason = f"training diverged: {evidence.diverged}; the last good checkpoint is kept"
    usable = evidence.cloud.usable
    return Verdict(VerdictKind.USER_FAILURE, reason, final=True, slice_usable=usable)


_CHIPS = {
    Clue.CHIPS_BUSY: "its chips are held by a process that this attempt did not start",
    Clue.CHIPS_BROKEN: "its chips do not work",
}


def _chips_at_fault(evidence: Evidence) -> Verdict | None:
    for host in _failed(evidence):
        found = first_clue(host.last_lines)
        if found is not None and found.clue in _CHIPS:
            reason = f"{host.host}: {_CHIPS[found.clue]}: {found.line}"
            return Verdict(VerdictKind.INFRASTRUCTURE, reason, host=host.host)
    return None


def _stalled(evidence: Evidence) -> Verdict | None:
    if evidence.stalled is None:
        return None
    return Verdict(VerdictKind.INFRASTRUCTURE, f"no progress: {evidence.stalled}")


def _host_lost(evidence: Evidence) -> Verdict | None:
    lost = [host for host in evidence.hosts if host.lost is not None]
    if not lost:
        return None
    first = _first(lost)
    # A survivor's error seldom proves that it came before: a dead host is noticed seconds after its peers.
    return Verdict(VerdictKind.INFRASTRUCTURE, f"{first.host} was lost: {first.lost}", host=first.host)


# Signals that come from outside the program: the kernel's out-of-memory killer, a shutdown, a lost terminal,
# memory or a device that went away.
_FROM_OUTSIDE = frozenset({SIGKILL, SIGTERM, SIGHUP, SIGINT, SIGBUS})


def _killed(evidence: Evidence) -> Verdict | None:
    for host in _failed(evidence):
        number = _signal(host)
        if number is not None and number in _FROM_OUTSIDE:
            hint = " (out of memory?)" if number == SIGKILL else ""
            reason = f"{host.host}: the program was killed from outside by {_signal_name(number)}{hint}"
            usable = evidence.cloud.usable
            return Verdict(VerdictKind.INFRASTRUCTURE, reason, host=host.host, slice_usable=usable)
    return None


def _program_failed(evidence: Evidence) -> Verdict:
    failed = _failed(evidence)
    if _all_succeeded(evidence) and evidence.cloud.usable:
        reason = "every host's program exited with 0, but the last step was not committed"
        return Verdict(VerdictKind.USER_FAILURE, reason, slice_usable=True)
    if not failed:
        ended = any(host.ended_by_us for host in evidence.hosts)
        reason = (
            "the gang was ended by us, and who ended it died before it could write down why"
            if ended
            else "the gang ended, and no host says why"
        )
        return Verdict(VerdictKind.INFRASTRUCTURE, reason, slice_usable=ended and evidence.cloud.usable)
    own = [host for host in failed if not _fell_by_a_peer(host, evidence)]
    if not own:
        first = _first(failed)
        reason = f"all failed by each other, {first.host} first: {_said(first)}"
        return Verdict(VerdictKind.INFRASTRUCTURE, reason, host=first.host)
    first = _first(own)
    if first.exit_code == EXIT_PREEMPTED:
        reason = (
            f"{first.host} stopped itself (exit code {EXIT_PREEMPTED}) without a preemption that we know of"
        )
        return Verdict(VerdictKind.INFRASTRUCTURE, reason, host=first.host)
    if first.exit_code == EXIT_FENCED_OUT:
        reason = (
            f"{first.host} found its attempt closed and left (exit code {EXIT_FENCED_OUT}): the run's fence was "
            "moved on by somebody else, another driver or a person"
        )
        usable = evidence.cloud.usable
        return Verdict(VerdictKind.INFRASTRUCTURE, reason, host=first.host, slice_usable=usable)
    if not evidence.cloud.usable:
        # Nobody is blamed before the cloud has said that the slice is well.
        reason = (
            f"{first.host}: {_said(first)}; not charged to the program, since the slice is not known to be "
            f"well: {evidence.cloud.reason}"
        )
        return Verdict(VerdictKind.INFRASTRUCTURE, reason, host=first.host)
    return Verdict(
        VerdictKind.USER_FAILURE, f"{first.host}: {_said(first)}", host=first.host, slice_usable=True
    )


def _failed(evidence: Evidence) -> list[HostEvidence]:
    """Hosts whose program failed before we ended the gang, the earliest first."""
    failed = [
        host
        for host in evidence.hosts
        if not host.ended_by_us and (host.signal is not None or host.exit_code not in (None, 0))
    ]
    return sorted(failed, key=_when)


def _fell_by_a_peer(host: HostEvidence, evidence: Evidence) -> bool:
    if len(evidence.hosts) < 2:
        return False  # there was no peer: the same words are the program's own
    found = first_clue(host.last_lines)
    return found is not None and found.clue is Clue.PEER_DIED


def _said(host: HostEvidence) -> str:
    """How a failed host ended, in words."""
    number = _signal(host)
    if number is None:
        ended = f"exit code {host.exit_code}"
    else:
        ended = f"killed by {_signal_name(number)}"
        if number == SIGABRT:
            ended += " (it aborted itself)"
    found = first_clue(host.last_lines)
    if found is not None:
        return f"{ended}: {found.line}"
    last = next((line.strip() for line in reversed(host.last_lines) if line.strip()), None)
    return f"{ended}, last line: {last}" if last else f"{ended}, without a word"


def _signal(host: HostEvidence) -> int | None:
    """The signal that ended it; a shell in between reports it as 128 + signal."""
    if host.signal is not None:
        return host.signal
    if host.exit_code is not None and 128 < host.exit_code < 128 + 65:
        return host.exit_code - 128
    return None


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _when(host: HostEvidence) -> float:
    return host.at_s if host.at_s is not None else float("inf")


def _first(hosts: Sequence[HostEvidence]) -> HostEvidence:
    return min(hosts, key=_when)
