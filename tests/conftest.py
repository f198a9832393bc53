"""Every test runs on eight simulated CPU devices, with float64 available and all shape annotations checked."""

import contextlib
import fcntl
import gc
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# Compiling for TPUs on a machine without one.
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jaxtyping
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

ROOT = Path(__file__).resolve().parent.parent
# What is tested is the package that is installed: the checkout comes last, for all that no wheel has.
sys.path.sort(key=lambda folder: Path(folder).resolve() == ROOT)
PACKAGE = Path(find_spec("ringjax").origin).parent
read = lambda folder: {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
if read(PACKAGE) != read(ROOT / "ringjax"):
    raise pytest.UsageError(f"{PACKAGE} is not what this checkout has: install it anew, or with pip install -e")

# The modules with shapes in their annotations; of the rest, integers, the type checker sees all that there is to see.
SOURCES = [path for path in (ROOT / "ringjax").rglob("*.py") if "from jaxtyping import" in path.read_text()]
SHAPED = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES]
assert {"ringjax._attention", "ringjax._kernels.softmax", "ringjax.nn"} <= {*SHAPED}
with install_import_hook(SHAPED, "shape_checks.check"):
    import ringjax  # noqa: F401

from forked_runs import ForkedRuns

from benchmarks.training_runs import Runs

# A quarter of the time of tracing goes into looking for garbage among what jax keeps anyway.
gc.freeze()
gc.set_threshold(2_000_000, 50, 100)


def pytest_configure():
    """Sets what makes the tests quick, and float64 available, before jax starts."""
    jax.config.update("jax_enable_x64", True)
    # Less than half the compile time; that fusions are not to be built through MLIR only an older XLA can be told.
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
    flags += ["--xla_cpu_parallel_codegen_split_count=1"]  # the other cores have tests of their own
    flags += ["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []
    os.environ["XLA_FLAGS"] = " ".join(flags)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure():
    """Looks for garbage once, and leaves nothing to the five times that pytest looks then."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config, items):
    """Marks as slow the cases of a test that it does not name as quick; each name has to be that of a case."""
    unknown = {}
    for item in items:
        if quick := {name for mark in item.iter_markers("quick") for name in mark.args}:
            unknown.setdefault(item.function, quick).discard(item.callspec.id)
            if item.callspec.id not in quick:
                item.add_marker("slow")
    unknown = {function.__qualname__: names for function, names in unknown.items() if names}
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"cases that do not exist: {unknown}")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder of all workers of one run of the tests."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def runs(shared_folder):
    """Starts training runs, which share what they import and what they compile."""
    with one_at_a_time(shared_folder):
        return ForkedRuns(shared_folder)


@pytest.fixture(scope="session")
def undisturbed(shared_folder):
    """The folder of a run on eight devices, started as users do: the first worker that needs it makes it."""
    folder = shared_folder / "undisturbed"
    with one_at_a_time(shared_folder):
        if not folder.exists():
            ended = Runs(shared_folder).run(folder, "--tensorboard")
            assert ended.code == 0, ended.stderr
            assert "held-out bits per byte: bigram table" in ended.stdout
    return folder


@contextlib.contextmanager
def one_at_a_time(folder):
    """Lets one worker in, while the others wait."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def unchecked():
    """Switches the checks of annotations off, so that a wrong argument reaches the library's own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
