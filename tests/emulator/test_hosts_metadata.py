"""The metadata server of a host, asked by google-auth itself and as a preemption watcher asks."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest

from tests.emulator.machines import key_line, room
from tpu.emulator.metadata import lookup, render_json, render_text

HEADERS = {"Metadata-Flavor": "Google"}
ASK_GOOGLE_AUTH = """
import json, google.auth, google.auth.transport.requests as transport
from google.auth import compute_engine
from google.auth.compute_engine import _metadata
request = transport.Request()
credentials, project = google.auth.default()
credentials.refresh(request)
print(json.dumps({
    "ping": _metadata.ping(request),
    "project": project,
    "kind": type(credentials).__module__,
    "token": credentials.token,
    "email": credentials.service_account_email,
    "universe": credentials.universe_domain,
    "worker": _metadata.get(request, "instance/attributes/agent-worker-number"),
    "account": _metadata.get_service_account_info(request),
}))
"""


class Metadata:
    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self._root = f"http://{address}/computeMetadata/v1/"

    async def get(self, path: str, headers: dict[str, str] = HEADERS, **query: str) -> tuple[int, str, str]:
        """Return status, body and ETag."""
        async with self._session.get(self._root + path, params=query, headers=headers) as response:
            assert response.headers["Metadata-Flavor"] == "Google"
            return response.status, await response.text(), response.headers.get("ETag", "")


async def test_google_auth_finds_its_project_account_and_token(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot(attributes={"ssh-keys": key_line(r.key), "agent-worker-number": "0"})
        (host.spec.home / "ask.py").write_text(ASK_GOOGLE_AUTH)
        async with r.connect(host) as client:
            done = await client.run("python ask.py")
        found = json.loads(done.stdout), done.stderr
        answer = found[0]
        assert answer["ping"] is True
        assert answer["project"] == "emulated-project"
        assert answer["kind"].startswith("google.auth.compute_engine")
        assert answer["token"].startswith("emulated-")
        assert answer["email"].endswith("-compute@developer.gserviceaccount.com")
        assert answer["universe"] == "googleapis.com"
        assert str(answer["worker"]) == "0"
        assert answer["account"]["aliases"] == ["default"]
        assert answer["account"]["scopes"] == ["https://www.googleapis.com/auth/cloud-platform"]


async def test_values_listings_and_refusals(tmp_path):
    async with room(tmp_path) as r, aiohttp.ClientSession() as session:
        host = await r.boot(
            attributes={"ssh-keys": "", "tpu-env": "ZONE: 'us-central2-b'\n", "camel-case": "no"}
        )
        ask = Metadata(session, f"{host.spec.address}:{host.spec.metadata_port}")

        assert (await ask.get("instance/preempted"))[:2] == (200, "FALSE")
        assert (await ask.get("instance/attributes/tpu-env"))[1] == "ZONE: 'us-central2-b'\n"
        assert (await ask.get("instance/attributes/"))[1] == "camel-case\nssh-keys\ntpu-env\n"
        assert (await ask.get("instance/zone"))[1].endswith("/zones/us-central2-b")
        assert (await ask.get("instance/id"))[1].isdigit()
        assert (await ask.get("project/project-id"))[1] == "emulated-project"
        whole = json.loads((await ask.get("instance/", recursive="true"))[1])
        assert whole["attributes"]["camel-case"] == "no"
        assert whole["networkInterfaces"][0]["ip"] == host.spec.address
        assert "token" not in json.dumps(whole)

        assert (await ask.get("instance/no-such-thing"))[0] == 404
        assert (await ask.get("instance/preempted", headers={}))[0] == 403
        assert (await ask.get("instance/preempted", headers={**HEADERS, "X-Forwarded-For": "1.2.3.4"}))[
            0
        ] == 403
        assert (await ask.get("instance/preempted", wait_for_change="true", timeout_sec="soon"))[0] == 400


async def test_a_waiting_watcher_hears_of_the_preemption_at_once(tmp_path):
    async with room(tmp_path) as r, aiohttp.ClientSession() as session:
        host = await r.boot()
        ask = Metadata(session, f"{host.spec.address}:{host.spec.metadata_port}")
        _, _, etag = await ask.get("instance/preempted")

        waiting = asyncio.create_task(ask.get("instance/preempted", wait_for_change="true", last_etag=etag))
        await host.set_attributes({"ssh-keys": "", "another": "thing"})  # not what is waited for
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        began = time.monotonic()
        await host.set_preempted(True)
        assert (await asyncio.wait_for(waiting, 5))[:2] == (200, "TRUE")
        assert time.monotonic() - began < 1.0

        # Who comes late with the old ETag is answered at once.
        late = ask.get("instance/preempted", wait_for_change="true", last_etag=etag)
        assert (await asyncio.wait_for(late, 5))[1] == "TRUE"


async def test_waiting_ends_at_its_time_out_with_the_value_as_it_is(tmp_path):
    async with room(tmp_path) as r, aiohttp.ClientSession() as session:
        host = await r.boot()
        ask = Metadata(session, f"{host.spec.address}:{host.spec.metadata_port}")
        answer = ask.get("instance/preempted", wait_for_change="true", timeout_sec="0.2")
        assert (await asyncio.wait_for(answer, 5))[:2] == (200, "FALSE")


async def test_a_watcher_does_not_hold_up_the_death_of_its_host(tmp_path):
    async with room(tmp_path) as r, aiohttp.ClientSession() as session:
        host = await r.boot()
        ask = Metadata(session, f"{host.spec.address}:{host.spec.metadata_port}")
        _, _, etag = await ask.get("instance/preempted")
        waiting = asyncio.create_task(ask.get("instance/preempted", wait_for_change="true", last_etag=etag))
        await asyncio.wait({waiting}, timeout=0.1)
        began = time.monotonic()
        await host.kill()
        assert time.monotonic() - began < 2.0
        await asyncio.wait({waiting}, timeout=5)
        assert waiting.done()
        if not waiting.cancelled():
            waiting.exception()


TREE = {"a-b": "1", "dir": {"x-y": "2", "attributes": {"my-key": "3"}}, "nets": {"0": {"ip": "4"}}}


@pytest.mark.parametrize(
    ("path", "found"),
    [("", TREE), ("a-b", "1"), ("/dir/x-y/", "2"), ("a-b/deeper", None), ("dir/none", None)],
)
def test_lookup(path, found):
    assert lookup(TREE, path) == found


def test_renderings():
    assert render_text(TREE, recursive=False) == "a-b\ndir/\nnets/\n"
    assert render_text(TREE, recursive=True) == "a-b 1\ndir/attributes/my-key 3\ndir/x-y 2\nnets/0/ip 4\n"
    assert json.loads(render_json(TREE, "")) == {
        "aB": "1",
        "dir": {"xY": "2", "attributes": {"my-key": "3"}},
        "nets": [{"ip": "4"}],
    }
    assert json.loads(render_json({"my-key": "3"}, "instance/attributes")) == {"my-key": "3"}
