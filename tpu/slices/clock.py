"""The clock that the code of this package takes as an argument."""

from tpu.clock import Clock, SystemClock

__all__ = ["Clock", "SystemClock"]
