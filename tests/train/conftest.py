"""Four CPU devices for every test here, set in JAX alone so that no other test's processes inherit it."""

import jax
import pytest

from tpu.emulator.gcs import GcsServer

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(scope="session", autouse=True)
def _compile_once(tmp_path_factory):
    """Equal programs of different tests are compiled once."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """A bucket of a local server, which the environment leads to."""
    folder = tmp_path_factory.mktemp("gcs")
    server = GcsServer(folder / "objects", folder / "log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.start())
        yield "gs://relay-emulated"
    server.stop()
