"""From the slice that is wanted to what the cloud is asked for."""

from __future__ import annotations

from tpu.cloud import NodeRequest
from tpu.slices.labels import intent_hash
from tpu.slices.request import SliceRequest


def node_request(name: str, request: SliceRequest) -> NodeRequest:
    """The node of a slice. It carries the hash of its intent, by which whoever asks again finds it as its own."""
    return NodeRequest(
        accelerator_type=request.accelerator_type,
        runtime_version=request.image,
        provisioning=request.provisioning,
        intent=intent_hash(name, request),
        network=request.network,
        subnetwork=request.subnetwork,
        external_ips=request.external_ips,
        service_account=request.service_account,
        metadata=request.metadata,
        labels=request.labels,
        max_run_s=request.max_run_s if request.provisioning == "flex-start" else None,
    )
