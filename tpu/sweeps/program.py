"""A program that takes its parameters as arguments: `program` and `command` of a Weights & Biases sweep file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tpu.runs.config import RunConfigError

_WHOLE = re.compile(r"\$\{([^}]*)\}")
# As Weights & Biases starts a program if a file has no `command`.
_USUAL = ["${env}", "${interpreter}", "${program}", "${args}"]
_ARGUMENTS = ("args", "args_no_hyphens", "args_no_boolean_flags", "args_json")


def program_words(program: Any, command: Any) -> list[str]:
    """The command of a file: `${program}`, `${env}` and `${interpreter}` are known now, arguments in each trial.

    Raises:
        RunConfigError: a word that cannot be known, or no program.
    """
    words = _USUAL if command is None else shlex.split(command) if isinstance(command, str) else command
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise RunConfigError("command: a list of words, such as [python, train.py, '${args}']")
    if "${program}" in words and not isinstance(program, str):
        raise RunConfigError("program: missing, and the command names ${program}")
    known = {"${env}": "/usr/bin/env", "${interpreter}": "python", "${program}": str(program)}
    filled = [known.get(word, word) for word in words]
    check_words(filled)
    return filled


def check_words(words: Sequence[str]) -> None:
    """Raises RunConfigError for a `${…}` that is none of the arguments."""
    for word in words:
        for name in _WHOLE.findall(word):
            if name not in _ARGUMENTS or word != f"${{{name}}}":
                raise RunConfigError(
                    f"command: {word} is not supported; arguments come from "
                    + ", ".join(f"${{{one}}}" for one in _ARGUMENTS)
                    + ", each a word of its own"
                )


def takes_arguments(command: Sequence[str]) -> bool:
    return any(word == f"${{{name}}}" for word in command for name in _ARGUMENTS)


def with_arguments(command: Sequence[str], parameters: Mapping[str, Any]) -> list[str]:
    """The command of one trial."""
    words: list[str] = []
    for word in command:
        match word:
            case "${args}":
                words += [f"--{name}={_text(value)}" for name, value in parameters.items()]
            case "${args_no_hyphens}":
                words += [f"{name}={_text(value)}" for name, value in parameters.items()]
            case "${args_no_boolean_flags}":
                for name, value in parameters.items():
                    if value is True:
                        words.append(f"--{name}")
                    elif value is not False:
                        words.append(f"--{name}={_text(value)}")
            case "${args_json}":
                words.append(json.dumps(dict(parameters)))
            case _:
                words.append(word)
    return words


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
