"""Summing a step's gradient over members: partial sums go to the owner of each chunk, finished sums to everybody.

A frame is named by what it holds: a chunk of the sum at a node of the tree, or of the finished sum, of a step. Its
bytes are the same whoever made it, so a member takes whatever comes, from whomever and however often, and nobody has
to agree on anything when a member is lost: the chunks it owned get other owners, to whom all send what they have.

Each member sends its part of the gradient once (reduce-scatter) and its share of the sum to all others (all-gather):
2·(S−1)/S of the gradient where S members divide the tree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpu.elastic import tree
from tpu.elastic.frames import Header, Kind, bytes_of, json_frame, receive_body, receive_into
from tpu.elastic.link import Link
from tpu.elastic.scratch import Scratch
from tpu.elastic.table import SHARDS, Table, table_of
from tpu.elastic.tree import Node

# Elements of a chunk: what is sent, added and sent on at a time. Neither changes a bit.
_CHUNK_MOST, _CHUNK_LEAST, _CHUNKS_WANTED = 1 << 18, 1 << 13, 32

# (phase, step): "sending" before a frame leaves, "receiving" before one is taken.
Trace = Callable[[str, int], None]


def chunk_elements(size: int) -> int:
    """Elements a chunk for a gradient of `size` elements: many enough to share out, long enough to be quick."""
    return min(_CHUNK_MOST, max(_CHUNK_LEAST, -(-size // _CHUNKS_WANTED)))


class _Step:
    """What is known of the sum of one step."""

    def __init__(self, step: int, sums: np.ndarray, chunks: int) -> None:
        self.step = step
        self.sums = sums
        self.have = bytearray(chunks)
        self.left = chunks
        self.summing: set[int] = set()
        self.arriving: set[int] = set()
        self.mine: dict[Node, np.ndarray] = {}
        self.parts: dict[int, dict[Node, np.ndarray]] = {}
        self.in_flight = 0  # queued frames whose bytes lie in `sums`


class Exchange:
    """The sums of all steps in progress, for one host. `offer` what was computed, `wait` for the sum of a step.

    `size` elements of float32; `scale` multiplies the sum at the root, once. `broken` is told of a peer whose
    connection failed while it was a member.
    """

    def __init__(
        self,
        size: int,
        units: int,
        scale: float,
        trace: Trace = lambda phase, step: None,
        broken: Callable[[int], None] = lambda peer: None,
    ) -> None:
        self.me = -1
        self._size, self._units, self._scale = size, units, np.float32(scale)
        self._chunk = chunk_elements(size)
        self._chunks = -(-size // self._chunk)
        self._scratch = Scratch()
        self._trace, self._broken = trace, broken
        self._changed = threading.Condition()
        self._tables: tuple[Table, ...] = ()
        self._generation = 0
        self._steps: dict[int, _Step] = {}
        self._links: dict[int, Link] = {}
        self._finished: dict[int, int] = {}  # of each peer: steps whose sums it has
        self._mine_finished = 0
        self._lossy_until = 0  # below it, what a lost member or connection had sent may be missing
        self._asked: dict[int, Link] = {}  # of each step: whom we have asked for its sums
        self.bytes_sent = 0

    # Told by the member.
    def begin(self, me: int, step: int) -> None:
        """Take part as `me`, with the state after `step` steps."""
        with self._changed:
            self.me, self._mine_finished = me, step
            self._drop_old()

    def set_tables(self, tables: Sequence[Table]) -> None:
        """The tables that hold now. Links to who is in none of them are closed."""
        with self._changed:
            before, self._tables = {m for table in self._tables for m in table.members}, tuple(tables)
            members = {member for table in tables for member in table.members}
            gone = [self._links.pop(peer) for peer in [*self._links] if peer not in members]
            self._finished = {peer: step for peer, step in self._finished.items() if peer in members}
            if before - members:
                self._lossy_until = self._mine_finished + 2
            self._generation += 1
            self._send_again()
            self._changed.notify_all()
        for link in gone:
            link.close()
        self._sum_what_is_ready()

    def add_link(self, peer: int, link_socket: Any) -> None:
        """Take a connection to a peer; an older one to it is given up."""
        link = Link(peer, link_socket, self._receive, self._lost_link, self._sending)
        with self._changed:
            members = {member for table in self._tables for member in table.members}
            if members and peer not in members and peer < max(members):
                link_socket.close()  # it was given up; one that is new to us has a higher number
                return
            old = self._links.pop(peer, None)
            self._links[peer] = link
            self._send_again()
        if old is not None:
            old.close()
        link.start()

    def finished_by(self, step: int) -> set[int]:
        """The peers that have the sums of all steps below `step`."""
        with self._changed:
            return {peer for peer, finished in self._finished.items() if finished >= step}

    def linked(self, peer: int) -> bool:
        with self._changed:
            return peer in self._links

    def offer(self, step: int, node: Node, total: np.ndarray) -> None:
        """The sum at a node of the tree that this member has computed: float32, `size` elements, not changed later."""
        with self._changed:
            if step < self._mine_finished:
                return
            self._state(step).mine[node] = total
            self._send_parts(step, node)
        self._sum_what_is_ready()

    def wait(self, step: int, generation: int, timeout_s: float) -> np.ndarray | None:
        """The whole sum of a step; None when the tables have changed since `generation`, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = self._state(step)
                if not found.left:
                    self._finish(found)
                    return found.sums
                left = deadline - time.monotonic()
                if self._generation != generation or left <= 0:
                    return None
                self._changed.wait(left)

    def is_whole(self, step: int) -> bool:
        with self._changed:
            return not self._state(step).left

    @property
    def generation(self) -> int:
        with self._changed:
            return self._generation

    def awaits(self, step: int) -> set[int]:
        """The members that the sum of a step still wants something of."""
        with self._changed:
            found, table = self._steps.get(step), table_of(self._tables, step)
            if table is None or found is None:
                return set()
            wanted: set[int] = set()
            for chunk in (chunk for chunk in range(self._chunks) if not found.have[chunk]):
                owner = self._owner(table, chunk)
                if owner != self.me:
                    wanted.add(owner)
                    continue
                nodes = {**found.mine, **found.parts.get(chunk, {})}
                for first, end in tree.uncovered(nodes, self._units):
                    wanted.update(table.units[first:end])
            return wanted - {self.me}

    def close(self) -> None:
        with self._changed:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()

    # Everything below that says "held" is called with the lock held.
    def _state(self, step: int) -> _Step:
        found = self._steps.get(step)
        if found is None:
            found = _Step(step, self._scratch.take(self._size), self._chunks)
            self._steps[step] = found
        return found

    def _owner(self, table: Table, chunk: int) -> int:
        return table.shards[chunk * SHARDS // self._chunks]

    def _slice(self, chunk: int) -> slice:
        return slice(chunk * self._chunk, min((chunk + 1) * self._chunk, self._size))

    def _send_again(self) -> None:
        """Queue whatever a link has not been given yet (held)."""
        for step, found in self._steps.items():
            for node in found.mine:
                self._send_parts(step, node)
            table = table_of(self._tables, step)
            if table is not None:
                for chunk in range(self._chunks):
                    if found.have[chunk] and self._owner(table, chunk) == self.me:
                        self._send_sum(found, chunk)
        for link in self._links.values():
            link.put(*json_frame({"finished": self._mine_finished}))
        self._ask_who_is_ahead()

    def _send_parts(self, step: int, node: Node) -> None:
        """Queue the chunks of a node for their owners (held)."""
        table, found = table_of(self._tables, step), self._steps[step]
        if table is None:
            return
        for chunk in range(self._chunks):
            owner = self._owner(table, chunk)
            if owner != self.me and not found.have[chunk] and owner in self._links:
                self._put(self._links[owner], found, Kind.PART, node, chunk, found.mine[node])

    def _send_sum(self, found: _Step, chunk: int, only: Link | None = None) -> None:
        """Queue a chunk of the finished sum (held)."""
        for link in [only] if only is not None else list(self._links.values()):
            if self._finished.get(link.peer, 0) <= found.step:
                self._put(link, found, Kind.SUM, (0, 0), chunk, found.sums)

    def _put(self, link: Link, found: _Step, kind: Kind, node: Node, chunk: int, source: np.ndarray) -> None:
        item = (kind, found.step, *node, chunk)
        if item in link.sent:
            return
        link.sent.add(item)
        body = bytes_of(source[self._slice(chunk)])
        self.bytes_sent += len(body)
        header = Header(kind, *node, chunk, found.step, len(body))
        if kind != Kind.SUM:
            link.put(header, body)
            return
        found.in_flight += 1

        def done() -> None:
            with self._changed:
                found.in_flight -= 1

        link.put(header, body, done)

    def _finish(self, found: _Step) -> None:
        """The sum of a step is whole: say so, and drop what nobody can want any more (held)."""
        if self._mine_finished > found.step:
            return
        self._mine_finished = found.step + 1
        found.mine, found.parts = {}, {}
        for link in self._links.values():
            link.put(*json_frame({"finished": self._mine_finished}))
        self._drop_old()

    def _drop_old(self) -> None:
        """Drop the sums of steps that every member has (held)."""
        for step in sorted(self._steps):
            table = table_of(self._tables, step)
            members = table.members if table is not None else ()
            behind = [m for m in members if m != self.me and self._finished.get(m, 0) <= step]
            if step >= self._mine_finished - 1 or behind:
                continue
            found = self._steps.pop(step)
            self._asked.pop(step, None)
            if not found.in_flight:
                self._scratch.give(found.sums)
            for link in self._links.values():
                link.sent = {item for item in link.sent if item[1] > step}

    def _ask_who_is_ahead(self) -> None:
        """After a loss: the sum of our step may be whole at a peer that has gone on (held)."""
        step = self._mine_finished
        found = self._steps.get(step)
        if found is None or not found.left or step >= self._lossy_until:
            return
        asked = self._asked.get(step)
        if asked is not None and not asked.closed:
            return
        for link in self._links.values():
            if self._finished.get(link.peer, 0) > step:
                self._asked[step] = link
                missing = [chunk for chunk in range(self._chunks) if not found.have[chunk]]
                link.put(*json_frame({"want": step, "chunks": missing}))
                return

    # Called by the threads of links.
    def _sending(self, header: Header) -> None:
        if header.kind != Kind.JSON:
            self._trace("sending", header.step)

    def _lost_link(self, link: Link) -> None:
        with self._changed:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
            self._changed.notify_all()
        self._broken(link.peer)

    def _receive(self, link: Link, header: Header) -> None:
        if header.kind == Kind.JSON:
            self._hear(link, receive_body(link.sock, header))
            return
        self._trace("receiving", header.step)
        with self._changed:
            late = header.step < self._mine_finished
            found = None if late else self._state(header.step)
            wanted = found is not None and not found.have[header.chunk]
        buffer = None
        if found is not None and wanted and header.kind == Kind.SUM and header.chunk not in found.arriving:
            # Straight to its place. Whoever else writes there writes the same bytes.
            found.arriving.add(header.chunk)
            try:
                receive_into(link.sock, bytes_of(found.sums[self._slice(header.chunk)]))
            finally:
                found.arriving.discard(header.chunk)
        else:
            buffer = self._scratch.take(header.size // 4)
            receive_into(link.sock, bytes_of(buffer))
        if found is not None and wanted:
            self._take(found, header, buffer)
        elif buffer is not None:
            self._scratch.give(buffer)

    def _take(self, found: _Step, header: Header, buffer: np.ndarray | None) -> None:
        if header.kind == Kind.PART and buffer is not None:
            with self._changed:
                found.parts.setdefault(header.chunk, {})[header.first, header.end] = buffer
            self._sum_if_ready(found, header.chunk)
            return
        with self._changed:
            if not found.have[header.chunk]:
                if buffer is not None:
                    found.sums[self._slice(header.chunk)] = buffer
                self._have(found, header.chunk)

    def _have(self, found: _Step, chunk: int) -> None:
        """A chunk of the sum is in its place (held)."""
        found.have[chunk] = 1
        found.left -= 1
        if not found.left:
            self._changed.notify_all()

    def _hear(self, link: Link, message: dict[str, Any]) -> None:
        with self._changed:
            if "finished" in message:
                self._finished[link.peer] = max(int(message["finished"]), self._finished.get(link.peer, 0))
                self._drop_old()
                self._ask_who_is_ahead()
            elif "want" in message:
                found = self._steps.get(int(message["want"]))
                if found is not None:
                    for chunk in message["chunks"]:
                        if found.have[chunk]:
                            self._send_sum(found, chunk, link)

    def _sum_what_is_ready(self) -> None:
        with self._changed:
            steps = [found for step, found in self._steps.items() if step >= self._mine_finished]
        for found in steps:
            for chunk in range(self._chunks):
                self._sum_if_ready(found, chunk)

    def _sum_if_ready(self, found: _Step, chunk: int) -> None:
        """Finish the tree for a chunk of ours, once."""
        with self._changed:
            table = table_of(self._tables, found.step)
            if table is None or self._owner(table, chunk) != self.me:
                return
            if found.have[chunk] or chunk in found.summing:
                return
            where = self._slice(chunk)
            received = found.parts.get(chunk, {})
            if not tree.is_covered({*found.mine, *received}, self._units):
                return
            parts = {node: total[where] for node, total in found.mine.items()} | received
            found.summing.add(chunk)
        np.multiply(tree.finish(parts, self._units, np.add), self._scale, out=found.sums[where])
        with self._changed:
            found.summing.discard(chunk)
            found.parts.pop(chunk, None)
            if not found.have[chunk]:
                self._have(found, chunk)
            self._send_sum(found, chunk)
        for buffer in received.values():
            self._scratch.give(buffer)
