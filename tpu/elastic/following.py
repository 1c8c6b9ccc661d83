"""How a member that arrives, or is behind, gets the state: from a peer's host memory, and what happened since.

The peer holds on to the state after the step it has reached (nothing is copied, since states are never changed in
place), sends it while it goes on, and then the sums of the steps since. Whoever follows applies them.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tpu.elastic.frames import (
    Header,
    Kind,
    PeerGone,
    bytes_of,
    receive_header,
    receive_into,
    receive_json,
    send,
    send_json,
    tune,
)

# A follower that falls behind by so many steps starts over with a newer state.
_BEHIND_MOST = 256
_BLOCK_BYTES = 1 << 20


class Donor:
    """Serves the newest state to those that follow; each has a log of the sums that it has not been sent."""

    def __init__(self, arrays: Callable[[Any], Mapping[str, np.ndarray]]) -> None:
        self._arrays = arrays
        self._changed = threading.Condition()
        self._latest: tuple[int, Any] | None = None
        self._logs: list[deque[tuple[int, np.ndarray]]] = []
        self._closed = False

    def begin(self, step: int, state: Any) -> None:
        """The state after `step` steps, before the first step of ours."""
        with self._changed:
            self._latest = (step, state)
            self._changed.notify_all()

    def advance(self, step: int, mean: np.ndarray, state: Any) -> None:
        """Step `step` is applied: its `mean` made `state`."""
        with self._changed:
            self._latest = (step + 1, state)
            for log in self._logs:
                log.append((step, mean.copy()))
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def serve(self, sock: socket.socket) -> None:
        """Serve one follower until it leaves."""
        log: deque[tuple[int, np.ndarray]] = deque()
        with self._changed:
            if self._latest is None or self._closed:
                sock.close()
                return
            step, state = self._latest
            self._logs.append(log)
        try:
            tune(sock)
            self._send_state(sock, step, state)
            del state
            while True:
                with self._changed:
                    idle = not log
                if idle:
                    send_json(sock, {"caught_up": True})
                with self._changed:
                    self._changed.wait_for(lambda: log or self._closed)
                    if self._closed or len(log) > _BEHIND_MOST:
                        return
                    at, mean = log.popleft()
                send(sock, Header(Kind.SUM, 0, 0, 0, at, mean.nbytes), bytes_of(mean))
        except OSError:
            pass  # it has what it wanted, or is gone
        finally:
            with self._changed:
                self._logs.remove(log)
            sock.close()

    def _send_state(self, sock: socket.socket, step: int, state: Any) -> None:
        given = self._arrays(state)
        # A number without axes gets one by this, which the peer must not see.
        arrays = {name: np.ascontiguousarray(array) for name, array in given.items()}
        shapes = {name: list(array.shape) for name, array in given.items()}
        described = [[name, array.dtype.str, shapes[name]] for name, array in arrays.items()]
        send_json(sock, {"step": step, "arrays": described})
        for array in arrays.values():
            body = bytes_of(array)
            for start in range(0, len(body), _BLOCK_BYTES):
                block = body[start : start + _BLOCK_BYTES]
                send(sock, Header(Kind.ARRAY, 0, 0, 0, step, len(block)), block)


def receive_state(sock: socket.socket) -> tuple[int, dict[str, np.ndarray]]:
    """(step, arrays) as a donor sends them first. Raises OSError."""
    told = receive_json(sock)
    arrays = {}
    for name, dtype, shape in told["arrays"]:
        array = np.empty(shape, np.dtype(dtype))
        body = bytes_of(array)
        filled = 0
        while filled < len(body):
            header = receive_header(sock)
            if header.kind != Kind.ARRAY or not 0 < header.size <= len(body) - filled:
                raise PeerGone(f"expected {len(body) - filled} bytes of {name}, found {header}")
            receive_into(sock, body[filled : filled + header.size])
            filled += header.size
        arrays[name] = array
    return int(told["step"]), arrays


def receive_sums(sock: socket.socket, size: int) -> Iterator[tuple[int, np.ndarray] | None]:
    """(step, mean) of each step since; None when there is nothing more so far. Raises OSError."""
    while True:
        header = receive_header(sock)
        if header.kind == Kind.JSON:
            receive_into(sock, memoryview(bytearray(header.size)))
            yield None
            continue
        mean = np.empty(size, np.float32)
        if header.kind != Kind.SUM or header.size != mean.nbytes:
            raise PeerGone(f"expected the sum of a step, found {header}")
        receive_into(sock, bytes_of(mean))
        yield header.step, mean
