"""Evaluate a checkpoint on the flow's own machine, beside the training or by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tpu.runs.evaluation import evaluate_checkpoint
from tpu.runs.evaluation_table import to_markdown
from tpu.runs.record import RunRecord


@task(
    name="evaluate",
    task_run_name="evaluate step {step}",
    retries=2,
    retry_delay_seconds=5,
    cache_policy=NO_CACHE,
)
async def evaluate(record: RunRecord, run_dir: str, step: int, again: bool = False) -> dict[str, Any]:
    """Return the metrics of the checkpoint of `step`; one that was evaluated before is not evaluated again."""
    return await evaluate_checkpoint(record, run_dir, step, get_run_logger().info, again)


@task(name="publish_evaluation", task_run_name="report", cache_policy=NO_CACHE)
async def publish_evaluation(
    name: str, evaluations: Mapping[int, Mapping[str, Any]], failures: Mapping[int, str]
) -> None:
    """The figures as an artifact."""
    await acreate_markdown_artifact(
        to_markdown(name, evaluations, failures),
        key=f"evaluation-{name}",
        description="Evaluation of checkpoints",
    )
