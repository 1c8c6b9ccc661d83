"""What one emulated TPU VM is made of, and the environment that its processes see."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

HOOK = Path(__file__).parent / "hook"
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


@dataclass(frozen=True)
class HostSpec:
    """One host of a node. `address` is its own 127.x.y.z; `cpus` are the cores that it is pinned to;
    `attributes` are its instance attributes (ssh-keys, startup-script, tpu-env …); `environment` is added to
    that of each of its processes."""

    node: str
    zone: str
    project: str
    index: int
    address: str
    ssh_port: int
    metadata_port: int
    accelerator_type: str
    chips: int
    devices_per_chip: int
    threads: int
    cpus: tuple[int, ...]
    home: Path
    attributes: dict[str, str]
    environment: dict[str, str]
    preemptible: bool

    @property
    def name(self) -> str:
        return f"{self.node}-{self.index}"

    @property
    def hostname(self) -> str:
        return f"{self.node}-w-{self.index}"


@dataclass(frozen=True)
class Machine:
    """A booted host: its spec, the folder of the files that are not the user's, and the id of this boot.

    Names come back (a node can be made again under the name of a deleted one), boot ids never.
    """

    spec: HostSpec
    folder: Path
    boot_id: str
    emulator_id: str

    @property
    def marker(self) -> str:
        """The entry of the environment by which a process of this boot is known."""
        return f"TPU_EMULATOR_BOOT={self.boot_id}"

    @property
    def authorized_keys(self) -> Path:
        return self.folder / "ssh-keys"

    @property
    def chip_locks(self) -> Path:
        return self.folder / "chips"

    def to_json(self) -> bytes:
        values = dataclasses.asdict(self)
        values["folder"], values["spec"]["home"] = str(self.folder), str(self.spec.home)
        return json.dumps(values).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Machine:
        values = json.loads(data)
        spec = values.pop("spec")
        spec["home"], spec["cpus"] = Path(spec["home"]), tuple(spec["cpus"])
        values["folder"] = Path(values["folder"])
        return cls(spec=HostSpec(**spec), **values)


def process_environment(machine: Machine, user: str = "root") -> dict[str, str]:
    """Return the whole environment of a process that `user` starts on this host."""
    spec = machine.spec
    metadata = f"{spec.address}:{spec.metadata_port}"
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "SHELL": "/bin/bash",
        "HOME": str(spec.home),
        "USER": user,
        "LOGNAME": user,
        "HOSTNAME": spec.hostname,
        # Hosts share the machine's /tmp; their temporary files must not meet, nor outlive them.
        "TMPDIR": str(machine.folder / "tmp"),
        "PYTHONPATH": str(HOOK),
        "GCE_METADATA_HOST": metadata,
        "GCE_METADATA_IP": metadata,
        "GCE_METADATA_ROOT": metadata,
        **{name: str(spec.threads) for name in _THREAD_VARIABLES},
        **spec.environment,
        "TPU_EMULATOR_ID": machine.emulator_id,
        "TPU_EMULATOR_HOST": spec.name,
        "TPU_EMULATOR_BOOT": machine.boot_id,
        "TPU_EMULATOR_CHIPS": str(spec.chips),
        "TPU_EMULATOR_CHIP_LOCKS": str(machine.chip_locks),
        "TPU_EMULATOR_DEVICES_PER_CHIP": str(spec.devices_per_chip),
        "RELAY_CHIP_DEVICES": f"{machine.chip_locks}/[0-9]*",
    }
