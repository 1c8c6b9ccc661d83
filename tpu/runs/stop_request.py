"""A wish that a run stops, left in the bucket for whoever drives it.

It names the controller's term, so that it ends the driver that was seen and not one that starts later.
"""

from __future__ import annotations

import json

from tpu.checkpoint import files, objects


def request_stop(run_dir: str, term: int) -> None:
    files.write(f"{run_dir}/stop.json", json.dumps({"term": term}).encode())


def stop_requested(run_dir: str, term: int) -> bool:
    """Whether the driver of this term was asked to stop."""
    found = objects.read(f"{run_dir}/stop.json")
    return found is not None and json.loads(found[0])["term"] == term
