"""Metrics of a run: small parts written once by each attempt, read as one record a step."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from tpu.checkpoint import files
from tpu.checkpoint.fence import Fence
from tpu.checkpoint.paths import checked_run_dir

Record = Mapping[str, object]
FLUSH_S = 10.0
_PART = re.compile(r"/metrics/(\d+)-(\d+)\.jsonl$")
_READERS = 8


class MetricsWriter:
    """Collects records and writes them as parts: when told to, and by itself every ten seconds.

    A part that could not be written is written again with what came since; nothing is dropped.
    """

    def __init__(self, run_dir: str, attempt: int, flush_s: float = FLUSH_S) -> None:
        self._prefix = f"{checked_run_dir(run_dir)}/metrics/{attempt}-"
        self._flush_s = flush_s
        self._records: list[Record] = []
        self._records_lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._part = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._flush_regularly, name="metrics-flusher", daemon=True)
        self._thread.start()

    def add(self, record: Record) -> None:
        with self._records_lock:
            self._records.append(record)

    def flush(self) -> None:
        """Return when every record added so far is in the bucket.

        Raises:
            StorageUnavailable, OSError: the bucket did not take them; they are kept for the next flush.
        """
        with self._flush_lock:
            with self._records_lock:
                taken = list(self._records)
            if not taken:
                return
            content = "".join(json.dumps(record) + "\n" for record in taken).encode()
            files.write(f"{self._prefix}{self._part:06d}.jsonl", content)
            self._part += 1
            with self._records_lock:
                del self._records[: len(taken)]

    def close(self) -> None:
        """End the regular flushing; does not flush."""
        self._ended.set()
        self._thread.join()

    def _flush_regularly(self) -> None:
        while not self._ended.wait(self._flush_s):
            try:
                self.flush()
            except (
                Exception
            ):  # kept, and tried again in ten seconds and before the next commit, which reports it
                continue


def read_metrics(run_dir: str, fence: Fence) -> list[dict[str, object]]:
    """One record a step, sorted by step, each with the `attempt` it came from.

    Of a closed attempt only what its last accepted commit covers counts: the steps after it were done again.
    Of the open attempt everything counts so far. For a step of several attempts the latest one wins.
    """
    records = [
        (attempt, record)
        for attempt, record in read_records(run_dir)
        if "step" in record and "event" not in record
    ]
    return merged(records, fence)


def read_logged(run_dir: str) -> list[dict[str, object]]:
    """As read_metrics, of a program without checkpoints of ours: what an attempt logs from its first step on counts in
    place of what those before it did."""
    rows: dict[int, dict[str, object]] = {}
    newest = 0
    for attempt, record in read_records(run_dir):
        step = record.get("step")
        if not isinstance(step, int) or "event" in record:
            continue
        if attempt > newest:
            rows, newest = {at: row for at, row in rows.items() if at < step}, attempt
        rows[step] = rows.get(step, {}) | record | {"attempt": attempt}
    return [rows[step] for step in sorted(rows)]


def read_events(run_dir: str) -> list[tuple[int, dict[str, object]]]:
    """(attempt, event) of all attempts' metrics parts, in the order they were written."""
    return [(attempt, record) for attempt, record in read_records(run_dir) if "event" in record]


def merged(records: Iterable[tuple[int, Record]], fence: Fence) -> list[dict[str, object]]:
    """The records that count, as `read_metrics` says; pure."""
    best: dict[int, tuple[int, Record]] = {}
    for attempt, record in records:
        step = record["step"]
        if not isinstance(step, int) or not _counts(fence, attempt, step):
            continue
        if step not in best or best[step][0] <= attempt:
            best[step] = (attempt, record)
    return [{**record, "attempt": attempt} for _, (attempt, record) in sorted(best.items())]


def _counts(fence: Fence, attempt: int, step: int) -> bool:
    if attempt == fence.attempt and fence.open:
        return True
    last = fence.closed.get(attempt)
    return last is not None and step <= last.step


def read_records(run_dir: str) -> list[tuple[int, dict[str, object]]]:
    """(attempt, record) of every part, in order of attempt and part."""
    return MetricsParts(run_dir).new()


class MetricsParts:
    """The parts of a run's metrics, each read once."""

    def __init__(self, run_dir: str) -> None:
        self._folder = f"{checked_run_dir(run_dir)}/metrics"
        self._known: set[tuple[int, int]] = set()

    def new(self) -> list[tuple[int, dict[str, object]]]:
        """(attempt, record) of the parts that were not read before, in order of attempt and part."""
        found: dict[tuple[int, int], str] = {}
        for url in files.names(self._folder):
            match = _PART.search(url)
            if match and (key := (int(match[1]), int(match[2]))) not in self._known:
                found[key] = url
        keys = sorted(found)
        with ThreadPoolExecutor(_READERS) as readers:
            contents = list(readers.map(lambda key: files.read(found[key]), keys))
        self._known.update(keys)
        return [
            (attempt, json.loads(line))
            for (attempt, _), content in zip(keys, contents, strict=True)
            for line in content.splitlines()
            if line
        ]
