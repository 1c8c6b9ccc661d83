import concurrent.futures
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.runs.conftest import Track
from tpu.checkpoint import files, objects
from tpu.clock import SystemClock
from tpu.runs.controller import (
    BEAT_S,
    LONGEST_BEAT_S,
    MISSED,
    ControllerLost,
    ControllerState,
    MalformedController,
    Owner,
    RunIsDriven,
    claim,
    may_claim,
    observe,
    pace_s,
    process_start,
    this_process,
)
from tpu.runs.opening import become_controller
from tpu.runs.tenure import Tenure
from tpu.slices.lease import LEASE_TTL_S

HERE = this_process("flow-1")
ELSEWHERE = Owner("flow-2", "another-machine", 1, "boot/1")


def dead_owner() -> Owner:
    child = subprocess.Popen([sys.executable, "-c", ""])
    owner = Owner("flow-3", socket.gethostname(), child.pid, process_start(child.pid) or "gone at once")
    child.wait()
    return owner


@pytest.mark.parametrize(
    ("state", "silent_s", "take_over", "answer", "why"),
    [
        (ControllerState(ELSEWHERE, 4, released=True), 0, False, True, "nobody drives"),
        (ControllerState(ELSEWHERE, 4), 0, False, False, "driven by process 1 on another-machine, term 4"),
        (ControllerState(ELSEWHERE, 4), MISSED * BEAT_S - 1, False, False, "driven by"),
        (ControllerState(ELSEWHERE, 4, beat_s=15), 59, False, False, "driven by"),
        (ControllerState(ELSEWHERE, 4, beat_s=15), 60, False, True, "was silent for 60 s"),
        (ControllerState(ELSEWHERE, 4), MISSED * BEAT_S, False, True, "was silent for 20 s"),
        (ControllerState(ELSEWHERE, 4), 0, True, True, "taken over by request from process 1"),
        (ControllerState(HERE, 4), 0, False, False, "driven by"),
        (ControllerState(dataclasses.replace(ELSEWHERE, flow_run="new"), 4), 0, False, True, "same flow run"),
    ],
)
def test_who_may_claim(state, silent_s, take_over, answer, why):
    allowed, reason = may_claim(state, dataclasses.replace(HERE, flow_run="new"), silent_s, take_over)
    assert allowed is answer
    assert why in reason


def test_beats_of_many_runs_cost_a_process_less_each_and_never_look_like_death():
    assert [pace_s(1), pace_s(16), pace_s(32)] == [BEAT_S, BEAT_S, 2 * BEAT_S]
    assert pace_s(440) == LONGEST_BEAT_S
    assert MISSED * LONGEST_BEAT_S <= LEASE_TTL_S  # which the reaper watches


def test_a_dead_process_of_this_machine_is_known_to_be_dead():
    owner = dead_owner()
    assert owner.known_dead()
    assert may_claim(ControllerState(owner, 1), HERE, 0, False)[0]
    assert not HERE.known_dead()
    # The same number given to a later process, or used before the machine was booted, is another process.
    assert dataclasses.replace(HERE, started="boot/1").known_dead()


def test_of_a_process_elsewhere_nobody_can_tell():
    assert not dataclasses.replace(dead_owner(), host="another-machine").known_dead()


def test_a_zombie_counts_as_dead():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(child.pid) == ""
    child.wait()


def test_of_many_that_claim_at_once_one_wins(track: Track):
    run_dir = track.directory("race")

    def attempt(over):
        def one(number: int) -> int:
            try:
                return claim(run_dir, dataclasses.replace(HERE, flow_run=f"{number}"), over).term
            except RunIsDriven:
                return 0

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return sorted(pool.map(one, range(8)))

    assert attempt(None) == [0] * 7 + [1]
    assert attempt(observe(run_dir)) == [0] * 7 + [2]


