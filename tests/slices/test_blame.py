"""A machine on which attempts die while they live elsewhere is to blame; a program that dies everywhere is, too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.slices.blame import Tried, as_charged, blamed, suspect
from tpu.slices.verdict import VerdictKind

P, I, U, F = (  # noqa: E741
    VerdictKind.PREEMPTED,
    VerdictKind.INFRASTRUCTURE,
    VerdictKind.USER_FAILURE,
    VerdictKind.FINISHED,
)


def tried(*attempts: tuple[str, VerdictKind, int | None]) -> list[Tried]:
    return [Tried(*attempt) for attempt in attempts]


@pytest.mark.parametrize(
    ("story", "attempts", "charged"),
    [
        ("fails once at its start", [("a", U, 0)], [U]),
        ("fails at its start on one slice", [("a", U, 0), ("a", U, 0), ("a", U, 0)], [U, U, U]),
        ("lived on a, dies at once on b", [("a", P, 490), ("b", U, 0)], [P, I]),
        ("lived on a, keeps dying on b", [("a", P, 490), ("b", U, 0), ("b", U, 480)], [P, I, I]),
        ("dies on b, lives on c", [("a", P, 490), ("b", U, 0), ("c", P, 700)], [P, I, P]),
        # Whoever dies everywhere is at fault, whatever was before: a full disk of its own, a changed data set.
        ("lived on a, dies on b and c", [("a", P, 490), ("b", U, 0), ("c", U, 0)], [P, U, U]),
        # A step that fails wherever it is tried.
        ("dies at step 500 on two slices", [("a", U, 500), ("b", U, 500)], [U, U]),
        ("dies at step 500 again and again", [("a", U, 500), ("a", U, 500)], [U, U]),
        # Found out afterwards: what died twice on a was done on b.
        ("dies twice on a, lives on b", [("a", U, 0), ("a", U, 0), ("b", F, 900)], [I, I, F]),
        ("dies twice at 500 on a, passes on b", [("a", U, 500), ("a", U, 500), ("b", P, 600)], [I, I, P]),
        ("dies once at 500 on a, passes on b", [("a", U, 500), ("b", P, 600)], [U, P]),
        ("dies, and lives on the same slice", [("a", U, 0), ("a", P, 600), ("b", P, 700)], [U, P, P]),
        ("a command that does not say", [("a", P, None), ("b", U, None)], [P, U]),
        ("other kinds stay", [("a", I, 0), ("b", P, 100), ("a", I, 0)], [I, P, I]),
    ],
)
def test_who_is_charged(
    story: str, attempts: list[tuple[str, VerdictKind, int | None]], charged: list[VerdictKind]
) -> None:
    history = tried(*attempts)
    assert as_charged(history) == charged, story
    moved = [one.slice for one, kind in zip(history, charged, strict=True) if kind is not one.kind]
    assert blamed(history) == list(dict.fromkeys(moved))


@pytest.mark.parametrize(
    ("story", "attempts", "allowed", "proven"),
    [
        ("nothing has happened", [], 2, None),
        ("a first failure", [("a", U, 0)], 2, None),
        ("one more is left: elsewhere", [("a", U, 0), ("a", U, 0)], 2, False),
        ("did steps before it died, twice", [("a", U, 500), ("a", U, 500)], 2, None),
        ("did steps once", [("a", U, 20), ("a", U, 0)], 2, None),
        ("was elsewhere already", [("a", U, 0), ("b", U, 0)], 2, None),
        ("none is left", [("a", U, 0), ("a", U, 0), ("a", U, 0)], 2, None),
        ("one try is all", [("a", U, 0)], 1, None),
        ("without limit", [("a", U, 0), ("a", U, 0)], None, None),
        ("got further elsewhere", [("a", P, 490), ("b", U, 0)], 2, True),
        ("got further elsewhere, no failure allowed", [("a", P, 490), ("b", U, 0)], 0, True),
        ("a preemption", [("a", U, 0), ("a", U, 0), ("a", P, 0)], 2, None),
        ("a command that does not say", [("a", U, None), ("a", U, None)], 2, None),
    ],
)
def test_which_slice_is_left(
    story: str, attempts: list[tuple[str, VerdictKind, int | None]], allowed: int | None, proven: bool | None
) -> None:
    found = suspect(tried(*attempts), allowed)
    assert (found.proven if found else None) is proven, story


def test_a_mistake_in_the_program_is_not_tried_elsewhere() -> None:
    mistakes = [Tried("a", U, 0, mistake=True), Tried("a", U, 0, mistake=True)]
    assert suspect(mistakes, 2) is None
    resumed = [Tried("a", U, 20, resumed=20), Tried("a", U, 20, resumed=20)]
    assert suspect(resumed, 2) is not None


attempts = st.lists(
    st.builds(
        Tried,
        st.sampled_from("abc"),
        st.sampled_from([P, I, U]),
        st.one_of(st.none(), st.integers(0, 5).map(lambda n: 100 * n)),
    ),
    max_size=12,
)


@given(history=attempts)
def test_only_failures_are_moved_and_never_all_slices_are_blamed(history: list[Tried]) -> None:
    charged = as_charged(history)
    moved = [one for one, kind in zip(history, charged, strict=True) if kind is not one.kind]
    assert all(one.kind is U for one in moved)
    for one in moved:  # somewhere else it did better
        assert any(o.slice != one.slice and (o.reached or 0) > (one.reached or 0) for o in history)


@given(history=attempts, more=st.integers(1, 4))
def test_a_program_that_dies_everywhere_is_charged_in_the_end(history: list[Tried], more: int) -> None:
    dying = [*history, *(Tried(f"new-{i}", U, 0) for i in range(more + 1))]
    assert as_charged(dying)[-1] is U
