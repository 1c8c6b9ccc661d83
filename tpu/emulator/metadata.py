"""The metadata server of one emulated host, as google-auth and a preemption watcher ask it.

It belongs to the cloud, not to the VM: it runs in the emulator and answers while the host hangs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from typing import Union

from aiohttp import web

from tpu.emulator.host_spec import HostSpec

FLAVOR = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
ROOT = "/computeMetadata/v1"
TOKEN_LIFE_S = 3599
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_MAX_WAIT_S = 3600.0
_PLAIN = frozenset({"attributes"})  # below these, keys are the user's and are not turned into camelCase

Tree = Mapping[str, Union[str, "Tree"]]


class MetadataServer:
    """Serves the metadata of one host at its own address. Runs in the caller's event loop."""

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec
        self._attributes = dict(spec.attributes)
        self._preempted = False
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is taken.
        """
        app = web.Application()
        app.router.add_get("/", self._answer_ping)
        app.router.add_get(ROOT + "/{path:.*}", self._answer)
        app.router.add_get(ROOT, self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, self._spec.address, self._spec.metadata_port, reuse_address=True, shutdown_timeout=0
        )
        await site.start()

    async def stop(self) -> None:
        """Close the port and every connection, those that wait for a change as well."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self._announce()
            await runner.cleanup()

    def set_attributes(self, attributes: Mapping[str, str]) -> None:
        """Put these attributes in place of all there were."""
        self._attributes = dict(attributes)
        self._announce()

    def set_preempted(self, preempted: bool) -> None:
        self._preempted = preempted
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer_ping(self, _request: web.Request) -> web.Response:
        return web.Response(text="computeMetadata/\n", headers=FLAVOR, content_type="application/text")

    async def _answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
            text = "Missing Metadata-Flavor:Google header (or X-Forwarded-For is there).\n"
            return web.Response(status=403, text=text, headers=FLAVOR)
        response = self._render(request)
        if request.query.get("wait_for_change", "").lower() != "true":
            return response
        try:
            timeout_s = min(float(request.query.get("timeout_sec", _MAX_WAIT_S)), _MAX_WAIT_S)
        except ValueError:
            return web.Response(status=400, text="timeout_sec must be a number of seconds\n", headers=FLAVOR)
        last = request.query.get("last_etag", response.headers.get("ETag"))
        deadline = time.monotonic() + timeout_s
        while response.headers.get("ETag") == last and (left := deadline - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except asyncio.TimeoutError:
                break
            if self._runner is None:
                break
            response = self._render(request)
        return response

    def _render(self, request: web.Request) -> web.Response:
        path = request.match_info.get("path", "")
        found = lookup(metadata_tree(self._spec, self._attributes, self._preempted), path)
        if found is None:
            return web.Response(status=404, text=f"{ROOT}/{path} is not there\n", headers=FLAVOR)
        recursive = request.query.get("recursive", "").lower() == "true"
        form = request.query.get("alt", "json" if recursive else "text")
        if isinstance(found, str):
            is_json = form == "json" or path.rstrip("/").endswith("/token")
            body = json.dumps(found) if form == "json" and not path.rstrip("/").endswith("/token") else found
        else:
            is_json = form == "json"
            body = render_json(found, path) if is_json else render_text(found, recursive)
        etag = hashlib.sha256(body.encode()).hexdigest()[:16]
        if path.rstrip("/").endswith("/token"):
            etag = "token"
        kind = "application/json" if is_json else "application/text"
        return web.Response(text=body, headers={**FLAVOR, "ETag": etag}, content_type=kind)


def metadata_tree(spec: HostSpec, attributes: Mapping[str, str], preempted: bool) -> Tree:
    """Return all that the server knows, as a tree of the names of the real one."""
    digits = hashlib.sha256(f"{spec.project}/{spec.zone}/{spec.name}/{spec.address}".encode()).hexdigest()
    number = str(int(hashlib.sha256(spec.project.encode()).hexdigest()[:10], 16))
    email = f"{number}-compute@developer.gserviceaccount.com"
    account: Tree = {
        "aliases": "default\n",
        "email": email,
        "scopes": "\n".join(SCOPES) + "\n",
        "token": json.dumps(
            {"access_token": f"emulated-{digits[:24]}", "expires_in": TOKEN_LIFE_S, "token_type": "Bearer"}
        ),
    }
    return {
        "instance": {
            "attributes": dict(attributes),
            "hostname": f"{spec.hostname}.{spec.zone}.c.{spec.project}.internal",
            "id": str(int(digits[:15], 16)),
            "machine-type": f"projects/{number}/machineTypes/emulated-{spec.accelerator_type}",
            "maintenance-event": "NONE",
            "name": spec.hostname,
            "network-interfaces": {
                "0": {"ip": spec.address, "access-configs": {"0": {"external-ip": spec.address}}}
            },
            "preempted": "TRUE" if preempted else "FALSE",
            "scheduling": {
                "automatic-restart": "FALSE" if spec.preemptible else "TRUE",
                "on-host-maintenance": "TERMINATE",
                "preemptible": "TRUE" if spec.preemptible else "FALSE",
            },
            "service-accounts": {"default": account, email: account},
            "zone": f"projects/{number}/zones/{spec.zone}",
        },
        "project": {"attributes": {}, "numeric-project-id": number, "project-id": spec.project},
        "universe": {"universe-domain": "googleapis.com"},
    }


def lookup(tree: Tree, path: str) -> str | Tree | None:
    """Return the value or directory at `path`, None if there is none."""
    found: str | Tree = tree
    for name in path.strip("/").split("/") if path.strip("/") else ():
        if isinstance(found, str) or name not in found:
            return None
        found = found[name]
    return found


def render_text(directory: Tree, recursive: bool, prefix: str = "") -> str:
    """Return a listing: names, directories with a slash; with `recursive`, each path and its value."""
    lines: list[str] = []
    for name, value in sorted(directory.items()):
        if not recursive:
            lines.append(name if isinstance(value, str) else f"{name}/")
        elif isinstance(value, str):
            lines.append(f"{prefix}{name} {value}")
        else:
            lines.append(render_text(value, True, f"{prefix}{name}/").rstrip("\n"))
    return "".join(f"{line}\n" for line in lines if line)


def render_json(directory: Tree, path: str) -> str:
    """Return the directory at `path` as the real server's JSON: camelCase but for the user's own keys."""
    plain = bool(_PLAIN & set(path.strip("/").split("/")))
    return json.dumps(_as_json(directory, plain))


def _as_json(value: str | Tree, plain: bool) -> object:
    if isinstance(value, str):
        return value
    if value.keys() and all(name.isdigit() for name in value):  # network-interfaces/0 …
        return [_as_json(item, plain) for _, item in sorted(value.items())]
    result: dict[str, object] = {}
    for name, item in value.items():
        if not plain and name in ("aliases", "scopes") and isinstance(item, str):
            result[name] = item.split()
        elif name != "token":  # no recursive answer holds it
            result[name if plain else _camel(name)] = _as_json(item, plain or name in _PLAIN)
    return result


def _camel(name: str) -> str:
    if "@" in name:
        return name
    first, *rest = name.split("-")
    return first + "".join(word.capitalize() for word in rest)
