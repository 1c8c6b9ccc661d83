"""Which checkpoints may go: the rule, pure, and the deletion, fence first and bytes after."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from tpu.checkpoint import files
from tpu.checkpoint.fence import Commit, Fence, Refused, drop_commits, update_fence
from tpu.checkpoint.paths import checked_run_dir
from tpu.checkpoint.verify import verify_commit

SAFE = 2  # so many of the newest verified commits stay, whatever the rule says


@dataclass(frozen=True)
class KeepRule:
    """Keep the newest `last` commits, and those whose step is a multiple of `every`; None leaves that part
    out.

    With neither, everything is kept.
    """

    last: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every)):
            if value is not None and value < 1:
                raise ValueError(f"keep rule: {name!r} must be at least 1, found {value}")

    @classmethod
    def from_json(cls, text: str) -> KeepRule:
        """The rule of RELAY_KEEP, such as {"last": 3, "every": 1000}; the empty text keeps everything."""
        body = json.loads(text) if text else {}
        unknown = set(body) - {"last", "every"}
        if unknown:
            raise ValueError(f"keep rule: {sorted(unknown)} unknown; there are 'last' and 'every'")
        return cls(body.get("last"), body.get("every"))


KEEP_ALL = KeepRule()


def outdated(commits: Iterable[Commit], rule: KeepRule, verified: Iterable[Commit]) -> tuple[Commit, ...]:
    """The commits that `rule` lets go. `verified` are commits known to be whole; the newest two of them
    stay."""
    ordered = sorted(commits)
    if rule.last is None and rule.every is None:
        return ()
    kept = set(sorted(set(verified) & set(ordered))[-SAFE:])
    if rule.last is not None:
        kept.update(ordered[-rule.last :])
    if rule.every is not None:
        kept.update(c for c in ordered if c.step % rule.every == 0)
    return tuple(c for c in ordered if c not in kept)


@dataclass
class Pruner:
    """Deletes what the rule of one attempt lets go, remembering which commits it has verified already."""

    run_dir: str
    attempt: int
    rule: KeepRule
    _verified: dict[Commit, bool] = field(default_factory=dict)

    def prune(self, fence: Fence) -> tuple[Commit, ...]:
        """Delete outdated checkpoints and the leftovers of closed attempts; returns the commits that went.

        The fence forgets them first: a crash in between leaves bytes that nobody reads and the next attempt
        deletes.

        Raises:
            FencedOut: another attempt is open by now; nothing is deleted.
        """
        if not outdated(fence.commits, self.rule, ()):
            return ()
        gone = outdated(fence.commits, self.rule, self._newest_verified(fence))
        if not gone:
            return ()

        def forget(current: Fence) -> Fence | Refused:
            if current.attempt != self.attempt or not current.open:
                return Refused(
                    f"attempt {self.attempt} may not delete: attempt {current.attempt} is the newest"
                )
            return drop_commits(current, gone)

        after = update_fence(self.run_dir, forget)
        self._delete_unnamed(after, also=gone)
        return gone

    def _newest_verified(self, fence: Fence) -> list[Commit]:
        found: list[Commit] = []
        for commit in sorted(fence.commits, reverse=True):
            if commit not in self._verified:
                self._verified[commit] = verify_commit(self.run_dir, commit).whole
            if self._verified[commit]:
                found.append(commit)
            if len(found) == SAFE:
                break
        return found

    def _delete_unnamed(self, fence: Fence, also: Iterable[Commit]) -> None:
        named = {(c.step, c.attempt) for c in fence.commits}
        dropped = {(c.step, c.attempt) for c in also}
        for key, urls in files.stored_checkpoints(checked_run_dir(self.run_dir)).items():
            # Of the open attempt only what was dropped just now: the rest may be a save in progress.
            if key not in named and (key in dropped or key[1] < fence.attempt):
                files.remove(urls)
