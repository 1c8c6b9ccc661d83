"""A member of a run over several slices: computes its units, sums them with the others, applies the sum.

It is in one of three places: waiting for a table, following a peer to get the state, or in a step. Its state after
step t is one value whatever happened to whom, so it needs nobody's leave to go on.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu.elastic import tree
from tpu.elastic.commits import Commits, Save
from tpu.elastic.control import Address, Control, Out, Report, Told, hello
from tpu.elastic.exchange import Exchange
from tpu.elastic.following import Donor, receive_state, receive_sums
from tpu.elastic.frames import hang_up
from tpu.elastic.peers import Peers
from tpu.elastic.program import Program, state_hash
from tpu.elastic.table import Table, table_of

# A wait asks again after so long whether this member is out.
_LOOK_S = 0.5


@dataclass(frozen=True)
class Settings:
    """Where a member is and what it has to do. `host` is where it listens, `advertised` where others reach it."""

    slice: str
    key: str
    last_step: int
    coordinator: Callable[[], Address]
    host: str = "127.0.0.1"
    advertised: str = ""
    port: int = 0
    report_s: float = 0.25
    hash_every: int = 100  # steps between two comparisons of the state over members; 0: never
    stop_steps: frozenset[int] = frozenset()  # after these the state is saved
    facts: Mapping[str, str] | None = None  # what all members have to have in common
    committed: int = 0  # the step that the state comes from, if it comes from a checkpoint


@dataclass(frozen=True)
class Hooks:
    """`phase(name, step)`: what the member does now, from several threads: waiting, computing, sending, receiving,
    applying, committing, following. `applied(step, state, mean)`: step `step` (from 0) is applied;
    `followed(step, mean)`: so is one that the others have made. `save` begins to
    save a state and calls back when it is committed; `leads` hears whether the states are this member's to save, and
    `committed(step)` that everything up to a step is.
    `in_step(step)`: it takes part from this step on. `noticed()`: whether it is to leave, after it has saved if it is
    the one that saves. `hand_on` gives what a peer that follows is given besides the state, and `take` takes it; their
    names begin with BESIDE.
    """

    phase: Callable[[str, int], None] = lambda name, step: None
    applied: Callable[[int, Any, np.ndarray], None] = lambda step, state, mean: None
    followed: Callable[[int, np.ndarray], None] = lambda step, mean: None
    save: Save | None = None
    leads: Callable[[bool], None] = lambda leads: None
    committed: Callable[[int], None] = lambda step: None
    in_step: Callable[[int], None] = lambda step: None
    noticed: Callable[[], bool] = lambda: False
    hand_on: Callable[[], Mapping[str, np.ndarray]] = dict
    take: Callable[[Mapping[str, np.ndarray]], None] = lambda arrays: None


# Names of arrays that are handed on besides the state begin so.
BESIDE = "beside/"


class Left(Exception):
    """This member was told to leave, and has; nothing that it alone had is lost."""


class _WholeAlready(Exception):
    """The sum has come from elsewhere while units of it were computed."""


def take_part(program: Program, state: Any, step: int, settings: Settings, hooks: Hooks) -> Any:
    """Take part from the state after `step` steps to the last one; the final state.

    A member that was given up while it lives, such as one that hung for a while, comes back as a new one.

    Raises Out if the coordinator does not want it back, Left if it was told to leave.
    """
    unit_s = _warm_up(program, state, step)
    while True:
        stint = _Stint(program, state, step, settings, hooks, unit_s)
        try:
            return stint.run()
        except Out as out:
            if out.final:
                raise
            state, step, unit_s = stint.state, stint.step, stint.unit_s
        finally:
            stint.close()


def _warm_up(program: Program, state: Any, step: int) -> float:
    """Compile while the others go on; seconds of a unit."""
    gradient = program.gradient(state, step, 0)
    program.apply(state, step, gradient)
    began = time.monotonic()
    program.gradient(state, step, 0)
    return time.monotonic() - began


class _Stint:
    """A member under one identity."""

    def __init__(
        self, program: Program, state: Any, step: int, settings: Settings, hooks: Hooks, unit_s: float
    ) -> None:
        self.state, self.step, self.unit_s = state, step, unit_s
        self._program, self._settings, self._hooks = program, settings, hooks
        self._told = Told()
        self._news = threading.Condition()
        self._me = -1
        self._ready, self._follows = False, False
        self._waits_since: float | None = None
        self._followed: socket.socket | None = None
        self._hashes: dict[str, str] = {}
        self._donor = Donor(lambda state: {**program.arrays(state), **hooks.hand_on()})
        self._exchange = Exchange(
            program.size, program.units, 1.0 / program.units, hooks.phase, lambda peer: self._link_broke()
        )
        self._peers = Peers(
            settings.host, settings.port, settings.key, 0, self._exchange.add_link, self._exchange.linked,
            self._donor.serve,
        )  # fmt: skip
        self._commits = Commits(
            hooks.save, hooks.phase, self._poke, hooks.leads, settings.committed, hooks.committed
        )
        advertised = (settings.advertised or settings.host, self._peers.port)
        greeting = hello(settings.key, settings.slice, [advertised], settings.facts or {})
        self._control = Control(settings.coordinator, greeting, self._report, self._hear, settings.report_s)

    def run(self) -> Any:
        self._peers.start()
        self._control.start()
        self._me = self._control.wait_for_id()
        self._be_at(self.step, self.state)
        with self._news:
            self._use(self._told)
        if self.step in self._settings.stop_steps:
            self._commits.hold(self.step, self.state)  # under an earlier identity it may not have been saved
        self._ready = True
        self._poke()
        taking_part = False
        while self.step < self._settings.last_step:
            self._check_out()
            tables = self._told.tables
            table = table_of(tables, self.step)
            if table is not None and self._me in table.members:
                if not taking_part:
                    self._hooks.in_step(self.step)
                taking_part = True
                self._make_step(table)
            elif tables and not (table is None and self.step >= tables[-1].until and self._is_in(tables)):
                self._follow()
            else:
                self._hooks.phase("waiting", self.step)
                self._await_news()
        self._leave()
        return self.state

    def close(self) -> None:
        self._control.close()
        self._hooks.leads(False)
        self._donor.close()
        self._exchange.close()
        self._peers.close()

    # In a step.
    def _make_step(self, table: Table) -> None:
        step, done = self.step, set[int]()
        self._follows = False
        self._hooks.phase("waiting", step)
        while True:
            generation = self._exchange.generation
            now = table_of(self._told.tables, step)
            if now is None or self._me not in now.members:
                self._check_out()
                now = table
            try:
                for node in tree.complete_nodes(now.units_of(self._me) - done, self._program.units):
                    total = tree.sum_node(node, lambda unit: self._gradient(step, unit), np.add)
                    self._exchange.offer(step, node, total)
                    done.update(range(*node))
            except _WholeAlready:
                pass
            mean = self._wait_for_sum(step, generation)
            if mean is not None:
                break
        self._apply(step, mean)

    def _gradient(self, step: int, unit: int) -> np.ndarray:
        if self._exchange.is_whole(step):
            raise _WholeAlready
        self._hooks.phase("computing", step)
        began = time.monotonic()
        gradient = self._program.gradient(self.state, step, unit)
        self.unit_s = 0.8 * self.unit_s + 0.2 * (time.monotonic() - began)
        return gradient

    def _wait_for_sum(self, step: int, generation: int) -> np.ndarray | None:
        """The sum of a step; None when the tables have changed."""
        self._waits_since = time.monotonic()
        try:
            while True:
                mean = self._exchange.wait(step, generation, _LOOK_S)
                if mean is not None or self._exchange.generation != generation:
                    return mean
                self._check_out()
        finally:
            self._waits_since = None

    def _apply(self, step: int, mean: np.ndarray) -> None:
        self._hooks.phase("applying", step)
        state = self._program.apply(self.state, step, mean)
        self._donor.advance(step, mean, state)
        every = self._settings.hash_every
        if every and (step + 1) % every == 0:
            self._hashes = {str(step + 1): state_hash(self._program.arrays(state))}
        self.state, self.step = state, step + 1
        self._hooks.applied(step, state, mean)
        if step + 1 in self._settings.stop_steps:
            self._commits.hold(step + 1, state)
        table = table_of(self._told.tables, step + 1)
        if table is None or str(step + 1) in self._hashes:
            self._poke()

    # To get the state.
    def _follow(self) -> None:
        """Get the state from a peer, and what happened since, until a table has us."""
        tables, addresses = self._told.tables, self._told.addresses or {}
        donors = [m for m in tables[-1].members if m != self._me and m in addresses]
        if not donors:
            self._await_news()
            return
        self._hooks.phase("following", self.step)
        try:
            with self._peers.follow(addresses[random.choice(donors)]) as sock:
                self._followed = sock
                self._follow_one(sock)
        except OSError:
            if not self._has_units():
                self._await_news()  # the donor is gone: another one is chosen
        finally:
            self._followed = None

    def _follow_one(self, sock: socket.socket) -> None:
        step, arrays = receive_state(sock)
        beside = {name: array for name, array in arrays.items() if name.startswith(BESIDE)}
        self._hooks.take(beside)
        own = {name: array for name, array in arrays.items() if name not in beside}
        self._be_at(step, self._program.from_arrays(own))
        for since in receive_sums(sock, self._program.size):
            self._check_out()
            if since is None:
                self._follows = True
                self._poke()
            elif since[0] == self.step:
                state = self._program.apply(self.state, self.step, since[1])
                self._hooks.followed(self.step, since[1])
                self._be_at(self.step + 1, state)
            if self.step >= self._settings.last_step or self._has_units():
                return

    def _has_units(self) -> bool:
        """Whether we are at a step that we take part in."""
        table = table_of(self._told.tables, self.step)
        return table is not None and self._me in table.members

    def _be_at(self, step: int, state: Any) -> None:
        self.state, self.step = state, step
        self._exchange.begin(self._me, step)
        self._donor.begin(step, state)

    # At the end.
    def _leave(self) -> None:
        """Stay until nobody wants anything of us any more: every member has the last sum, the last state is saved."""
        self._poke()
        while True:
            self._check_out()
            tables = self._told.tables
            others = {m for table in tables for m in table.members} - {self._me}
            behind = others - self._exchange.finished_by(self._settings.last_step)
            if not behind and self._commits.settled:
                return
            self._await_news(0.05)

    # What the coordinator says and hears.
    def _hear(self, told: Told) -> None:
        with self._news:
            self._told = told
            self._news.notify_all()
            if self._control.out is not None:
                self._hooks.leads(False)  # at once, however long the unit lasts that is computed now
            elif self._me >= 0:
                self._use(told)
            followed = self._followed
        if followed is not None and self._has_units():
            hang_up(followed)  # the peer makes no step without us now, so that no more would come

    def _use(self, told: Told) -> None:
        self._exchange.set_tables(told.tables)
        members = {m for table in told.tables for m in table.members}
        if self._me in members:
            self._peers.want(self._me, members - {self._me}, told.addresses or {})
        leader = min(told.tables[0].members) if told.tables else None
        self._commits.hear(told.committed, leads=leader == self._me)

    def _report(self) -> Report:
        since, step = self._waits_since, self.step
        table = table_of(self._told.tables, step)
        members = table.members if table is not None and self._me in table.members else ()
        broken = tuple(m for m in members if m != self._me and not self._exchange.linked(m))
        awaits = tuple(sorted(self._exchange.awaits(step))) if since is not None else ()
        return Report(
            version=self._told.version[1],
            step=step,
            ready=self._ready,
            follows=self._follows,
            unit_s=self.unit_s,
            awaits=awaits,
            awaits_s=time.monotonic() - since if since is not None and awaits else 0.0,
            broken=broken,
            hashes=self._hashes,
            committed=self._commits.committed,
        )

    def _is_in(self, tables: tuple[Table, ...]) -> bool:
        return any(self._me in table.members for table in tables)

    def _link_broke(self) -> None:
        self._peers.wake()
        self._poke()

    def _poke(self) -> None:
        self._control.poke()

    def _check_out(self) -> None:
        if self._control.out is not None:
            raise self._control.out
        if self._hooks.noticed() and self._commits.nothing_to_save(self.step, self.state):
            raise Left

    def _await_news(self, timeout_s: float = _LOOK_S) -> None:
        with self._news:
            before = self._told
            self._news.wait_for(lambda: self._told is not before or self._control.out is not None, timeout_s)
