"""Every test runs on eight simulated CPU devices, with float64 available and all shape annotations checked."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"  # halves compile time
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


@pytest.fixture
def unchecked():
    """Switches the checks of annotations off, so that a wrong argument reaches the library's own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
