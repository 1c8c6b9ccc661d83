"""The control API as methods: what tests and the command line call on a running emulator."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

T = TypeVar("T")
_CALL_SECONDS = 120.0
_POLL_SECONDS = 0.05


class ControlError(RuntimeError):
    """The emulator refused a control request, or does not answer; the message says why."""


class ControlClient:
    """Speaks to the control API at `url` with the emulator's key. Blocking, standard library only."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key
        # Loopback must not go through a proxy that the environment names.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    # --- capacity and time --------------------------------------------------------------------------

    def set_capacity(self, zone: str, type: str, slices: int | None) -> None:
        """Let a zone hold so many slices of a type at a time; None: as many as are asked for."""
        self._post("capacity", zone=zone, type=type, slices=slices)

    def set_quota(self, zone: str, type: str, limit: int | None) -> None:
        """Let the project hold so many slices of a type in a zone, dead ones counted; None: any number."""
        self._post("quota", zone=zone, type=type, slices=limit)

    def set_reservation(self, zone: str, type: str, slices: int | None) -> None:
        """Let reserved slices be at most so many; None: any number."""
        self._post("reservation", zone=zone, type=type, slices=slices)

    def stockout(self, zone: str, type: str, on: bool = True) -> None:
        """Let new creations of a type in a zone fail for lack of capacity, or end that."""
        self._post("stockout", zone=zone, type=type, on=on)

    def set_delay(self, seconds: float) -> None:
        """Set how long a node shows CREATING before its hosts boot (default 0)."""
        self._post("delay", seconds=seconds)

    def set_delete_delay(self, seconds: float) -> None:
        """Set how long a node shows DELETING after its hosts are gone (default 0)."""
        self._post("delete-delay", seconds=seconds)

    def set_notice_seconds(self, seconds: float) -> None:
        """Set the time between a preemption notice and the kill (default 30)."""
        self._post("notice-seconds", seconds=seconds)

    def set_creation_rate(self, per_minute: int) -> None:
        """Set how many nodes may be created a minute (default 91)."""
        self._post("creation-rate", per_minute=per_minute)

    def set_life(self, seconds: float) -> None:
        """Set how long preemptible nodes live that become READY from now on (default 24 hours)."""
        self._post("life", seconds=seconds)

    def set_queues(self, zone: str, on: bool) -> None:
        """Let a zone know queued resources (as all do at first), or plain nodes only."""
        self._post("queues", zone=zone, on=on)

    def set_project(
        self,
        apis_off: Sequence[str] = (),
        missing: Sequence[str] = (),
        os_login: bool = False,
        ssh_from: Sequence[str] = ("0.0.0.0/0",),
        private_access: bool = True,
        clock_ahead_s: float = 0.0,
    ) -> None:
        """Set the project up wrongly: APIs that are off, permissions that are missing, who may reach port 22, ….

        What is left out is as it should be. `clock_ahead_s` is how far the cloud's clock is ahead of ours.
        """
        self._post(
            "project", apis_off=list(apis_off), missing=list(missing), os_login=os_login, ssh_from=list(ssh_from),
            private_access=private_access, clock_ahead_s=clock_ahead_s,
        )  # fmt: skip

    # --- trouble ------------------------------------------------------------------------------------

    def repair(
        self,
        node: str,
        seconds: float,
        zone: str | None = None,
        maintenance: bool = False,
        reboot: bool = True,
    ) -> None:
        """Take the hosts of an on-demand or reserved node away for so long; then it is READY again.

        The node shows REPAIRING, or for maintenance stays READY with a health that says so. With `reboot` its
        hosts are made anew, with nothing on their disks; without, they are as frozen and go on afterwards.
        """
        self._post("repair", node=node, seconds=seconds, zone=zone, maintenance=maintenance, reboot=reboot)

    def preempt(
        self,
        node: str,
        notice: bool = False,
        zone: str | None = None,
        state: str = "PREEMPTED",
        linger_s: float = 0.0,
    ) -> None:
        """Preempt a spot node; returns once its hosts are dead, or once the notice is given.

        `state` is what the API shows afterwards: PREEMPTED, TERMINATED, STOPPED, UNKNOWN or gone. With
        `linger_s` the API shows it at once and the processes live on for so long.
        """
        self._post("preempt", node=node, notice=notice, zone=zone, state=state, linger_s=linger_s)

    def schedule_preemptions(
        self,
        seed: int,
        mean_s: float,
        notice: bool | Literal["never", "always", "alternate"] = False,
        count: int | None = None,
    ) -> None:
        """Preempt a spot node every `mean_s` seconds on average, the same way for the same seed."""
        if isinstance(notice, bool):
            notice = "always" if notice else "never"
        self._post("schedule", seed=seed, mean_s=mean_s, notice=notice, count=count)

    def stop_schedule(self) -> None:
        self._post("stop-schedule")

    def kill_host(self, node: str, index: int = 0, zone: str | None = None) -> None:
        """Kill one host with all its processes; the API goes on showing the node as READY."""
        self._post("kill-host", node=node, index=index, zone=zone)

    def hang_host(self, node: str, index: int = 0, zone: str | None = None) -> None:
        """Stop all processes of one host where they stand (SIGSTOP)."""
        self._post("hang-host", node=node, index=index, zone=zone)

    def resume_host(self, node: str, index: int = 0, zone: str | None = None) -> None:
        """Let a hung host go on (SIGCONT)."""
        self._post("resume-host", node=node, index=index, zone=zone)

    def kill_ssh(self, node: str, index: int = 0, zone: str | None = None) -> None:
        """Kill the SSH server of one host; processes live on, and it comes back after a second."""
        self._post("kill-ssh", node=node, index=index, zone=zone)

    def busy_chips(self, node: str, index: int = 0, zone: str | None = None) -> None:
        """Leave the chips of one host held by a process that does nothing else."""
        self._post("busy-chips", node=node, index=index, zone=zone)

    def set_node_state(self, node: str, state: str, zone: str | None = None) -> None:
        """Let the API show any state of a node, such as REPAIRING; its hosts go on."""
        self._post("node-state", node=node, state=state, zone=zone)

    def fail_next(
        self, method: str, code: int | str, message: str, times: int = 1, after: bool = False
    ) -> None:
        """Let the next calls of an API method (`*`: of any) fail; with `after` only the answer is lost."""
        self._post("fail-next", method=method, code=code, message=message, times=times, after=after)

    def reset(self) -> None:
        """Delete all nodes, queued resources, operations and objects; all settings are default again."""
        self._post("reset")

    # --- what there is ------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return self._call("GET", "status", None)

    def nodes(self) -> list[dict[str, Any]]:
        """Return all nodes: name, node, zone, state, accelerator_type, provisioning, hosts and more."""
        return self.status()["nodes"]

    def queued_resources(self) -> list[dict[str, Any]]:
        """Return all queued resources: name, zone, state, nodes, waits_for, error."""
        return self.status()["queued_resources"]

    def preempted(self) -> list[str]:
        """Return the ids of the nodes that were preempted since the last reset, in that order."""
        return self.status()["preempted"]

    def processes(self) -> list[int]:
        """Return the pids of all processes that live on emulated hosts."""
        return self._call("GET", "processes", None)["processes"]

    def wait_for(
        self,
        condition: Callable[[], T],
        what: str = "the condition",
        timeout_s: float = 30.0,
    ) -> T:
        """Ask `condition` again and again until it returns something true, and return that.

        Raises:
            TimeoutError: it did not within the time; the message has `what` and the emulator's status.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:.0f} s for {what}; status: {self.status()}")
            time.sleep(_POLL_SECONDS)
        return found

    def _post(self, action: str, **arguments: Any) -> None:
        self._call("POST", action, json.dumps(arguments).encode())

    def _call(self, method: str, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(
            f"{self._url}/{path}",
            data=body,
            method=method,
            headers={"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )
        try:
            with self._opener.open(request, timeout=_CALL_SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ControlError(_error_text(error)) from None
        except (urllib.error.URLError, ConnectionError) as error:
            raise ControlError(f"no emulator answers at {self._url}: {error}") from error


def _error_text(error: urllib.error.HTTPError) -> str:
    body = error.read().decode(errors="replace")
    try:
        return json.loads(body)["error"]
    except (ValueError, KeyError):
        return f"{error.code}: {body}"
