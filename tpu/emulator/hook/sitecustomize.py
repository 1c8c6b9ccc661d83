"""Loaded by every Python that starts on an emulated TPU VM: stands in for libtpu.

Takes the chips that the process is to see, as libtpu takes /dev/vfio/*, and gives JAX and PyTorch/XLA as many CPU
devices as those chips would have. Once it holds them, its own subprocesses do not ask again. `python -I -S` does not
load this file, so helpers that need no chip take none.
"""

import os
import sys


def _wanted_chips(environment, chips):
    """Return the chips asked for: those of TPU_VISIBLE_CHIPS (or its older name), all if neither is set."""
    for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        text = environment.get(name, "").strip()
        if text:
            return sorted({part.strip() for part in text.split(",") if part.strip()})
    return [str(chip) for chip in range(chips)]


def _refuse(chip):
    sys.stderr.write(
        "RuntimeError: Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed: "
        f"open /dev/vfio/{chip}: Device or resource busy; Couldn't open iommu group /dev/vfio/{chip}\n"
    )
    sys.stderr.flush()
    os._exit(1)  # `site` would turn any exception into a warning


def _ancestors():
    pid = os.getppid()
    while pid > 0:
        yield pid
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return


def _take(folder, chips):
    """Lock the files of these chips and keep them open; ends the process if one cannot be had."""
    import fcntl

    for chip in chips:
        if not chip.isdigit():
            _refuse(chip)
        try:
            file = os.open(os.path.join(folder, chip), os.O_RDWR)  # not there: not a chip of this host
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _refuse(chip)


def _start(environment):
    folder = environment["TPU_EMULATOR_CHIP_LOCKS"]
    wanted = _wanted_chips(environment, int(environment["TPU_EMULATOR_CHIPS"]))
    holder = environment.get("TPU_EMULATOR_CHIP_HOLDER", "")
    if not (holder.isdigit() and int(holder) in _ancestors()):
        _take(folder, wanted)
        environment["TPU_EMULATOR_CHIP_HOLDER"] = str(os.getpid())
    environment["JAX_PLATFORMS"] = "cpu"
    environment["PJRT_DEVICE"] = "CPU"  # PyTorch/XLA's
    devices = len(wanted) * int(environment["TPU_EMULATOR_DEVICES_PER_CHIP"])
    environment["CPU_NUM_DEVICES"] = str(devices)
    # A value that this hook gave to the parent process was for the parent's chips.
    if environment.get("JAX_NUM_CPU_DEVICES") == environment.get("TPU_EMULATOR_JAX_DEVICES"):
        environment["JAX_NUM_CPU_DEVICES"] = environment["TPU_EMULATOR_JAX_DEVICES"] = str(devices)


if "TPU_EMULATOR_CHIP_LOCKS" in os.environ:
    _start(os.environ)
