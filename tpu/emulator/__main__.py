"""`python -m tpu.emulator`: start, stop and disturb a local Cloud TPU from the command line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tpu.emulator import emulator as emulators
from tpu.emulator import gcloud
from tpu.emulator.client import ControlClient, ControlError
from tpu.emulator.emulator import EmulatorFailed, read_record
from tpu.emulator.finding import DEFAULT_STATE, Found, NotRunning, find, state_folder


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ControlError, EmulatorFailed, NotRunning) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


_Run = Callable[[argparse.Namespace], None]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tpu.emulator", description=__doc__)
    commands = _Commands(parser.add_subparsers(required=True, metavar="command"))
    _add_life(commands)
    _add_trouble(commands)
    _add_limits(commands)
    return parser


class _Commands:
    """Adds commands, with what several of them have in common."""

    def __init__(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        self._subparsers = subparsers

    def add(self, name: str, run: _Run, help: str) -> argparse.ArgumentParser:
        command = self._subparsers.add_parser(name, help=help, description=help)
        command.add_argument(
            "--state", type=Path, metavar="DIR", help=f"folder of the emulator's files (default {DEFAULT_STATE})"
        )  # fmt: skip
        command.set_defaults(run=run)
        return command

    def add_place(self, name: str, run: _Run, help: str) -> argparse.ArgumentParser:
        """Add a command about one accelerator type in one zone."""
        command = self.add(name, run, help)
        command.add_argument("zone")
        command.add_argument("type", help="accelerator type, such as v4-8")
        return command

    def add_node(self, name: str, run: _Run, help: str) -> argparse.ArgumentParser:
        """Add a command about one node."""
        command = self.add(name, run, help)
        command.add_argument("node")
        command.add_argument("--zone", help="its zone, if nodes of several zones have that name")
        return command

    def add_host(self, name: str, run: _Run, help: str) -> None:
        """Add a command about one host of a node."""
        command = self.add_node(name, run, help)
        command.add_argument("index", type=int, nargs="?", default=0, help="which host (default 0)")


def _add_life(commands: _Commands) -> None:
    for name, run, help in (
        ("up", _up, "start an emulator in the background and print its environment"),
        ("serve", _serve, "run an emulator in the foreground"),
    ):
        command = commands.add(name, run, help)
        command.add_argument("--host-threads", type=int, default=1, help="threads of each host (default 1)")
        command.add_argument("--project", default="relay-emulated")
        command.add_argument(
            "--simulated",
            action="store_true",
            help="hosts that are a script in place of processes, with stockouts, preemptions and hangs: no SSH",
        )
        command.add_argument(
            "--speed", type=_speed, default=60.0, help="seconds of a simulated cloud in one (default 60)"
        )
        command.add_argument("--seed", type=int, default=0, help="of what happens in a simulated cloud")
        if name == "serve":
            command.add_argument("--temporary", action="store_true", help="remove the folder at the end")
            command.add_argument("--until-stdin-closes", action="store_true", help="end when stdin does")
    commands.add("down", _down, "stop the emulator; nothing of it is left but the bucket's files")
    commands.add("status", _status, "print nodes, queued resources and settings as JSON")
    env = commands.add(
        "env", _env, 'print the environment that leads to it: eval "$(python -m tpu.emulator env)"'
    )
    env.add_argument("--gcloud", action="store_true", help="that of gcloud instead of ours")


def _add_trouble(commands: _Commands) -> None:
    preempt = commands.add_node("preempt", _preempt, "preempt a spot or preemptible node")
    preempt.add_argument("--notice", action="store_true", help="tell its metadata server 30 s ahead")
    preempt.add_argument("--becomes", default="PREEMPTED", metavar="STATE", help="what the API shows then")
    repair = commands.add_node(
        "repair", _repair, "take the hosts of an on-demand or reserved node for a while"
    )
    repair.add_argument("--seconds", type=float, default=60.0, help="for how long (default 60)")
    repair.add_argument("--maintenance", action="store_true", help="show it as maintenance, not REPAIRING")
    repair.add_argument("--freeze", action="store_true", help="its processes go on afterwards, as they stood")
    for name, help in (
        ("kill-host", "kill one host of a node with all its processes"),
        ("hang-host", "stop all processes of one host where they stand"),
        ("resume-host", "let a hung host go on"),
        ("kill-ssh", "kill one host's SSH server; it comes back after a second"),
        ("busy-chips", "leave the chips of one host held by a dead program's process"),
    ):
        commands.add_host(name, _host_trouble(name.replace("-", "_")), help)
    schedule = commands.add("schedule", _schedule, "preempt spot and preemptible nodes by a seeded plan")
    schedule.add_argument("--seed", type=int, default=0)
    schedule.add_argument(
        "--mean", type=float, default=60.0, metavar="SECONDS", help="mean wait (default 60)"
    )
    schedule.add_argument("--notice", choices=["never", "always", "alternate"], default="never")
    schedule.add_argument("--count", type=int, help="how many (default: no end)")
    schedule.add_argument("--stop", action="store_true", help="end the plan under way")


def _add_limits(commands: _Commands) -> None:
    for name, run, what in (
        ("capacity", _capacity, "slices a zone can hold"),
        ("quota", _quota, "slices the project may hold"),
    ):
        command = commands.add_place(name, run, f"limit the {what}")
        command.add_argument("slices", type=_number_or_none, help="a number, or none for no limit")
    stockout = commands.add_place("stockout", _stockout, "let creations fail for lack of capacity")
    stockout.add_argument("--off", action="store_true", help="end the stockout")
    queues = commands.add("queues", _queues, "let a zone know queued resources, or plain nodes only")
    queues.add_argument("zone")
    queues.add_argument("--off", action="store_true", help="plain nodes only")
    project = commands.add(
        "project",
        _project,
        "set the project up wrongly, for `relay preflight`; without options all is right again",
    )
    project.add_argument(
        "--api-off", action="append", default=[], metavar="API", help="such as tpu.googleapis.com"
    )
    project.add_argument(
        "--missing", action="append", default=[], metavar="PERMISSION", help="such as tpu.nodes.create"
    )
    project.add_argument("--os-login", action="store_true", help="OS Login is on, so that keys do not count")
    project.add_argument(
        "--ssh-from",
        action="append",
        metavar="RANGE",
        help="who may reach port 22 (none: nobody; all at first)",
    )
    project.add_argument("--no-private-access", action="store_true", help="no Private Google Access")
    project.add_argument(
        "--clock-ahead", type=float, default=0.0, metavar="SECONDS", help="of the cloud's clock"
    )
    life = commands.add("life", _life, "set how long preemptible nodes live (a day at first)")
    life.add_argument("seconds", type=float)
    delay = commands.add("delay", _delay, "set how long a node is CREATING")
    delay.add_argument("seconds", type=float)


# What was done to {host}, a host of a node, as a sentence.
_HOST_TROUBLES = {
    "kill_host": "killed {host} with all its processes",
    "hang_host": "stopped all processes of {host}; resume-host lets them go on",
    "resume_host": "the processes of {host} go on",
    "kill_ssh": "killed the SSH server of {host}; it comes back after a second",
    "busy_chips": "the chips of {host} are held by a dead program's process now",
}


def _host_trouble(method: str) -> _Run:
    def run(options: argparse.Namespace) -> None:
        getattr(_client(options), method)(options.node, options.index, options.zone)
        print(_HOST_TROUBLES[method].format(host=f"host {options.index} of {options.node}"))

    return run


def _speed(text: str) -> float:
    if not 0 < float(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"a speed is above 0 and at most 10000, found {text}")
    return float(text)


def _number_or_none(text: str) -> int | None:
    return None if text == "none" else int(text)


def _found(options: argparse.Namespace) -> Found:
    return find(options.state, os.environ)


def _client(options: argparse.Namespace) -> ControlClient:
    return _found(options).client


def _serve(options: argparse.Namespace) -> None:
    from tpu.emulator.serve import AlreadyRunning, ServeOptions, serve  # slow to import

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(
            serve(
                ServeOptions(
                    state_folder(options.state),
                    options.project,
                    options.host_threads,
                    options.temporary,
                    options.until_stdin_closes,
                    options.speed if options.simulated else None,
                    options.seed,
                )
            )
        )
    except AlreadyRunning as error:
        raise EmulatorFailed(str(error)) from error


def _up(options: argparse.Namespace) -> None:
    folder = state_folder(options.state)
    record = read_record(folder)
    if record is None:
        wanted = ["--host-threads", str(options.host_threads), "--project", options.project]
        wanted += ["--simulated"] if options.simulated else []
        wanted += ["--speed", str(options.speed), "--seed", str(options.seed)]
        process = emulators.start_process(folder, wanted, stdin=subprocess.DEVNULL)
        record = emulators.wait_until_ready(process, folder)
    else:
        print(
            f"an emulator runs in {folder} already (process {record.pid}); this is its environment",
            file=sys.stderr,
        )
    _print_env(record.env)


def _down(options: argparse.Namespace) -> None:
    folder = state_folder(options.state)
    record = read_record(folder)
    if record is None:
        with contextlib.suppress(NotRunning):
            find(options.state, os.environ)
            raise EmulatorFailed(
                f"no emulator runs in {folder}; the one that your environment leads to was started in another "
                "folder: run `down` there, or name its state folder with --state"
            )
        print(f"no emulator runs in {folder}")
        return
    os.kill(record.pid, signal.SIGTERM)
    emulators.wait_until_gone(record, folder)
    print("stopped")


def _status(options: argparse.Namespace) -> None:
    print(json.dumps(_client(options).status(), indent=1))


def _env(options: argparse.Namespace) -> None:
    found = _found(options)
    _print_env(gcloud.environment(found.env) if options.gcloud else found.env)


def _print_env(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        print(f"export {name}={shlex.quote(value)}")


def _preempt(options: argparse.Namespace) -> None:
    client = _client(options)
    client.preempt(options.node, options.notice, options.zone, options.becomes)
    if options.notice:
        seconds = client.status()["settings"]["notice_s"]
        print(f"told {options.node} that it is preempted; its hosts are killed {seconds:g} s after that")
    else:
        print(f"preempted {options.node}: its hosts are dead")


def _repair(options: argparse.Namespace) -> None:
    _client(options).repair(
        options.node,
        options.seconds,
        options.zone,
        maintenance=options.maintenance,
        reboot=not options.freeze,
    )
    print(f"the hosts of {options.node} are away for {options.seconds:g} s")


def _queues(options: argparse.Namespace) -> None:
    _client(options).set_queues(options.zone, not options.off)
    print(f"{options.zone} knows {'plain nodes only' if options.off else 'queued resources'} now")


def _project(options: argparse.Namespace) -> None:
    _client(options).set_project(
        options.api_off,
        options.missing,
        options.os_login,
        ["0.0.0.0/0"] if options.ssh_from is None else [one for one in options.ssh_from if one != "none"],
        not options.no_private_access,
        options.clock_ahead,
    )
    print("the project is set up so now; `relay preflight` says what is wrong with it")


def _life(options: argparse.Namespace) -> None:
    _client(options).set_life(options.seconds)
    print(f"preemptible nodes that become READY from now on live for {options.seconds:g} s")


def _capacity(options: argparse.Namespace) -> None:
    _client(options).set_capacity(options.zone, options.type, options.slices)
    print(f"{options.zone} holds {_at_most(options.slices)} of {options.type} now")


def _quota(options: argparse.Namespace) -> None:
    _client(options).set_quota(options.zone, options.type, options.slices)
    print(f"the project may hold {_at_most(options.slices)} of {options.type} in {options.zone} now")


def _at_most(slices: int | None) -> str:
    return "any number of slices" if slices is None else f"at most {slices} slice(s)"


def _stockout(options: argparse.Namespace) -> None:
    _client(options).stockout(options.zone, options.type, not options.off)
    how = "no longer fail" if options.off else "fail from now on"
    print(f"creations of {options.type} in {options.zone} {how} for lack of capacity")


def _delay(options: argparse.Namespace) -> None:
    _client(options).set_delay(options.seconds)
    print(f"new nodes are CREATING for {options.seconds:g} s")


def _schedule(options: argparse.Namespace) -> None:
    client = _client(options)
    if options.stop:
        client.stop_schedule()
        print("no preemptions are planned any more")
        return
    client.schedule_preemptions(options.seed, options.mean, options.notice, options.count)
    how_many = "" if options.count is None else f", {options.count} in all"
    print(f"a spot node is preempted every {options.mean:g} s on average{how_many} (seed {options.seed})")


if __name__ == "__main__":
    sys.exit(main())
