"""Evaluate checkpoints of a run on the flow's own machine, with the run's own evaluator. Needs no TPU."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from prefect import State, flow, get_run_logger
from prefect.states import Failed

from flows.plain_errors import EXPECTED, log_plainly
from tasks.evaluate import evaluate as evaluate_step
from tasks.evaluate import publish_evaluation
from tpu.checkpoint import objects
from tpu.connection import Connection
from tpu.runs.evaluation import EvaluationFailed, asked_checkpoints


@flow(name="evaluate", flow_run_name="evaluate {checkpoint}")
async def evaluate(
    checkpoint: str,
    commits: Literal["newest", "all"] = "newest",
    again: bool = False,
) -> dict[int, dict[str, Any]] | State[Any]:
    """Evaluate checkpoints of a run as the run itself does, on the machine of the worker: no slice is made.

    Args:
        checkpoint: A run, such as icl-3, or one of its checkpoints, such as icl-3@1000.
        commits: Of a run without a step, its newest checkpoint or all of them.
        again: Evaluate also what was evaluated before, and keep the new figures.

    Returns:
        The figures by step.
    """
    log_plainly()
    try:
        return await evaluate_asked(checkpoint, commits == "all", again)
    except EXPECTED as error:
        return Failed(message=str(error), data=error)  # the sentence, which the UI shows first


async def evaluate_asked(checkpoint: str, every: bool, again: bool) -> dict[int, dict[str, Any]]:
    """One after the other, and the figures as an artifact, also if some cannot be had."""
    bucket = Connection.from_environment().bucket
    await asyncio.to_thread(objects.check_bucket, bucket)
    asked = await asyncio.to_thread(asked_checkpoints, bucket, checkpoint, every)
    once = evaluate_step.with_options(retries=0)  # somebody waits for the answer, who can start it again
    evaluations: dict[int, dict[str, Any]] = {}
    failures: dict[int, str] = {}
    for step in asked.steps:
        try:
            evaluations[step] = await once(asked.record, asked.run_dir, step, again)
        except EvaluationFailed as error:  # the others may well be evaluated
            failures[step] = str(error)
    await publish_evaluation(asked.record.config.name, evaluations, failures)
    if failures:
        raise EvaluationFailed("\n".join(failures.values()))
    if isinstance(told := evaluations[max(evaluations)].get("summary"), str):
        get_run_logger().info(told)
    return evaluations
