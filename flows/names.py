"""What a flow run is called: as its run, or as whoever started it wrote into *Run Name*.

Prefect never leaves that field empty, so what somebody wrote is told from what it makes up by its vocabulary.
"""

from __future__ import annotations

import re

from coolname.data import config
from prefect.context import FlowRunContext

# The server's names are two of these words.
_WORDS = {word for part in config.values() if part["type"] == "words" for word in part["words"]}
# Those of the form in the UI are names of stars, such as `sigma3-librae`, `eta` and `mu12--quadrant`.
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi|"
    "psi|omega"
)
_STAR = re.compile(rf"({_GREEK})\d*(-[a-z]*)*")


def is_made_up(name: str) -> bool:
    """Whether Prefect made a name up."""
    words = name.split("-")
    return (len(words) == 2 and _WORDS.issuperset(words)) or _STAR.fullmatch(name) is not None


def flow_run_name() -> str:
    """The name of a flow run of a flow that has a parameter `run`."""
    given, ours = _names()
    return ours if is_made_up(given) else given


def kept_name() -> str | None:
    """The name of this flow run if it isn't that of its run."""
    given, ours = _names()
    return None if given == ours else given


def _names() -> tuple[str, str]:
    """What the flow run is called, and what its run is called."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    assert context.parameters is not None
    return context.flow_run.name, context.parameters["run"].name
