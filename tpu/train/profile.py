"""A trace of a running training, on request: open it in XProf or Perfetto.

A request is a file `profile.json`, such as {"steps": 20}, beside the attempt's events file on a host. It is
looked for before each call; the traced steps have the same bits as any others. The trace of host i goes to
<run>/profiles/<attempt>/<first step>/host-<i>/.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUEST = "profile.json"


@dataclass(frozen=True)
class Tracer:
    """How a framework traces: `start` into a folder, `wait` for the devices to have a result, `stop`."""

    start: Callable[[str], None]
    stop: Callable[[], None]
    wait: Callable[[Any], object]


def jax_tracer() -> Tracer:
    """JAX's own."""
    import jax

    def start(folder: str) -> None:
        jax.profiler.start_trace(folder, create_perfetto_trace=True)

    return Tracer(start, jax.profiler.stop_trace, jax.block_until_ready)


class Profiler:
    """Traces calls when asked. One a process; `before_call` and `after_call` go around each call."""

    def __init__(
        self, request: Path | None, target: str, process_id: int, tracer: Tracer | None = None
    ) -> None:
        """`request` is the file to look for (None: never), `target` the folder of the attempt's traces; traces JAX
        unless another `tracer` is given."""
        self._request, self._target, self._process_id = request, target, process_id
        self._tracer = tracer
        self._until = 0
        self._url: str | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def before_call(self, step: int) -> None:
        """Begin a trace if one was asked for."""
        if self._request is None or self._folder is not None or not self._request.exists():
            return
        steps = _requested_steps(self._request)
        self._request.unlink()
        if steps is None:
            return
        self._until, self._url = step + steps, f"{self._target}/{step}/host-{self._process_id}"
        self._folder = tempfile.TemporaryDirectory(prefix="profile-")
        self._tracer = self._tracer or jax_tracer()
        self._tracer.start(self._folder.name)
        print(f"tracing steps {step} to {self._until}", file=sys.stderr, flush=True)

    def after_call(self, step: int, result: Any) -> None:
        """End the trace once it has its steps, and put it into the bucket. `step`: steps done after the call."""
        if self._folder is None or self._tracer is None or step < self._until:
            return
        self._tracer.wait(result)
        self._tracer.stop()
        folder, self._folder = self._folder, None
        with folder:
            _upload(Path(folder.name), str(self._url))


def _requested_steps(request: Path) -> int | None:
    try:
        return max(int(json.loads(request.read_text())["steps"]), 1)
    except (ValueError, KeyError, TypeError) as error:
        wanted = 'wanted {"steps": a whole number}'
        print(f"the request for a profile cannot be read, {wanted}: {error!r}", file=sys.stderr, flush=True)
        return None


def _upload(folder: Path, url: str) -> None:
    from tpu.checkpoint import files

    try:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            files.write(f"{url}/{path.relative_to(folder)}", path.read_bytes())
        print(f"profile: {url}", file=sys.stderr, flush=True)
    except Exception as failure:  # a trace is a help, not worth a training, whatever the bucket says
        print(f"the profile could not be kept in {url}: {failure}", file=sys.stderr, flush=True)
