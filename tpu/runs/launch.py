"""From a run's record to what is asked of cloud and hosts, and from what was seen back to evidence. Pure."""

from __future__ import annotations

import io
import json
import posixpath
import tarfile
from collections.abc import Sequence

from tpu.checkpoint.fence import Commit
from tpu.connection import Connection
from tpu.hosts.gang import GangSpec, HostStatus, Tenant
from tpu.hosts.identity import Identity
from tpu.runs.code import Bundle, CodeError
from tpu.runs.config import RunConfig
from tpu.runs.parts import Part, role_of
from tpu.runs.plan import CheckpointRule
from tpu.runs.record import RunRecord
from tpu.runs.sync import Installed
from tpu.runs.watch import GangView
from tpu.runtime.environment import training_environment
from tpu.slices.acquire import Wish
from tpu.slices.labels import flavour_of, ownership_labels
from tpu.slices.pool import Wanted
from tpu.slices.provision import ReadySlice
from tpu.slices.request import SliceRequest
from tpu.slices.verdict import Evidence, HostEvidence
from tpu.topology import accelerator_type
from tpu.train.packs import Member

TRAINERS = {"jax": ["-m", "tpu.train.jax_trainer"], "xla": ["-m", "tpu.train.xla_trainer"]}
PACK_TRAINER = ["-m", "tpu.train.pack_trainer"]
ELASTIC_TRAINER = ["-m", "tpu.train.elastic_trainer"]
# torch_xla would take the host's processor, and say so in a warning only, where it finds no chips.
FRAMEWORK_VARIABLES = {"jax": {}, "xla": {"PJRT_DEVICE": "TPU"}}
# The host's own PYTHONPATH and PATH stay behind ours: an image may need them.
_WITH_PATHS = (
    'PYTHONPATH="$RELAY_PYTHONPATH${PYTHONPATH:+:$PYTHONPATH}" PATH="$RELAY_PATH:$PATH"; '
    'export PYTHONPATH PATH; exec "$@"'
)


def slice_wish(config: RunConfig, connection: Connection, identity: Identity) -> Wish:
    """The slice that a configuration asks for, in any of its ways."""
    return Wish(
        candidates=config.slice.choices,
        request=slice_request(config, connection, identity),
        race=config.slice.race,
        queue_patience_s=config.slice.queue_minutes * 60,
    )


def slice_request(config: RunConfig, connection: Connection, identity: Identity) -> SliceRequest:
    """What all candidates of a configuration have in common; `SliceRequest.of` makes it the request of one."""
    wanted = config.slice
    metadata = {"ssh-keys": f"{connection.ssh_user}:{identity.public_line}"}
    if wanted.startup_script:
        metadata["startup-script"] = wanted.startup_script
    return SliceRequest(
        zone=wanted.zone,
        accelerator_type=wanted.accelerator_type,
        provisioning=wanted.provisioning,
        runtime_version=wanted.runtime_version,
        network=wanted.network,
        subnetwork=wanted.subnetwork,
        external_ips=wanted.external_ips,
        service_account=wanted.service_account,
        metadata=metadata,
        labels=ownership_labels(config.pool, connection.ssh_user, config.name, connection.bucket),
        deadline_s=wanted.ready_minutes * 60,
        max_run_s=wanted.max_run_hours * 3600,
    )


def run_wanted(record: RunRecord, connection: Connection, identity: Identity) -> Wanted:
    """What the run waits for in its pool."""
    config = record.config
    return Wanted(
        run=config.name,
        uid=record.uid,
        candidates=config.slice.choices,
        chips=config.slice.chips,
        priority=config.priority,
        since=record.created,
        flavour=flavour_of(slice_request(config, connection, identity)),
    )


def requirements_text(config: RunConfig, code: Bundle) -> str | None:
    """Text of the program's requirements file out of its bundle; None if it names none.

    Raises:
        CodeError: the bundle has no such file, or it is no text.
    """
    path = config.environment.requirements
    if path is None:
        return None
    with tarfile.open(fileobj=io.BytesIO(code.data), mode="r:gz") as archive:
        # `tar -czf … .` names its entries ./requirements.txt.
        names = {posixpath.normpath(name): name for name in archive.getnames()}
        try:
            content = archive.extractfile(names[posixpath.normpath(path)])
        except KeyError:
            content = None
        if content is None:
            raise CodeError(f"environment.requirements: there is no file {path} in {code.source}")
        try:
            return content.read().decode()
        except UnicodeDecodeError:
            raise CodeError(
                f"environment.requirements: {path} in {code.source} is not text in UTF-8"
            ) from None


