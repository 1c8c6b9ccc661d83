"""A local Cloud TPU: the real API, real SSH hosts, a metadata server a host and a local GCS server.

`with Emulator() as emulator:` in Python, `python -m tpu.emulator up` in a shell.
"""
