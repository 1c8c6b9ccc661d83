"""One connection to a peer: a thread that sends what is queued, and one that receives."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable

from tpu.elastic.frames import Header, hang_up, receive_header, send, tune

Body = memoryview | bytes
# What a frame was about; each is sent once over a link.
Item = tuple[int, int, int, int, int]


class Link:
    """Sends in order of `put`; `receive` is called for each header and takes the frame's bytes off the socket.

    `broken` is called once, when the connection fails in any way but `close`.
    """

    def __init__(
        self,
        peer: int,
        sock: socket.socket,
        receive: Callable[[Link, Header], None],
        broken: Callable[[Link], None],
        sending: Callable[[Header], None],
    ) -> None:
        self.peer = peer
        self.sock = sock
        self.sent: set[Item] = set()
        self._receive, self._broken, self._sending = receive, broken, sending
        self._queue: deque[tuple[Header, Body, Callable[[], None] | None]] = deque()
        self._woken = threading.Condition()
        self._closed = False
        tune(sock)

    def start(self) -> None:
        for job in (self._send_all, self._receive_all):
            threading.Thread(
                target=self._guarded, args=(job,), name=f"{job.__name__}-{self.peer}", daemon=True
            ).start()

    def put(self, header: Header, body: Body = b"", done: Callable[[], None] | None = None) -> None:
        """Queue a frame; `done` is called when its bytes are not needed any more, sent or not."""
        with self._woken:
            if not self._closed:
                self._queue.append((header, body, done))
                self._woken.notify()
                return
        if done is not None:
            done()

    def close(self) -> None:
        """Give up what is queued and end both threads, without calling `broken`."""
        with self._woken:
            already, self._closed = self._closed, True
            left = [done for _, _, done in self._queue if done is not None]
            self._queue.clear()
            self._woken.notify()
        for done in left:
            done()
        if not already:
            hang_up(self.sock)

    @property
    def closed(self) -> bool:
        return self._closed

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except (OSError, ValueError, LookupError):  # it is gone, or sends what is no frame of ours
            with self._woken:
                mine = not self._closed
            self.close()
            if mine:
                self._broken(self)

    def _send_all(self) -> None:
        while True:
            with self._woken:
                while not self._queue and not self._closed:
                    self._woken.wait()
                if self._closed:
                    self.sock.close()
                    return
                header, body, done = self._queue.popleft()
            try:
                self._sending(header)
                send(self.sock, header, body)
            finally:
                if done is not None:
                    done()

    def _receive_all(self) -> None:
        while not self._closed:
            self._receive(self, receive_header(self.sock))
