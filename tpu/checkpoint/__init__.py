"""Checkpoints in the bucket: safetensors shards, a manifest written last, and a fence that names what counts.

Import what you need from the modules; this package imports nothing by itself, since a training process
that has just replaced a preempted one must start fast.
"""
