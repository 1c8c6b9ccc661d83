"""The built-in JAX trainer for one slice of a run with `mode: elastic`: `python -m tpu.train.elastic_trainer`.

The order is that of a fast start: the newest checkpoint and the compiled programs are fetched beside the imports.
"""

from __future__ import annotations

from tpu.elastic import part
from tpu.train.compile_cache import FETCH_DEADLINE_S, Background, cache_key, open_cache
from tpu.train.fingerprint import compile_facts, training_facts


def main() -> None:
    """Take part to the last step, or until a preemption notice.

    Raises ValidationError for wrong settings, DataChangedError, and what tpu.elastic.part raises.
    """
    with part.start() as own:
        values = {name: value for name, value in own.config.items() if name != "elastic"}
        bucket, _, run = own.plan.run_dir.partition("/runs/")
        program = {name: value for name, value in values.items() if name not in ("seed", "data_sha256")}
        key = cache_key([program, own.units, own.unit_devices, dict(compile_facts(1))])
        cache = open_cache(own.compile_cache_dir, key, f"{run}-{own.role.name}", bucket)
        fetching = Background("fetching compiled programs", cache.fetch)
        # Here and not above: these import JAX.
        from tpu.train.compile_cache import use_cache
        from tpu.train.elastic import unit_program
        from tpu.train.workloads import Configuration, make_workload

        fetching.wait(FETCH_DEADLINE_S)
        use_cache(cache)
        configuration = Configuration.from_values(values)
        workload = make_workload(configuration)
        units = unit_program(configuration.training, workload, own.units, own.unit_devices)
        own.train(units, training_facts, warm=cache.publish)
        cache.close()


if __name__ == "__main__":
    main()
