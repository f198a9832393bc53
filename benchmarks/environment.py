"""Processes and environments of their own: for peers that need other libraries, and for plugins of jax."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / "peers"
# What each environment holds; the peers on the Python and the jax that they work with.
REQUIREMENTS = {
    "peers": ("torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "ringattention==0.1.2", "jax==0.10.2"),
    "tunix": (str(ROOT), "google-tunix==0.1.7"),
    "maxtext": (str(ROOT), "maxtext[tpu]==0.2.5"),  # they exclude each other
    "plugins": (
        f"{ROOT}[examples]",
        f"jax[tpu]=={jax.__version__}",
        f"jax-cuda12-plugin=={jax.__version__}",
        f"jax-cuda12-pjrt=={jax.__version__}",
        "nvidia-cuda-nvcc-cu12",
    ),
    # XLA asks cuDNN from jax 0.12 on; later versions of cuDNN do not know the description of the device.
    "cudnn": (
        str(ROOT),
        "jax==0.12.0.1",
        "jax-cuda12-plugin==0.12.0.1",
        "jax-cuda12-pjrt==0.12.0.1",
        "nvidia-cuda-nvcc-cu12",
        "nvidia-cudnn-cu12==9.23.2.1",
        "nvidia-cublas-cu12",
        "nvidia-cuda-nvrtc-cu12",
        "nvidia-cuda-runtime-cu12",
        "nvidia-cuda-nvdisasm",
    ),
}
# Versions of Python; the others have that of this process.
VERSIONS = {"peers": "3.11", "cudnn": "3.12", "tunix": "3.12", "maxtext": "3.12"}

# Plugins compile for their devices but must not look for them.
VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def run_peer(script: str, *arguments: int | str) -> Any:
    """Runs a script of the peers; returns what it prints as JSON."""
    return _run(_interpreter("peers"), str(PEERS / script), *map(str, arguments))


def run_client(name: str, *arguments: str) -> Any:
    """Runs the script of a client in an environment of its own, on this checkout; returns what it prints as JSON."""
    script = ROOT / "tests" / "clients" / f"check_{name}.py"
    with tempfile.TemporaryDirectory() as folder:  # where it may leave what it likes
        return _run(_interpreter(name), str(script), *arguments, variables={"PYTHONPATH": str(ROOT)}, folder=folder)


def run_module(
    module: str,
    *arguments: str,
    environment: str | None = None,
    libraries: str | None = None,
    variables: dict[str, str] | None = None,
) -> Any:
    """Runs a module of these benchmarks in a process of its own; returns what it prints as JSON.

    `libraries` are the folders of libraries that it finds before others, `variables` those of the process.
    """
    python = _interpreter(environment) if environment else sys.executable
    # Another version of XLA does not know all flags of this one.
    dropped = {"XLA_FLAGS"} if environment else set()
    return _run(python, "-m", module, *arguments, libraries=libraries, variables=variables, dropped=dropped)


def folder_of(name: str) -> Path:
    """Returns the folder of an environment, which is made in the temporary folder if it is not there."""
    return Path(_interpreter(name)).parent.parent


def _interpreter(name: str) -> str:
    """Returns the interpreter of an environment."""
    folder = Path(tempfile.gettempdir()) / f"ringjax-{name}"
    interpreter = folder / "bin" / "python"
    if not (folder / "ready").exists():
        python = _find_python(VERSIONS[name]) if name in VERSIONS else sys.executable
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([interpreter, "-m", "pip", "install", "-q", *REQUIREMENTS[name]], check=True)
        (folder / "ready").touch()
    return str(interpreter)


def _find_python(version: str) -> str:
    """Returns an interpreter that runs: pyenv puts names on the PATH of versions that are not switched on."""
    own = sorted(map(str, (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")))
    for python in (f"python{version}", *own):
        found = shutil.which(python)
        if found and subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode == 0:
            return found
    raise FileNotFoundError(f"no interpreter of Python {version} is here: install one")


def _run(
    *command: str,
    libraries: str | None = None,
    variables: dict[str, str] | None = None,
    dropped: Collection[str] = (),
    folder: Path | str = ROOT,
) -> Any:
    # Where this process has the TPUs' compiler, jax names it here, and another environment has its own.
    dropped = {"TPU_LIBRARY_PATH", *dropped}
    environment = {name: value for name, value in os.environ.items() if name not in dropped} | VARIABLES
    environment |= ({"LD_LIBRARY_PATH": libraries} if libraries else {}) | (variables or {})
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)
    sys.stderr.write(done.stderr)
    done.check_returncode()
    return json.loads(done.stdout.strip().splitlines()[-1])
