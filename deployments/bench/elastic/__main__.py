"""What one run over several slices costs and loses.

Gaps: four emulated slices train, one is killed and comes back. `loss_gap_steps` is the longest time without a finished
step after the loss, less the time until the coordinator knew of it, in step times of those that are left;
`return_gap_steps` is what the step in which it takes part again took longer than a step, in step times. Units are paced
by sleeping: on 2 cores real ones would measure the cores.

Exactness: `exact_ratio` is the time of a sum by the fixed tree over that of gloo's all-reduce (through JAX), for the
same gradients over the same loopback.
"""

from __future__ import annotations

import sys

from deployments.bench.elastic.gaps import gaps
from deployments.bench.elastic.ratio import compare
from deployments.bench.lab import BenchFailed, machine, parser, say, tell

UNITS, UNIT_S, STEPS = 8, 0.05, 300
# (processes, megabytes of gradient)
SIZES = ((2, 4), (2, 64), (2, 1000), (4, 64), (8, 16), (8, 256))
SHORT_SIZES = ((2, 64), (8, 16))
AIMS = {"loss_gap_steps": 2.0, "return_gap_steps": 1.0, "exact_ratio": 1.3}


def main() -> None:
    chosen = parser("elastic", __doc__).parse_args()
    about = machine()
    steps = STEPS // 3 if chosen.short else STEPS
    found = {}
    for slices in (4,) if chosen.short else (2, 4, 8):
        found[slices] = gaps(slices, UNITS, UNIT_S, steps)
        say(f"{slices} slices: {found[slices]}")
    ratios = [
        compare(processes, megabytes, 20_000 + 300 * number)
        for number, (processes, megabytes) in enumerate(SHORT_SIZES if chosen.short else SIZES)
    ]
    tell(
        {
            "bench": "elastic",
            "loss_gap_steps": found[4]["loss_gap_steps"],
            "return_gap_steps": found[4]["return_gap_steps"],
            "exact_ratio": max(one["exact_ratio"] for one in ratios),
            "aims": AIMS,
            "gaps_by_slices": found,
            "exactness": ratios,
            "machine": about,
        }
    )


if __name__ == "__main__":
    try:
        main()
    except BenchFailed as error:
        sys.exit(str(error))
