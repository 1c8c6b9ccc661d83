"""Make the pictures of the README anew: a run from the form of the Prefect UI, preempted on its way, photographed.

Starts all it needs in a folder of its own, as `make up` does, and ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.browser import CHROMIUM, Page, page
from deployments.local import Local, say
from tpu.checkpoint.fence import load_fence
from tpu.emulator.client import ControlClient
from tpu.runs.record import run_directory

PICTURES = Path("deployments/pictures")
WIDTH, COLOURS = 1280, 128
# At these shares of the run its slice is taken away: with the 30 s notice, and without.
PREEMPTIONS = ((0.45, True), (0.7, False))
LOOK_S, RUN_S = 0.5, 900.0


@dataclass(frozen=True)
class Studio:
    """Where pictures are taken: the UI in a browser, its server, and the emulated cloud."""

    page: Page
    ui: str
    client: PrefectClient
    cloud: ControlClient
    bucket: str
    into: Path

    async def take(self, name: str, path: str, shows: str, height: int, prepare: str = "true") -> None:
        """Photograph a page of the UI once it shows a text; `prepare` is JavaScript that brings it into view."""
        await self.page.go(f"{self.ui}{path}")
        await self.page.until(f"document.body && document.body.innerText.includes({shows!r})")
        await self.page.until(prepare)
        (self.into / f"{name}.png").write_bytes(smaller(await self.page.picture(WIDTH, height)))
        say(f"{self.into / name}.png")


def smaller(picture: bytes) -> bytes:
    """The same with fewer colours: a page of text has few, and the repository keeps every version."""
    from PIL import Image  # comes with matplotlib

    made = io.BytesIO()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(made, "PNG", optimize=True)
    return made.getvalue()


async def until(check: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(RUN_S):
            while True:
                if await asyncio.to_thread(check):
                    return
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        sys.exit(f"{what} did not come within {RUN_S:.0f} s")


async def photograph(studio: Studio) -> None:
    """One run from the form to its report, with a picture of each thing that a person sees on the way."""
    deployment = await studio.client.read_deployment_by_name("train/icl")
    await studio.take("deployments", "/deployments", "bytelm", 620)
    await studio.take("work-pool", "/work-pools/work-pool/tpu", "cloud-tpu", 700)
    await studio.take("work-pool-form", "/work-pools/work-pool/tpu/edit", "Accelerator type", 2400)
    await studio.take("run-form", f"/deployments/deployment/{deployment.id}/run", "changes", 2400)
    await studio.page.click("Submit")
    await studio.page.until("!location.pathname.endsWith('/run')")
    flow_run = await newest(studio.client, deployment.id)
    name = f"icl-{str(flow_run.id)[:8]}"
    say(f"{name} trains")
    await preempted(studio, name, deployment.parameters["run"]["steps"])
    await ended(studio.client, flow_run.id)
    await studio.take("flow-run", f"/runs/flow-run/{flow_run.id}", "Completed", 1000)
    for artifact in await studio.client.read_artifacts(
        artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
    ):
        kind = (artifact.key or "").partition("-")[0]
        await studio.take(kind, f"/artifacts/artifact/{artifact.id}", "Artifact", 1200)
    await studio.take("events", "/events", "Event", 900)


async def newest(client: PrefectClient, deployment: UUID) -> FlowRun:
    (mine,) = [run for run in await client.read_flow_runs() if run.deployment_id == deployment]
    return mine


async def preempted(studio: Studio, name: str, steps: int) -> None:
    """Take the run's slices away, and photograph the fleet while it has one."""
    run_dir = run_directory(studio.bucket, name)
    for share, notice in PREEMPTIONS:
        wanted = round(share * steps)
        await until(partial(has_reached, run_dir, wanted), f"step {wanted} of {name}")
        (node,) = [one["node"] for one in studio.cloud.nodes() if one["state"] == "READY"]
        studio.cloud.preempt(node, notice=notice)
        say(f"preempted {node}")


def has_reached(run_dir: str, step: int) -> bool:
    newest = load_fence(run_dir).newest()
    return newest is not None and newest.step >= step


async def ended(client: PrefectClient, flow_run: UUID) -> None:
    async with asyncio.timeout(RUN_S):
        while True:
            now = await client.read_flow_run(flow_run)
            if now.state is not None and now.state.is_final():
                break
            await asyncio.sleep(LOOK_S)
    if not now.state.is_completed():
        sys.exit(f"the run did not end well: {now.state}")


@asynccontextmanager
async def studio(local: Local, into: Path) -> AsyncIterator[Studio]:
    """A browser on what `local` has started."""
    record, url = local.emulator(), local.api_url()
    assert record is not None
    assert url is not None
    ui = url.removesuffix("/api")
    with tempfile.TemporaryDirectory() as folder:
        async with page("about:blank", Path(folder)) as one, get_client() as client:
            cloud = ControlClient(record.control, record.key)
            yield Studio(one, ui, client, cloud, record.env["TPU_RELAY_BUCKET"], into)


async def take_all(local: Local, into: Path) -> None:
    async with studio(local, into) as made:
        await photograph(made)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.pictures", description=__doc__)
    parser.add_argument("--into", type=Path, default=PICTURES, help=f"where the pictures go ({PICTURES})")
    arguments = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("pictures are taken in Chromium or Chrome, and neither is on the PATH")
    arguments.into.mkdir(parents=True, exist_ok=True)
    ours = ("PREFECT_", "TPU_RELAY_", "TPU_EMULATOR_", "STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT")
    for name in [name for name in os.environ if name.startswith(ours)]:
        del os.environ[name]
    folder = Path(tempfile.mkdtemp(prefix="relay-pictures-"))
    local = Local(folder, os.environ)
    try:
        run_local("up", folder)
        os.environ.update(local.environment())
        # Prefect has read its settings when it was imported.
        with temporary_settings({PREFECT_API_URL: local.api_url()}):
            asyncio.run(take_all(local, arguments.into))
    finally:
        run_local("down", folder)
        shutil.rmtree(folder, ignore_errors=True)


def run_local(do: str, folder: Path) -> None:
    """What `make up` and `make down` run."""
    subprocess.run([sys.executable, "-m", "deployments.local", do, "--folder", folder], check=True)


if __name__ == "__main__":
    main()
