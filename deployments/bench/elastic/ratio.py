"""The cost of exactness: the fixed tree beside gloo's all-reduce, in turns, over the same loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median
from typing import Any

from deployments.bench.lab import BenchFailed, say

REPETITIONS = 5


def compare(processes: int, megabytes: int, port: int) -> dict[str, Any]:
    """Seconds, bytes sent and peak memory a process of both ways. Raises BenchFailed."""
    elements = megabytes * 1_000_000 // 4
    found = {
        how: run(how, processes, elements, port + 100 * number) for number, how in enumerate(("tree", "gloo"))
    }
    # The first repetition sets up memory and connections.
    seconds = {how: median(one["seconds"] for one in records[1:]) for how, records in found.items()}
    told = {
        "processes": processes,
        "megabytes": megabytes,
        "exact_ratio": round(seconds["tree"] / seconds["gloo"], 3),
        "tree_s": round(seconds["tree"], 4),
        "gloo_s": round(seconds["gloo"], 4),
        "tree_megabytes_sent": round(found["tree"][-1]["sent"] / 1e6, 1),
        "optimum_megabytes_sent": round(2 * (processes - 1) / processes * megabytes, 1),
        "tree_peak_megabytes": round(found["tree"][-1]["peak"] / 1e6),
        "gloo_peak_megabytes": round(found["gloo"][-1]["peak"] / 1e6),
    }
    say(f"{processes} processes, {megabytes} MB: {told['tree_s']} s by the tree, {told['gloo_s']} s by gloo")
    return told


def run(how: str, processes: int, elements: int, port: int) -> list[dict[str, float]]:
    """What the first process tells of each repetition."""
    started = [
        subprocess.Popen(
            [
                sys.executable, "-m", "deployments.bench.elastic.exact", how, "--rank", str(rank),
                "--count", str(processes), "--elements", str(elements), "--repetitions", str(REPETITIONS),
                "--port", str(port),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=600)[0] for process in started]
    except subprocess.TimeoutExpired as error:
        raise BenchFailed(f"{processes} processes did not end by {how} within 10 minutes") from error
    finally:
        for process in started:
            process.kill()
            process.wait()
    lines = [line for line in outputs[0].decode().splitlines() if line.startswith("{")]
    if len(lines) != REPETITIONS + 1:
        raise BenchFailed(
            f"{how} over {processes} processes told {len(lines)} of {REPETITIONS + 1} repetitions"
        )
    return [json.loads(line) for line in lines]
