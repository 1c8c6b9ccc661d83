"""A sweep on one machine: 12 trials on two emulated VMs of 4 chips, one of which is preempted in the middle.

Afterwards the same trials are trained one at a time, undisturbed, and the parameters are compared byte for byte.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from deployments.demo import PLAIN_LOG, RELAY_FOLDER, flow_process, leave, say, wait
from deployments.prefect_server import prefect_server
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.files import filesystem
from tpu.emulator.emulator import Emulator
from tpu.runs.record import run_directory
from tpu.slices.lease_book import GcsLeaseBook
from tpu.slices.pool_settings import PoolSettings
from tpu.sweeps.book import SweepBook, sweep_directory
from tpu.sweeps.config import Sweep, load_sweep
from tpu.sweeps.outcome import Outcome

FILE = Path("deployments/sweeps/icl.yaml")
FLOW = "flows.sweep"
SLICES = 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.sweep_demo", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=FILE, help=f"a sweep file ({FILE})")
    parser.add_argument("--no-check", action="store_true", help="do not train the trials a second time alone")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        demonstrate(arguments.file, check=not arguments.no_check)


def demonstrate(file: Path, check: bool) -> None:
    """Sweep, preempt, show the results, compare. Exits 1 if the flow fails or parameters differ."""
    sweep = load_sweep(file)
    began = time.monotonic()
    say("starting the Prefect server and the emulated Cloud TPU (about 15 s)")
    with prefect_server(RELAY_FOLDER / "prefect") as prefect, Emulator() as emulator:
        os.environ.update(emulator.env)  # for the readers of the bucket below
        bucket = emulator.env["TPU_RELAY_BUCKET"]
        say(f"Prefect UI while this runs: {prefect['PREFECT_API_URL'].removesuffix('/api')}/runs")
        environment = os.environ | prefect | PLAIN_LOG
        asyncio.run(limit_pool(bucket, sweep.run.pool))
        say(
            f"sweep {sweep.run.name}: {sweep.search.runs} trials on {SLICES} emulated slices, one is preempted"
        )
        book = SweepBook(sweep_directory(bucket, sweep.run.name))
        with flow_process([str(file)], environment, FLOW) as flow:
            preempt_one(emulator, flow, book, bucket, sweep)
        if flow.returncode != 0:
            sys.exit(f"the sweep failed with exit code {flow.returncode}")
        folder = RELAY_FOLDER / "sweeps" / sweep.run.name
        folder.mkdir(parents=True, exist_ok=True)
        filesystem().get(f"{book.sweep_dir}/results.csv", str(folder / "results.csv"))
        say(f"results are kept in {folder / 'results.csv'}")
        if check:
            compare(file, sweep, environment, bucket, book)
        say(f"done in {time.monotonic() - began:.0f} s; `make ui` shows the sweep's page again")


async def limit_pool(bucket: str, pool: str) -> None:
    await GcsLeaseBook(bucket).set_settings(pool, lambda _: PoolSettings(max_slices=SLICES))


def preempt_one(
    emulator: Emulator, flow: subprocess.Popen[bytes], book: SweepBook, bucket: str, sweep: Sweep
) -> None:
    """Take a slice away in the middle of the sweep, once a trial on it has committed."""

    def preempted() -> bool:
        if len(book.outcomes()) < sweep.search.runs // 3:
            return False
        live = [trial.run for trial in book.trials()[-(sweep.search.at_once or 1) :]]
        committed = [run for run in live if _in_the_middle(run_directory(bucket, run), sweep.run.steps)]
        ready = {one["name"].rpartition("/")[2] for one in emulator.nodes() if one["state"] == "READY"}
        leases = [kept.lease for kept in asyncio.run(GcsLeaseBook(bucket).list(sweep.run.pool))]
        where = {lease.slice for lease in leases for holder in lease.holders if holder.run in committed}
        if hit := sorted(where & ready):
            say(f"preempting {hit[0]} without notice")
            emulator.preempt(hit[0], notice=False)
        return bool(hit)

    wait(flow, preempted)


def _in_the_middle(run_dir: str, steps: int) -> bool:
    newest = load_fence(run_dir).newest()
    return newest is not None and newest.step < steps


def compare(file: Path, sweep: Sweep, environment: dict[str, str], bucket: str, book: SweepBook) -> None:
    """Train the same trials one at a time and compare the parameters' hashes."""
    name = f"{sweep.run.name}-alone"
    say("the same trials again, one at a time and undisturbed, to compare")
    with flow_process([str(file), "--name", name, "--set", "at_once=1"], environment, FLOW) as flow:
        pass
    if flow.returncode != 0:
        sys.exit(f"the sweep alone failed with exit code {flow.returncode}")
    ours, alone = book.outcomes(), SweepBook(sweep_directory(bucket, name)).outcomes()
    for trial in book.trials():
        print(f"{trial.run}  {told(ours[trial.number])}   alone {told(alone[trial.number])}")
    if [n for n in ours if ours[n].parameters_sha256 != alone[n].parameters_sha256]:
        sys.exit("parameters DIFFER: this is a defect, please report it")
    say(f"the same bits in all {len(ours)} trials")


def told(outcome: Outcome) -> str:
    return f"{(outcome.parameters_sha256 or 'no checkpoint')[:16]} in {outcome.attempts} attempt(s)"


if __name__ == "__main__":
    main()
