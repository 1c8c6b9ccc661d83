"""Chips as files: who holds a chip holds an exclusive flock on its file, and the kernel lets go when it dies.

Run as a script (`python -I -S chips.py FOLDER`) this is the leftover of a dead program: it takes every chip
that is free, waits for the others, and never lets go. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path


def create_locks(folder: Path, chips: int) -> None:
    """Make one lock file for each chip 0 … chips-1."""
    folder.mkdir(parents=True, exist_ok=True)
    for chip in range(chips):
        (folder / str(chip)).touch()


def held_chips(folder: Path) -> list[int]:
    """Return the chips that some process holds. Looks without taking: a start at this moment is unharmed."""
    held = []
    inodes = {os.stat(folder / name).st_ino: int(name) for name in os.listdir(folder)}
    for line in Path("/proc/locks").read_text().splitlines():
        # 1: FLOCK  ADVISORY  WRITE 4242 fe:00:1234 0 EOF; a waiting one has "->" behind its number
        fields = line.split()
        if fields[1] == "FLOCK" and (chip := inodes.get(int(fields[5].split(":")[2]))) is not None:
            held.append(chip)
    return sorted(set(held))


def hold_all(folder: Path) -> None:
    """Take all chips, those that are free first, and wait for ever."""
    files = [os.open(folder / name, os.O_RDWR) for name in sorted(os.listdir(folder))]
    waiting = []
    for file in files:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting.append(file)
    for file in waiting:
        fcntl.flock(file, fcntl.LOCK_EX)
    signal.pause()


if __name__ == "__main__":
    hold_all(Path(sys.argv[1]))
