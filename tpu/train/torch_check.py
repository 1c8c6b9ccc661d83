"""Check an exported model by evaluating it in plain PyTorch: `python -m tpu.train.torch_check FOLDER`.

Runs the model on the inputs that the export kept, compares with the predictions that the run's own evaluator had for
them, and prints one JSON object last. Exits 1 if they differ. Needs torch, not XLA.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tpu.train.torch_model import load_exported, next_byte_losses, predict_labels

TOLERANCE = 2e-4  # float32 sums in another order; predictions and losses are of size 1


def check_export(folder: Path) -> dict[str, Any]:
    """Figures of the exported model beside those of the reference, and whether all predictions `agree`."""
    model, about = load_exported(str(folder))
    kept = load_file(folder / "check.safetensors")
    with torch.no_grad():
        if about["workload"]["kind"] == "bytelm":
            expected, found = kept["losses"], next_byte_losses(model, kept["windows"])
            figures = {
                "bits_per_byte": found.mean().item() / math.log(2),
                "reference_bits_per_byte": expected.mean().item() / math.log(2),
            }
        else:
            expected, found = kept["predictions"], predict_labels(model, kept["x"], kept["y"])
            dimensions, clean = about["workload"]["dimensions"], kept["clean"]
            figures = {
                "model_error": (found - clean).square().mean().item() / dimensions,
                "reference_error": (expected - clean).square().mean().item() / dimensions,
                "zero_error": clean.square().mean().item() / dimensions,
            }
    difference = (found - expected).abs().max().item()
    facts = {"workload": about["workload"]["kind"], "step": about["step"], "run": about["run"]}
    return {**facts, **figures, "largest_difference": difference, "agree": difference <= TOLERANCE}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tpu.train.torch_check", description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder of tpu.train.torch_export")
    found = check_export(parser.parse_args(arguments).folder)
    print(json.dumps(found), flush=True)
    if not found["agree"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
