"""Values of a run's secret variables, from the environment or from Prefect Secret blocks."""

from __future__ import annotations

from collections.abc import Mapping

from prefect.blocks.system import Secret

from tpu.runs.config import RunConfig
from tpu.runs.opening import NoSuchSecret, environment_secret
from tpu.runtime.supervisor import SHORTEST_SECRET


class SecretTooShort(ValueError):
    """A secret that logs could not keep: every text would have to be masked wherever those few characters stand."""


async def load_wandb_key(run: RunConfig) -> str | None:
    """The API key that `tracking` of a run names; None if it names none. Raises as load_secrets."""
    wandb = run.tracking.wandb
    if wandb is None or wandb.key is None:
        return None
    return (await load_secrets({"tracking.wandb.key": wandb.key}))["tracking.wandb.key"]


async def load_secrets(sources: Mapping[str, str]) -> dict[str, str]:
    """Secret values by variable name. They go to the hosts on standard input and are masked in every log.

    Raises:
        NoSuchSecret: a variable is not set, or there is no such block.
        SecretTooShort: a value could not be masked in logs.
    """
    values = {}
    for name, source in sources.items():
        kind, _, target = source.partition(":")
        if kind == "env":
            values[name] = environment_secret(name, target)
        else:
            try:
                values[name] = str((await Secret.aload(target)).get())
            except ValueError as error:
                raise NoSuchSecret(f"secret {name}: there is no Prefect Secret block {target!r}") from error
        if 0 < len(values[name].strip()) < SHORTEST_SECRET:
            raise SecretTooShort(
                f"secret {name} has fewer than {SHORTEST_SECRET} characters, too few to be masked in logs: if it "
                "need not be secret, give it under `variables`"
            )
    return values
