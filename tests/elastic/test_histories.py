"""Random histories of members in processes of their own: whatever happens to whom, the same bits come out."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.elastic.conftest import Lab
from tests.elastic.test_losses import OPTIONS, PACED, fixed

STEPS = 150


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_a_random_history_comes_to_the_same_bits(lab: Lab, seed: int) -> None:
    draw = random.Random(seed)
    told = {**PACED, "steps": STEPS, "stop_steps": [50, 100, STEPS]}
    slices = draw.randint(1, 4)
    options = {
        **OPTIONS,
        "last_step": STEPS,
        "expect": slices,
        "form_s": 2.0,
        "silent_s": 1.5,
        "stuck_s": 3.0,
    }
    members, coordinator = lab.open(**options)
    alive = {f"s{number}": members.start(f"s{number}", **told) for number in range(slices)}
    for _ in range(draw.randint(2, 6)):
        # Not a wait for something, here and below: when things happen is what the seed decides.
        time.sleep(draw.uniform(0.1, 1.0))
        what = draw.choice(["kill", "kill", "stop", "start", "coordinator"])
        if what == "start" or not alive:
            name = f"s{len(members.processes)}"
            alive[name] = members.start(name, **told)
        elif what == "coordinator":
            coordinator.end()
            coordinator = lab.coordinate(members.folder, **options)
        else:
            name = draw.choice(sorted(alive))
            if what == "kill":
                alive.pop(name).kill()
            else:
                os.kill(alive[name].pid or 0, signal.SIGSTOP)
                time.sleep(draw.uniform(0.1, 2.5))
                os.kill(alive[name].pid or 0, signal.SIGCONT)
    if not any(process.is_alive() for process in alive.values()):
        members.start("last", **told)
    members.wait(120)
    assert members.result() == fixed(lab, 1, steps=STEPS)
