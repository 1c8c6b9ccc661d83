"""A member's word with the coordinator: what it reports, and the tables it is told. Outlives a lost connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpu.elastic.frames import hang_up, receive_json, send_json, tune
from tpu.elastic.table import Table

Address = tuple[str, int]
# Between two tries to reach the coordinator.
_RETRY_S = 0.2
_CONNECT_S = 2.0
# It says something every BEAT_S. One that is silent for longer is sought anew: its host hangs, or is gone.
BEAT_S, _SILENT_S = 1.0, 5.0
_LAST_REPORT_S = 5.0


@dataclass(frozen=True)
class Report:
    """What a member says of itself. `version` of the tables it has; `step`: steps applied;
    `awaits`: members that it has waited for, for `awaits_s`."""

    version: int
    step: int
    ready: bool
    follows: bool
    unit_s: float | None
    awaits: tuple[int, ...]
    awaits_s: float
    broken: tuple[int, ...]
    hashes: Mapping[str, str]
    committed: int


@dataclass(frozen=True)
class Told:
    """What the coordinator said last. `addresses` are those of each member's hosts."""

    version: tuple[int, int] = (0, -1)
    tables: tuple[Table, ...] = ()
    addresses: Mapping[int, tuple[Address, ...]] | None = None
    committed: int = 0


class Out(Exception):
    """The coordinator has given this member up; `final`: it may not come back either.

    `bad`: its slice has computed other numbers than the others. `differs`: it would, by what it is made of.
    """

    def __init__(self, why: str, final: bool, bad: bool = False, differs: bool = False) -> None:
        super().__init__(why)
        self.final, self.bad, self.differs = final, bad, differs


class Control:
    """Connects, says hello, reports regularly and when poked.

    `coordinator` gives the address where the coordinator is now; `report` is called for each report, `told` for each
    news, in threads of their own. After `out` is set nothing more is heard.
    """

    def __init__(
        self,
        coordinator: Callable[[], Address],
        hello: Mapping[str, Any],
        report: Callable[[], Report],
        told: Callable[[Told], None],
        every_s: float = 0.25,
    ) -> None:
        self.id: int | None = None
        self.out: Out | None = None
        self._coordinator, self._hello, self._report, self._on_told = coordinator, hello, report, told
        self._every_s = every_s
        self._told = Told()
        self._raw_tables: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        self._poked = threading.Event()
        self._known = threading.Event()
        self._closed = False
        self._sock: socket.socket | None = None
        self._reporter: threading.Thread | None = None

    def start(self) -> None:
        threading.Thread(target=self._stay_connected, name="control", daemon=True).start()

    def wait_for_id(self) -> int:
        """This member's identity. Raises Out if the coordinator does not want it."""
        self._known.wait()
        if self.out is not None:
            raise self.out
        assert self.id is not None
        return self.id

    def poke(self) -> None:
        """Report now."""
        self._poked.set()

    def close(self) -> None:
        """Report once more and leave."""
        self._closed = True
        self._poked.set()
        reporter = self._reporter
        if reporter is not None:
            reporter.join(_LAST_REPORT_S)
        self._hang_up()

    def _hang_up(self) -> None:
        sock = self._sock
        if sock is not None:
            hang_up(sock)

    def _stay_connected(self) -> None:
        while not self._closed and self.out is None:
            try:
                with socket.create_connection(self._coordinator(), _CONNECT_S) as sock:
                    self._sock = sock
                    self._talk(sock)
            except (OSError, ValueError):
                time.sleep(_RETRY_S)  # it is away, or another one takes its place: steps go on meanwhile

    def _talk(self, sock: socket.socket) -> None:
        sock.settimeout(_SILENT_S)
        tune(sock)
        version, tables = list(self._told.version), self._raw_tables
        send_json(
            sock,
            {
                **self._hello, "id": self.id, "told": version, "tables": tables, "names": self._names,
                "step": self._report().step,
            },
        )  # fmt: skip
        first = receive_json(sock)
        if "out" in first:
            self._set_out(first)
            return
        self.id = int(first["welcome"])
        self._known.set()
        ended = threading.Event()
        reporter = threading.Thread(target=self._report_all, args=(sock, ended), name="reports", daemon=True)
        self._reporter = reporter
        reporter.start()
        try:
            while True:
                self._hear(receive_json(sock))
                if self.out is not None:
                    return
        finally:
            ended.set()
            self._poked.set()
            reporter.join()

    def _report_all(self, sock: socket.socket, ended: threading.Event) -> None:
        last = False
        while not ended.is_set() and not last:
            last = self._closed
            try:
                report = asdict(self._report())
                send_json(sock, report)
            except OSError:
                self._hang_up()
                return
            if not last:
                self._poked.wait(self._every_s)
            self._poked.clear()

    def _hear(self, message: dict[str, Any]) -> None:
        if "out" in message:
            self._set_out(message)
            return
        if "told" not in message:
            return  # it only lives
        version = (int(message["told"][0]), int(message["told"][1]))
        if version <= self._told.version:
            return
        self._raw_tables, self._names = message["tables"], message["names"]
        addresses = {
            int(i): tuple((str(host), int(port)) for host, port in hosts)
            for i, hosts in message["addresses"].items()
        }
        tables = tuple(Table.from_json(table) for table in self._raw_tables)
        self._told = Told(version, tables, addresses, int(message["committed"]))
        self._on_told(self._told)

    def _set_out(self, message: Mapping[str, Any]) -> None:
        flags = (bool(message.get(name, False)) for name in ("final", "bad", "differs"))
        self.out = Out(str(message["out"]), *flags)
        self._known.set()
        self._on_told(self._told)


def hello(
    key: str, slice_name: str, addresses: Sequence[Address], facts: Mapping[str, str]
) -> dict[str, Any]:
    """What a member says first."""
    return {"key": key, "slice": slice_name, "addresses": addresses, "facts": dict(facts)}
