"""Gangs on emulated hosts: started together, followed through broken connections, ended and confirmed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
import urllib.parse
import urllib.request

import pytest

from tests.hosts.conftest import Slice, eventually
from tpu.emulator.emulator import Emulator
from tpu.hosts.address import HostAddress
from tpu.hosts.errors import GangStartFailed
from tpu.hosts.gang import (
    Beat,
    Event,
    Exit,
    GangSpec,
    HostSignal,
    Log,
    Lost,
    Notice,
    end_gang,
    end_hosts,
    follow_gang,
    gang_status,
    start_gang,
)
from tpu.hosts.group import HostGroup

FOREVER = "echo up $W; while :; do sleep 1000; done"


async def followed(group: HostGroup, spec: GangSpec) -> list[HostSignal]:
    return [signal async for signal in follow_gang(group, spec) if not isinstance(signal, Beat)]


def lines(signals: list[HostSignal]) -> list[tuple[int, str]]:
    return sorted((signal.host.index, signal.line) for signal in signals if isinstance(signal, Log))


@contextlib.asynccontextmanager
async def running(pair: Slice, spec: GangSpec):
    """A started gang that has said that it is up, its connections, and its signals from then on."""
    async with pair.connect() as group:
        await start_gang(group, spec)
        async with contextlib.aclosing(follow_gang(group, spec, silence_s=3)) as signals:
            up: set[HostAddress] = set()
            while len(up) < len(group.members):
                signal = await anext(signals)
                if isinstance(signal, Log) and signal.line.startswith("up"):
                    up.add(signal.host)
            yield group, signals


class TestStartAndFollow:
    async def test_both_hosts_run_and_their_lines_events_and_exits_come(self, pair: Slice) -> None:
        spec = pair.gang('echo hello $W; echo "{\\"event\\": \\"w$W\\"}" >> $RELAY_EVENTS; exit $W')
        async with pair.connect() as group:
            await start_gang(group, spec)
            signals = await followed(group, spec)
            status = await gang_status(group, spec)
        assert lines(signals) == [(0, "hello 0"), (1, "hello 1")]
        assert sorted(s.record["event"] for s in signals if isinstance(s, Event)) == ["w0", "w1"]
        assert sorted((s.host.index, s.code) for s in signals if isinstance(s, Exit)) == [(0, 0), (1, 1)]
        assert [(s.state, s.exit.code if s.exit else None) for s in status] == [("exited", 0), ("exited", 1)]

    async def test_a_gang_outlives_its_connections_and_is_found_again(self, pair: Slice) -> None:
        spec = pair.gang(FOREVER)
        async with pair.connect() as group:
            await start_gang(group, spec)
        async with pair.connect() as group:
            await start_gang(group, spec)
            assert [s.state for s in await gang_status(group, spec)] == ["running", "running"]
            assert (await group.run("pgrep -fc 'echo [u]p'"))[0].stdout.strip() in ("1", "2")
            assert await end_gang(group, spec, 0)

    async def test_a_part_that_cannot_start_ends_the_others(self, pair: Slice, emulator: Emulator) -> None:
        spec = pair.gang(FOREVER)
        async with pair.connect() as group:
            # Host 1 has seen a newer attempt: this one is over there.
            await group.members[1].run(
                "mkdir -p .relay/runs/r/2 && echo '{}' > .relay/runs/r/2/supervisor.json"
            )
            with pytest.raises(
                GangStartFailed, match="pair-w1: attempt 2 of this run was started here"
            ) as caught:
                await start_gang(group, spec)
            assert caught.value.unconfirmed == {}
            assert [s.state for s in await gang_status(group, spec)] != ["running", "running"]
            assert (await group.run("pgrep -f 'echo [u]p'"))[0].stdout == ""

    async def test_a_gang_that_was_ended_before_it_started_never_starts(self, pair: Slice) -> None:
        spec = pair.gang(FOREVER)
        async with pair.connect() as group:
            assert await end_gang(group, spec, 0)
            with pytest.raises(GangStartFailed, match="never started again"):
                await start_gang(group, spec)
            assert [s.state for s in await gang_status(group, spec)] == ["absent", "absent"]

    async def test_every_host_needs_an_environment(self, pair: Slice) -> None:
        spec = dataclasses.replace(pair.gang(FOREVER), environments={})
        async with pair.connect() as group:
            with pytest.raises(ValueError, match="pair-w0, pair-w1"):
                await start_gang(group, spec)

    def test_O7_a_secret_in_the_command_line_is_refused(self) -> None:
        with pytest.raises(ValueError, match="environment"):
            GangSpec("r", 1, argv=["curl", "-H", "token: hunter2"], secrets=["hunter2"])

    @pytest.mark.parametrize(("run", "attempt"), [("../x", 1), ("", 1), ("a b", 1), ("a", -1)])
    def test_a_run_or_attempt_that_is_no_name_is_refused(self, run: str, attempt: int) -> None:
        with pytest.raises(ValueError, match="a gang has"):
            GangSpec(run, attempt)


class TestBrokenConnections:
    async def test_following_again_misses_and_repeats_no_line(self, pair: Slice) -> None:
        spec = pair.gang(
            'for i in $(seq 400); do echo $i; echo "{\\"event\\": $i}" >> $RELAY_EVENTS; sleep 0.01; done'
        )
        offsets = {host: [0, 0] for host in pair.hosts}
        seen: dict[HostAddress, list[str]] = {host: [] for host in pair.hosts}
        events: dict[HostAddress, list[int]] = {host: [] for host in pair.hosts}
        exits: set[HostAddress] = set()
        async with pair.connect() as group:
            await start_gang(group, spec)
        breaks = 0
        while len(exits) < 2:
            async with pair.connect() as group:
                known = {host: (log, event) for host, (log, event) in offsets.items()}
                async with contextlib.aclosing(follow_gang(group, spec, known)) as signals:
                    async for signal in signals:
                        match signal:
                            case Log(host, line, offset):
                                seen[host].append(line)
                                offsets[host][0] = offset
                            case Event(host, record, offset):
                                events[host].append(record["event"])
                                offsets[host][1] = offset
                            case Exit(host):
                                exits.add(host)
                            case Lost(host):
                                break
                        if breaks < 2 and len(seen[pair.hosts[0]]) > 100 * (breaks + 1):
                            await asyncio.to_thread(pair.emulator.kill_ssh, pair.name, breaks)
                            breaks += 1
        assert breaks == 2
        for host in pair.hosts:
            assert seen[host] == [str(i) for i in range(1, 401)]
            assert events[host] == list(range(1, 401))

    async def test_a_dropped_connection_is_known_within_two_seconds(self, pair: Slice) -> None:
        async with running(pair, pair.gang(FOREVER)) as (group, signals):
            begun = time.monotonic()
            await asyncio.to_thread(pair.emulator.kill_ssh, pair.name, 1)
            lost = await _next(signals, Lost)
            assert time.monotonic() - begun < 2
            assert (lost.host.index, lost.final) == (1, False)
        async with pair.connect() as group:
            assert [s.state for s in await gang_status(group, pair.gang(FOREVER))] == ["running", "running"]

    async def test_G8_a_hung_host_is_lost_after_its_silence(self, pair: Slice) -> None:
        async with running(pair, pair.gang(FOREVER)) as (_, signals):
            await asyncio.to_thread(pair.emulator.hang_host, pair.name, 0)
            lost = await _next(signals, Lost, within_s=8)
            assert (lost.host.index, lost.reason) == (0, "silent for 3 s")
            await asyncio.to_thread(pair.emulator.resume_host, pair.name, 0)

    async def test_P3_a_killed_host_is_lost_and_the_other_goes_on(self, pair: Slice) -> None:
        async with running(pair, pair.gang(FOREVER)) as (group, signals):
            await asyncio.to_thread(pair.emulator.kill_host, pair.name, 1)
            assert (await _next(signals, Lost)).host.index == 1
            ended = await end_hosts(group, pair.gang(FOREVER), 0)
            assert [host.index for host in ended.confirmed] == [0]
            assert [host.index for host in ended.unconfirmed] == [1]
            assert [s.state for s in await gang_status(group, pair.gang(FOREVER))] == ["exited", "unknown"]

    async def test_a_slow_reader_is_not_a_silent_host(self, pair: Slice) -> None:
        spec = pair.gang("seq 20000")
        async with pair.connect() as group:
            await start_gang(group, spec)
            signals: list[HostSignal] = []
            async for signal in follow_gang(group, spec, silence_s=2.5):
                if len(signals) == 10:
                    await asyncio.sleep(4)  # the reader's own time, which this test is about
                signals.append(signal)
        assert not any(isinstance(signal, Lost) for signal in signals)
        assert len(lines(signals)) == 40_000


class TestEnd:
    async def test_who_is_told_to_end_has_its_grace(self, pair: Slice) -> None:
        spec = pair.gang("trap 'sleep 0.3; echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done")
        async with running(pair, spec) as (group, signals):
            assert await end_gang(group, spec, 20)
            rest = [signal async for signal in signals]
        assert [s.line for s in rest if isinstance(s, Log)].count("saved") == 2
        assert [s.code for s in rest if isinstance(s, Exit)] == [0, 0]

    async def test_who_ignores_it_is_killed_on_both_hosts(self, pair: Slice, emulator: Emulator) -> None:
        spec = pair.gang("trap '' TERM; (setsid bash -c 'trap \"\" TERM; sleep 1000' &); " + FOREVER)
        before = set(await asyncio.to_thread(emulator.processes))
        async with running(pair, spec) as (group, _):
            ended = await end_hosts(group, spec, 0.2)
            assert len(ended.confirmed) == 2
            await eventually(
                lambda: not set(emulator.processes()) - before, "only the hosts' own processes are left"
            )

    async def test_G6_another_run_on_the_same_hosts_goes_on(self, pair: Slice) -> None:
        other = pair.gang(FOREVER, run="other")
        async with running(pair, pair.gang(FOREVER)) as (group, _):
            await start_gang(group, other)
            assert await end_gang(group, pair.gang(FOREVER), 0)
            assert [s.state for s in await gang_status(group, other)] == ["running", "running"]

    async def test_G7_the_next_attempt_finds_the_last_one_gone(self, pair: Slice) -> None:
        async with running(pair, pair.gang("trap '' TERM; " + FOREVER, attempt=1)) as (group, signals):
            second = pair.gang("pgrep -fa '[e]cho up' | grep -v second; echo second; exit 0", attempt=2)
            await start_gang(group, second)
            assert {s.signal for s in [await _next(signals, Exit), await _next(signals, Exit)]} == {9}
            assert [s.state for s in await gang_status(group, pair.gang(FOREVER))] == ["exited", "exited"]


class TestPreemption:
    async def test_P8_a_notice_comes_with_time_to_save(self, pair: Slice) -> None:
        spec = pair.gang("trap 'echo saving; exit 75' TERM; echo up; while :; do sleep 0.05; done")
        async with running(pair, spec) as (_, signals):
            await asyncio.to_thread(pair.emulator.preempt, pair.name, True)
            rest = [signal async for signal in signals]
        assert {s.source for s in rest if isinstance(s, Notice)} == {"metadata server: preempted"}
        assert [s.code for s in rest if isinstance(s, Exit)] == [75, 75]
        assert [s.line for s in rest if isinstance(s, Log)].count("saving") == 2

    async def test_O6_O7_last_words_are_in_the_bucket_and_no_secret(self, pair: Slice) -> None:
        target = f"{pair.connection.bucket}/runs/r/logs/1"
        spec = pair.gang("echo last words $TOKEN; exit 1", log_target=target, secrets=["hunter2-of-the-lab"])
        environments = {host: {"TOKEN": "hunter2-of-the-lab"} for host in pair.hosts}
        async with pair.connect() as group:
            await start_gang(group, dataclasses.replace(spec, environments=environments))
            signals = await followed(group, spec)
        assert lines(signals) == [(0, "last words ***"), (1, "last words ***")]
        for host in pair.hosts:
            name = f"runs/r/logs/1/{host.name}-000000.log"
            assert await asyncio.to_thread(_stored, pair.connection.bucket, name) == b"last words ***\n"


def _stored(bucket: str, name: str) -> bytes:
    quoted = urllib.parse.quote(name, safe="")
    url = f"{os.environ['STORAGE_EMULATOR_HOST']}/storage/v1/b/{bucket.removeprefix('gs://')}/o/{quoted}?alt=media"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


async def _next(signals, kind, within_s: float = 15.0):
    """The next signal of a kind."""
    async with asyncio.timeout(within_s):
        async for signal in signals:
            if isinstance(signal, kind):
                return signal
    raise AssertionError(f"the stream ended before a {kind.__name__}")
