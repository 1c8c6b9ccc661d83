from pathlib import Path

import pytest

from tpu.runs.config import (
    RunConfigError,
    configuration_hash,
    differences,
    load_run_config,
    parse_changes,
    parse_run_config,
)
from tpu.slices.candidate import Candidate

ICL = {"name": "a-run", "training": {"workload": {"kind": "icl"}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Upper"}, "name: .*'Upper'"),
        ({"name": "x" * 41}, "name: "),
        ({"stepps": 3}, "stepps: there is no such field; did you mean steps?"),
        ({"training": {"workload": {"kind": "icl"}, "optimiser": 1}}, "did you mean optimizer"),
        ({"quux": 3}, "quux: there is no such field; --fields lists all"),
        ({"variables": {"DEBUG": True}}, "variables.DEBUG: .*string"),
        ({"steps": 0}, "steps: .*greater than or equal to 1 .found 0"),
        ({"slice": {"accelerator_type": "v4-9"}}, "slice.accelerator_type: .*v4-8"),
        ({"slice": {"zone": ""}}, "slice.zone: write a zone such as us-central2-b, found ''"),
        ({"slice": {"candidates": [{"zone": "a/b"}]}}, "slice.candidates.0.zone: .*found 'a/b'"),
        ({"pool": "größe"}, "pool: lower-case letters.*'größe'"),
        ({"slice": {"candidates": [{"accelerator_type": "v5p-9"}]}}, "slice.candidates.0.accelerator_type: "),
        ({"slice": {"candidates": [{}, {"accelerator_type": "v5p-8"}]}}, r"\(v4-8, v5p-8\).*allow_mixed"),
        ({"command": "python train.py"}, "exactly one of `training`"),
        ({"training": None}, "exactly one of `training`"),
        ({"training": {"workload": {"kind": "chess"}}}, "training.workload: .*'icl'"),
        (
            {"training": {"workload": {"kind": "icl", "modle": 1}}},
            "training.workload.modle: there is no such field",
        ),
        ({"secrets": {"KEY": "hunter2"}}, "KEY: write env:VARIABLE"),
        ({"checkpoints": {"at": [2000]}}, "2000 is not between 1 and steps"),
        ({"checkpoints": {"every": 5, "log_spaced": 5}}, "checkpoints: give one of"),
        ({"steps": 2 * 10**9, "checkpoints": {"every": 1}}, "2000000000 of them"),
        ({"steps": 10**30}, "steps: .*less than"),
        ({"slice": {"ready_minutes": float("inf")}}, "slice.ready_minutes: .*finite"),
        ({"variables": {"A=B": "1"}}, "variables: 'A=B' cannot be a variable"),
        ({"variables": {"A": "1\0"}}, "variables: a NUL"),
        ({"variables": {"A": "\ud800"}}, "variables: a NUL or half a character"),
        ({"variables": {"RELAY_RUN_DIR": "gs://x"}}, "RELAY_RUN_DIR: .*set by tpu-relay"),
        ({"secrets": {"RELAY_RUN_DIR": "env:X"}}, "RELAY_RUN_DIR: .*set by tpu-relay"),
        ({"command": ["python", "\0"]}, "command: a NUL"),
        ({"command": [""]}, "command: it is empty"),
        ({"evaluate_command": ""}, "evaluate_command: it is empty"),
    ],
)
def test_a_wrong_field_gets_one_line_that_names_it(change, message):
    with pytest.raises(RunConfigError, match=message):
        parse_run_config(ICL | change)


@pytest.mark.parametrize("text", ["steps: 2026-13-45", f"steps: {'9' * 5000}", "[" * 900 + "]" * 900])
def test_what_the_yaml_parser_chokes_on_is_no_traceback(tmp_path: Path, text: str):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(RunConfigError, match=r"run.yaml is not YAML"):
        load_run_config(tmp_path / "run.yaml")
    with pytest.raises(RunConfigError, match="steps: the value is not YAML"):
        parse_changes([f"steps={text.removeprefix('steps: ')}"])


