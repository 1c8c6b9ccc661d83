"""The chips of a host: one file each, held by one process at a time."""

from __future__ import annotations

import asyncio
import json

from tests.emulator.machines import room

SHOW = """python -c '
import json, os
print(json.dumps([os.environ["JAX_PLATFORMS"], os.environ["JAX_NUM_CPU_DEVICES"]]))'"""
SHOW_XLA = """python -c '
import json, os
print(json.dumps([os.environ["PJRT_DEVICE"], os.environ["CPU_NUM_DEVICES"]]))'"""
HOLD = "python -c 'import time; print(\"holding\", flush=True); time.sleep(1000)'"


async def hold(client, visible: str = ""):
    process = await client.create_process(f"{visible} exec {HOLD}")
    assert await process.stdout.readline() == "holding\n"
    return process


def refusal(chip: int) -> str:
    return f"/dev/vfio/{chip}: Device or resource busy"


async def test_a_program_gets_all_chips_or_those_it_names_as_jax_devices(tmp_path):
    async with room(tmp_path) as r:
        host, old = await r.boot(), await r.boot(index=1, accelerator_type="v3-8", devices_per_chip=2)
        async with r.connect(host) as client, r.connect(old) as client_of_old:
            assert json.loads((await client.run(SHOW)).stdout) == ["cpu", "4"]
            assert json.loads((await client.run(f"TPU_VISIBLE_CHIPS=2 {SHOW}")).stdout) == ["cpu", "1"]
            assert json.loads((await client.run(f"TPU_VISIBLE_DEVICES=1,3 {SHOW}")).stdout) == ["cpu", "2"]
            assert json.loads((await client.run(f"JAX_NUM_CPU_DEVICES=7 {SHOW}")).stdout) == ["cpu", "7"]
            assert json.loads((await client_of_old.run(SHOW)).stdout) == ["cpu", "8"]


async def test_pytorch_xla_gets_one_device_a_chip_and_two_on_old_chips(tmp_path):
    async with room(tmp_path) as r:
        host, old = await r.boot(), await r.boot(index=1, accelerator_type="v2-8", devices_per_chip=2)
        async with r.connect(host) as client, r.connect(old) as client_of_old:
            assert json.loads((await client.run(f"PJRT_DEVICE=TPU {SHOW_XLA}")).stdout) == ["CPU", "4"]
            assert json.loads((await client.run(f"TPU_VISIBLE_CHIPS=2 {SHOW_XLA}")).stdout) == ["CPU", "1"]
            assert json.loads((await client_of_old.run(SHOW_XLA)).stdout) == ["CPU", "8"]
            one_chip = await client_of_old.run(f"TPU_VISIBLE_CHIPS=3 {SHOW_XLA}")
            assert json.loads(one_chip.stdout) == ["CPU", "2"]


async def test_a_held_chip_is_busy_until_its_holder_dies(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            holder = await hold(client, "TPU_VISIBLE_CHIPS=1,2")
            everything = await client.run(SHOW)
            assert everything.exit_status == 1
            assert refusal(1) in everything.stderr
            assert everything.stdout == ""
            one = await client.run(f"TPU_VISIBLE_CHIPS=2 {SHOW}")
            assert refusal(2) in one.stderr
            assert (await client.run(f"TPU_VISIBLE_CHIPS=0,3 {SHOW}")).exit_status == 0

            holder.kill()
            await holder.wait()
            assert (await client.run(SHOW)).exit_status == 0


async def test_a_chip_that_the_host_does_not_have_is_refused(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            for chips, named in (
                ("4", "/dev/vfio/4"),
                ("0,17", "/dev/vfio/17"),
                ("../ssh-keys", "/dev/vfio/../"),
            ):
                done = await client.run(f"TPU_VISIBLE_CHIPS={chips} {SHOW}")
                assert done.exit_status == 1
                assert named in done.stderr
                assert "Device or resource busy" in done.stderr


async def test_chips_of_one_host_are_not_those_of_another(tmp_path):
    async with room(tmp_path) as r:
        first, second = await r.boot(), await r.boot(index=1)
        async with r.connect(first) as client, r.connect(second) as other:
            await hold(client)
            assert (await other.run(SHOW)).exit_status == 0


async def test_subprocesses_of_the_holder_share_its_chips(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            host.spec.home.joinpath("show.sh").write_text(SHOW)
            host.spec.home.joinpath("launch.py").write_text(
                "import subprocess; subprocess.run(['bash', 'show.sh'])"
            )
            host.spec.home.joinpath("narrow.py").write_text(
                "import os, subprocess\n"
                "subprocess.run(['bash', 'show.sh'], env={**os.environ, 'TPU_VISIBLE_CHIPS': '3'})\n"
            )
            done = await client.run("python launch.py")
            assert json.loads(done.stdout) == ["cpu", "4"], done.stderr
            narrowed = await client.run("python narrow.py")
            assert json.loads(narrowed.stdout) == ["cpu", "1"], narrowed.stderr


async def test_the_mark_of_a_dead_holder_opens_nothing(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            await hold(client)
            assert (await client.run(f"TPU_EMULATOR_CHIP_HOLDER=99999999 {SHOW}")).exit_status == 1


async def test_a_helper_in_isolated_mode_takes_no_chip(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            await hold(client)
            assert (await client.run("python -I -S -c 'print(1)'")).stdout == "1\n"
            helper = await client.create_process("python -I -S -c 'import time; time.sleep(1000)'")
            assert helper.exit_status is None


async def test_jax_sees_the_chips(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            done = await client.run(
                "python -c 'import jax; print(jax.device_count(), jax.default_backend())'"
            )
            assert done.stdout == "4 cpu\n", done.stderr


async def test_busy_chips_leaves_a_process_of_the_host_that_holds_them_all(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        before = set(host.processes())
        await host.busy_chips()
        async with r.connect(host) as client:
            done = await client.run(f"TPU_VISIBLE_CHIPS=3 {SHOW}")
            assert refusal(3) in done.stderr
            [leftover] = set(host.processes()) - before
            await client.run(f"kill -9 {leftover}")
            assert (await client.run(SHOW)).exit_status == 0


async def test_busy_chips_takes_over_from_a_program_that_runs(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            holder = await hold(client, "TPU_VISIBLE_CHIPS=0")
            await asyncio.wait_for(host.busy_chips(), 10)
            holder.kill()
            await holder.wait()
            assert refusal(0) in (await client.run(f"TPU_VISIBLE_CHIPS=0 {SHOW}")).stderr
