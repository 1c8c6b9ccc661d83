"""Publish the final report: in the bucket, in the Prefect UI and in the terminal."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tpu.checkpoint import objects
from tpu.runs.driver import RunDriver
from tpu.runs.figures import collect, figures_of, save_report
from tpu.runs.lanes import Lane
from tpu.runs.links import file_links
from tpu.runs.report import cost_text, summary, to_markdown


@task(name="report", task_run_name="report", cache_policy=NO_CACHE)
async def publish_report(driver: RunDriver | Lane, failure: BaseException | None) -> dict[str, Any]:
    """Return the report's figures."""
    log = get_run_logger()
    reason = None if failure is None else f"failed: {str(failure) or type(failure).__name__}"
    report = await asyncio.to_thread(
        collect, driver.record, driver.run_dir, driver.log.events, reason, time.time()
    )
    pictures = await asyncio.to_thread(save_report, driver.run_dir, report)
    await acreate_markdown_artifact(
        to_markdown(
            report,
            {name: _inline(picture) for name, picture in pictures.items()},
            file_links(driver.run_dir, objects.local_server()),
        ),
        key=f"report-{driver.record.config.name}",
        description=summary(report),
    )
    log.info("written to %s/report/report.md", driver.run_dir)
    if driver.record.config.commits:
        digest = report.parameters_sha256 or "none committed"
        log.info("parameters sha256 %s, goodput %.0f %%", digest, 100 * report.goodput)
    else:
        log.info("%d attempt(s) in %.0f s", len(report.attempts), report.wall_s)
    log.info("cost %s", cost_text(report.ledger, driver.record.config.max_cost))
    figures = figures_of(report)
    if figures["evaluation"] and isinstance(told := figures["evaluation"].get("summary"), str):
        log.info(told)
    return figures


def _inline(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
