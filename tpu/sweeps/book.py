"""What the bucket knows of a sweep: `sweep.json`, each trial before it starts, each outcome once known."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tpu.checkpoint import files, objects
from tpu.runs.code import Bundle
from tpu.runs.config import RunConfig, differences, parse_run_config
from tpu.sweeps.config import Search, SweepError, parse_search
from tpu.sweeps.outcome import Outcome
from tpu.sweeps.parquet import to_parquet
from tpu.sweeps.trial import Trial

_READERS = 16
# How many at once, where the study is kept, and until when: none of it makes another sweep of it.
_MAY_CHANGE = ("at_once", "storage", "trials")


def sweep_directory(bucket: str, name: str) -> str:
    """`gs://…/sweeps/<name>`."""
    return f"{bucket}/sweeps/{name}"


class SweepBook:
    """The folder of one sweep."""

    def __init__(self, sweep_dir: str) -> None:
        self.sweep_dir = sweep_dir

    def open(self, run: RunConfig, search: Search, code: Bundle, renew: bool = False) -> str:
        """Create the sweep, or take it up; returns where the code of the trials is that begin from now on.

        That is the code of the sweep's first start, unless it is to be renewed.

        Raises:
            SweepError: a sweep of this name exists and is another one.
        """
        url = f"{self.sweep_dir}/sweep.json"
        target = f"{self.sweep_dir}/code/{code.sha256}.tar.gz"
        values = {
            "format": 1,
            "run": run.model_dump(mode="json"),
            "search": search.model_dump(mode="json"),
            "code": {"source": code.source, "sha256": code.sha256, "url": target},
        }
        files.write(target, code.data)
        try:
            objects.create_exclusive(url, json.dumps(values, indent=1).encode())
        except objects.ObjectExists:
            content, generation = objects.read(url) or (b"", 0)
            existing = json.loads(content)
            self._check_same(existing, values)
            if not renew:
                return str(existing["code"]["url"])
            renewed = json.dumps(existing | {"code": values["code"]}, indent=1).encode()
            objects.compare_and_set(url, renewed, generation)
        return target

    def _check_same(self, existing: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """A run in it is compared when its trials are: here only what makes other trials."""
        changed = [
            line
            for part in ("search",)
            for line in differences(existing[part], wanted[part])
            if line.partition(":")[0].partition(".")[0] not in _MAY_CHANGE
        ]
        changed += differences(
            {name: existing["run"][name] for name in ("training", "command", "seed", "steps", "framework")},
            {name: wanted["run"][name] for name in ("training", "command", "seed", "steps", "framework")},
        )
        if changed:
            name = self.sweep_dir.rpartition("/")[2]
            raise SweepError(
                f"the sweep {name} exists and is another one; nothing was changed. Choose another name.\n"
                + "\n".join(f"  {line}" for line in changed)
            )

    def settings(self) -> tuple[RunConfig, Search] | None:
        """The run and the search it was started with; None if there is no such sweep."""
        if (found := objects.read(f"{self.sweep_dir}/sweep.json")) is None:
            return None
        values = json.loads(found[0])
        return parse_run_config(values["run"]), parse_search(values["search"])

    def trials(self) -> list[Trial]:
        """Those that were begun, in order."""
        with ThreadPoolExecutor(_READERS) as readers:
            urls = sorted(url for url in files.names(f"{self.sweep_dir}/trials") if url.endswith(".json"))
            return [Trial.from_json(data) for data in readers.map(files.read, urls)]

    def begin(self, trial: Trial) -> None:
        """Write a trial down before its run is made."""
        objects.create_exclusive(f"{self.sweep_dir}/trials/{trial.number:06d}.json", trial.to_json())

    def settle(self, trial: Trial, outcome: Outcome) -> None:
        files.write(f"{self.sweep_dir}/outcomes/{trial.number:06d}.json", outcome.to_json())

    def outcomes(self) -> dict[int, Outcome]:
        """Of those that have ended, by number."""
        with ThreadPoolExecutor(_READERS) as readers:
            urls = [url for url in files.names(f"{self.sweep_dir}/outcomes") if url.endswith(".json")]
            found = readers.map(files.read, urls)
            numbers = [int(url.rpartition("/")[2].removesuffix(".json")) for url in urls]
            return {n: Outcome.from_json(data) for n, data in zip(numbers, found, strict=True)}

    def save_results(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """`results.csv`, `.parquet` and `.jsonl`, a row a trial; later ones replace them."""
        files.write(f"{self.sweep_dir}/results.csv", to_csv(rows).encode())
        if rows:
            files.write(f"{self.sweep_dir}/results.parquet", to_parquet(rows))
        text = "".join(json.dumps(row) + "\n" for row in rows)
        files.write(f"{self.sweep_dir}/results.jsonl", text.encode())

    def results(self) -> list[dict[str, Any]]:
        """The rows that were saved last; none before the first."""
        found = objects.read(f"{self.sweep_dir}/results.jsonl")
        return [json.loads(line) for line in found[0].splitlines()] if found else []


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every column that a row has, in the order in which they come."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()})
    return text.getvalue()
