"""The connection that the environment configures, for commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpu.connection import Connection


def configured_connection() -> Connection:
    """The configured connection, with a bucket that answers: nobody waits a minute to hear that it is not there."""
    from tpu.checkpoint.objects import check_bucket
    from tpu.checkpoint.retry import RetryPolicy
    from tpu.connection import Connection

    connection = Connection.from_environment()
    check_bucket(connection.bucket, RetryPolicy(deadline_s=5.0))
    return connection
