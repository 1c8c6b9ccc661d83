"""The fixtures of the checkpoint tests, for those of the segment contract."""

from tests.checkpoint.conftest import bucket, bucket_server, training

__all__ = ["bucket", "bucket_server", "training"]
