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
from prefect.client.schemas.objects import Artifact, FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.browser import CHROMIUM, Page, page
from deployments.local import Local, say
from tpu.checkpoint.fence import load_fence
from tpu.emulator.client import ControlClient
from tpu.runs.record import run_directory

PICTURES, OTHERS = Path("deployments/pictures"), Path(".relay/pictures")
# Those of the README; the others are taken to be looked at after a change.
SHOWN = ("flow-run", "report", "fleet")
WIDTH, COLOURS = 1280, 128
# At these shares of the run its slice is taken away: with the 30 s notice, and without.
PREEMPTIONS = ((0.45, True), (0.7, False))
LOOK_S, RUN_S = 0.5, 900.0
# A second run, so that the table of slices has two.
BESIDE = {
    "changes": {
        "name": "seed-7", "training.seed": 7, "slice.provisioning": "on-demand", "slice.price_an_hour": 12.88,
        "steps": 800, "evaluate": "never",
    }
}  # fmt: skip


@dataclass(frozen=True)
class Studio:
    """Where pictures are taken: the UI in a browser, its server, and the emulated cloud."""

    page: Page
    ui: str
    client: PrefectClient
    cloud: ControlClient
    bucket: str
    into: Path
    others: Path | None

    async def take(self, name: str, path: str, shows: str, height: int) -> None:
        """Photograph a page of the UI once it shows a text."""
        folder = self.into if name in SHOWN else self.others
        if folder is None:
            return
        await self.page.go(f"{self.ui}{path}")
        try:
            await self.page.until(f"document.body && document.body.innerText.includes({shows!r})")
        except TimeoutError:
            sys.exit(f"{path} does not show {shows!r}")
        file = folder / f"{name}.png"
        file.write_bytes(smaller(await self.page.picture(WIDTH, height)))
        say(f"{file}")


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
    form = f"/deployments/deployment/{deployment.id}/run"
    await studio.take("deployments", "/deployments", "bytelm", 620)
    await studio.take("work-pool", "/work-pools/work-pool/tpu", "Base Job Configuration", 700)
    await studio.take("work-pool-form", "/work-pools/work-pool/tpu/edit", "Accelerator type", 4200)
    await studio.take("run-form", form, "fresh_name", 3000)
    await studio.page.go(f"{studio.ui}{form}")
    await studio.page.until("document.body?.innerText.includes('fresh_name')")
    await studio.page.settled()
    await studio.page.click("Submit")
    await studio.page.until("!location.pathname.endsWith('/run')")
    flow_run = await newest(studio.client, deployment.id)
    name = f"icl-{str(flow_run.id)[:8]}"
    say(f"{name} trains")
    await until(partial(has_reached, run_directory(studio.bucket, name), 1), f"a checkpoint of {name}")
    await studio.client.create_flow_run_from_deployment(
        deployment.id, parameters=deployment.parameters | BESIDE
    )
    table = await fleet_of_two(studio)
    await studio.take("fleet", f"/artifacts/artifact/{table.id}", "an hour", 330)
    await preempted(studio, name, deployment.parameters["run"]["steps"])
    await ended(studio.client, flow_run.id)
    await studio.take("flow-run", f"/runs/flow-run/{flow_run.id}", "Completed", 560)
    await studio.take("log", f"/runs/flow-run/{flow_run.id}", "Completed", 3600)
    await studio.take("artifacts", "/artifacts", "slices-in", 700)
    for artifact in await artifacts(studio.client, flow_run.id):
        match (artifact.key or "").partition("-")[0]:
            case "progress":
                await studio.take("progress", f"/artifacts/artifact/{artifact.id}", "to go", 500)
            case "report":
                await studio.take("report", f"/artifacts/artifact/{artifact.id}", "Segments", 1150)
                await studio.take("whole-report", f"/artifacts/artifact/{artifact.id}", "Files", 3300)
    await studio.take("events", "/events", "Flow run completed", 900)


async def fleet_of_two(studio: Studio) -> Artifact:
    """The table of slices once two of them are in use."""
    async with asyncio.timeout(RUN_S):
        while True:
            for artifact in await artifacts(studio.client):
                if artifact.type == "table" and str(artifact.data).count("in use") == 2:
                    return artifact
            await asyncio.sleep(LOOK_S)


async def artifacts(client: PrefectClient, flow_run: UUID | None = None) -> list[Artifact]:
    only = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run])) if flow_run else None
    return await client.read_artifacts(artifact_filter=only)


async def newest(client: PrefectClient, deployment: UUID) -> FlowRun:
    (mine,) = [run for run in await client.read_flow_runs() if run.deployment_id == deployment]
    return mine


async def preempted(studio: Studio, name: str, steps: int) -> None:
    """Take the run's slices away."""
    run_dir = run_directory(studio.bucket, name)
    for share, notice in PREEMPTIONS:
        wanted = round(share * steps)
        await until(partial(has_reached, run_dir, wanted), f"step {wanted} of {name}")
        nodes = [one["node"] for one in studio.cloud.nodes() if one["state"] == "READY"]
        (node,) = [node for node in nodes if node.startswith(f"relay-{name}-")]
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
async def studio(local: Local, into: Path, others: Path | None) -> AsyncIterator[Studio]:
    """A browser on what `local` has started."""
    record, url = local.emulator(), local.api_url()
    assert record is not None
    assert url is not None
    ui = url.removesuffix("/api")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a browser's children end late
        async with page("about:blank", Path(folder)) as one, get_client() as client:
            cloud = ControlClient(record.control, record.key)
            yield Studio(one, ui, client, cloud, record.env["TPU_RELAY_BUCKET"], into, others)


async def take_all(local: Local, into: Path, others: Path | None) -> None:
    async with studio(local, into, others) as made:
        await photograph(made)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.pictures", description=__doc__)
    parser.add_argument("--into", type=Path, default=PICTURES, help=f"where the README's go ({PICTURES})")
    parser.add_argument(
        "--all", action="store_true", help=f"also photograph what the README does not show, into {OTHERS}"
    )
    arguments = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("pictures are taken in Chromium or Chrome, and neither is on the PATH")
    for folder in (arguments.into, OTHERS):
        folder.mkdir(parents=True, exist_ok=True)
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
            asyncio.run(take_all(local, arguments.into, OTHERS if arguments.all else None))
    finally:
        run_local("down", folder)
        shutil.rmtree(folder, ignore_errors=True)


def run_local(do: str, folder: Path) -> None:
    """What `make up` and `make down` run, in a clone, so that no picture shows where whoever takes it works."""
    clone = folder / "tpu-relay"
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", ".", clone], check=True)
    subprocess.run([sys.executable, "-m", "deployments.local", do, "--folder", folder], cwd=clone, check=True)


if __name__ == "__main__":
    main()
