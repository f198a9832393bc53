"""Processes and environments of their own: for peers that need other libraries, and for plugins of jax."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / "peers"
# What each environment holds; the peers on the Python and the jax that they work with.
REQUIREMENTS = {
    "peers": ("torch==2.13.0", "transformers==5.23.0", "ringattention==0.1.2", "jax==0.10.2"),
    "plugins": (
        str(ROOT),
        f"jax[tpu]=={jax.__version__}",
        f"jax-cuda12-plugin=={jax.__version__}",
        f"jax-cuda12-pjrt=={jax.__version__}",
        "nvidia-cuda-nvcc-cu12",
    ),
}

# Plugins compile for their devices but must not look for them.
VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def run_peer(script: str, *arguments: int | str) -> Any:
    """Runs a script of the peers; returns what it prints as JSON."""
    return _run(_interpreter("peers", "python3.11"), str(PEERS / script), *map(str, arguments))


def run_module(module: str, *arguments: str, environment: str | None = None) -> Any:
    """Runs a module of these benchmarks in a process of its own; returns what it prints as JSON."""
    python = _interpreter(environment, sys.executable) if environment else sys.executable
    return _run(python, "-m", module, *arguments)


def _interpreter(name: str, python: str) -> str:
    """Returns the interpreter of an environment, which it makes in the temporary folder if it is not there."""
    folder = Path(tempfile.gettempdir()) / f"ringjax-{name}"
    interpreter = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([interpreter, "-m", "pip", "install", "-q", *REQUIREMENTS[name]], check=True)
        (folder / "ready").touch()
    return str(interpreter)


def _run(*command: str) -> Any:
    # Where this process has the TPUs' compiler, jax names it here, and another environment has its own.
    environment = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"} | VARIABLES
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])