def gang_spec(
    record: RunRecord,
    run_dir: str,
    attempt: int,
    resume: Commit | None,
    ready: ReadySlice,
    tenant: Tenant,
    installed: Installed,
    secrets: dict[str, str],
    members: Sequence[Member] = (),
    part: Part | None = None,
) -> GangSpec:
    """What every host of the slice is to run for this attempt, on the chips that the run holds.

    `members` are those of a pack, as its program is told of them. With a `part` it takes part in another run: what it
    saves is that one's.
    """
    config = record.config
    told = record if part is None else part.record
    kind = accelerator_type(ready.request.accelerator_type)
    program = _program(record, installed, part)
    common = (
        FRAMEWORK_VARIABLES[config.framework]
        | config.variables
        | {
            "RELAY_RUN_DIR": run_dir if part is None else part.run_dir,
            "RELAY_RESUME": f"{resume.step}/{resume.attempt}" if resume else "",
            "RELAY_STOP_STEPS": ",".join(map(str, told.segments)),
            "RELAY_LAST_STEP": str(told.config.steps),
            "RELAY_SEED": str(config.training.seed if config.training else config.seed),
            "RELAY_ALLOW_MIXED": "1" if config.allow_mixed else "0",
            "RELAY_KEEP": keep_rule(told.config.checkpoints),
            "RELAY_PYTHONPATH": ":".join(installed.python_path),
            "RELAY_PATH": installed.bin_folder,
        }
    )
    environments = {
        host: common
        | training_environment(
            accelerator=kind,
            host_index=host.index,
            hostnames=[other.internal for other in ready.hosts],
            attempt=attempt,
            run=config.name,
            chips=tenant.chips if config.slice.chips is not None else None,
        )
        | secrets
        for host in ready.hosts
    }
    training = (
        told.config.training.model_dump(mode="json") | {"data_sha256": told.data_sha256}
        if told.config.training
        else {"members": [member.to_values() for member in members]}
        if members
        else {}
    )
    role = {} if part is None else {"elastic": role_of(part, ready.name)}
    return GangSpec(
        run=config.name,
        attempt=attempt,
        argv=["/bin/sh", "-c", _WITH_PATHS, "sh", *program],
        environments=environments,
        files={"config.json": json.dumps(training | role)},
        log_target=f"{run_dir}/logs/{attempt}",
        secrets=list(secrets.values()),
        grace_s=config.grace_seconds,
        cwd=installed.folder,
        tenant=tenant,
    )


def _program(record: RunRecord, installed: Installed, part: Part | None) -> list[str]:
    config = record.config
    if record.members:
        return [installed.python, *PACK_TRAINER]
    if part is not None:
        own = part.record.config.command
        return [installed.python, *ELASTIC_TRAINER] if own is None else own
    if config.command is None:
        return [installed.python, *TRAINERS[config.framework]]
    if config.contract:
        return config.command
    # Ours is the last folder; nothing of the command's own is imported, whatever it is called.
    wrapper = [installed.python, "-I", "-S", f"{installed.python_path[-1]}/tpu/runtime/foreign.py"]
    file = ["--metrics-file", config.metrics_file] if config.metrics_file else []
    return [*wrapper, *file, "--", *config.command]


def why_not_taken_up(status: HostStatus) -> str | None:
    """Why a gang cannot go on, by what one host knows of it; None if nothing speaks against it.

    A host that does not answer speaks neither for nor against: following it finds out.
    """
    if status.state == "absent":
        return f"{status.host.name}: the flow died before its gang had started"
    if status.state == "lost":
        return f"{status.host.name}: the supervisor died while no flow was watching"
    return None


def keep_rule(rule: CheckpointRule) -> str:
    """The keep rule as the contract has it: JSON, or empty if every checkpoint is kept."""
    if rule.keep_last is None:
        return ""
    return json.dumps({"last": rule.keep_last, "every": rule.keep_every})


def evidence(view: GangView, last_step: int | None, stopped: str | None) -> Evidence:
    """What was seen of a gang that ended, for the verdict. `last_step` is None for a foreign command."""
    return Evidence(
        hosts=tuple(
            HostEvidence(
                host=host.address.name,
                exit_code=host.exit_code,
                signal=host.exit_signal,
                ended_by_us=host.ended_by_us,
                noticed=host.noticed,
                lost=host.lost,
                at_s=host.ended_at,
                last_lines=tuple(host.tail),
            )
            for host in view.hosts
        ),
        condition=view.cloud,
        stop_wanted=stopped,
        life_over=view.life_over,
        stalled=f"no step for {view.hung_s:.0f} s after step {view.step}"
        if view.hung_s is not None
        else None,
        diverged=view.diverged,
        evicted=view.evicted,
        finished=None if last_step is None else view.committed >= last_step and view.finished,
    )
