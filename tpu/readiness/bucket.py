"""Whether a run can do in its bucket all that it does, and whether the bucket is where the slices are."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from tpu.checkpoint import files, objects
from tpu.checkpoint.retry import RetryPolicy, StorageUnavailable
from tpu.connection import Connection
from tpu.readiness.caller import Caller
from tpu.readiness.finding import Finding, State, good, unknown, wrong
from tpu.slices.candidate import Candidate
from tpu.slices.preflight import Traffic, region_problem
from tpu.slices.regions import bucket_home

# Nobody waits minutes to hear that nothing answers.
PATIENCE = RetryPolicy(deadline_s=5.0)
ROLE = "roles/storage.objectAdmin"


def bucket(connection: Connection, region: str, caller: Caller) -> Finding:
    """List, write, change by precondition, read, delete: all that a run does there, with one small object."""
    url, what = connection.bucket, "bucket"
    try:
        objects.check_bucket(url, PATIENCE)
    except objects.BucketUnusable as error:
        if "there is no bucket" in str(error):
            mend = (
                f"gcloud storage buckets create {url} --project={connection.project} --location={region} "
                "--uniform-bucket-level-access"
            )
            return wrong(what, str(error), mend)
        return wrong(what, str(error), grant(url, caller.member))
    except StorageUnavailable as error:
        return wrong(what, str(error))
    done: list[str] = []
    doing = ""
    try:
        for doing, step in _steps(f"{url}/preflight/{uuid.uuid4().hex}.json"):
            step()
            done.append(doing)
    except StorageUnavailable as error:
        return wrong(what, str(error))
    except Exception as error:  # a right that is missing comes as an error of whichever client asked
        can = f"objects can be {', '.join(done)}, but not " if done else "objects cannot be "
        return wrong(what, f"{url}: {can}{doing} ({error})", grant(url, caller.member))
    return good(what, f"{url}: objects can be listed, {', '.join(done)}")


def _steps(url: str) -> Sequence[tuple[str, Callable[[], object]]]:
    made: list[int] = []
    return (
        ("written", lambda: made.append(objects.create_exclusive(url, b"[]"))),
        ("changed by compare-and-set", lambda: objects.compare_and_set(url, b"{}", made[0])),
        ("read", lambda: objects.read(url)),
        ("deleted", lambda: files.remove([url], PATIENCE)),
    )


def grant(url: str, member: str) -> str:
    return f"gcloud storage buckets add-iam-policy-binding {url} --member={member} --role={ROLE}"


def place(connection: Connection, candidates: Sequence[Candidate], allowed: Sequence[str]) -> list[Finding]:
    """Whether the bucket is in the region of each candidate, or that was allowed."""
    what = "bucket's region"
    try:
        location = objects.bucket_location(connection.bucket)
    except Exception as error:  # it was usable a moment ago
        return [unknown(what, str(error))]
    if location is None:
        return [unknown(what, "no right to ask where the bucket is (storage.buckets.get)")]
    home = bucket_home(*location)
    problems = [region_problem(one, home, allowed, Traffic(None, 0)) for one in candidates]
    found = [wrong(what, text) for text in dict.fromkeys(problems) if text]
    return found or [Finding(what, State.HOLDS, f"{home.name.lower()}, as the slices, or allowed")]
