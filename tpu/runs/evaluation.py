"""Run a run's evaluator on a checkpoint as a process of its own, and keep its answer in the bucket under the step."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tpu.checkpoint import files, objects
from tpu.checkpoint.digest import NoSuchCheckpoint, commit_at
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.paths import checkpoint_url
from tpu.runs.record import RunRecord, code_url, load_record, run_directory

EVALUATION_S = 3600.0
# Runs a command that ends with the process that started it, even by SIGKILL (where the kernel can do that), with all
# that the command started and its folder: a flow that is killed and started again evaluates again, and must not leave
# an evaluator behind.
_DIES_WITH_US = """
import ctypes, os, shutil, signal, subprocess, sys
parent, folder, *command = sys.argv[1:]
def leave(*_):
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
signal.signal(signal.SIGTERM, leave)
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        leave()
code = subprocess.run(command).returncode
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class EvaluationFailed(RuntimeError):
    """The evaluator did not exit with 0 or printed no JSON object last; the message holds its last words."""


class InvalidCheckpointName(ValueError):
    """A text means no checkpoint; the message shows how one is written."""


class NoEvaluator(ValueError):
    """Nothing can say how good the run's checkpoints are; the message says why, and what to do."""


@dataclass(frozen=True)
class Asked:
    """Checkpoints of a run that are to be evaluated."""

    record: RunRecord
    run_dir: str
    steps: tuple[int, ...]


def asked_checkpoints(bucket: str, text: str, every: bool) -> Asked:
    """What `RUN@STEP` means, or `RUN`: its newest checkpoint, with `every` all of them.

    Raises:
        InvalidCheckpointName: it is neither.
        RunNotFound, NoSuchCheckpoint, NoEvaluator: it cannot be done.
    """
    name, at, step = text.strip().partition("@")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or (at and not re.fullmatch(r"[0-9]+", step)):
        raise InvalidCheckpointName(
            f"write a run, such as icl, or one of its checkpoints, such as icl@500; found {text!r}"
        )
    if at and every:
        raise InvalidCheckpointName(f"{text} is one checkpoint: write {name} for all of them")
    run_dir = run_directory(bucket, name)
    record = load_record(run_dir)
    _check_evaluator(record)
    commits = load_fence(run_dir).commits
    if at:
        return Asked(record, run_dir, (commit_at(commits, int(step), run_dir).step,))
    steps = tuple(sorted({commit.step for commit in commits}))
    if not steps:
        raise NoSuchCheckpoint(f"{name} has no checkpoint yet; `relay status {name}` says how it is")
    return Asked(record, run_dir, steps if every else steps[-1:])


def _check_evaluator(record: RunRecord) -> None:
    config = record.config
    if not config.commits:
        raise NoEvaluator(
            f"{config.name} is a command that saves by its own means, so there are no checkpoints to evaluate; "
            "see `contract` of a run configuration"
        )
    if config.command and not config.evaluate_command:
        raise NoEvaluator(
            f"{config.name} has a program of its own and no evaluate_command, so nothing knows how to evaluate it: "
            f"relay fork {config.name}@STEP NEW --set evaluate_command='python evaluate.py', then evaluate NEW@STEP"
        )


def evaluation_url(run_dir: str, step: int) -> str:
    return f"{run_dir}/evaluations/{step}.json"


def load_evaluation(run_dir: str, step: int) -> dict[str, float] | None:
    """What an evaluation of `step` gave, or None if there was none."""
    found = objects.read(evaluation_url(run_dir, step))
    return json.loads(found[0]) if found else None


async def evaluate_checkpoint(
    record: RunRecord, run_dir: str, step: int, report: Callable[[str], None], again: bool = False
) -> dict[str, Any]:
    """Metrics of the checkpoint of `step`, from the bucket if they are there already, unless it is wanted `again`.

    A command of the run's own starts in the run's code, as it was when the run was made.

    Raises:
        EvaluationFailed: the evaluator failed.
    """
    known = await asyncio.to_thread(objects.read, evaluation_url(run_dir, step))
    if known is not None and not again:
        return json.loads(known[0])
    command = record.config.evaluate_command or [
        sys.executable,
        "-m",
        "tpu.train.evaluate",
        run_dir,
        str(step),
    ]
    # The flow's machine may have no accelerator, and the flow and its emulator need the processor too.
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "RELAY_RUN_DIR": run_dir,
        "RELAY_STEP": str(step),
        # `python` of a command is ours also where the flow was started without its environment's PATH.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "RELAY_CHECKPOINT": await asyncio.to_thread(_checkpoint_of, run_dir, step),
    }
    with contextlib.ExitStack() as stack:
        folder = None
        if record.config.evaluate_command:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-evaluate-"))
            if not await asyncio.to_thread(_unpack_code, record, run_dir, Path(folder)):
                report(
                    f"the bucket has no code of {record.config.name}; its evaluation starts in {Path.cwd()}"
                )
                folder = None
        code, out, err = await _run(command, environment, folder)
    words = "\n".join(err.strip().splitlines()[-15:])
    if code is None:
        raise EvaluationFailed(f"evaluation of step {step} did not end in {EVALUATION_S:.0f} s:\n{words}")
    try:
        if code != 0:
            raise ValueError
        metrics = json.loads(out.strip().splitlines()[-1])
        if not isinstance(metrics, dict):
            raise ValueError
    except (ValueError, IndexError):
        missing = "" if code else " and printed no JSON object last"
        raise EvaluationFailed(f"evaluation of step {step} exited {code}{missing}:\n{words}") from None
    await asyncio.to_thread(_keep, evaluation_url(run_dir, step), metrics, known and known[1], report)
    return metrics


def _keep(
    url: str, metrics: Mapping[str, Any], generation: int | None, report: Callable[[str], None]
) -> None:
    """Write an answer; of two who evaluate at the same time, the first one's stands."""
    data = json.dumps(metrics).encode()
    try:
        if generation is None:
            objects.create_exclusive(url, data)
        else:
            objects.compare_and_set(url, data, generation)
    except (objects.ObjectExists, objects.StaleGeneration):
        report(f"{url} was written by another evaluation at the same time; the first answer stands")


def _unpack_code(record: RunRecord, run_dir: str, folder: Path) -> bool:
    """Put the run's program into a folder; False if the bucket does not have it (any more)."""
    try:
        data = files.read(code_url(run_dir, record.code))
    except FileNotFoundError:
        return False
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")
    return True


async def _run(
    command: Sequence[str], environment: Mapping[str, str], folder: str | None
) -> tuple[int | None, str, str]:
    """Exit code (None: it took too long) and the end of both outputs.

    They go to files: a pipe would stay open for as long as anything that the command started, which ends here too.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", _DIES_WITH_US, str(os.getpid()), folder or "", *command,
            env=environment, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        code = None
        try:
            code = await asyncio.wait_for(process.wait(), EVALUATION_S)
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return code, _end_of(out), _end_of(err)


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - objects.LARGEST_BYTES))
    return file.read().decode(errors="replace")


def _checkpoint_of(run_dir: str, step: int) -> str:
    """Folder of the newest commit of `step`; empty if there is none (any more)."""
    commit = max((c for c in load_fence(run_dir).commits if c.step == step), default=None)
    return checkpoint_url(run_dir, step, commit.attempt) if commit else ""
