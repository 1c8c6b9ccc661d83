"""The coordinator: hears members, decides by `rules`, tells them their tables. Small enough to lose.

It holds no file. When it is lost, members go on to the end of their last table and connect to the next coordinator,
which rebuilds what it needs from what they tell it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from tpu.elastic import hearing
from tpu.elastic.control import BEAT_S
from tpu.elastic.frames import HEADER_BYTES, JSON_MOST, Kind, json_frame, unpack
from tpu.elastic.rules import Evicted, Options, Phase, State, decide
from tpu.elastic.table import Table

# How often rules are asked when nobody says anything.
TICK_S = 0.05


class Coordinator:
    """Serves members on an open `server`. `event` is told of each member that comes in or goes out, and why.

    Members have to name `key`, and agree with the first of them in their `facts` (libraries, chips, sizes).
    """

    def __init__(
        self,
        options: Options,
        key: str,
        event: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Identities of an earlier coordinator are not given again.
        self.state = State(next_id=secrets.randbelow(1 << 20) << 10)
        self.reason = ""
        self._options, self._key, self._event, self._clock = options, key, event, clock
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._addresses: dict[int, list[list[object]]] = {}
        self._facts: Mapping[str, str] | None = None
        self._told_version = -1

    @property
    def connected(self) -> int:
        """How many members are connected."""
        return len(self._writers)

    async def serve(self, host: str, port: int, ready: Callable[[int], None] = lambda port: None) -> None:
        """Until cancelled. `ready` is told the port, which is chosen when `port` is 0."""
        server = await asyncio.start_server(self._connected, host, port)
        ready(server.sockets[0].getsockname()[1])
        async with server:
            beaten_at = self._clock()
            while True:
                self._decide()
                if self._clock() - beaten_at >= BEAT_S:
                    beaten_at = self._clock()
                    for member_writer in self._writers.values():
                        _say(member_writer, {"beat": True})
                await asyncio.sleep(TICK_S)  # what is only a matter of time: silence, forming, no progress

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member: int | None = None
        try:
            member = self._greet(await _receive(reader), writer)
            while member is not None:
                report = await _receive(reader)
                self.state = hearing.reported(self.state, self._clock(), member, report)
                self._decide()
        except asyncio.CancelledError:
            pass  # the coordinator ends, and with it the connection
        except (OSError, asyncio.IncompleteReadError, ValueError, KeyError, TypeError):
            pass  # the connection ended, or what came over it was none of ours: the rules decide what follows
        finally:
            if member is not None and self._writers.get(member) is writer:
                del self._writers[member]
                self.state = hearing.closed(self.state, self._clock(), member)
                self._decide()
            writer.close()

    def _greet(self, hello: Mapping[str, Any], writer: asyncio.StreamWriter) -> int | None:
        """The identity of who has just connected; None if it is refused, and told why."""
        if not hmac.compare_digest(str(hello["key"]), self._key):
            return _say(writer, {"out": "the key is not this run's"})
        name, now = str(hello["slice"]), self._clock()
        why = self._refused(name, hello["facts"])
        if why is not None:
            bad = name in self.state.quarantined
            return _say(writer, {"out": why, "final": True, "bad": bad, "differs": not bad})
        if hello["id"] is None:
            for old in [m for m in self.state.members.values() if m.slice == name]:
                self.state = hearing.closed(self.state, now - self._options.reconnect_s - 1, old.id)
            self.state, member = hearing.joined(self.state, now, name)
            self._event("joins", member=member, slice=name)
        else:
            member = int(hello["id"])
            tables = [Table.from_json(table) for table in hello["tables"]]
            term, version = hello["told"]
            back = hearing.returned(
                self.state, now, member, name, int(hello["step"]), (term, version), tables,
                {int(i): str(slice_name) for i, slice_name in hello.get("names", {}).items()},
            )  # fmt: skip
            if back is None:
                return _say(writer, {"out": "it was given up while it was away"})
            self.state = back
        self._facts = hello["facts"]
        self._writers[member], self._addresses[member] = writer, hello["addresses"]
        _say(writer, {"welcome": member})
        _say(writer, self._told())
        self._told_version = -1
        self._decide()
        return member

    def _refused(self, name: str, facts: Mapping[str, str]) -> str | None:
        if name in self.state.quarantined:
            return f"{name} is in quarantine: {self.state.quarantined[name]}"
        if self._facts is None or not self.state.members:
            return None
        differing = [k for k in sorted({*facts, *self._facts}) if facts.get(k) != self._facts.get(k)]
        if not differing:
            return None
        told = ", ".join(f"{k} is {facts.get(k)} there and {self._facts.get(k)} here" for k in differing)
        return f"{name} would compute other bits: {told}"

    def _decide(self) -> None:
        before = self.state
        decision = decide(self._clock(), before, self._options)
        self.state = decision.state
        for out in decision.evicted:
            self._evict(out)
        for member in self.state.members.values():
            was = before.members.get(member.id)
            if member.phase is Phase.IN and was is not None and was.phase is not Phase.IN:
                first = next(t.first for t in self.state.tables if member.id in t.members)
                self._event("takes part", member=member.id, slice=member.slice, step=first)
        if decision.reason and decision.reason != self.reason:
            self._event("decided", reason=decision.reason)
        self.reason = decision.reason or self.reason
        if self.state.version != self._told_version:
            self._told_version = self.state.version
            told = self._told()
            for writer in self._writers.values():
                _say(writer, told)

    def _evict(self, out: Evicted) -> None:
        self._event("is out", member=out.id, slice=out.slice, step=out.step, reason=out.why)
        writer = self._writers.pop(out.id, None)
        self._addresses.pop(out.id, None)
        if writer is not None:
            _say(writer, {"out": out.why, "final": out.final, "bad": out.quarantined})
            writer.close()

    def _told(self) -> dict[str, Any]:
        return {
            "told": [self.state.term, self.state.version],
            "tables": [table.to_json() for table in self.state.tables],
            "addresses": {str(i): address for i, address in self._addresses.items()},
            "names": {str(member.id): member.slice for member in self.state.members.values()},
            "committed": self.state.committed,
        }


def _say(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    header, body = json_frame(message)
    writer.write(header.pack() + body)


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    header = unpack(await reader.readexactly(HEADER_BYTES))
    if header.kind != Kind.JSON or header.size > JSON_MOST:
        raise ValueError("no message of ours")
    return json.loads(await reader.readexactly(header.size))


async def run(options: Options, key: str, host: str, port: int, event: Callable[..., None]) -> None:
    """A coordinator for as long as it is not cancelled."""
    coordinator = Coordinator(options, key, event)
    with contextlib.suppress(asyncio.CancelledError):
        await coordinator.serve(host, port)
