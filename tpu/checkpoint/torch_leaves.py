"""PyTorch in a checkpoint: tensors as arrays, and modules, optimizers and schedulers by what they tell of themselves.

Nothing here imports torch: a program that has no tensors does not need it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np


def is_tensor(leaf: Any) -> bool:
    """Whether it is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)


def is_stateful(node: Any) -> bool:
    """Whether it is an object such as nn.Module, an optimizer or a scheduler, which gives its state as a dict."""
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None))


def dtype_name(tensor: Any) -> str:
    """NumPy's name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def host_array(tensor: Any) -> np.ndarray:
    """A copy of a tensor in host memory, from whatever device."""
    torch = sys.modules["torch"]
    host = tensor.detach().to("cpu", copy=True).contiguous()
    if host.dtype == torch.bfloat16:  # which NumPy does not know by itself
        import ml_dtypes

        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


def tensor_like(leaf: Any, value: np.ndarray) -> Any:
    """`value` as a tensor on the device of `leaf`."""
    torch = sys.modules["torch"]
    own = np.array(value, copy=True)
    if value.dtype.name == "bfloat16":
        made = torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    else:
        made = torch.from_numpy(own)
    return made.to(leaf.device).requires_grad_(leaf.requires_grad)


def saved_leaves(name: str, node: Any) -> Iterator[tuple[str, Any]]:
    """(name, leaf) of all tensors and numbers in the state_dict of a stateful object.

    Words and None in it belong to the program, not to its state.
    """
    for path, leaf in _walk(name, node.state_dict()):
        if is_tensor(leaf) or isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
            yield path, leaf


def make_room(name: str, node: Any, stored: set[str]) -> None:
    """Give an optimizer that has not made a step yet the moments (zeros) that the checkpoint has (`stored`)."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(node, torch.optim.Optimizer):
        return
    known = {path for path, _ in saved_leaves(name, node)}
    if any(path.startswith(f"{name}/state/") for path in stored - known):
        _make_moments(node)


def load(name: str, node: Any, value: Callable[[str, Any], Any]) -> None:
    """Give a stateful object the values of a checkpoint: `value(name, leaf)` for each of its leaves."""
    wanted = {path for path, _ in saved_leaves(name, node)}
    node.load_state_dict(
        _map(name, node.state_dict(), lambda p, leaf: value(p, leaf) if p in wanted else leaf)
    )


def _make_moments(optimizer: Any) -> None:
    """Have an optimizer make its state as its first step does: by a step with no gradient and a rate of 0."""
    torch = sys.modules["torch"]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    gradients, rates = [p.grad for p in parameters], [group["lr"] for group in optimizer.param_groups]
    before = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if is_tensor(group["lr"]) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient, value in zip(parameters, gradients, before, strict=True):
        parameter.grad = gradient
        parameter.data.copy_(value)


def _walk(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key in node:
            yield from _walk(f"{path}/{key}", node[key])
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _walk(f"{path}/{index}", child)
    else:
        yield path, node


def _map(path: str, node: Any, change: Callable[[str, Any], Any]) -> Any:
    if isinstance(node, Mapping):
        return {key: _map(f"{path}/{key}", node[key], change) for key in node}
    if isinstance(node, list | tuple):
        return type(node)(_map(f"{path}/{index}", child, change) for index, child in enumerate(node))
    return change(path, node)