def test_who_lost_the_run_notices_before_it_acts(track: Track):
    run_dir = track.directory("lost")
    first = claim(run_dir, HERE, None)
    first.check()
    first.beat()
    second = claim(run_dir, dataclasses.replace(HERE, flow_run="other"), observe(run_dir))
    for action in (first.check, first.beat, first.release):
        with pytest.raises(ControllerLost, match="another process drives this run now"):
            action()
    second.check()
    second.release()
    seen = observe(run_dir)
    assert seen is not None
    assert (seen[0].released, seen[0].term, seen[0].owner.flow_run) == (True, 2, "other")


def test_a_beat_that_is_on_its_way_does_not_spoil_the_release(track: Track, monkeypatch: pytest.MonkeyPatch):
    controller = claim(track.directory("leaving"), HERE, None)
    written, go_on, write = threading.Event(), threading.Event(), objects.compare_and_set

    def slowly(url: str, data: bytes, generation: int) -> int:
        generation = write(url, data, generation)
        written.set()
        assert go_on.wait(10)
        return generation

    monkeypatch.setattr(objects, "compare_and_set", slowly)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        beat = pool.submit(controller.beat)
        assert written.wait(10)
        release = pool.submit(controller.release)
        time.sleep(0.1)  # a release that did not wait for the beat would be written by now
        go_on.set()
        beat.result()
        release.result()
    seen = observe(track.directory("leaving"))
    assert seen is not None
    assert (seen[0].released, seen[0].beats) == (True, 1)


@pytest.mark.parametrize("junk", [b"", b"{}", b"[]", b'{"owner": 1}'])
async def test_a_damaged_statement_is_one_clear_error_and_ends_the_tenure(track: Track, junk: bytes):
    run_dir = track.directory("junk")
    controller = claim(run_dir, HERE, None)
    files.write(f"{run_dir}/controller.json", junk)
    with pytest.raises(MalformedController, match="cannot be understood"):
        observe(run_dir)
    tenure = Tenure(controller, run_dir, SystemClock(), print)
    tenure.start()
    with pytest.raises(MalformedController, match="cannot be understood"):
        await tenure.pause(30)


async def test_a_living_driver_is_seen_and_left_alone(track: Track):
    run_dir = track.directory("driven")
    other = claim(run_dir, ELSEWHERE, None)
    heard: list[str] = []

    def report(text: str) -> None:
        heard.append(text)
        other.beat()

    with pytest.raises(RunIsDriven, match="driven by process 1 on another-machine, term 1 and alive"):
        await become_controller(run_dir, HERE, False, SystemClock(), report)
    assert heard == ["driven by process 1 on another-machine, term 1; looking for 20 s whether it lives"]


async def test_a_silent_driver_is_replaced(track: Track):
    run_dir = track.directory("silent")
    claim(run_dir, ELSEWHERE, None)

    class Quick(SystemClock):
        """Each pause passes at once, as seen by the one who waits."""

        passed = 0.0

        def monotonic(self) -> float:
            return self.passed

        async def sleep(self, seconds: float) -> None:
            self.passed += seconds

    heard: list[str] = []
    controller = await become_controller(run_dir, HERE, False, Quick(), heard.append)
    assert controller.term == 2
    assert "was silent for 20 s" in heard[-1]


async def test_a_dead_driver_is_replaced_at_once(track: Track):
    run_dir = track.directory("dead")
    claim(run_dir, dead_owner(), None)
    heard: list[str] = []
    assert (await become_controller(run_dir, HERE, False, SystemClock(), heard.append)).term == 2
    assert "its last driver is dead" in heard[0]


async def test_a_run_whose_controller_was_deleted_goes_on_at_the_next_term(track: Track):
    run = track.numpy_run("headless", steps=4, checkpoints={"every": 4})
    for term in (1, 2):
        async with track.driving(run):
            assert (observe(track.directory("headless")) or [None])[0].term == term
    files.remove([f"{track.directory('headless')}/controller.json"])
    await track.train(run)
    assert (observe(track.directory("headless")) or [None])[0].term == 3
    assert track.fence("headless").newest().step == 4
