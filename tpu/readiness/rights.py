"""What the caller may do in the project, and how much of it: API, permissions, service account, quota."""

from __future__ import annotations

from tpu.cloud import CloudError, TpuCloud
from tpu.cloud.project import GoogleProject, ProjectUnknown, Quota, Why, is_off
from tpu.readiness.bucket import grant
from tpu.readiness.caller import Caller
from tpu.readiness.finding import Finding, enable, good, not_told, unknown, wrong
from tpu.slices.candidate import Candidate
from tpu.slices.provision import check_offered
from tpu.slices.request import SliceRequest
from tpu.topology import accelerator_type

NEEDED = ("tpu.nodes.create", "tpu.nodes.delete", "tpu.nodes.get", "tpu.nodes.list", "tpu.nodes.update")
# What names of quotas have of each generation, in small letters; "s" stands where Google writes one.
_IN_NAMES = {
    "v2": ("tpuv2",), "v3": ("tpuv3",), "v4": ("tpuv4",), "v5litepod": ("tpuv5", "lite"), "v5p": ("tpuv5p",),
    "v6e": ("tpuv6e",),
}  # fmt: skip
_PREEMPTIBLE_QUOTA = ("spot", "preemptible", "flex-start")


async def api(cloud: TpuCloud, zone: str, project: str, caller: Caller) -> Finding:
    """The API in a zone: is it on, does it know the zone, may we look?"""
    what = f"Cloud TPU API in {zone}"
    try:
        nodes = await cloud.list_nodes(zone)
    except CloudError as error:
        if is_off(error.message):
            return wrong(what, f"it is off in {project}", enable("tpu", project))
        if error.code == 7 and "locations/" not in error.message:
            return wrong(what, error.message, give("roles/tpu.admin", project, caller))
        return wrong(what, str(error))
    return good(what, f"answers; {len(nodes)} node(s) there now")


async def permissions(project: GoogleProject, name: str, caller: Caller, iap: bool) -> Finding:
    """The permissions on the project that a run needs."""
    what = "rights in the project"
    wanted = [*NEEDED, "iap.tunnelInstances.accessViaIAP"] if iap else list(NEEDED)
    try:
        missing = await project.missing_permissions(wanted)
    except ProjectUnknown as error:
        return not_told(what, error, name)
    roles = ["roles/tpu.admin"] if set(missing) & set(NEEDED) else []
    roles += ["roles/iap.tunnelResourceAccessor"] if set(missing) - set(NEEDED) else []
    if missing:
        return wrong(
            what, f"no {', '.join(missing)}", " && ".join(give(role, name, caller) for role in roles)
        )
    return good(
        what, "slices can be made, seen, changed and deleted" + (", and reached by IAP" if iap else "")
    )


async def service_account(
    project: GoogleProject, name: str, wanted: str | None, bucket: str, caller: Caller
) -> list[Finding]:
    """Whether VMs may be made to run as the service account that they are to have, and what it may do itself."""
    what = "service account of the VMs"
    try:
        account = wanted or (await project.compute()).default_account
        if account is None:
            return [wrong(what, "the project has no default one: make one, and name it in slice.service_account",
                          f"gcloud iam service-accounts create relay-vm --project={name}")]  # fmt: skip
        if not await project.may_act_as(account):
            mend = (
                f"gcloud iam service-accounts add-iam-policy-binding {account} --project={name} "
                f"--member={caller.member} --role=roles/iam.serviceAccountUser"
            )
            return [wrong(what, f"no right to start VMs as {account}", mend)]
    except ProjectUnknown as error:
        if error.why is Why.NOT_THERE:
            short = (wanted or "").partition("@")[0]
            return [wrong(what, f"there is no {wanted}",
                          f"gcloud iam service-accounts create {short} --project={name}")]  # fmt: skip
        return [not_told(what, error, name)]
    its_own = grant(bucket, f"serviceAccount:{account}")
    return [
        good(what, account),
        unknown(f"right of {account} to the bucket", "only a VM can see it; if it has none yet", its_own),
    ]


async def offer(cloud: TpuCloud, candidate: Candidate, request: SliceRequest) -> Finding:
    """Type and image, in the zone."""
    try:
        await check_offered(cloud, request)
    except CloudError as error:
        see = "accelerator-types" if "accelerator type" in error.message else "versions"
        return wrong(
            str(candidate), error.message, f"gcloud compute tpus tpu-vm {see} list --zone={candidate.zone}"
        )
    return good(str(candidate), f"offered, with image {request.image}")


async def quotas(project: GoogleProject, name: str, candidates: tuple[Candidate, ...]) -> list[Finding]:
    """Whether the limits leave room for one slice of each candidate. What is in use is not looked at."""
    try:
        known = await project.quotas()
    except ProjectUnknown as error:
        return [not_told("quota", error, name)]
    return [quota(known, one, name) for one in candidates]


def quota(known: list[Quota], candidate: Candidate, project: str) -> Finding:
    """Of what the project may have, is one slice of the candidate covered? Pure.

    Google counts chips or cores, and splits some generations into quotas by size: the largest that fits counts.
    """
    what = f"quota for {candidate}"
    kind = accelerator_type(candidate.accelerator_type)
    if candidate.provisioning == "reserved":
        return unknown(what, "a reservation's, which its creation tells")
    preemptible = candidate.provisioning in _PREEMPTIBLE_QUOTA
    fitting = [
        one
        for one in known
        if all(word in one.name.lower() for word in _IN_NAMES[kind.generation])
        and ("preemptible" in one.name.lower()) == preemptible
        and "reserv" not in one.name.lower()
        and one.places & {candidate.zone, candidate.region}
    ]
    if not fitting:
        look = f"gcloud beta quotas info list --service=tpu.googleapis.com --project={project}"
        return unknown(what, "none is listed there; a creation tells", look)
    best = max(fitting, key=lambda one: float("inf") if one.limit is None else one.limit)
    if best.limit is None or best.limit >= kind.chips:
        return good(what, f"{best.name} is {'unlimited' if best.limit is None else best.limit}")
    (where,) = sorted(best.places & {candidate.zone, candidate.region})[:1]
    dimension = "zone" if where == candidate.zone else "region"
    mend = (
        f"gcloud beta quotas preferences create --service=tpu.googleapis.com --project={project} "
        f"--quota-id={best.name} --preferred-value={kind.chips} --dimensions={dimension}={where}"
    )
    text = f"{best.name} is {best.limit} in {where}, and a slice has {kind.chips} chips: use other terms, or ask for it"
    return wrong(what, text, mend)


def give(role: str, project: str, caller: Caller) -> str:
    return f"gcloud projects add-iam-policy-binding {project} --member={caller.member} --role={role}"
