"""Which attempt may write, and which checkpoints count: pure decisions, then their thin way to the bucket.

A checkpoint is real when the fence names it with the checksum of its manifest, and not before. What a
closed attempt writes later is never named, so nobody reads it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tpu.checkpoint import objects
from tpu.checkpoint.paths import checked_run_dir, fence_url


class MalformedFence(ValueError):
    """fence.json cannot be read; the message shows where it is and what is wrong."""


class FencedOut(Exception):
    """This attempt may not write any more: another one has been opened, or it was closed. Leave quietly."""


class FenceContended(Exception):
    """Others changed fence.json each time we tried; the message says how often and for how long."""


@dataclass(frozen=True, order=True)
class Commit:
    """A checkpoint that counts: ordered by (step, attempt), never by time."""

    step: int
    attempt: int
    manifest_crc32c: str


@dataclass(frozen=True)
class Refused:
    """A change that the fence does not allow, with the reason as a sentence."""

    reason: str


@dataclass(frozen=True)
class Fence:
    """`attempt` may write while `open`. `commits` are sorted by (step, attempt). `closed` maps each closed
    attempt to its last accepted commit, or None if it never made one."""

    attempt: int = 0
    open: bool = False
    commits: tuple[Commit, ...] = ()
    closed: Mapping[int, Commit | None] = field(default_factory=dict)

    def newest(self) -> Commit | None:
        """The newest commit by (step, attempt), or None."""
        return self.commits[-1] if self.commits else None

    def last_of(self, attempt: int) -> Commit | None:
        """The last commit that `attempt` got in, whether it is open or closed."""
        if attempt in self.closed:
            return self.closed[attempt]
        return max((c for c in self.commits if c.attempt == attempt), default=None)


def open_attempt(fence: Fence, attempt: int) -> Fence | Refused:
    """Let `attempt` write. An older one that is still open is closed by the same change.

    Opening the attempt that is open already changes nothing, so that a controller that takes over can say it
    again.
    """
    if attempt == fence.attempt and fence.open:
        return fence
    if attempt <= fence.attempt:
        return Refused(
            f"attempt {attempt} cannot open: attempt {fence.attempt} has been there; use a higher one"
        )
    return dataclasses.replace(close_attempt(fence), attempt=attempt, open=True)


def close_attempt(fence: Fence) -> Fence:
    """Refuse all further commits of the open attempt; unchanged if none is open."""
    if not fence.open:
        return fence
    closed = {**fence.closed, fence.attempt: fence.last_of(fence.attempt)}
    return dataclasses.replace(fence, open=False, closed=closed)


def add_commit(fence: Fence, commit: Commit) -> Fence | Refused:
    """Make a checkpoint count. Saying it twice changes nothing: an answer can be lost on its way."""
    if commit in fence.commits:
        return fence
    if commit.attempt != fence.attempt or not fence.open:
        state = "open" if fence.open else "closed"
        return Refused(
            f"step {commit.step} of attempt {commit.attempt} cannot be committed: "
            f"attempt {fence.attempt} is the newest and it is {state}"
        )
    others = (c for c in fence.commits if (c.step, c.attempt) != (commit.step, commit.attempt))
    return dataclasses.replace(fence, commits=tuple(sorted((*others, commit))))


def add_commits(fence: Fence, commits: Iterable[Commit]) -> Fence | Refused:
    """Several commits in one change, all or none."""
    for commit in commits:
        changed = add_commit(fence, commit)
        if isinstance(changed, Refused):
            return changed
        fence = changed
    return fence


def drop_commits(fence: Fence, dropped: Iterable[Commit]) -> Fence:
    """Forget commits (whose bytes may then be deleted); what a closed attempt reached stays noted."""
    gone = set(dropped)
    return dataclasses.replace(fence, commits=tuple(c for c in fence.commits if c not in gone))


def to_json(fence: Fence) -> bytes:
    """The content of fence.json."""
    body = {
        "attempt": fence.attempt,
        "open": fence.open,
        "commits": [dataclasses.asdict(c) for c in fence.commits],
        "closed": {str(a): c and dataclasses.asdict(c) for a, c in sorted(fence.closed.items())},
    }
    return json.dumps(body, indent=1).encode()


def from_json(data: bytes) -> Fence:
    """The fence that `to_json` wrote.

    Raises:
        MalformedFence: it is not that.
    """
    try:
        body = json.loads(data)
        return Fence(
            attempt=int(body["attempt"]),
            open=bool(body["open"]),
            commits=tuple(sorted(Commit(**c) for c in body["commits"])),
            closed={int(a): Commit(**c) if c else None for a, c in body["closed"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedFence(f"fence.json cannot be understood ({error!r}): {data[:200]!r}") from error


def load_fence(run_dir: str) -> Fence:
    """The fence of a run; an empty one if the run has none yet.

    Raises:
        MalformedFence: fence.json is not one.
        StorageUnavailable: the bucket does not answer.
    """
    return _load(checked_run_dir(run_dir))[0]


def update_fence(
    run_dir: str,
    change: Callable[[Fence], Fence | Refused],
    deadline_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Fence:
    """Apply a pure change to the fence by compare-and-set, anew as often as others come first.

    Returns the fence as it now stands. Nothing is written when `change` changes nothing.

    Raises:
        FencedOut: `change` refused; the message is its reason.
        FenceContended: others won every time until `deadline_s` was over.
    """
    run_dir, began, tries = checked_run_dir(run_dir), clock(), 0
    while True:
        before, generation = _load(run_dir)
        after = change(before)
        if isinstance(after, Refused):
            raise FencedOut(f"{fence_url(run_dir)}: {after.reason}")
        if after == before:
            return after
        tries += 1
        try:
            if generation is None:
                objects.create_exclusive(fence_url(run_dir), to_json(after))
            else:
                objects.compare_and_set(fence_url(run_dir), to_json(after), generation)
            return after
        except (objects.StaleGeneration, objects.ObjectExists) as error:
            if clock() - began > deadline_s:
                raise FenceContended(
                    f"others changed {fence_url(run_dir)} at each of {tries} tries in {deadline_s:.0f} s"
                ) from error
        sleep(min(0.05 * tries, 1.0))


def _load(run_dir: str) -> tuple[Fence, int | None]:
    found = objects.read(fence_url(run_dir))
    return (Fence(), None) if found is None else (from_json(found[0]), found[1])
