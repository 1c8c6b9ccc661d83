"""`python -m tpu.worker.ending RUN FLOW_RUN_ID`: leave nothing of a run, or a sweep, whose flow run has ended.

A process of its own, since a flow run may have another project, bucket and credentials than its worker.
"""

from __future__ import annotations

import asyncio
import sys

from tpu.connection import Connection
from tpu.runs.controller import RunIsDriven, observe
from tpu.runs.record import RunNotFound, run_directory
from tpu.runs.stopping import stop_run
from tpu.sweeps.book import SweepBook, sweep_directory
from tpu.sweeps.packing import packs_of

OF_ANOTHER = "it is another flow run's now: nothing is touched"


async def end_run_of(connection: Connection, run: str, flow_run_id: str) -> str:
    """Return, with a sentence, when the cloud says that no slice is left which this flow run had made or taken.

    A run that another flow run has taken over since is that one's: nothing is touched.

    Raises:
        tpu.runs.stopping.NotStopped: a driver of the flow run lives and does not stop.
        tpu.cloud.CloudError: the cloud refuses; to be tried again.
    """
    run_dir = run_directory(connection.bucket, run)
    seen = await asyncio.to_thread(observe, run_dir)
    if seen is None:
        return await _end_trials_of(connection, run, flow_run_id)
    if seen[0].owner.flow_run != flow_run_id:
        return OF_ANOTHER
    told: list[str] = []
    try:
        await stop_run(connection, run_dir, told.append, flow_run_id)
    except RunNotFound:
        return f"{run} is gone"
    except RunIsDriven as taken:
        return str(taken)
    return told[-1]


async def _end_trials_of(connection: Connection, sweep: str, flow_run_id: str) -> str:
    """A sweep that was killed could not end its trials, which are runs of the same flow run."""
    book = SweepBook(sweep_directory(connection.bucket, sweep))
    trials = await asyncio.to_thread(book.trials)
    if not trials:
        return f"nothing is left of {sweep}: it was never begun"
    settled = await asyncio.to_thread(book.outcomes)
    left = [trial for trial in trials if trial.number not in settled]
    # A pack's gang saves the work of all of its trials, as long as their attempts are open.
    await asyncio.gather(*(end_run_of(connection, pack, flow_run_id) for pack in packs_of(sweep, left)))
    told = await asyncio.gather(*(end_run_of(connection, trial.run, flow_run_id) for trial in left))
    ended = len(told) - told.count(OF_ANOTHER)
    return f"nothing is left of the sweep {sweep}" + (f"; {ended} trial(s) were ended" if ended else "")


if __name__ == "__main__":
    print(asyncio.run(end_run_of(Connection.from_environment(), sys.argv[1], sys.argv[2])))