def test_a_secret_value_is_never_shown():
    with pytest.raises(RunConfigError) as refused:
        parse_run_config(ICL | {"secrets": {"KEY": "hunter2"}})
    assert "hunter2" not in str(refused.value)


def test_only_what_changes_numbers_is_hashed():
    def hash_of(**change):
        return configuration_hash(parse_run_config(ICL | change).numbers(None))

    same = hash_of()
    assert (
        hash_of(
            name="b", steps=7, checkpoints={"every": 3}, evaluate="never", slice={"zone": "us-central1-a"}
        )
        == same
    )
    assert hash_of(training={"workload": {"kind": "icl"}, "seed": 1}) != same
    assert hash_of(slice={"accelerator_type": "v4-16"}) != same
    assert hash_of(variables={"XLA_FLAGS": "--x"}) != same


def test_differences_name_each_field():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": None}) == ["a.c: 2 → 3"]


def test_a_variable_may_be_a_number():
    assert parse_run_config(ICL | {"variables": {"N": 3, "X": 0.5}}).variables == {"N": "3", "X": "0.5"}


def test_a_command_is_split_as_a_shell_would():
    assert parse_run_config({"name": "c", "command": "python 'my train.py' --x 1"}).command == [
        "python", "my train.py", "--x", "1",
    ]  # fmt: skip


def test_yaml_with_changes(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("name: a\ntraining: {workload: {kind: icl}}\n")
    run = load_run_config(file, parse_changes(["training.seed=3", "checkpoints.every=10", "steps=50"]))
    assert run.training is not None
    assert (run.training.seed, run.checkpoints.every, run.steps) == (3, 10, 50)
    with pytest.raises(RunConfigError, match="FIELD=VALUE"):
        parse_changes(["seed"])
    file.write_text("name: [")
    with pytest.raises(RunConfigError, match="not YAML"):
        load_run_config(file)
    with pytest.raises(RunConfigError, match="cannot read"):
        load_run_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("file", sorted(Path("deployments/runs").glob("*.yaml")), ids=lambda f: f.stem)
def test_configurations_that_come_with_the_project_are_right(file):
    assert load_run_config(file).name


def test_a_candidate_takes_what_it_leaves_out_from_the_slice():
    slice = parse_run_config(
        ICL
        | {
            "slice": {
                "zone": "us-east5-a",
                "accelerator_type": "v6e-8",
                "price_an_hour": 8.0,
                "candidates": [
                    {},
                    {"zone": "us-east1-d"},
                    {"provisioning": "on-demand"},
                    {"zone": "us-east5-b", "provisioning": "on-demand", "price_an_hour": 20},
                    {"zone": "us-east5-a", "price_an_hour": 9},  # the first again, at another price
                ],
            }
        }
    ).slice
    assert slice.choices == (
        Candidate("us-east5-a", "v6e-8", "spot", 8.0),
        Candidate("us-east1-d", "v6e-8", "spot", 8.0),
        Candidate("us-east5-a", "v6e-8", "on-demand", None),  # the spot price says nothing of it
        Candidate("us-east5-b", "v6e-8", "on-demand", 20.0),
    )
    assert slice.types == ("v6e-8",)


def test_without_candidates_the_slice_is_its_own():
    assert parse_run_config(ICL).slice.choices == (Candidate("us-central2-b", "v4-8", "spot"),)


def test_types_of_a_mixed_run_are_a_part_of_its_numbers_and_places_are_not():
    def hash_of(*candidates):
        values = ICL | {"allow_mixed": True, "slice": {"candidates": list(candidates)}}
        return configuration_hash(parse_run_config(values).numbers(None))

    same = hash_of()
    assert hash_of({}, {"zone": "us-east5-a"}, {"provisioning": "on-demand"}) == same
    mixed = hash_of({}, {"accelerator_type": "v5p-8"})
    assert mixed == hash_of({"accelerator_type": "v5p-8"}, {}) != same
