"""`python -m tpu.emulator`: start, stop and disturb a local Cloud TPU from the command line."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tpu.emulator import emulator as emulators
from tpu.emulator.client import ControlClient, ControlError
from tpu.emulator.emulator import EmulatorFailed, EmulatorRecord, read_record

_DEFAULT_STATE = Path(".relay/emulator")


class NotRunning(RuntimeError):
    """No emulator lives in the state folder."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.state = options.state.absolute()
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
            "--state", type=Path, default=_DEFAULT_STATE, metavar="DIR",
            help=f"folder of the emulator's files (default {_DEFAULT_STATE})",
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
        if name == "serve":
            command.add_argument("--temporary", action="store_true", help="remove the folder at the end")
            command.add_argument("--until-stdin-closes", action="store_true", help="end when stdin does")
    commands.add("down", _down, "stop the emulator; nothing of it is left but the bucket's files")
    commands.add("status", _status, "print nodes, queued resources and settings as JSON")
    commands.add("env", _env, 'print the environment that leads to it: eval "$(python -m tpu.emulator env)"')


def _add_trouble(commands: _Commands) -> None:
    preempt = commands.add_node("preempt", _preempt, "preempt a spot node")
    preempt.add_argument("--notice", action="store_true", help="tell its metadata server 30 s ahead")
    preempt.add_argument("--becomes", default="PREEMPTED", metavar="STATE", help="what the API shows then")
    for name, help in (
        ("kill-host", "kill one host of a node with all its processes"),
        ("hang-host", "stop all processes of one host where they stand"),
        ("resume-host", "let a hung host go on"),
        ("kill-ssh", "kill one host's SSH server; it comes back after a second"),
        ("busy-chips", "leave the chips of one host held by a dead program's process"),
    ):
        commands.add_host(name, _host_trouble(name.replace("-", "_")), help)
    schedule = commands.add("schedule", _schedule, "preempt spot nodes by a seeded plan")
    schedule.add_argument("--seed", type=int, default=0)
    schedule.add_argument(
        "--mean", type=float, default=60.0, metavar="SECONDS", help="mean wait (default 60)"
    )
    schedule.add_argument("--notice", choices=["never", "always", "alternate"], default="never")
    schedule.add_argument("--count", type=int, help="how many (default: no end)")
    schedule.add_argument("--stop", action="store_true", help="end the plan under way")


def _add_limits(commands: _Commands) -> None:
    for name, run, what in (
        ("capacity", lambda o: _client(o).set_capacity(o.zone, o.type, o.slices), "slices a zone can hold"),
        ("quota", lambda o: _client(o).set_quota(o.zone, o.type, o.slices), "slices the project may hold"),
    ):
        command = commands.add_place(name, run, f"limit the {what}")
        command.add_argument("slices", type=_number_or_none, help="a number, or none for no limit")
    stockout = commands.add_place("stockout", _stockout, "let creations fail for lack of capacity")
    stockout.add_argument("--off", action="store_true", help="end the stockout")
    delay = commands.add(
        "delay", lambda o: _client(o).set_delay(o.seconds), "set how long a node is CREATING"
    )
    delay.add_argument("seconds", type=float)


def _host_trouble(method: str) -> _Run:
    return lambda options: getattr(_client(options), method)(options.node, options.index, options.zone)


def _number_or_none(text: str) -> int | None:
    return None if text == "none" else int(text)


def _record(options: argparse.Namespace) -> EmulatorRecord:
    record = read_record(options.state)
    if record is None:
        raise NotRunning(f"no emulator runs in {options.state}: start one with `python -m tpu.emulator up`")
    return record


def _client(options: argparse.Namespace) -> ControlClient:
    record = _record(options)
    return ControlClient(record.control, record.key)


def _serve(options: argparse.Namespace) -> None:
    from tpu.emulator.serve import AlreadyRunning, ServeOptions, serve  # slow to import

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(
            serve(
                ServeOptions(
                    options.state,
                    options.project,
                    options.host_threads,
                    options.temporary,
                    options.until_stdin_closes,
                )
            )
        )
    except AlreadyRunning as error:
        raise EmulatorFailed(str(error)) from error


def _up(options: argparse.Namespace) -> None:
    record = read_record(options.state)
    if record is None:
        wanted = ["--host-threads", str(options.host_threads), "--project", options.project]
        process = emulators.start_process(options.state, wanted, stdin=subprocess.DEVNULL)
        record = emulators.wait_until_ready(process, options.state)
    _print_env(record)


def _down(options: argparse.Namespace) -> None:
    record = read_record(options.state)
    if record is None:
        print(f"no emulator runs in {options.state}")
        return
    os.kill(record.pid, signal.SIGTERM)
    emulators.wait_until_gone(record, options.state)
    print("stopped")


def _status(options: argparse.Namespace) -> None:
    print(json.dumps(_client(options).status(), indent=1))


def _env(options: argparse.Namespace) -> None:
    _print_env(_record(options))


def _print_env(record: EmulatorRecord) -> None:
    for name, value in record.env.items():
        print(f"export {name}={shlex.quote(value)}")


def _preempt(options: argparse.Namespace) -> None:
    _client(options).preempt(options.node, options.notice, options.zone, options.becomes)


def _stockout(options: argparse.Namespace) -> None:
    _client(options).stockout(options.zone, options.type, not options.off)


def _schedule(options: argparse.Namespace) -> None:
    if options.stop:
        _client(options).stop_schedule()
    else:
        _client(options).schedule_preemptions(options.seed, options.mean, options.notice, options.count)


if __name__ == "__main__":
    sys.exit(main())
