"""The NumPy trainer with a connection between its two processes, as collectives have: who loses it exits with 1.

Process 0 listens at RELAY_COORDINATOR. `python -m tests.trainers.peers`.
"""

from __future__ import annotations

import os
import socket
import threading
import time

from tests.trainers import numpy_trainer

MEET_S = 30.0


def connect() -> socket.socket:
    host, _, port = os.environ["RELAY_COORDINATOR"].rpartition(":")
    if os.environ["RELAY_PROCESS_ID"] == "0":
        with socket.create_server((host, int(port))) as server:
            return server.accept()[0]
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def fail_with(peer: socket.socket) -> None:
    try:
        said = peer.recv(1)
    except OSError:
        said = b""
    if not said:
        print("UNAVAILABLE: failed to connect to all addresses; last error: Socket closed", flush=True)
        os._exit(1)


def main() -> None:
    peer = connect()
    threading.Thread(target=fail_with, args=(peer,), daemon=True).start()
    numpy_trainer.main()
    peer.sendall(b".")  # so that the other does not take an end for a death


if __name__ == "__main__":
    main()
