"""Labels that every slice carries: whose it is, who made it, and for which intent.

They are what the reaper goes by, so nothing is ever created without them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping

from tpu.cloud.values import INTENT_LABEL
from tpu.slices.request import SliceRequest

POOL_LABEL = "relay-pool"
CREATOR_LABEL = "relay-creator"
RUN_LABEL = "relay-run"
# Pools of several buckets may share a project, and even a name: what another bucket's runs made is not ours to delete.
BUCKET_LABEL = "relay-bucket"

_LONGEST_VALUE = 63
_NOT_THE_SLICE = frozenset({"deadline_s", "max_run_s", "labels"})


def label_value(text: str) -> str:
    """`text` as a label value: at most 63 of [a-z0-9_-].

    Text that has to be changed gets a piece of its hash, so that different texts stay different.
    """
    clean = re.sub(r"[^a-z0-9_-]", "-", text.lower())
    if clean == text and len(text) <= _LONGEST_VALUE:
        return text
    mark = "-" + hashlib.sha256(text.encode()).hexdigest()[:8]
    return clean[: _LONGEST_VALUE - len(mark)].strip("-_") + mark


def ownership_labels(
    pool: str, creator: str, run: str | None = None, bucket: str | None = None
) -> dict[str, str]:
    """Labels for a new slice; the intent's is added when it is created. `bucket` is the gs:// URL of the pool's."""
    labels = {POOL_LABEL: label_value(pool), CREATOR_LABEL: label_value(creator)}
    if run is not None:
        labels[RUN_LABEL] = label_value(run)
    if bucket is not None:
        labels[BUCKET_LABEL] = bucket_label(bucket)
    return labels


def bucket_label(bucket: str) -> str:
    """The label's value for a bucket, given as gs:// URL."""
    return label_value(bucket.removeprefix("gs://").rstrip("/"))


def intent_hash(name: str, request: SliceRequest) -> str:
    """32 hexadecimal characters for what the slice is.

    Who asks, from which machine and how patiently does not count: a flow that is started again elsewhere
    must find its slice, and can put its own SSH key on it afterwards.
    """
    fields = {k: v for k, v in dataclasses.asdict(request).items() if k not in _NOT_THE_SLICE}
    fields["metadata"] = {k: v for k, v in request.metadata.items() if k != "ssh-keys"}
    text = json.dumps({"name": name, **fields}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def flavour_of(request: SliceRequest) -> str:
    """16 hexadecimal characters for what of a slice can neither be changed nor chosen by a candidate.

    Of two requests with the same one, each can use the slice that was made for the other.
    """
    kind = {"zone", "accelerator_type", "provisioning", *_NOT_THE_SLICE}
    fields = {k: v for k, v in dataclasses.asdict(request).items() if k not in kind}
    fields["metadata"] = {k: v for k, v in request.metadata.items() if k != "ssh-keys"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def is_ours(labels: Mapping[str, str], pool: str | None = None) -> bool:
    """True if we made what carries these labels (for the given pool)."""
    if INTENT_LABEL not in labels or POOL_LABEL not in labels:
        return False
    return pool is None or labels[POOL_LABEL] == label_value(pool)
