"""Points that come next: each method, a study that is made anew, and storage that others can open."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import optuna
import pytest

from deployments.postgres import own_postgres
from tpu.sweeps.config import Search, parse_search
from tpu.sweeps.parameters import canonical
from tpu.sweeps.search import Searcher, StudyError, storage_url

SPACE = {
    "rate": {"min": 0.001, "max": 1.0, "log": True},
    "kind": {"values": ["a", "b", [1, 2]]},
    "width": {"min": 8, "max": 64, "step": 8, "when": {"kind": "a"}},
}


def search(method: str, **values: Any) -> Search:
    return parse_search({"method": method, "parameters": SPACE, "trials": 30} | values)


def url(folder: Path, name: str = "study") -> str:
    return f"sqlite:///{folder}/{name}.db"


@pytest.mark.parametrize("method", ["random", "quasi-random", "tpe"])
def test_points_lie_in_the_space_and_differ(tmp_path: Path, method: str):
    made = Searcher(search(method), "s", url(tmp_path))
    found = [made.next() for _ in range(15)]
    assert all(found)
    assert len({canonical(point) for point in found if point}) == 15
    for point in found:
        assert point is not None
        assert 0.001 <= point["rate"] <= 1.0
        assert point["kind"] in ("a", "b", [1, 2])
        assert ("width" in point) == (point["kind"] == "a")
        made.tell(point, point["rate"])


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_a_sweep_that_is_started_again_goes_on_as_it_would_have(tmp_path: Path, method: str):
    def go_on(made: Searcher, count: int) -> list[dict[str, Any]]:
        found = []
        for _ in range(count):
            point = made.next()
            assert point is not None
            found.append(point)
            made.tell(point, point["rate"])
        return found

    whole = go_on(Searcher(search(method), "whole", url(tmp_path)), 14)
    go_on(Searcher(search(method), "cut", url(tmp_path)), 9)
    again = Searcher(search(method), "cut", url(tmp_path))
    for point in whole[:9]:
        again.give(point)
        again.tell(point, point["rate"])
    assert go_on(again, 5) == whole[9:]


def test_a_space_that_is_used_up_has_an_end(tmp_path: Path):
    made = Searcher(search("random", parameters={"x": {"values": [1, 2, 3]}}), "s", url(tmp_path))
    found = [made.next() for _ in range(4)]
    assert sorted(point["x"] for point in found if point) == [1, 2, 3]
    assert found[3] is None


def test_another_program_reads_the_study(tmp_path: Path):
    made = Searcher(search("tpe", metric={"goal": "maximize"}), "bucket/name", url(tmp_path))
    good, bad = made.next(), made.next()
    assert good is not None
    assert bad is not None
    made.tell(good, 3.0)
    made.tell(bad, None)
    study = optuna.load_study(study_name="bucket/name", storage=url(tmp_path))
    assert (study.best_value, study.best_params["rate"]) == (3.0, good["rate"])
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL"]


def test_a_storage_that_cannot_be_had_is_told_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = search("random", storage="env:STUDIES")
    with pytest.raises(StudyError, match="STUDIES is not set"):
        storage_url(made, tmp_path, "gs://bucket", "s")
    monkeypatch.setenv("STUDIES", "postgresql://me:secret@127.0.0.1:1/studies")
    found = storage_url(made, tmp_path, "gs://bucket", "s")
    with pytest.raises(StudyError, match=r"search.storage postgresql://127.0.0.1:1/studies") as caught:
        Searcher(made, "s", found)
    assert "secret" not in str(caught.value)


def test_a_sqlite_file_is_read_while_it_is_written_to(tmp_path: Path):
    made = Searcher(search("random"), "s", url(tmp_path))
    reader = optuna.load_study(study_name="s", storage=url(tmp_path))
    for number in range(3):
        assert made.next()
        assert len(reader.get_trials()) == number + 1


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+asyncpg", "postgresql+psycopg"])
def test_a_postgresql_that_does_not_answer_is_told_whatever_driver_its_url_names(scheme: str):
    with pytest.raises(StudyError, match=r"127\.0\.0\.1.*port 1 failed|connection is bad"):
        Searcher(search("random"), "s", f"{scheme}://me@127.0.0.1:1/studies")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("initdb") is None, reason="no PostgreSQL on this machine")
def test_a_study_in_postgresql_is_what_another_program_reads_of_it_and_is_made_anew_at_each_start():
    with own_postgres() as database:
        for _ in range(2):
            made = Searcher(search("tpe"), "bucket/name", database)
            good, bad = made.next(), made.next()
            assert good is not None
            assert bad is not None
            made.report(good, 10, 4.0)
            made.tell(good, 3.0)
            made.report(bad, 10, 9.0)
            made.tell(bad, None, pruned=True)
        study = optuna.load_study(study_name="bucket/name", storage=database.replace("+asyncpg", "+psycopg"))
        assert [(trial.state.name, trial.intermediate_values) for trial in study.trials] == [
            ("COMPLETE", {10: 4.0}), ("PRUNED", {10: 9.0})
        ]  # fmt: skip
