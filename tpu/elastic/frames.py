"""Frames between hosts: a header of 32 bytes, then so many bytes, received straight into the array they belong to."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

_HEADER = struct.Struct("<B3xIIIQQ")
HEADER_BYTES = _HEADER.size
# Beyond it a message is not one of ours.
JSON_MOST = 64 << 20
_SOCKET_BUFFER = 4 << 20


class Kind(IntEnum):
    JSON = 1  # a small message
    PART = 2  # a chunk of the sum at a node of the tree
    SUM = 3  # a chunk of the finished sum of a step
    ARRAY = 4  # bytes of the state


class Header(NamedTuple):
    """What follows: `size` bytes that belong to chunk `chunk` of node [first, end) of a step."""

    kind: int
    first: int
    end: int
    chunk: int
    step: int
    size: int

    def pack(self) -> bytes:
        return _HEADER.pack(*self)


def unpack(head: bytes | bytearray) -> Header:
    """A header from its bytes."""
    return Header(*_HEADER.unpack(head))


def bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def hang_up(sock: socket.socket) -> None:
    """End a connection or a listener, and wake whoever waits in it."""
    with contextlib.suppress(OSError):  # it was not connected any more
        sock.shutdown(socket.SHUT_RDWR)


class PeerGone(ConnectionError):
    """The other side has closed the connection, or sends what is no frame."""


def tune(sock: socket.socket) -> None:
    """Send at once, and keep enough in flight."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)


def send(sock: socket.socket, header: Header, body: memoryview | bytes = b"") -> None:
    """Send a frame; header and body leave together."""
    head = header.pack()
    if not len(body):
        sock.sendall(head)
        return
    sent = sock.sendmsg([head, body])
    if sent < len(head):
        sock.sendall(head[sent:])
        sent = len(head)
    rest = memoryview(body)[sent - len(head) :]
    if len(rest):
        sock.sendall(rest)


def json_frame(message: dict[str, Any]) -> tuple[Header, bytes]:
    """A message as a frame."""
    body = json.dumps(message).encode()
    return Header(Kind.JSON, 0, 0, 0, 0, len(body)), body


def send_json(sock: socket.socket, message: dict[str, Any]) -> None:
    send(sock, *json_frame(message))


def receive_header(sock: socket.socket) -> Header:
    """The next header. Raises PeerGone."""
    head = bytearray(HEADER_BYTES)
    receive_into(sock, memoryview(head))
    return unpack(head)


def receive_into(sock: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises PeerGone."""
    filled = 0
    while filled < len(target):
        count = sock.recv_into(target[filled:], len(target) - filled, socket.MSG_WAITALL)
        if count == 0:
            raise PeerGone("the other side closed the connection")
        filled += count


def receive_body(sock: socket.socket, header: Header) -> dict[str, Any]:
    """The message that follows the header of a JSON frame. Raises PeerGone."""
    if header.kind != Kind.JSON or header.size > JSON_MOST:
        raise PeerGone(f"expected a message, found a frame of kind {header.kind} and {header.size} bytes")
    body = bytearray(header.size)
    receive_into(sock, memoryview(body))
    message = json.loads(body)
    if not isinstance(message, dict):
        raise PeerGone("expected a message with names")
    return message


def receive_json(sock: socket.socket) -> dict[str, Any]:
    """The next frame, which has to be a message. Raises PeerGone."""
    return receive_body(sock, receive_header(sock))
