"""The evaluate flow: checkpoints of a run that trained without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flows.evaluate import evaluate
from tests.scenarios.conftest import Lab
from tests.scenarios.prefect_record import artifacts, log_with
from tpu.runs.evaluation import EvaluationFailed
from tpu.runs.record import RunNotFound


async def test_checkpoints_are_evaluated_by_the_runs_own_evaluator_once(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    evaluated = tmp_path / "evaluated"
    monkeypatch.setenv("EVALUATED", str(evaluated))
    monkeypatch.setenv("HOLD", str(tmp_path / "hold"))
    run = lab.numpy_run("judged", evaluate_command=[sys.executable, "-m", "tests.trainers.evaluator"])
    await lab.train(run)
    monkeypatch.chdir(tmp_path)  # as a worker, which has no working tree: the run's code is in the bucket
    assert set(await evaluate("judged@20")) == {20}
    assert [figures["step"] for figures in (await evaluate("judged", commits="all")).values()] == [20, 40, 60]
    assert evaluated.read_text().split() == ["20", "40", "60"]
    assert (await evaluate("judged", again=True))[60]["checkpoint"].endswith("/checkpoints/60/1")
    assert evaluated.read_text().split()[3:] == ["60"]
    (shown,) = [one for one in await artifacts() if one.key == "evaluation-judged"][-1:]
    assert "# Evaluation of judged" in str(shown.data)
    with pytest.raises(RunNotFound, match="there is no run jugded"):
        await evaluate("jugded")


@pytest.mark.slow
async def test_what_cannot_be_evaluated_does_not_hide_the_others(lab: Lab):
    script = "test $RELAY_STEP != 40 && echo '{\"loss\": 0.5}' || { echo broken >&2; exit 3; }"
    run = lab.numpy_run("half-judged", evaluate_command=["/bin/sh", "-c", script])
    await lab.train(run)
    with pytest.raises(EvaluationFailed, match=r"evaluation of step 40 exited 3:\nbroken"):
        await evaluate.with_options(flow_run_name="half")("half-judged", commits="all")
    await log_with("half", "exited 3")
    (shown,) = [one for one in await artifacts() if one.key == "evaluation-half-judged"][-1:]
    assert "| | step 20 | step 60 |" in str(shown.data)
    assert "**Step 40 could not be evaluated:**" in str(shown.data)
