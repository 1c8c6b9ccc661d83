"""The Prefect worker type `cloud-tpu`: runs flows beside itself and leaves nothing of a run that has ended."""
