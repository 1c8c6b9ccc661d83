#!/bin/bash
# Startup script of a small VM that carries the worker, so that a laptop may sleep. It runs as root at every boot and
# can be run again; the README says how the VM is made. What it is told stands in the VM's metadata:
#   relay-repository, relay-commit   where tpu-relay comes from (git URL, and commit or tag)
#   relay-bucket                     the bucket of the runs, gs://…
#   relay-grant                      TPU_RELAY_GRANT, if there is one
# Secrets never stand there: the worker fetches them from Secret Manager when it starts.
set -euo pipefail

ROOT=${RELAY_ROOT:-}
METADATA=${RELAY_METADATA:-http://metadata.google.internal}
HOME_OF_ALL=$ROOT/opt/tpu-relay

metadata() {
  curl --silent --show-error --fail --retry 5 --retry-connrefused --header 'Metadata-Flavor: Google' \
    "$METADATA/computeMetadata/v1/$1"
}

attribute() {
  metadata "instance/attributes/$1" || {
    echo "startup: the VM has no metadata $1: gcloud compute instances add-metadata NAME --metadata=$1=…" >&2
    exit 1
  }
}

as_relay() {
  runuser -u relay -- "$@"
}

repository=$(attribute relay-repository)
commit=$(attribute relay-commit)
bucket=$(attribute relay-bucket)
grant=$(metadata instance/attributes/relay-grant 2>/dev/null || true)
project=$(metadata project/project-id)

if ! command -v git >/dev/null || ! python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))'; then
  apt-get update --quiet
  DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes git python3 python3-venv
fi
id relay >/dev/null 2>&1 || useradd --system --create-home --home-dir "$ROOT/var/lib/tpu-relay" relay
install --directory --owner=relay --mode=0755 "$HOME_OF_ALL"

if [ ! -d "$HOME_OF_ALL/source" ]; then
  as_relay git clone --quiet "$repository" "$HOME_OF_ALL/source.new"
  mv "$HOME_OF_ALL/source.new" "$HOME_OF_ALL/source"
fi
cd "$HOME_OF_ALL/source"
as_relay git remote set-url origin "$repository"
as_relay git fetch --quiet --tags origin
as_relay git checkout --quiet --detach "$commit"
[ -d "$HOME_OF_ALL/venv" ] || as_relay python3 -m venv "$HOME_OF_ALL/venv"
as_relay "$HOME_OF_ALL/venv/bin/python" -m pip install --quiet --editable "$HOME_OF_ALL/source"

install --directory --mode=0755 "$ROOT/etc/tpu-relay"
cat >"$ROOT/etc/tpu-relay/worker.env" <<END
TPU_RELAY_PROJECT="$project"
TPU_RELAY_BUCKET="$bucket"
TPU_RELAY_SSH_ROUTE="internal"
TPU_RELAY_HOME="/var/lib/tpu-relay"
PREFECT_HOME="/var/lib/tpu-relay/prefect"
END
if [ -n "$grant" ]; then
  echo "TPU_RELAY_GRANT=\"$grant\"" >>"$ROOT/etc/tpu-relay/worker.env"
fi
install -D --mode=0644 deployments/vm/tpu-relay-worker.service \
  "$ROOT/etc/systemd/system/tpu-relay-worker.service"
systemctl daemon-reload
systemctl enable --quiet tpu-relay-worker.service
systemctl restart tpu-relay-worker.service
echo "startup: the worker runs tpu-relay at $commit; its log: journalctl -fu tpu-relay-worker"
