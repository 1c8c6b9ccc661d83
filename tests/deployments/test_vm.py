"""The recipe that puts the worker on a small VM, as far as it goes without a cloud.

Real here: the script itself, git, curl, files, HTTP. Made up: the services of Google that it asks, and the programs
that would change this machine or install packages for minutes; they only note what they were asked for.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

from deployments.vm.start_worker import NotStarted, prefect_variables

ROOT = Path(__file__).parents[2]
VM = ROOT / "deployments/vm"
# Each notes its words; what is behind them is done, where it is harmless.
PROGRAMS = {
    "apt-get": "",
    "useradd": "",
    "id": "exit 1",
    "systemctl": "",
    "runuser": 'shift 3; exec "$@"',
    # As root it would give the folder to a user that is not made here.
    "install": 'for word; do shift; case $word in --owner=*) ;; *) set -- "$@" "$word";; esac; done; '
    'exec /usr/bin/install "$@"',
    "python3": 'case $1 in -m) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";; esac',
}


@dataclass
class Google:
    """A local HTTP server in the place of the metadata server and of Secret Manager: answers by path."""

    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def google() -> Iterator[Google]:
    made = Google()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked.append((self.path, self.headers.get("Metadata-Flavor")))
            status, text = made.answers.get(self.path, (404, "not there"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def machine(tmp_path: Path, google: Google) -> dict[str, str]:
    """The environment of a machine on which the script may run: its root folder, and its programs."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, does in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{tmp_path}/notes\n{does}\n')
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path), "RELAY_ROOT": str(tmp_path / "root"),
        "RELAY_METADATA": google.url, "NO_PROXY": "*",
    }  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    """A git repository with our unit in it, and its first commit; a second one is newer."""
    made = tmp_path / "repository"
    (made / "deployments/vm").mkdir(parents=True)
    shutil.copy(VM / "tpu-relay-worker.service", made / "deployments/vm")

    def git(*words: str) -> str:
        settings = ("-c", "user.name=t", "-c", "user.email=t@example.com")
        return subprocess.run(
            ["git", "-C", made, *settings, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    for number in ("first", "second"):
        (made / "version").write_text(number)
        git("add", ".")
        git("commit", "--quiet", "--message", number)
    return made, git("rev-parse", "HEAD~1")


def start(machine: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", VM / "startup.sh"], env=machine, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_startup_script_installs_the_commit_and_starts_the_worker_at_every_boot(
    machine: dict[str, str], google: Google, repository: tuple[Path, str], tmp_path: Path
):
    path, commit = repository
    told = {"relay-repository": str(path), "relay-commit": commit, "relay-bucket": "gs://my-runs"}
    google.answers = {
        f"/computeMetadata/v1/instance/attributes/{name}": (200, text) for name, text in told.items()
    }
    google.answers["/computeMetadata/v1/project/project-id"] = (200, "my-project")
    for boot in (1, 2):  # the second finds everything there
        done = start(machine)
        assert done.returncode == 0, (boot, done.stderr)
    root = tmp_path / "root"
    assert (root / "opt/tpu-relay/source/version").read_text() == "first"
    assert {flavor for _, flavor in google.asked} == {"Google"}
    assert (root / "etc/tpu-relay/worker.env").read_text().splitlines() == [
        'TPU_RELAY_PROJECT="my-project"', 'TPU_RELAY_BUCKET="gs://my-runs"', 'TPU_RELAY_SSH_ROUTE="internal"',
        'TPU_RELAY_HOME="/var/lib/tpu-relay"', 'PREFECT_HOME="/var/lib/tpu-relay/prefect"',
    ]  # fmt: skip
    unit = (root / "etc/systemd/system/tpu-relay-worker.service").read_text()
    assert unit == (VM / "tpu-relay-worker.service").read_text()
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes.count("systemctl restart tpu-relay-worker.service") == 2
    assert sum(note.startswith("python3 -m venv") for note in notes) == 1
    assert f"runuser -u relay -- git checkout --quiet --detach {commit}" in notes
    # A new commit in the metadata is taken at the next boot.
    google.answers["/computeMetadata/v1/instance/attributes/relay-commit"] = (200, "origin/HEAD")
    google.answers["/computeMetadata/v1/instance/attributes/relay-grant"] = (200, "v4:us-central2-b:spot=32")
    assert start(machine).returncode == 0
    assert (root / "opt/tpu-relay/source/version").read_text() == "second"
    assert 'TPU_RELAY_GRANT="v4:us-central2-b:spot=32"' in (root / "etc/tpu-relay/worker.env").read_text()


def test_a_vm_that_was_told_nothing_says_what_is_missing(machine: dict[str, str], google: Google):
    done = start(machine)
    assert done.returncode != 0
    assert "the VM has no metadata relay-repository: gcloud compute instances add-metadata" in done.stderr


def secret(text: str) -> tuple[int, str]:
    return 200, json.dumps({"payload": {"data": base64.b64encode(text.encode()).decode()}})


def test_the_worker_gets_address_and_key_of_prefect_from_secret_manager(google: Google):
    url, key = (
        f"/v1/projects/p/secrets/prefect-api-{name}/versions/latest:access" for name in ("url", "key")
    )
    session = requests.Session()
    session.trust_env = False
    with pytest.raises(NotStarted, match="gcloud secrets create prefect-api-url --project=p --data-file=-"):
        prefect_variables(session, "p", google.url)
    google.answers[url] = (403, "{}")
    with pytest.raises(NotStarted, match=r"--role=roles/secretmanager\.secretAccessor"):
        prefect_variables(session, "p", google.url)
    google.answers[url] = secret("https://prefect.example/api\n")
    assert prefect_variables(session, "p", google.url) == {"PREFECT_API_URL": "https://prefect.example/api"}
    google.answers[key] = secret("pnu_123")
    assert prefect_variables(session, "p", google.url)["PREFECT_API_KEY"] == "pnu_123"


def test_the_scripts_are_clean_for_shellcheck():
    program = Path(sys.executable).with_name("shellcheck")
    scripts = sorted((ROOT / "deployments").rglob("*.sh"))
    assert scripts
    done = subprocess.run([program, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path):
    unit = tmp_path / "tpu-relay-worker.service"
    text = (VM / "tpu-relay-worker.service").read_text()
    assert "KillMode=process" in text  # flows outlive the worker, and it takes them up
    unit.write_text(text.replace("/opt/tpu-relay/venv/bin/python", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
