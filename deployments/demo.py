"""The main job on one machine: an emulated Cloud TPU, a Prefect server, and a training that is preempted twice.

Afterwards the same configuration is trained without a preemption, and the parameters are compared byte for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deployments.prefect_server import free_port, prefect_server
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.files import filesystem
from tpu.emulator.emulator import Emulator
from tpu.runs.config import RunConfig, load_run_config
from tpu.runs.record import run_directory

RELAY_FOLDER = Path(".relay")
PREFECT_PORT = 4200
# One host: torch_xla's CPU runtime, with which an emulated host trains, has no way between processes. Half the steps:
# it takes longer for each, and compiles at each start.
FOR_XLA = {
    "framework": "xla",
    "slice.accelerator_type": "v4-8",
    "slice.price_an_hour": 5.16,
    "steps": 1000,
    "training.schedule_steps": 1000,
    "checkpoints.every": 200,
}
# Shorter than a line of Prefect's own, so that an event stays on one line of a terminal.
PLAIN_LOG = {
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT": "%(asctime)s | %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT": "%(asctime)s | %(task_run_name)s: %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FMT": "%(asctime)s | %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_DATEFMT": "%H:%M:%S",
}


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.demo", description=__doc__)
    parser.add_argument("run", nargs="?", default="icl", help="icl or bytelm: a file of deployments/runs")
    parser.add_argument("--framework", choices=["jax", "xla"], default="jax", help="of the trainer (jax)")
    parser.add_argument(
        "--preemptions", type=int, default=2, help="how often the slice is taken away (default 2)"
    )
    parser.add_argument(
        "--no-check", action="store_true", help="do not train the run a second time undisturbed"
    )
    parser.add_argument("--ui", action="store_true", help="only serve the Prefect UI with the runs so far")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    # A shell that starts this in the background lets it ignore Ctrl-C, and its flows too, which are ended by that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        if arguments.ui:
            serve_ui()
        else:
            demonstrate(
                arguments.run, arguments.framework, arguments.preemptions, check=not arguments.no_check
            )


def leave(*_: object) -> None:
    """End in order: make passes SIGTERM on to whom a terminal or `timeout` has told already, so it comes twice."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def demonstrate(run: str, framework: str, preemptions: int, check: bool) -> None:
    """Train, preempt, report, compare. Exits 1 if the flow fails or the parameters differ."""
    file = Path(f"deployments/runs/{run}.yaml")
    config = load_run_config(file)
    if framework == "xla":
        config = load_run_config(file, FOR_XLA | {"name": f"{config.name}-xla"})
        os.environ["TPU_RELAY_HOST_PYTHON_XLA"] = str(Path(".venv-xla/bin/python").absolute())
        file = RELAY_FOLDER / f"{config.name}.yaml"
        RELAY_FOLDER.mkdir(exist_ok=True)
        file.write_text(config.model_dump_json())  # JSON is YAML
    began = time.monotonic()
    say("starting the Prefect server and the emulated Cloud TPU (about 15 s)")
    with prefect_server(RELAY_FOLDER / "prefect") as prefect, Emulator() as emulator:
        os.environ.update(emulator.env)  # for the readers of the bucket below
        say(f"Prefect UI while this runs: {prefect['PREFECT_API_URL'].removesuffix('/api')}/runs")
        environment = os.environ | prefect | PLAIN_LOG
        say(f"training {config.name}: {config.steps} steps on an emulated {config.slice.provisioning} "
            f"{config.slice.accelerator_type}, with {preemptions} preemptions")  # fmt: skip
        run_dir = run_directory(emulator.env["TPU_RELAY_BUCKET"], config.name)
        with flow_process([str(file)], environment) as flow:
            for number in range(preemptions):
                preempt(emulator, flow, run_dir, config, number, preemptions)
        if flow.returncode != 0:
            sys.exit(f"the flow failed with exit code {flow.returncode}")
        folder = keep(run_dir, config.name)
        print((folder / "report" / "report.md").read_text())
        say(f"report, checkpoints, metrics and logs are kept in {folder}")
        if check:
            compare(file, config, environment, run_dir)
        say(f"done in {time.monotonic() - began:.0f} s; `make ui` shows the run page again")


def preempt(
    emulator: Emulator, flow: subprocess.Popen[bytes], run_dir: str, config: RunConfig, number: int, of: int
) -> None:
    """Take the slice away in the middle of a segment, the first time with the 30 s notice, then without."""
    wanted = config.steps * (number + 1) / (of + 1)
    if not wait(
        flow, lambda: (newest := load_fence(run_dir).newest()) is not None and newest.step >= wanted - 1
    ):
        return
    time.sleep(1.5)  # into the next segment; when exactly does not matter to the bits
    nodes = [node["name"].rpartition("/")[2] for node in emulator.nodes() if node["state"] == "READY"]
    if flow.poll() is None and nodes:
        notice = number % 2 == 0
        say(f"preempting {nodes[0]} {'with 30 s notice' if notice else 'without notice'}")
        emulator.preempt(nodes[0], notice=notice)


def compare(file: Path, config: RunConfig, environment: dict[str, str], run_dir: str) -> None:
    """Train the same numbers undisturbed and compare the parameters' hashes."""
    name = f"{config.name}-undisturbed"
    say("the same training again, without preemptions, to compare")
    with flow_process([str(file), "--name", name, "--set", "evaluate=never"], environment) as flow:
        pass
    if flow.returncode != 0:
        sys.exit(f"the undisturbed run failed with exit code {flow.returncode}")
    ours, undisturbed = run_digest(run_dir, config.steps), run_digest(f"{run_dir}-undisturbed", config.steps)
    say(f"parameters after preemptions  {ours}")
    say(f"parameters undisturbed        {undisturbed}")
    if ours != undisturbed:
        sys.exit("the parameters DIFFER: this is a defect, please report it")
    say("the same bits")


@contextlib.contextmanager
def flow_process(
    arguments: list[str], environment: dict[str, str], flow_module: str = "flows.train"
) -> Iterator[subprocess.Popen[bytes]]:
    """A flow as `python -m`; waited for at the end of the block, interrupted if the block is."""
    flow = subprocess.Popen(
        [sys.executable, "-m", flow_module, *arguments], env=environment, stdin=subprocess.DEVNULL
    )
    try:
        yield flow
        flow.wait()
    finally:
        if flow.poll() is None:
            flow.send_signal(signal.SIGINT)
            flow.wait()


def wait(flow: subprocess.Popen[bytes], condition: Callable[[], bool]) -> bool:
    """Poll until the condition holds; False if the flow ended before."""
    while flow.poll() is None:
        if condition():
            return True
        time.sleep(0.2)
    return False


def keep(run_dir: str, name: str) -> Path:
    """Copy a run out of the emulated bucket, which ends with the emulator."""
    folder = RELAY_FOLDER / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    filesystem().get(f"{run_dir}/", f"{folder}/", recursive=True)
    return folder


def serve_ui() -> None:
    """A server on Prefect's usual port that knows the runs of the demo, until it is interrupted."""
    with prefect_server(RELAY_FOLDER / "prefect", free_port(PREFECT_PORT)) as environment:
        url = environment["PREFECT_API_URL"]
        say(f"Prefect UI: {url.removesuffix('/api')}/runs (Ctrl-C ends it)")
        say(f"to see your own runs there, too: export PREFECT_API_URL={url}")
        signal.pause()


if __name__ == "__main__":
    main()
