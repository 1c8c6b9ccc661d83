"""A page in headless Chromium, driven through its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from websockets.asyncio.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WAIT_S = 60.0
# A page is still when so many looks in a row, so far apart, show the same; some never are.
LOOKS, LOOK_S, STILL_S = 4, 0.5, 10.0


Seen = TypeVar("Seen")


async def _still(look: Callable[[], Awaitable[Seen]]) -> Seen:
    """What `look` sees once it has seen the same so many times, or STILL_S later."""
    same, last, end = 0, await look(), time.monotonic() + STILL_S
    while same < LOOKS and time.monotonic() < end:
        await asyncio.sleep(LOOK_S)
        now = await look()
        same, last = (same + 1, last) if now == last else (0, now)
    return last


class Page:
    """One page."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        mine = next(self._ids)
        await self._socket.send(json.dumps({"id": mine, "method": method, "params": parameters}))
        while True:
            answer = json.loads(await self._socket.recv())
            if answer.get("id") == mine:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    async def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"])[:500])
        return result["result"].get("value")

    async def until(self, script: str) -> Any:
        """Poll until a JavaScript expression gives something true.

        Raises:
            TimeoutError: it did not within WAIT_S; the message has what the page says instead.
        """
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if value := await self.evaluate(script):
                return value
            await asyncio.sleep(0.2)
        raise TimeoutError(
            f"{script} is not true; the page says: {await self.evaluate('document.body?.innerText')}"
        )

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def picture(self, width: int, height: int) -> bytes:
        """What a window of this size shows, as PNG, once nothing moves any more, or STILL_S later."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

        async def look() -> bytes:
            return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

        return await _still(look)

    async def settled(self) -> None:
        """Return once no field changes any more, or STILL_S later.

        A form fills itself in bit by bit, and what is submitted before is dropped without a word.
        """
        values = "JSON.stringify([...document.querySelectorAll('input, textarea')].map(field => field.value))"
        await _still(lambda: self.evaluate(values))

    async def click(self, text: str) -> None:
        """Click the button of this text once it is there."""
        await self.until(
            "(() => { const found = [...document.querySelectorAll('button')]"
            f".find(b => b.innerText.trim() === {json.dumps(text)} && !b.disabled);"
            " if (found) found.click(); return !!found })()"
        )

    async def fill(self, label: str, value: str) -> None:
        """Write into the first field whose label begins with this line, once it is there."""
        await self.until(
            "(() => { const found = [...document.querySelectorAll('input, textarea')].find(field =>"
            f" (field.closest('.p-label, label')?.innerText ?? '').split('\\n')[0].trim() === {json.dumps(label)});"
            " if (!found) return false;"
            # Past the setter that the UI's framework has put on the element, or it would not hear of it.
            " Object.getOwnPropertyDescriptor(Object.getPrototypeOf(found), 'value').set"
            f".call(found, {json.dumps(value)});"
            " found.dispatchEvent(new Event('input', {bubbles: true}));"
            " found.dispatchEvent(new Event('change', {bubbles: true})); return true })()"
        )


def _address(file: Path) -> str:
    """Where the one page of a browser is debugged, once the browser has said by a file how it is reached."""
    while not file.exists() or "\n" not in file.read_text():
        time.sleep(0.1)  # polling another process: there is nothing to be told by
    with urllib.request.urlopen(f"http://127.0.0.1:{file.read_text().splitlines()[0]}/json") as answer:
        return next(one for one in json.load(answer) if one["type"] == "page")["webSocketDebuggerUrl"]


@contextlib.asynccontextmanager
async def page(url: str, folder: Path) -> AsyncIterator[Page]:
    """A page of a browser of its own, which ends with the block."""
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,2400",
        "--remote-debugging-port=0", f"--user-data-dir={folder}", url,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(WAIT_S):
            address = await asyncio.to_thread(_address, folder / "DevToolsActivePort")
        async with connect(address, max_size=2**26) as socket:
            yield Page(socket)
    finally:
        browser.terminate()
        await browser.wait()
