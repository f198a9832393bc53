"""The environment of the peers: libraries that others would pick, on the Python and the jax that they work with."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REQUIREMENTS = ("torch==2.13.0", "ringattention==0.1.2", "jax==0.10.2")
PEERS = Path(__file__).parent / "peers"


def peers_python() -> Path:
    """Returns the interpreter of the peers' environment, which it makes in the temporary folder if it is not there."""
    folder = Path(tempfile.gettempdir()) / "ringjax-peers"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run(["python3.11", "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
        (folder / "ready").touch()
    return python


def run_peer(script: str, *arguments: int) -> Any:
    """Runs a script of the peers; returns what it prints as JSON."""
    return _run(str(peers_python()), str(PEERS / script), *map(str, arguments))


def run_module(module: str, *arguments: str) -> Any:
    """Runs a module of these benchmarks in a process of its own; returns what it prints as JSON."""
    return _run(sys.executable, "-m", module, *arguments)


def _run(*command: str) -> Any:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])
