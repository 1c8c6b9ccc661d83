"""Start the worker of a VM: the address and key of Prefect from Secret Manager, all flows deployed, then the worker.

The worker takes the place of this process. What is secret is in its environment only: in no file, and not in the VM's
metadata, which every program on the VM can read.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys

import google.auth
import requests
from google.auth.exceptions import GoogleAuthError
from google.auth.transport.requests import AuthorizedSession

from deployments.deploy import POOL, delete_former, deploy_flows, make_work_pool

SECRET_MANAGER = "https://secretmanager.googleapis.com"
# Variable and secret; a Prefect server of one's own may want no key.
URL, KEY = ("PREFECT_API_URL", "prefect-api-url"), ("PREFECT_API_KEY", "prefect-api-key")
ANSWER_S = 20.0


class NotStarted(Exception):
    """The worker cannot be started; the message says what is missing, and the command that adds it."""


def secret(session: requests.Session, project: str, name: str, at: str = SECRET_MANAGER) -> str | None:
    """The newest version of a secret; None if there is none.

    Raises:
        NotStarted: no right to it, or no answer.
    """
    url = f"{at}/v1/projects/{project}/secrets/{name}/versions/latest:access"
    try:
        answer = session.get(url, timeout=ANSWER_S)
    except (requests.RequestException, GoogleAuthError) as error:
        raise NotStarted(f"Secret Manager does not answer ({type(error).__name__})") from None
    if answer.status_code == 404:
        return None
    if answer.status_code == 403:
        raise NotStarted(
            f"no right to the secret {name}, or its API is off: gcloud services enable secretmanager.googleapis.com "
            f"--project={project}; gcloud secrets add-iam-policy-binding {name} --project={project} "
            "--member=serviceAccount:ACCOUNT-OF-THIS-VM --role=roles/secretmanager.secretAccessor"
        )
    if not answer.ok:
        raise NotStarted(f"Secret Manager answers {answer.status_code} for {name}")
    return base64.b64decode(answer.json()["payload"]["data"]).decode().strip()


def prefect_variables(session: requests.Session, project: str, at: str = SECRET_MANAGER) -> dict[str, str]:
    """How Prefect is found.

    Raises:
        NotStarted: its address is not to be had.
    """
    found = {variable: secret(session, project, name, at) for variable, name in (URL, KEY)}
    if not found[URL[0]]:
        raise NotStarted(
            f"there is no secret {URL[1]}: printf %s https://…/api | gcloud secrets create {URL[1]} "
            f"--project={project} --data-file=-"
        )
    return {name: value for name, value in found.items() if value}


def main() -> None:
    try:
        credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
        session = AuthorizedSession(credentials)
        os.environ.update(prefect_variables(session, os.environ["TPU_RELAY_PROJECT"]))
        asyncio.run(make_work_pool())
        deploy_flows(os.environ)
        asyncio.run(delete_former())
    except Exception as error:  # systemd tries again; what it was stands in the journal, without a traceback
        sys.exit(f"start_worker: {type(error).__name__}: {error}")
    words = [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        POOL,
        "--name",
        os.uname().nodename,
    ]
    os.execv(sys.executable, words)


if __name__ == "__main__":
    main()
