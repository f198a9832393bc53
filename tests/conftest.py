"""Every test runs on eight simulated CPU devices, with float64 available and all shape annotations checked."""

import os
from importlib.metadata import version

# Less than half the compile time; that fusions are not to be built through MLIR only an older XLA can be told.
flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
flags += ["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []
os.environ["XLA_FLAGS"] = " ".join(flags)
# Compiling for TPUs on a machine without one.
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jaxtyping
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

with install_import_hook("ringjax", "beartype.beartype"):
    import ringjax  # noqa: F401

from benchmarks.training_runs import Runs

# What depends on the interpreter and the version of jax, beside a tenth of the rest.
ALWAYS = "arguments", "layers", "settings", "default_flags", "documentation", "schedule", "pattern", "device_order"


def pytest_addoption(parser):
    parser.addoption("--tenth", action="store_true", help="of the tests of numbers, run every tenth")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--tenth"):
        rest = [item for item in items if item.path.stem.removeprefix("test_") not in ALWAYS]
        left_out = set(rest) - set(rest[::10])
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Starts training runs, which share what they compile."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def undisturbed(runs, tmp_path_factory):
    """The folder of a run on eight devices."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = runs.run(folder)
    assert ended.code == 0, ended.stderr
    assert "held-out bits per byte: bigram" in ended.stdout
    return folder


@pytest.fixture
def unchecked():
    """Switches the checks of annotations off, so that a wrong argument reaches the library's own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
