"""Loopback addresses for hosts: each emulator owns one 127.x.0.0/16, each host one address of it.

Two emulators must never hand out the same address. Who owns a /16 is decided by who can bind a lock port
on its last address: the kernel lets go of it whatever way the owner dies, and needs no file.
"""

from __future__ import annotations

import errno
import random
import socket

_LOCK_PORT = 20127
_FIRST_NETWORK, _LAST_NETWORK = 1, 254


class NoFreeNetwork(RuntimeError):
    """Every 127.x.0.0/16 is owned by a running emulator."""


class AddressPool:
    """Addresses 127.<network>.b.c; one is given again only after it was freed, and as late as possible."""

    def __init__(self, network: int, lock: socket.socket) -> None:
        self.network = network
        self._lock = lock
        self._taken: set[int] = set()
        self._next = 0

    @classmethod
    def claim(cls) -> AddressPool:
        """Claim a free /16, tried in random order so that emulators started together do not queue up.

        Raises:
            NoFreeNetwork: none is left.
        """
        networks = list(range(_FIRST_NETWORK, _LAST_NETWORK + 1))
        random.shuffle(networks)
        for network in networks:
            lock = socket.socket()
            try:
                lock.bind((f"127.{network}.255.254", _LOCK_PORT))
                lock.listen(1)
            except OSError as error:
                lock.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return cls(network, lock)
        raise NoFreeNetwork(
            f"all of 127.{_FIRST_NETWORK}-{_LAST_NETWORK}.0.0/16 are owned by running emulators: stop some"
        )

    def take(self) -> str:
        """Return an address that no living host has.

        Raises:
            NoFreeNetwork: all of the /16 are taken.
        """
        for _ in range(254 * 254):
            number = self._next
            self._next = (self._next + 1) % (254 * 254)
            if number not in self._taken:
                self._taken.add(number)
                return f"127.{self.network}.{1 + number // 254}.{1 + number % 254}"
        raise NoFreeNetwork(f"all addresses of 127.{self.network}.0.0/16 are taken: delete some nodes")

    def free(self, address: str) -> None:
        _, _, high, low = (int(part) for part in address.split("."))
        self._taken.discard((high - 1) * 254 + low - 1)

    def close(self) -> None:
        self._lock.close()


def free_port(address: str, wanted: int) -> int:
    """Return the first port from `wanted` upwards that nobody listens on at this address.

    The same port then serves every host: their addresses are ours alone, but a server on all interfaces
    (0.0.0.0) would still be in the way.
    """
    for port in range(wanted, wanted + 500):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(errno.EADDRINUSE, f"no free port from {wanted} to {wanted + 499} on {address}")
