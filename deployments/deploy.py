"""The work pool, and the flows of deployments/prefect.yaml in it, on whatever server the environment leads to."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping

POOL = "tpu"
# Ours of earlier versions that are called otherwise now. With its schedule each would go on beside its successor.
FORMER = ("reap/every-10-minutes", "steer/sweep")
ABOUT_POOL = (
    "Trains on preemptible Cloud TPU slices. What a run leaves open, such as the zone, is taken from here."
)


class NotDeployed(RuntimeError):
    """Prefect does not take the deployments; the message has its words."""


def deploy_flows(environment: Mapping[str, str]) -> None:
    """Deploy all of deployments/prefect.yaml, from the root of the repository.

    Raises:
        NotDeployed: Prefect refuses it; the message has its words.
    """
    words = ["--no-prompt", "deploy", "--prefect-file", "deployments/prefect.yaml", "--all"]
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *words], env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise NotDeployed(f"prefect {' '.join(words)} failed:\n{done.stdout.strip()}")


async def delete_former() -> None:
    """Delete the deployments of FORMER, if they are ours: by their tag."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    async with get_client() as client:
        for name in FORMER:
            with contextlib.suppress(ObjectNotFound):
                found = await client.read_deployment_by_name(name)
                if "tpu-relay" in found.tags:
                    await client.delete_deployment(found.id)


async def make_work_pool() -> None:
    """Make our pool; of one that is there, only renew the form."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    from tpu.worker.template import renewed
    from tpu.worker.worker import CloudTpuWorker

    template = CloudTpuWorker.get_default_base_job_template()
    async with get_client() as client:
        try:
            pool = await client.read_work_pool(POOL)
        except ObjectNotFound:
            pool = WorkPoolCreate(
                name=POOL, type=CloudTpuWorker.type, base_job_template=template, description=ABOUT_POOL
            )
            # A slow server may have made it at a first try of the client, of which no answer came.
            with contextlib.suppress(ObjectAlreadyExists):
                await client.create_work_pool(pool)
        else:
            renewal = WorkPoolUpdate(base_job_template=renewed(template, pool.base_job_template))
            await client.update_work_pool(POOL, renewal)
