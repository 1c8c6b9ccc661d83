"""A name that somebody wrote is told from one that Prefect made up."""

from __future__ import annotations

import re
from pathlib import Path

import prefect
import pytest
from prefect.utilities.names import generate_slug

from flows.names import is_made_up


def test_what_the_server_makes_up_is_known():
    assert [name for name in (generate_slug(2) for _ in range(300)) if not is_made_up(name)] == []


def test_what_the_form_of_the_ui_makes_up_is_known():
    """Its words are in the UI itself: Greek letters with a number, constellations, and now and then a third word."""
    assets = Path(prefect.__file__).parent / "server/ui/assets"
    code = "".join(file.read_text() for file in assets.glob("index-*.js"))
    letters, stars = (
        re.findall(rf"`({first}[.][^`]*)`", code)[0].split(".") for first in ("alpha", "andromedae")
    )
    made_up = {
        f"{letter.replace('RANDOM', '17')}-{star}{third}".rstrip("-")
        for letter in letters
        for star in stars
        for third in ("", "-quadrant")
    }
    assert len(made_up) > 1000
    assert {name for name in made_up if not is_made_up(name)} == set()


@pytest.mark.parametrize(
    "name", ["mine", "my-run", "lr-0.01", "icl-m64-seed0", "icl-0f1e2d3c", "baseline again", "test-2"]
)
def test_what_somebody_writes_is_not_taken_for_made_up(name: str):
    assert not is_made_up(name)
