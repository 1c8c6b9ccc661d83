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
        return options.run(options) or 0
    except (ControlError, EmulatorFailed, NotRunning) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tpu.emulator", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help)
        command.add_argument(
            "--state", type=Path, default=_DEFAULT_STATE, metavar="DIR",
            help=f"folder of the emulator's files (default {_DEFAULT_STATE})",
        )  # fmt: skip
        command.set_defaults(run=run)
        return command

    def add_place(name: str, run, help: str) -> argparse.ArgumentParser:
        command = add(name, run, help)
        command.add_argument("zone")
        command.add_argument("type", help="accelerator type, such as v4-8")
        return command

    def add_host(name: str, run, help: str) -> None:
        command = add(name, run, help)
        command.add_argument("node")
        command.add_argument("index", type=int, nargs="?", default=0, help="which host (default 0)")
        command.add_argument("--zone")

    for name, run, help in (
        ("up", _up, "start an emulator in the background and print its environment"),
        ("serve", _serve, "run an emulator in the foreground"),
    ):
        command = add(name, run, help)
        command.add_argument("--host-threads", type=int, default=1, help="threads of each host (default 1)")
        command.add_argument("--project", default="relay-emulated")
        if name == "serve":
            command.add_argument("--temporary", action="store_true", help="remove the folder at the end")
            command.add_argument("--until-stdin-closes", action="store_true", help="end when stdin does")
    add("down", _down, "stop the emulator; nothing of it is left but the bucket's files")
    add("status", _status, "print nodes, queued resources and settings as JSON")
    add("env", _env, 'print the environment that leads to it: eval "$(python -m tpu.emulator env)"')

    preempt = add("preempt", _preempt, "preempt a spot node")
    preempt.add_argument("node")
    preempt.add_argument("--zone")
    preempt.add_argument("--notice", action="store_true", help="tell its metadata server 30 s ahead")
    preempt.add_argument("--becomes", default="PREEMPTED", metavar="STATE", help="what the API shows then")
    add_host("kill-host", lambda o: _client(o).kill_host(o.node, o.index, o.zone), "kill one host of a node")
    add_host(
        "hang-host", lambda o: _client(o).hang_host(o.node, o.index, o.zone), "stop one host's processes"
    )
    add_host("resume-host", lambda o: _client(o).resume_host(o.node, o.index, o.zone), "let it go on")
    add_host("kill-ssh", lambda o: _client(o).kill_ssh(o.node, o.index, o.zone), "kill a host's SSH server")
    add_host("busy-chips", lambda o: _client(o).busy_chips(o.node, o.index, o.zone), "hold a host's chips")

    for name, run, what in (
        ("capacity", lambda o: _client(o).set_capacity(o.zone, o.type, o.slices), "slices a zone can hold"),
        ("quota", lambda o: _client(o).set_quota(o.zone, o.type, o.slices), "slices the project may hold"),
    ):
        command = add_place(name, run, f"limit the {what}")
        command.add_argument("slices", type=_number_or_none, help="a number, or none for no limit")
    stockout = add_place("stockout", _stockout, "let creations fail for lack of capacity")
    stockout.add_argument("--off", action="store_true", help="end the stockout")
    delay = add("delay", lambda o: _client(o).set_delay(o.seconds), "set how long a node is CREATING")
    delay.add_argument("seconds", type=float)
    schedule = add("schedule", _schedule, "preempt spot nodes by a seeded plan")
    schedule.add_argument("--seed", type=int, default=0)
    schedule.add_argument(
        "--mean", type=float, default=60.0, metavar="SECONDS", help="mean wait (default 60)"
    )
    schedule.add_argument("--notice", choices=["never", "always", "alternate"], default="never")
    schedule.add_argument("--count", type=int, help="how many (default: no end)")
    schedule.add_argument("--stop", action="store_true", help="end the plan under way")
    return parser


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
