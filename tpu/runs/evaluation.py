"""Run an evaluator on a checkpoint as a process of its own, and keep its answer in the bucket under the step."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tpu.checkpoint import objects
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.paths import checkpoint_url
from tpu.runs.record import RunRecord

EVALUATION_S = 3600.0
# Runs a command that ends with the process that started it, even by SIGKILL (where the kernel can do that), and all
# that the command started with it: a flow that is killed and started again evaluates again, and must not leave an
# evaluator behind.
_DIES_WITH_US = """
import ctypes, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
code = subprocess.run(sys.argv[2:]).returncode
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class EvaluationFailed(RuntimeError):
    """The evaluator did not exit with 0 or printed no JSON object last; the message holds its last words."""


def evaluation_url(run_dir: str, step: int) -> str:
    return f"{run_dir}/evaluations/{step}.json"


def load_evaluation(run_dir: str, step: int) -> dict[str, float] | None:
    """What an evaluation of `step` gave, or None if there was none."""
    found = objects.read(evaluation_url(run_dir, step))
    return json.loads(found[0]) if found else None


async def evaluate_checkpoint(
    record: RunRecord, run_dir: str, step: int, report: Callable[[str], None]
) -> dict[str, float]:
    """Metrics of the checkpoint of `step`, from the bucket if they are there already.

    Raises:
        EvaluationFailed: the evaluator failed.
    """
    if (known := await asyncio.to_thread(load_evaluation, run_dir, step)) is not None:
        return known
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
        "RELAY_CHECKPOINT": await asyncio.to_thread(_checkpoint_of, run_dir, step),
    }
    code, out, err = await _run(command, environment)
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
    try:
        await asyncio.to_thread(
            objects.create_exclusive, evaluation_url(run_dir, step), json.dumps(metrics).encode()
        )
    except objects.ObjectExists:
        report(f"step {step} was evaluated twice at the same time; the first answer stands")
    return metrics


async def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int | None, str, str]:
    """Exit code (None: it took too long) and the end of both outputs.

    They go to files: a pipe would stay open for as long as anything that the command started, which ends here too.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", _DIES_WITH_US, str(os.getpid()), *command,
            env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
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
