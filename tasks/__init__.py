"""The tasks of the flows: each a thin, retryable Prefect task around one call of the driver."""
