"""One verdict a gang, by the first cause, over the evidence of every host."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.slices.condition import Condition, LifeView
from tpu.slices.log_clues import Clue, first_clue, is_mistake
from tpu.slices.verdict import Evidence, HostEvidence, VerdictKind, give_verdict, needs_the_cloud

K = VerdictKind

WELL = LifeView(Condition.READY_HEALTHY, "the node is READY")
TAKEN = LifeView(Condition.LOST, "the node is PREEMPTED", preempted=True)
BROKEN = LifeView(Condition.LOST, "the node is READY but TIMEOUT")
REPAIRED = LifeView(Condition.RECOVERING, "the node is REPAIRING")
UNKNOWN = LifeView(Condition.UNKNOWN, "cloud not reachable")

VALUE_ERROR = (
    "step 10 loss 3.2",
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in <module>',
    '    raise ValueError("heads must divide width")  # barrier timed out, Socket closed',
    "ValueError: heads must divide width",
)
SOCKET_CLOSED = (
    "Traceback (most recent call last):",
    '  File "train.py", line 30, in <module>',
    "    loss.block_until_ready()",
    "jaxlib._jax.XlaRuntimeError: UNAVAILABLE: Socket closed",
)
BARRIER = (
    "E1129 12:00:00.000000 coordination_service_agent.cc:700] Barrier error: DEADLINE_EXCEEDED: "
    "Barrier timed out. Id: PjRT_Client_Connect::0",
)
BUSY = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "RuntimeError: Unable to initialize backend 'tpu': open(/dev/vfio/0): Device or resource busy",
)
# A crashed process of a multi-host job shuts its peers' connections down while it goes, and says so.
VALUE_ERROR_THEN_BARRIER = (*VALUE_ERROR, *BARRIER)


def host(index: int = 0, **evidence: object) -> HostEvidence:
    return HostEvidence(host=f"host {index}", **evidence)  # type: ignore[arg-type]


def kind(*hosts: HostEvidence, condition: LifeView | None = WELL, **evidence: object) -> VerdictKind:
    return give_verdict(Evidence(hosts, condition, **evidence)).kind  # type: ignore[arg-type]


TABLE = [
    # what happened, hosts, the cloud's word, verdict, host it began at, slice usable
    ("all exit 0", [host(exit_code=0), host(1, exit_code=0)], WELL, K.FINISHED, None, True),
    ("all exit 0, then preempted", [host(exit_code=0)], TAKEN, K.FINISHED, None, False),
    ("exit 1", [host(exit_code=1, last_lines=VALUE_ERROR)], WELL, K.USER_FAILURE, "host 0", True),
    ("exit 2 without a word", [host(exit_code=2)], WELL, K.USER_FAILURE, "host 0", True),
    ("segmentation fault", [host(signal=11)], WELL, K.USER_FAILURE, "host 0", True),
    ("segmentation fault under a shell", [host(exit_code=139)], WELL, K.USER_FAILURE, "host 0", True),
    ("exit 0 after notice", [host(exit_code=0, noticed=True)], WELL, K.PREEMPTED, "host 0", False),
    ("exit 0 after notice, preempted", [host(exit_code=0, noticed=True)], TAKEN, K.PREEMPTED, None, False),
    ("exit 1, slice preempted", [host(exit_code=1, last_lines=VALUE_ERROR)], TAKEN, K.PREEMPTED, None, False),
    ("exit 1, on-demand node broken", [host(exit_code=1)], BROKEN, K.INFRASTRUCTURE, None, False),
    ("exit 1, on-demand node under repair", [host(exit_code=1)], REPAIRED, K.INFRASTRUCTURE, None, False),
    ("exit 1, cloud unknown", [host(exit_code=1)], UNKNOWN, K.INFRASTRUCTURE, "host 0", False),
    ("exit 1, cloud not asked", [host(exit_code=1)], None, K.INFRASTRUCTURE, "host 0", False),
    ("exit 75 after notice", [host(exit_code=75, noticed=True)], WELL, K.PREEMPTED, "host 0", False),
    ("exit 1 after notice", [host(exit_code=1, noticed=True)], UNKNOWN, K.PREEMPTED, "host 0", False),
    ("killed after notice", [host(signal=9, noticed=True)], WELL, K.PREEMPTED, "host 0", False),
    ("exit 75 without notice", [host(exit_code=75)], WELL, K.INFRASTRUCTURE, "host 0", False),
    ("exit 75 without notice, preempted", [host(exit_code=75)], TAKEN, K.PREEMPTED, None, False),
    ("exit 76, fenced out", [host(exit_code=76)], WELL, K.INFRASTRUCTURE, "host 0", True),
    ("exit 76, cloud unknown", [host(exit_code=76)], UNKNOWN, K.INFRASTRUCTURE, "host 0", False),
    ("killed", [host(signal=9)], WELL, K.INFRASTRUCTURE, "host 0", True),
    ("killed under a shell", [host(exit_code=137)], WELL, K.INFRASTRUCTURE, "host 0", True),
    ("lost", [host(lost="connection dropped")], WELL, K.INFRASTRUCTURE, "host 0", False),
    ("lost, cloud unknown", [host(lost="silent for 15 s")], UNKNOWN, K.INFRASTRUCTURE, "host 0", False),
    ("lost, slice preempted", [host(lost="connection dropped")], TAKEN, K.PREEMPTED, None, False),
    ("chips busy", [host(exit_code=1, last_lines=BUSY)], WELL, K.INFRASTRUCTURE, "host 0", False),
    (
        "its own words about a socket, with no peer",
        [host(exit_code=1, last_lines=SOCKET_CLOSED)],
        WELL,
        K.USER_FAILURE,
        "host 0",
        True,
    ),
    (
        "one raises, the other falls by it, and is seen first",
        [
            host(0, exit_code=1, last_lines=SOCKET_CLOSED, at_s=1.0),
            host(1, exit_code=1, last_lines=VALUE_ERROR, at_s=1.5),
        ],
        WELL,
        K.USER_FAILURE,
        "host 1",
        True,
    ),
    (
        "one raises, and its shutdown barrier fails after that",
        [
            host(0, exit_code=1, last_lines=VALUE_ERROR_THEN_BARRIER, at_s=1.0),
            host(1, signal=6, last_lines=BARRIER, at_s=1.1),
        ],
        WELL,
        K.USER_FAILURE,
        "host 0",
        True,
    ),
    (
        "a host is lost, the survivor exits 1",
        [
            host(0, exit_code=1, last_lines=SOCKET_CLOSED, at_s=1.0),
            host(1, lost="silent for 15 s", at_s=16.0),
        ],
        WELL,
        K.INFRASTRUCTURE,
        "host 1",
        False,
    ),
    (
        "a host is killed, the survivor exits 1",
        [host(0, exit_code=1, last_lines=BARRIER, at_s=1.0), host(1, signal=9, at_s=1.2)],
        WELL,
        K.INFRASTRUCTURE,
        "host 1",
        True,
    ),
    (
        "all fall by each other",
        [host(0, exit_code=1, last_lines=SOCKET_CLOSED), host(1, exit_code=1, last_lines=BARRIER)],
        WELL,
        K.INFRASTRUCTURE,
        "host 0",
        False,
    ),
    (
        "one raises, the rest is ended by us",
        [host(0, exit_code=1, last_lines=VALUE_ERROR), host(1, signal=9, ended_by_us=True)],
        WELL,
        K.USER_FAILURE,
        "host 0",
        True,
    ),
    (
        "chips of one host busy, its peer waits in vain",
        [host(0, exit_code=1, last_lines=BARRIER, at_s=2.0), host(1, exit_code=1, last_lines=BUSY, at_s=1.0)],
        WELL,
        K.INFRASTRUCTURE,
        "host 1",
        False,
    ),
    (
        "notice on one host, the other exits 1",
        [host(0, exit_code=1, last_lines=SOCKET_CLOSED), host(1, exit_code=75, noticed=True)],
        WELL,
        K.PREEMPTED,
        "host 1",
        False,
    ),
    ("nobody says anything", [host()], WELL, K.INFRASTRUCTURE, None, False),
    ("no hosts", [], WELL, K.INFRASTRUCTURE, None, False),
]


@pytest.mark.parametrize(
    ("hosts", "condition", "expected", "begins_at", "usable"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_the_table(
    hosts: list[HostEvidence],
    condition: LifeView | None,
    expected: VerdictKind,
    begins_at: str | None,
    usable: bool,
) -> None:
    verdict = give_verdict(Evidence(tuple(hosts), condition))
    assert (verdict.kind, verdict.host, verdict.slice_usable) == (expected, begins_at, usable)
    assert not verdict.final
    assert verdict.slice_recovers == (condition is REPAIRED)
    assert len(verdict.evidence) == 1 + len(hosts)


def test_P4_the_cloud_is_asked_before_the_users_code_is_blamed() -> None:
    failed = host(exit_code=1, last_lines=VALUE_ERROR)
    assert kind(failed, condition=TAKEN) is K.PREEMPTED
    assert kind(failed, condition=UNKNOWN) is not K.USER_FAILURE
    assert kind(failed, condition=WELL) is K.USER_FAILURE
    assert needs_the_cloud(Evidence((failed,), UNKNOWN))
    assert not needs_the_cloud(Evidence((failed,), WELL))
    assert not needs_the_cloud(Evidence((host(exit_code=0),), UNKNOWN))


def test_P5_a_survivor_that_exits_1_does_not_make_a_user_failure() -> None:
    survivor = host(0, exit_code=1, last_lines=SOCKET_CLOSED, at_s=0.1)
    assert kind(survivor, host(1, lost="connection dropped", at_s=2.0)) is K.INFRASTRUCTURE
    assert kind(survivor, host(1, lost="connection dropped", at_s=2.0), condition=TAKEN) is K.PREEMPTED
    verdict = give_verdict(Evidence((survivor, host(1, signal=9)), WELL))
    assert verdict.host == "host 1"
    assert any("Socket closed" in line for line in verdict.evidence)


def test_V10_busy_chips_are_no_user_failure_and_the_slice_is_replaced() -> None:
    verdict = give_verdict(Evidence((host(exit_code=1, last_lines=BUSY),), WELL))
    assert (verdict.kind, verdict.slice_usable) == (K.INFRASTRUCTURE, False)
    assert "busy" in verdict.reason


def test_chips_that_do_not_work_are_no_user_failure_either() -> None:
    lines = ("RuntimeError: TPU initialization failed: No ba16c7433 device found.",)
    verdict = give_verdict(Evidence((host(exit_code=1, last_lines=lines),), WELL))
    assert (verdict.kind, verdict.slice_usable) == (K.INFRASTRUCTURE, False)
    assert "ba16c7433" in verdict.reason


def test_P11_the_end_of_a_slices_life_is_a_preemption_whatever_the_program_makes_of_it() -> None:
    for ended in (host(exit_code=0), host(exit_code=75), host(exit_code=1), host(signal=15), host(lost="x")):
        verdict = give_verdict(Evidence((ended,), WELL, life_over="24 h end in 300 s"))
        assert (verdict.kind, verdict.slice_usable) == (K.PREEMPTED, False)
        assert "24 h end in 300 s" in verdict.reason
        assert any("24 h" in line for line in verdict.evidence)
    done = Evidence((host(exit_code=0),), WELL, life_over="24 h end in 300 s", finished=True)
    assert give_verdict(done).kind is K.FINISHED


def test_P10_a_node_under_repair_is_worth_waiting_for_and_a_lost_one_is_not() -> None:
    gone_dark = host(lost="connection dropped")
    repaired = give_verdict(Evidence((gone_dark,), REPAIRED))
    assert (repaired.kind, repaired.slice_recovers) == (K.INFRASTRUCTURE, True)
    broken = give_verdict(Evidence((gone_dark,), BROKEN))
    assert (broken.kind, broken.slice_recovers) == (K.INFRASTRUCTURE, False)


def test_G8_a_gang_without_progress_is_infrastructure() -> None:
    verdict = give_verdict(Evidence((host(), host(1)), WELL, stalled="no step for 600 s"))
    assert (verdict.kind, verdict.slice_usable) == (K.INFRASTRUCTURE, False)
    assert "no step for 600 s" in verdict.reason


def test_C10_divergence_is_final_since_it_would_come_again() -> None:
    failed = host(exit_code=1, last_lines=("DivergedError: loss is nan at step 120",))
    verdict = give_verdict(Evidence((failed,), WELL, diverged="loss nan at step 120"))
    assert (verdict.kind, verdict.final) == (K.USER_FAILURE, True)
    assert "step 120" in verdict.reason


def test_O8_the_users_error_is_in_the_reason() -> None:
    verdict = give_verdict(Evidence((host(exit_code=1, last_lines=VALUE_ERROR),), WELL))
    assert "ValueError: heads must divide width" in verdict.reason


def test_a_stop_is_a_stop_whatever_the_program_makes_of_it() -> None:
    for ended in (host(exit_code=0), host(exit_code=1), host(signal=15), host(exit_code=75), host(lost="x")):
        assert kind(ended, stop_wanted="by the user") is K.CANCELLED
        assert kind(ended, condition=TAKEN, stop_wanted="by the user") is K.CANCELLED
    assert kind(host(exit_code=0), stop_wanted="by the user", finished=True) is K.FINISHED


def test_a_program_that_leaves_before_its_last_commit_is_not_finished() -> None:
    assert kind(host(exit_code=0), finished=False) is K.USER_FAILURE
    assert kind(host(exit_code=0), finished=False, condition=UNKNOWN) is K.INFRASTRUCTURE
    assert kind(host(exit_code=0), finished=False, condition=TAKEN) is K.PREEMPTED
    assert kind(host(exit_code=0, noticed=True), finished=True) is K.FINISHED


def test_one_host_that_is_done_does_not_finish_a_gang() -> None:
    assert kind(host(exit_code=0), host(1, exit_code=1, last_lines=VALUE_ERROR)) is K.USER_FAILURE
    assert kind(host(exit_code=0), host(1, lost="connection dropped")) is K.INFRASTRUCTURE
    assert kind(host(exit_code=0), host(1)) is K.INFRASTRUCTURE


hosts = st.builds(
    HostEvidence,
    host=st.sampled_from(["host 0", "host 1", "host 2"]),
    exit_code=st.sampled_from([None, 0, 1, 2, 75, 134, 137, 255]),
    signal=st.sampled_from([None, None, 6, 9, 11, 15, 60]),
    ended_by_us=st.booleans(),
    noticed=st.booleans(),
    lost=st.sampled_from([None, None, "connection dropped"]),
    at_s=st.one_of(st.none(), st.floats(0, 100)),
    last_lines=st.sampled_from([(), VALUE_ERROR, SOCKET_CLOSED, BARRIER, BUSY, ("hello",)]),
)
evidences = st.builds(
    Evidence,
    st.lists(hosts, max_size=3).map(tuple),
    st.sampled_from([None, WELL, TAKEN, BROKEN, REPAIRED, UNKNOWN]),
    st.sampled_from([None, None, "by the user"]),
    st.sampled_from([None, None, None, "24 h"]),
    st.sampled_from([None, None, "no step"]),
    st.sampled_from([None, None, "loss nan"]),
    st.sampled_from([None, False, True]),
)


@given(evidence=evidences)
def test_there_is_always_one_verdict_with_a_reason(evidence: Evidence) -> None:
    verdict = give_verdict(evidence)
    assert verdict.reason
    if verdict.kind is K.USER_FAILURE and not verdict.final:
        assert evidence.cloud.usable
        assert not any(h.noticed or h.lost for h in evidence.hosts)
    if verdict.slice_usable:
        assert not evidence.cloud.lost
    if verdict.kind is K.FINISHED and not evidence.finished:
        assert evidence.finished is None
        assert all(h.exit_code == 0 and not h.noticed for h in evidence.hosts)
        assert evidence.hosts


@given(evidence=evidences)
def test_a_preemption_is_never_charged_to_anybody(evidence: Evidence) -> None:
    taken = dataclasses.replace(evidence, condition=TAKEN)
    assert give_verdict(taken).kind in (K.PREEMPTED, K.FINISHED, K.CANCELLED)


@pytest.mark.parametrize(
    ("line", "clue"),
    [
        ("open(/dev/vfio/3): Device or resource busy", Clue.CHIPS_BUSY),
        ("/dev/accel0: Device or resource busy", Clue.CHIPS_BUSY),
        ("The TPU is already in use by process with pid 4711.", Clue.CHIPS_BUSY),
        (
            "ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "
            '"$ sudo rm /tmp/libtpu_lockfile".',
            Clue.CHIPS_BUSY,
        ),
        ("The TPU is in use by process 811", Clue.CHIPS_BUSY),
        ("Couldn't open iommu group /dev/vfio/0", Clue.CHIPS_BROKEN),
        ("Failed to open /dev/accel1: No such device", Clue.CHIPS_BROKEN),
        ("INTERNAL: uncorrectable ECC error in HBM of chip 2", Clue.CHIPS_BROKEN),
        ("ICI link 3 of chip 1 is down", Clue.CHIPS_BROKEN),
        ("Couldn't open file /dev/null", None),
        ("UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:…", Clue.PEER_DIED),
        ("Timed out after 1801 seconds waiting for clients. 2/4 clients joined.", Clue.PEER_DIED),
        ("UNAVAILABLE: Socket closed", Clue.PEER_DIED),
        (
            "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.1.2]:40123",
            Clue.PEER_DIED,
        ),
        ("Shutdown barrier in coordination service has failed", Clue.PEER_DIED),
        ("Barrier timed out. Id: save_100", Clue.PEER_DIED),
        ("The following tasks are unhealthy (stopped sending heartbeats): heartbeat timeout", Clue.PEER_DIED),
        ("Terminating process because the JAX distributed service detected fatal errors", Clue.PEER_DIED),
        ("KeyError: 'width'", Clue.OWN_ERROR),
        ("mypackage.errors.BadConfigError: no such field", Clue.OWN_ERROR),
        ("KeyboardInterrupt", Clue.OWN_ERROR),
        ("umount: /data: target is busy", None),
        ("step 100 Error rate: 0.1", None),
        ("loss 1.2 (best 1.1)", None),
        ("passing the barrier at step 100", None),
    ],
)
def test_what_a_line_says(line: str, clue: Clue | None) -> None:
    found = first_clue([line])
    assert (found.clue if found else None) is clue


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("host 0: exit code 1: ModuleNotFoundError: No module named 'flax'", True),
        ("host 0: exit code 1: ValueError: heads must divide width", True),
        ("host 0: exit code 1: RuntimeError: Unable to initialize backend 'tpu'", False),
        ("host 0: exit code 1: OSError: [Errno 28] No space left on device", False),
        ("host 0: killed by SIGSEGV, without a word", False),
    ],
)
def test_which_errors_are_the_programs_on_any_machine(line: str, mistake: bool) -> None:
    assert is_mistake(line) == mistake


def test_source_lines_of_a_traceback_do_not_decide() -> None:
    found = first_clue(VALUE_ERROR)
    assert found is not None
    assert (found.clue, found.line) == (Clue.OWN_ERROR, "ValueError: heads must divide width")
