"""A way to the Prefect server that can be closed: it counts what passes; closed, it answers 429, 503 or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}")
_NOT_HANDED_ON = {"host", "transfer-encoding", "content-length", "content-encoding", "connection"}


class PrefectProxy:
    """Between a worker with its flows and their server. `api_url` is what they are told."""

    def __init__(self, target: str) -> None:
        self._target = target.removesuffix("/api")
        self._busy: tuple[int | None, str | None] | None = None
        self._sockets: set[web.WebSocketResponse] = set()
        self._session: aiohttp.ClientSession
        self.api_url = ""
        self.passed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.log_lines, self.events = 0, 0
        self.since = time.monotonic()

    async def close(self, status: int | None, retry_after: str | None = None) -> None:
        """From now on everything is refused, and connections that stream are cut.

        Without a `status` each connection breaks off, as those to a server that is down.
        """
        self._busy = (status, retry_after)
        for socket in list(self._sockets):
            await socket.close()

    def open(self) -> None:
        self._busy = None

    async def until_refused(self, kind: str, times: int, within_s: float) -> None:
        """Return once requests like `POST /api/artifacts/` were refused so often."""
        deadline = time.monotonic() + within_s
        while self.refused[kind] < times:
            assert time.monotonic() < deadline, self.refused
            await asyncio.sleep(0.1)

    def count_anew(self) -> None:
        self.passed.clear()
        self.log_lines, self.events, self.since = 0, 0, time.monotonic()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        kind = f"{request.method} {_ID.sub('ID', request.path)}"
        if self._busy is not None:
            self.refused[kind] += 1
            status, retry_after = self._busy
            if status is None:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return web.Response(status=status, headers={"Retry-After": retry_after} if retry_after else {})
        self.passed[kind] += 1
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._stream(request)
        body = await request.read()
        if kind == "POST /api/logs/":
            self.log_lines += body.count(b'"message"')
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_HANDED_ON}
        try:
            async with self._session.request(
                request.method, self._target + request.path_qs, data=body, headers=headers
            ) as answer:
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in _NOT_HANDED_ON}
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)
        except aiohttp.ClientError:
            return web.Response(status=502)

    async def _stream(self, request: web.Request) -> web.WebSocketResponse:
        asked = request.headers.get("Sec-WebSocket-Protocol", "")
        protocols = [one.strip() for one in asked.split(",") if one.strip()]
        near = web.WebSocketResponse(protocols=protocols, max_msg_size=0)
        async with self._session.ws_connect(
            self._target + request.path_qs, protocols=protocols, max_msg_size=0
        ) as far:
            await near.prepare(request)
            self._sockets.add(near)
            try:
                await asyncio.wait(
                    [
                        asyncio.create_task(self._pump(near, far, counted="events/in" in request.path)),
                        asyncio.create_task(self._pump(far, near)),
                    ],
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                self._sockets.discard(near)
                with contextlib.suppress(Exception):
                    await near.close()
        return near

    async def _pump(
        self,
        source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
        sink: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
        counted: bool = False,
    ) -> None:
        async for message in source:
            if message.type is aiohttp.WSMsgType.TEXT:
                self.events += counted
                await sink.send_str(message.data)
            elif message.type is aiohttp.WSMsgType.BINARY:
                await sink.send_bytes(message.data)


@contextlib.asynccontextmanager
async def prefect_proxy(target: str) -> AsyncIterator[PrefectProxy]:
    made = PrefectProxy(target)
    application = web.Application(client_max_size=0)
    application.router.add_route("*", "/{path:.*}", made._handle)
    runner = web.AppRunner(application, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    made.api_url = f"http://{host}:{port}/api"
    async with aiohttp.ClientSession(auto_decompress=True) as made._session:
        try:
            yield made
        finally:
            await made.close(503)
            await runner.cleanup()
