"""Connections between hosts: peers and followers come to one port. Of two members the later one calls the earlier."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable, Iterable, Mapping

from tpu.elastic.control import Address
from tpu.elastic.frames import hang_up, receive_json, send_json

_RETRY_S = 0.1
_CONNECT_S = 5.0


class Peers:
    """Listens, and keeps a connection to each peer that is wanted. `lane` is this host's number in its slice: host i
    talks with host i of the others."""

    def __init__(
        self,
        host: str,
        port: int,
        key: str,
        lane: int,
        linked: Callable[[int, socket.socket], None],
        is_linked: Callable[[int], bool],
        follower: Callable[[socket.socket], None],
    ) -> None:
        self._key, self._lane = key, lane
        self._linked, self._is_linked, self._follower = linked, is_linked, follower
        self._wanted: Mapping[int, Address] = {}
        self._me = -1
        self._woken = threading.Event()
        self._closed = False
        self._listener = socket.create_server((host, port), backlog=64)
        self.port: int = self._listener.getsockname()[1]

    def start(self) -> None:
        for job in (self._listen, self._call):
            threading.Thread(target=job, name=job.__name__, daemon=True).start()

    def want(self, me: int, peers: Iterable[int], addresses: Mapping[int, tuple[Address, ...]]) -> None:
        """Call those that came before `me`, again and again until they answer."""
        self._me = me
        self._wanted = {
            peer: addresses[peer][self._lane] for peer in peers if peer < me and peer in addresses
        }
        self._woken.set()

    def follow(self, address: tuple[Address, ...]) -> socket.socket:
        """A connection to a peer as one that follows it. Raises OSError."""
        return self._connect(address[self._lane], {"as": "follower"})

    def close(self) -> None:
        self._closed = True
        self._woken.set()
        hang_up(self._listener)
        self._listener.close()

    def _connect(self, address: Address, greeting: dict[str, object]) -> socket.socket:
        sock = socket.create_connection(address, _CONNECT_S)
        try:
            send_json(sock, {"key": self._key, "id": self._me, **greeting})
            sock.settimeout(None)
        except OSError:
            sock.close()
            raise
        return sock

    def _call(self) -> None:
        while not self._closed:
            missing = {peer: a for peer, a in self._wanted.items() if not self._is_linked(peer)}
            for peer, address in missing.items():
                try:
                    self._linked(peer, self._connect(address, {"as": "peer"}))
                except OSError:
                    continue  # it is away: it comes back, or the coordinator gives it up
            self._woken.wait(_RETRY_S if missing else None)
            self._woken.clear()

    def wake(self) -> None:
        """A connection is gone: call again."""
        self._woken.set()

    def _listen(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(sock,), name="greeting", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_CONNECT_S)
            greeting = receive_json(sock)
            sock.settimeout(None)
            if not hmac.compare_digest(str(greeting["key"]), self._key):
                raise ConnectionError("the key is not this run's")
        except (OSError, ValueError, KeyError):
            sock.close()
            return
        if greeting.get("as") == "follower":
            self._follower(sock)
        else:
            self._linked(int(greeting["id"]), sock)
