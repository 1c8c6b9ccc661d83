"""A sweep of 2,000 trials of five segments on 110 simulated slices of four chips, most of them spot.

The cloud is simulated as in `fleet` (spot slices live for six hours on average, stockouts, slow and hanging hosts,
failing calls), on virtual time; queue, search, leases and keeper are the product's own.

`busy_share` is the time of chips that a trial holds over the time of all chips of usable slices, while somebody waits
for a chip; `chip_free_s` is how long a chip stays free then, `trial_waits_s` how long a trial waits for one. `goodput`
is the time of steps that are in a checkpoint over the time that chips were held.

Then the live part (`live_sweep`): real sweeps on emulated slices, for what no simulation has. `mb_per_live_trial` and
`cpu_s_per_trial` are what their process takes, `refill_s` passes from a chip being given back to its next trial taking
it, `records_complete` says whether Prefect has a final state of each trial. `--live 0` leaves it out.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

from deployments.bench.fleet import ON_DEMAND, PLACES, SPOT, play
from deployments.bench.fleet_pool import PoolController
from deployments.bench.lab import BenchFailed, machine, parser, say, tell
from deployments.bench.live_sweep import live
from deployments.bench.sweep_fleet import MeteredBook, SimulatedSweep, figures_of
from tpu.emulator.capacity import Limits
from tpu.emulator.simulation import Simulation, simulate
from tpu.emulator.simulation_weather import TYPICAL
from tpu.slices.pool_size import Option
from tpu.sweeps.config import parse_search

CHIPS = 4
STEADY, SPOTS, TRIALS = 10, 100, 2000
SEGMENTS, TRIAL_S = 5, 5400.0
# Long enough for all; it ends when they have.
HOURS = 72.0
# Real trials at once: what two cores can start within two minutes.
FEW_LIVE, LIVE, SHORT_LIVE = 4, 24, 8


def fleet(steady: int, spots: int, trials: int, seed: int, trial_s: float = TRIAL_S) -> dict[str, Any]:
    """The figures of a sweep on so many on-demand and spot slices."""
    a_zone = spots // len(SPOT) * 3 // 2 + steady
    limits = Limits(capacity=dict.fromkeys(PLACES, a_zone), quota=dict.fromkeys(PLACES, a_zone))
    options = [Option(ON_DEMAND, steady), *(Option(spot, a_zone - steady) for spot in SPOT)]
    space = {"parameters": {"x": {"min": 0.0, "max": 1.0}}, "trials": trials, "method": "random"}

    async def story(simulation: Simulation) -> dict[str, Any]:
        before = resident_kb()
        sweep = SimulatedSweep(
            simulation, parse_search(space), [option.candidate for option in options],
            (steady + spots) * CHIPS, trial_s, SEGMENTS,
        )  # fmt: skip
        book = MeteredBook(simulation.clock, sweep.waits)
        controller = PoolController(simulation, options, steady + spots, None, book, sweep.serve)
        found = await play(simulation, controller, sweep.runs, HOURS)
        told = figures_of(sweep, book)
        return (
            found
            | told
            | {
                "trial_cpu_ms": round(1000 * simulation.cpu_s["runs"] / trials, 1),
                "most_memory_mb": round(
                    (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000, 1
                ),
            }
        )

    return simulate(story, seed=seed, weather=TYPICAL, limits=limits)


def resident_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    arguments = parser("sweep", __doc__)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--live", type=int, help=f"real trials at once, by fours (default {LIVE}, "
                           f"short {SHORT_LIVE}; 0 leaves that part out)")  # fmt: skip
    chosen: argparse.Namespace = arguments.parse_args()
    places = chosen.live if chosen.live is not None else SHORT_LIVE if chosen.short else LIVE
    if places and (places <= FEW_LIVE or places % CHIPS):
        arguments.error(f"--live: a multiple of {CHIPS} above {FEW_LIVE}, or 0")
    about, began = machine(), time.monotonic()
    steady, spots, trials = (2, 8, 120) if chosen.short else (STEADY, SPOTS, TRIALS)
    say(f"{trials} trials on {(steady + spots) * CHIPS} simulated places")
    found = fleet(steady, spots, trials, chosen.seed)
    real = live(FEW_LIVE, places) if places else {}
    tell(
        {"bench": "sweep", "busy_share": found["busy_share"], "goodput": found["goodput"]}
        | real
        | {"fleet": found}
        | {"seed": chosen.seed, "took_s": round(time.monotonic() - began), "machine": about}
    )


if __name__ == "__main__":
    try:
        main()
    except BenchFailed as error:
        sys.exit(str(error))
