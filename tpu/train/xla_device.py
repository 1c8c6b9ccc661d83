"""All that is specific to torch_xla: devices, its generator, compiled graphs, its counters, its caches and traces.

The rest of the trainer is plain PyTorch, so that a successor of torch_xla needs this module again and no other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# One algorithm on every kind of chip, by XLA's definition: what is drawn depends on the seed alone, not on the
# number of devices (tested) nor, but for the rounding of log and sqrt in normal numbers, on their kind.
GENERATOR = "philox"
AXIS = "data"


class UnsupportedByRuntime(RuntimeError):
    """torch_xla cannot do this on the devices that are here; the message says what can."""


def prepare(folder: Path) -> Path:
    """Set what torch_xla reads when it is imported; returns the file in `folder` in which it tells why it compiled.

    To be called before the first import of torch_xla.
    """
    causes = folder / "compilations.txt"
    os.environ["XLA_RNG_BIT_GENERATOR"] = GENERATOR
    os.environ["PT_XLA_DEBUG_LEVEL"] = "1"  # tells of compilations only, and costs nothing between
    os.environ["PT_XLA_DEBUG_FILE"] = str(causes)
    return causes


@dataclass(frozen=True)
class Devices:
    """The devices of all processes, used as one by SPMD when there are several."""

    torch: torch.device
    count: int
    processes: int
    kind: str
    mesh: Any  # None for a single device

    def place(self, arrays: Mapping[str, np.ndarray], shard: bool = False) -> dict[str, Tensor]:
        """Host arrays, the same in every process, on the devices: a copy each, or in parts if `shard`."""
        import torch
        import torch_xla

        placed = {}
        for name, array in arrays.items():
            tensor = torch.from_numpy(np.array(array, copy=True)).to(self.torch)
            placed[name] = self.part(tensor) if shard else self.replicated(tensor)
        torch_xla.sync()  # torch_xla holds single numbers back as constants of a graph to come
        return placed

    def batch(self, tensor: Tensor) -> Tensor:
        """Deal the first axis of a batch out to the devices."""
        return self._mark(tensor, (AXIS, *[None] * (tensor.dim() - 1)))

    def replicated(self, tensor: Tensor) -> Tensor:
        """A copy on each device."""
        return self._mark(tensor, (None,) * tensor.dim())

    def part(self, tensor: Tensor) -> Tensor:
        """A part on each device (FSDP), by the rule of the JAX trainer: the longest axis that divides evenly."""
        fitting = [a for a, size in enumerate(tensor.shape) if size and size % self.count == 0]
        if not fitting:
            return self.replicated(tensor)
        longest = max(fitting, key=lambda axis: tensor.shape[axis])
        return self._mark(tensor, tuple(AXIS if a == longest else None for a in range(tensor.dim())))

    def _mark(self, tensor: Tensor, where: tuple[str | None, ...]) -> Tensor:
        if self.mesh is not None:
            import torch_xla.distributed.spmd as spmd

            spmd.mark_sharding(tensor, self.mesh, where)
        return tensor

    def seed(self, number: int) -> None:
        """Seed XLA's generator. The seed is an input of a graph: another one compiles nothing."""
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(number, str(self.torch))

    def random_state(self) -> int:
        """The state of XLA's generator."""
        import torch_xla.core.xla_model as xm

        return int(xm.get_rng_state(str(self.torch)))

    def wait(self) -> None:
        """Return when the devices have done all that they were given; fetches nothing."""
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()


def open_devices(processes: int) -> Devices:
    """Start torch_xla on the chips that the environment leaves visible. Call `prepare` before.

    Raises UnsupportedByRuntime for several processes on the CPU.
    """
    import torch_xla
    import torch_xla.runtime as xr

    kind = xr.device_type() or "CPU"
    if processes > 1 and kind == "CPU":
        raise UnsupportedByRuntime(
            f"{processes} hosts were to train as one, but the CPU runtime of torch_xla has no way between processes: "
            "on the emulator, framework xla wants a slice of one host (such as v4-8); on TPUs any slice will do"
        )
    if xr.global_runtime_device_count() > 1:
        xr.use_spmd()
    count = xr.global_runtime_device_count()
    if xr.process_count() != processes:
        raise UnsupportedByRuntime(
            f"the run has {processes} hosts, torch_xla found {xr.process_count()}: look at TPU_PROCESS_BOUNDS, "
            "TPU_WORKER_HOSTNAMES and TPU_WORKER_ID"
        )
    return Devices(torch_xla.device(), count, processes, _kind(kind), _mesh(count) if count > 1 else None)


