"""Modules, optimizers, schedulers and tensors of plain PyTorch in a checkpoint, and back into fresh objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tpu.checkpoint.shards import placed, snapshot
from tpu.checkpoint.tree import StateMismatch, leaves_of, make_room, placed_leaves


def fresh(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    adam = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(adam, step_size=3, gamma=0.5)
    return {
        "model": model,
        "adam": adam,
        "schedule": schedule,
        "average": torch.zeros(3, dtype=torch.bfloat16),
        "generator": torch.get_rng_state(),
        "step": 0,
    }


def train(state: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        torch.manual_seed(100 + state["step"])
        x = torch.randn(16, 4)
        loss = (state["model"](x)[:, 0] - x.sum(-1)).square().mean()
        state["adam"].zero_grad()
        loss.backward()
        state["adam"].step()
        state["schedule"].step()
        state["average"] = state["average"] + loss.detach().to(torch.bfloat16)
        state["step"] += 1
        losses.append(loss.item())
    return losses


def saved(state: dict[str, Any]) -> dict[str, np.ndarray]:
    return {piece.name: data for piece, data in snapshot(leaves_of(state), 0).pieces}


def restored(state: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    make_room(state, set(arrays))
    names = leaves_of(state)
    assert set(names) == set(arrays)
    return placed_leaves(state, lambda n, leaf: placed(n, leaf, arrays[n]) if n in names else leaf)


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened():
    whole = fresh()
    before, arrays = train(whole, 5), saved(whole)
    after = train(whole, 5)
    again = fresh(seed=1)
    model, adam = again["model"], again["adam"]
    again = restored(again, arrays)
    assert again["model"] is model
    assert again["adam"] is adam
    assert again["step"] == 5
    assert again["average"].dtype == torch.bfloat16
    assert train(again, 5) == after
    assert before[0] > after[-1]
    ours, theirs = saved(again), saved(whole)
    assert {n: a.tobytes() for n, a in ours.items()} == {n: a.tobytes() for n, a in theirs.items()}


def test_what_was_saved_does_not_change_with_the_training():
    state = fresh()
    train(state, 1)
    arrays = saved(state)
    kept = {name: array.copy() for name, array in arrays.items()}
    train(state, 3)
    assert all(np.array_equal(arrays[name], kept[name]) for name in kept)


def test_names_are_those_of_the_state_dicts():
    names = set(leaves_of(fresh()))
    assert {
        "model/0.weight",
        "model/1.running_mean",
        "adam/param_groups/0/lr",
        "schedule/last_epoch",
    } <= names
    assert not any(name.startswith("adam/state/") for name in names)
    state = fresh()
    train(state, 1)
    assert "adam/state/0/exp_avg" in leaves_of(state)


def test_room_for_moments_changes_no_parameter():
    state, trained = fresh(), fresh()
    train(trained, 2)
    before = {name: array.copy() for name, array in saved({"model": state["model"]}).items()}
    make_room(state, set(saved(trained)))
    after = saved({"model": state["model"]})
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert state["adam"].param_groups[0]["lr"] == 0.05


def test_another_shape_is_refused_by_name():
    with pytest.raises(StateMismatch, match="w"):
        restored({"w": torch.zeros(3)}, {"w": np.zeros(4, np.float32)})
    with pytest.raises(StateMismatch, match="w"):
        restored({"w": torch.zeros(3)}, {"w": np.zeros(3, np.float64)})
