"""Saving beside the training: a copy to host memory at once, upload and commit in a thread of their own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tpu.checkpoint import files
from tpu.checkpoint.checksum import crc32c
from tpu.checkpoint.fence import (
    Commit,
    Fence,
    FenceContended,
    FencedOut,
    add_commits,
    load_fence,
    update_fence,
)
from tpu.checkpoint.keep import KEEP_ALL, KeepRule, Pruner
from tpu.checkpoint.manifest import (
    MANIFEST,
    Environment,
    FileEntry,
    HostPart,
    combine,
    part_from_json,
    part_name,
    to_json,
)
from tpu.checkpoint.paths import checked_run_dir, checkpoint_url
from tpu.checkpoint.retry import DEFAULT_RETRY, RetryPolicy, StorageUnavailable
from tpu.checkpoint.shards import Snapshot, files_of, snapshot
from tpu.checkpoint.tree import Leaves


class SaveFailed(Exception):
    """A checkpoint could not be written or committed; the last commit stands. The message says why."""


class PartsMissing(Exception):
    """Other hosts did not write their parts in time; the message names the processes."""


class DivergedError(Exception):
    """The numbers of the training are no numbers any more; the last good checkpoint stands."""


def is_infrastructure(error: BaseException | None) -> bool:
    """Whether a training failed by the bucket or by another host, so that it may be started again as it is."""
    if isinstance(error, SaveFailed):
        error = error.__cause__
    return isinstance(error, StorageUnavailable | PartsMissing | FenceContended)


class Report(Protocol):
    """Takes an event of the saver, such as commit or save_failed, from whatever thread."""

    def __call__(self, event: str, /, **fields: object) -> None: ...


@dataclass(frozen=True)
class SaveTarget:
    """Where a process of an attempt saves, and what its manifests say about it."""

    run_dir: str
    attempt: int
    process_id: int = 0
    num_processes: int = 1
    environment: Environment = field(default_factory=dict)
    mixed: bool = False
    keep: KeepRule = KEEP_ALL


@dataclass(frozen=True)
class SaveLimits:
    """Patience. `commit_interval_s`: GCS takes about one change a second of one object, so that commits which
    come closer are joined. `pending`: snapshots held in memory before the next save blocks."""

    upload: RetryPolicy = DEFAULT_RETRY
    parts_deadline_s: float = 120.0
    parts_poll_s: float = 0.1
    commit_interval_s: float = 1.0
    pending: int = 2


DEFAULT_LIMITS = SaveLimits()


@dataclass(frozen=True)
class _Job:
    step: int
    taken: Snapshot
    began: float


@dataclass(frozen=True)
class _Ready:
    commit: Commit
    bytes: int
    began: float


class Saver:
    """Saves the state of one process. Calls come from the training's thread, the work is done in another one.

    `before_commit` is called before each change of the fence and must have everything in the bucket that
    belongs to the steps so far (the metrics).
    """

    def __init__(
        self,
        target: SaveTarget,
        report: Report,
        before_commit: Callable[[], None] = lambda: None,
        limits: SaveLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._run_dir = checked_run_dir(target.run_dir)
        self._report = report
        self._before_commit = before_commit
        self._limits = limits
        self._clock = clock
        self._jobs: queue.Queue[_Job | threading.Event | None] = queue.Queue()
        self._room = threading.Semaphore(limits.pending)
        self._ready: list[_Ready] = []
        self._last_commit_at = clock() - limits.commit_interval_s
        self._pruner = Pruner(self._run_dir, target.attempt, target.keep)
        self._fatal: FencedOut | DivergedError | None = None
        self._failed: SaveFailed | None = None
        # A daemon: a training that dies of its own error must not be held by a bucket that is away.
        self._thread = threading.Thread(target=self._work, name="checkpoint-saver", daemon=True)
        self._thread.start()

    def save(self, step: int, leaves: Leaves) -> None:
        """Copy the state to host memory and return; the rest happens beside the training.

        Blocks while `pending` earlier snapshots are still on their way.

        Raises:
            FencedOut, DivergedError: an earlier save found that this attempt must end.
        """
        began = self._clock()
        self._room.acquire()
        try:
            self.check()
            taken = snapshot(leaves, self._target.process_id)
        except BaseException:
            self._room.release()
            raise
        self._jobs.put(_Job(step, taken, began))

    def check(self) -> None:
        """Raise FencedOut or DivergedError if the background work met one."""
        if self._fatal is not None:
            raise self._fatal

    def wait(self) -> None:
        """Return when everything saved so far is committed (on process 0) or written (on the others).

        Raises:
            FencedOut, DivergedError: this attempt must end.
            SaveFailed: the newest save could not be written or committed.
        """
        done = threading.Event()
        self._jobs.put(done)
        done.wait()
        self.check()
        if self._failed is not None:
            raise self._failed

    def close(self, deadline_s: float | None = None) -> None:
        """Finish what was begun and end the thread; leave it behind after `deadline_s`."""
        self._jobs.put(None)
        self._thread.join(deadline_s)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._until_due_s())
            except queue.Empty:
                self._guard("commit", self._commit_ready)
                continue
            if isinstance(job, _Job):
                self._guard(f"step {job.step}", lambda job=job: self._save(job))
                self._room.release()
                continue
            if self._ready:
                time.sleep(min(self._until_due_s() or 0.0, self._limits.commit_interval_s))
                self._guard("commit", self._commit_ready)
            if job is None:
                return
            job.set()

    def _until_due_s(self) -> float | None:
        """Seconds until waiting commits may be made; None when there are none."""
        if not self._ready:
            return None
        return max(0.0, self._last_commit_at + self._limits.commit_interval_s - self._clock())

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        """Run a piece of background work; what it raises is kept for the training's thread, and reported."""
        if self._fatal is not None:
            return
        try:
            action()
        except (FencedOut, DivergedError) as error:
            self._fatal, self._ready = error, []
            self._report("save_refused", reason=str(error))
        except Exception as error:  # the training goes on from the last commit, whatever a save met
            self._failed = SaveFailed(f"{what} of attempt {self._target.attempt} could not be saved: {error}")
            self._failed.__cause__ = error
            self._report("save_failed", what=what, reason=f"{type(error).__name__}: {error}")
            if what == "commit":  # tried again with the next save, not in a busy loop
                self._last_commit_at = self._clock()

    def _save(self, job: _Job) -> None:
        bad = job.taken.first_nan()
        if bad is not None:
            raise DivergedError(
                f"step {job.step}: {bad!r} holds NaN; not saved, the last good checkpoint stands"
            )
        own = self._write_part(job)
        if self._target.process_id == 0:
            self._ready.append(self._write_manifest(job, own))
            if not self._until_due_s():
                self._commit_ready()
        else:
            self._failed = None

    def _write_part(self, job: _Job) -> tuple[FileEntry, HostPart]:
        target, folder = self._target, self._folder(job.step)
        if target.process_id != 0:
            self._check_fence()
        entries, pieces = [], []
        for name, content, inside in files_of(job.taken, target.process_id):
            files.write(f"{folder}/{name}", content, self._limits.upload)
            entries.append(_entry(name, content))
            pieces.extend(inside)
        part = HostPart(target.process_id, tuple(entries), tuple(pieces), job.taken.arrays)
        name, content = part_name(target.process_id), to_json(part)
        files.write(f"{folder}/{name}", content, self._limits.upload)
        return _entry(name, content), part

    def _check_fence(self) -> None:
        """Only process 0 commits; the others look before they write, so that a zombie stops on every host."""
        fence = load_fence(self._run_dir)
        if fence.attempt != self._target.attempt or not fence.open:
            raise FencedOut(
                f"attempt {self._target.attempt} may not write: attempt {fence.attempt} is the newest"
            )

    def _write_manifest(self, job: _Job, own: tuple[FileEntry, HostPart]) -> _Ready:
        target, folder = self._target, self._folder(job.step)
        parts = [own, *self._await_parts(folder)]
        manifest = combine(job.step, target.attempt, parts, target.environment, target.mixed)
        content = to_json(manifest)
        files.write(f"{folder}/{MANIFEST}", content, self._limits.upload)
        size = len(content) + sum(f.size for f in manifest.files)
        return _Ready(Commit(job.step, target.attempt, crc32c(content)), size, job.began)

    def _await_parts(self, folder: str) -> list[tuple[FileEntry, HostPart]]:
        """The parts of all other processes, found by looking; no collective may run beside the training's
        own."""
        missing = {part_name(i) for i in range(1, self._target.num_processes)}
        found: list[tuple[FileEntry, HostPart]] = []
        deadline = self._clock() + self._limits.parts_deadline_s
        while missing:
            for url in files.names(folder):
                name = url.rpartition("/")[2]
                if name in missing:
                    content = files.read(url)
                    found.append((_entry(name, content), part_from_json(content)))
                    missing.discard(name)
            if missing and self._clock() > deadline:
                raise PartsMissing(
                    f"waited {self._limits.parts_deadline_s:.0f} s for "
                    f"{', '.join(sorted(missing))} in {folder}"
                )
            if missing:
                time.sleep(self._limits.parts_poll_s)
        return sorted(found, key=lambda pair: pair[1].process)

    def _commit_ready(self) -> None:
        """One change of the fence for all checkpoints that are written and wait for it."""
        self._before_commit()
        ready = list(self._ready)
        fence = update_fence(self._run_dir, lambda fence: add_commits(fence, (r.commit for r in ready)))
        self._ready.clear()
        self._failed = None
        self._last_commit_at = now = self._clock()
        for r in ready:
            self._report(
                "commit",
                step=r.commit.step,
                attempt=r.commit.attempt,
                bytes=r.bytes,
                seconds=round(now - r.began, 4),
            )
        self._prune(fence)

    def _prune(self, fence: Fence) -> None:
        try:
            gone = self._pruner.prune(fence)
        except FencedOut:
            raise
        except Exception as error:  # old checkpoints that stay cost money, not the run
            self._report("keep_failed", reason=f"{type(error).__name__}: {error}")
            return
        if gone:
            self._last_commit_at = self._clock()
            self._report("dropped", steps=[c.step for c in gone])

    def _folder(self, step: int) -> str:
        return checkpoint_url(self._run_dir, step, self._target.attempt)


def _entry(name: str, content: bytes) -> FileEntry:
    return FileEntry(name, len(content), crc32c(content))
