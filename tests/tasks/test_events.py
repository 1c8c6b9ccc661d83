"""Events of a run: bounded in number, and nothing of them can hold a training up or end it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tasks.events import A_MINUTE, AT_ONCE, Allowance
from tests.tasks.test_progress import Clock


def test_a_run_that_is_preempted_without_end_tells_of_it_a_few_times_a_minute():
    clock = Clock()
    allowance = Allowance(clock)
    assert [allowance.take() for _ in range(100)].count(True) == AT_ONCE
    told = 0
    for _ in range(3600):
        clock.now += 1
        told += allowance.take()
    assert A_MINUTE * 59 <= told <= A_MINUTE * 60


UNHEARD = """
import logging, os, sys, time
from tasks.events import Events
from tests.runs.histories import at, intended
with Events(logging.getLogger()) as events:
    events.about("unheard")
    events.heard([at(0, "slice-ready", slice="of which nothing is known")])
    events.heard([at(0, "attempt-ended")])
    events.heard([intended(0, "a"), at(1, "slice-ready", slice="a")])
    print("went on", flush=True)
print("ended", flush=True)
os._exit(0)  # at its exit Prefect itself waits for its server
"""


def test_a_history_that_cannot_be_understood_and_a_server_that_does_not_answer_hold_nobody_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = subprocess.run(
            [sys.executable, "-c", UNHEARD], stdout=subprocess.PIPE, text=True, timeout=60, check=False,
            env=os.environ | {"PREFECT_API_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/api"},
        )  # fmt: skip
    assert (done.returncode, done.stdout.split("\n")) == (0, ["went on", "ended", ""])
