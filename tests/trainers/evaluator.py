"""An evaluation command: waits while the file HOLD exists, and notes in the file EVALUATED that it was run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

step = int(os.environ["RELAY_STEP"])
with Path(os.environ["EVALUATED"]).open("a") as file:
    file.write(f"{step}\n")
while Path(os.environ["HOLD"]).exists():
    time.sleep(0.05)
print(json.dumps({"step": step, "checkpoint": os.environ["RELAY_CHECKPOINT"]}))