def _kind(kind: str) -> str:
    from torch_xla._internal import tpu

    return f"TPU v{tpu.version()}" if kind == "TPU" else kind


def _mesh(count: int) -> Any:
    import torch_xla.distributed.spmd as spmd

    return spmd.Mesh(np.arange(count), (count,), (AXIS,))


class StepGraph:
    """A function of tensors as one compiled graph, traced once and then run without Python's part of the work.

    torch_xla by itself traces each step anew to find that it has its graph already; for a small model that takes
    longer than the step. `function` maps a list of tensors to a list of tensors; what it draws is drawn by XLA's
    generator with the seed of the time of the call.
    """

    def __init__(
        self,
        devices: Devices,
        function: Callable[[list[Tensor]], list[Tensor]],
        example: list[Tensor],
        used_up: int = 0,
    ) -> None:
        """Trace `function` at `example` and compile it; nothing is run.

        The memory of the first `used_up` arguments is used for the outputs: those tensors are gone after a call.
        """
        import torch_xla
        from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

        self._xla = torch_xla._XLAC
        self._device = str(devices.torch)
        torch_xla.sync()
        devices.wait()
        places = {self._xla._xla_get_tensor_id(tensor): i for i, tensor in enumerate(example)}
        for tensor in example[:used_up]:
            self._xla._set_buffer_donation(tensor, True)
        outputs = function(example)
        ids, values = self._xla._get_tensors_xla_device_data_node(outputs)
        seed = self._xla._get_seed_info_id()
        # What is neither an argument nor the seed is a constant of the function.
        self._inputs: list[int | Tensor | None] = [
            None if i == seed else places.get(i, value) for i, value in zip(ids, values, strict=True)
        ]
        with alias_with_buffer_donor_config():
            self._hash = self._xla._get_graph_hash(outputs)
            self._xla._xla_warm_up_cache(outputs, [])
        self._xla._clear_pending_irs(self._device)
        self.draws = None in self._inputs

    def __call__(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Start the graph and return its outputs at once; their numbers come when the devices have them."""
        seed = self._xla._get_base_seed_as_tensor(self._device) if self.draws else None
        given = [
            seed if where is None else arguments[where] if isinstance(where, int) else where
            for where in self._inputs
        ]
        return self._xla._run_cached_graph(self._hash, given)


@dataclass(frozen=True)
class GraphCounts:
    """What torch_xla has done so far in this process. `fallbacks` are operators that it left to the CPU."""

    compiled: int
    executed: int
    fallbacks: Mapping[str, int]


def graph_counts() -> GraphCounts:
    """Read torch_xla's own metrics."""
    import torch_xla.debug.metrics as metrics

    def count(name: str) -> int:
        return (metrics.metric_data(name) or (0,))[0]

    fallbacks = {
        name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")
    }
    # A number taken out of a finished tensor is no computation.
    fallbacks.pop("aten::_local_scalar_dense", None)
    return GraphCounts(count("CompileTime"), count("ExecuteTime") + count("ExecuteReplicatedTime"), fallbacks)


def last_cause(causes: Path) -> str | None:
    """The line of Python that made torch_xla compile last, by the file that `prepare` named."""
    return cause_in(causes.read_text()) if causes.exists() else None


def cause_in(told: str) -> str | None:
    """The same, out of the text of that file; pure."""
    last = told.rpartition("Python Frame Triggered Execution:")[2]
    frames = re.findall(r"^Compilation Analysis:\s+(\S.*?) \((.+?:\d+)\)$", last, re.MULTILINE)
    inside = ("/torch_xla/", "/torch/")
    own = [
        f"{place} in {function}" for function, place in frames if not any(part in place for part in inside)
    ]
    return own[0] if own else None


def matmul_precision() -> str:
    """How XLA rounds the factors of matrix products: a TPU by default to bfloat16."""
    import torch_xla.backends

    return str(torch_xla.backends.get_mat_mul_precision())


def keeps_graphs() -> bool:
    """Whether compiled graphs can be kept between processes; the CPU runtime of torch_xla cannot."""
    import torch_xla.runtime as xr

    return xr.device_type() != "CPU"


def use_cache(folder: Path) -> None:
    """Keep compiled graphs in `folder` and take them from there. To be called before the first graph."""
    import torch_xla.runtime as xr

    xr.initialize_cache(str(folder))


def start_trace(folder: str) -> None:
    """Begin a trace of host and devices."""
    import torch_xla.debug.profiler as profiler

    profiler.start_trace(folder)


def stop_trace() -> None:
    """End the trace and write it into its folder."""
    import torch_xla.debug.profiler as profiler

    profiler.stop_trace()
