"""Seeded histories of trouble, several at a time: does every run end finished with the right bits, or tell the truth?

Each history is a real run: `python -m flows.train` as a process of its own (forked with the imports done), one Prefect
server, one emulated Cloud TPU, a small NumPy training through the segment contract. What strikes it, and when, is a
function of its seed: preemptions with and without notice, odd states, dead and hung hosts, dropped SSH, killed programs
and supervisors, API errors, answers that are lost, stockouts, and SIGKILL of the flow, which is then started again.

A history holds if its run is finished with the bits and losses of an undisturbed training, or has given up for a
reason that was really made; if each verdict on the way names what was done to that slice; and if nothing was done
twice, and no slice, queued resource or process is left. `ratio` is the share of histories that hold, `leaks` what was
left in all. One that failed is played again by its seed: make bench BENCH=chaos SEED=17. HISTORIES=n plays fewer.
"""

from __future__ import annotations

import os
import time

from deployments.bench.chaos.histories import left_in_all, open_stage, play_all, summary
from deployments.bench.lab import FOLDER, machine, open_lab, parser, say, tell

HISTORIES = 200
# Most of a history is waiting.
AT_ONCE = 8


def main() -> None:
    arguments = parser("chaos", __doc__)
    arguments.add_argument("--histories", type=int, default=int(os.environ.get("HISTORIES", HISTORIES)))
    arguments.add_argument("--seed", type=int, default=os.environ.get("SEED"), help="play this one alone")
    arguments.add_argument("--at-once", type=int, default=int(os.environ.get("AT_ONCE", AT_ONCE)))
    chosen = arguments.parse_args()
    count = 4 if chosen.short else chosen.histories
    seeds = [int(chosen.seed)] if chosen.seed is not None else range(1, count + 1)
    about, began = machine(), time.monotonic()
    say("starting the Prefect server and the emulated Cloud TPU")
    folder = FOLDER / "chaos"
    folder.mkdir(parents=True, exist_ok=True)
    with open_lab(hosts_alone=False) as lab:
        with open_stage(lab.emulator, lab.environment, folder) as stage:
            say(f"{len(seeds)} histories, {chosen.at_once} at once; the logs of their flows are in {folder}")
            judged = play_all(stage, seeds, chosen.at_once, say)
        left = left_in_all(lab.emulator)
    figures = summary(judged, left)
    tell({"bench": "chaos", **figures, "wall_s": round(time.monotonic() - began), "machine": about})


if __name__ == "__main__":
    main()
