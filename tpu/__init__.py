"""tpu-relay: training on preemptible Cloud TPU slices as Prefect flows."""
