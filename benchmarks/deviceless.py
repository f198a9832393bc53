"""Whether cuDNN has an engine for what ringjax asks of it, on an H100 that is not there.

By default, compiling ahead of time does not ask cuDNN. Here XLA does, which needs cuDNN's libraries, jax 0.12, and a
library that stands in for the driver's: it has all of its functions, and next to none does anything. What cuDNN does
not serve may end the process: each program has one of its own. `python -m benchmarks.deviceless`; needs Python 3.12 and
a C compiler.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.ahead_of_time import HEADS, LENGTH, OVERLAP, TOKENS, WIDTH, devices
from benchmarks.environment import folder_of, run_module
from benchmarks.programs import loop_permutes
from benchmarks.timing import save
from ringjax import Segments, Window, make_mesh, ring_dilated_attention

ALWAYS = ("xla_gpu_cudnn_deviceless_compilation_mode", "CUDNN_DEVICELESS_COMPILATION_ALWAYS")
DOCUMENTS = "with documents"
PROGRAMS: dict[str, tuple[Any, ...]] = {
    "a ring": (Segments(LENGTH),),
    "local segments": (Segments(4096),),
    "segments across devices": (Segments(12000),),
    "a window": (Window(1024),),
    "a dilated window": (Window(512, rate=2),),
    f"a ring {DOCUMENTS}": (Segments(LENGTH),),
    f"local segments {DOCUMENTS}": (Segments(4096),),
}
# What has no engine: the test must see that.
CONTROL = "heads that are too wide"
# Functions of the driver that have to do something; all others return that there is no device.
DRIVER = {
    "cuDriverGetVersion": "(int *version) { *version = 12090; return 0; }",
    "cuDeviceGetCount": "(int *count) { *count = 0; return 100; }",
    "cuGetErrorString": '(int error, const char **text) { *text = "none"; return 0; }',
    "cuGetErrorName": '(int error, const char **text) { *text = "none"; return 0; }',
    "cuGetProcAddress": "(const char *name, void **address, int version, long flags) { *address = 0; return 500; }",
    "cuGetProcAddress_v2": "(const char *name, void **address, int version, long flags, int *found)"
    " { *address = 0; if (found) *found = 1; return 500; }",
}
SEARCHED = "cudnn/lib", "cublas/lib", "cuda_nvrtc/lib", "cuda_runtime/lib"


def compile_program(name: str, gradient: bool, kv_heads: int) -> dict[str, Any]:
    """Compiles one program for 8 H100s; returns a row of the table."""
    mesh, width = make_mesh((8,), ("seq",), devices=devices("h100", "1x1x8")), 264 if name == CONTROL else WIDTH
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(None, "seq")))
    arrays = [of(jnp.bfloat16, 1, LENGTH, heads, width) for heads in (HEADS, kv_heads, kv_heads)]
    documents = of(jnp.int32, 1, LENGTH) if DOCUMENTS in name else None

    def attend(query: Any, key: Any, value: Any, documents: Any) -> Any:
        options: dict[str, Any] = {"pattern": PROGRAMS.get(name, PROGRAMS["local segments"]), "is_causal": True}
        if documents is not None:
            options |= {"document_ids": documents, "documents_are_sorted": True}
        return ring_dilated_attention(query, key, value, mesh=mesh, implementation="cudnn", **options)

    total = lambda *arrays: attend(*arrays).astype(jnp.float32).sum()
    lowered = jax.jit(jax.grad(total, (0, 1, 2)) if gradient else attend).lower(*arrays, documents)
    options: Any = dict((*OVERLAP, ALWAYS))
    compiled: Any = lowered.compile(options)
    text, peak = compiled.as_text(), compiled.memory_analysis().peak_memory_in_bytes
    return {
        "has an engine": "yes",
        "kernels": text.count('custom_call_target="__cudnn'),
        "peak bytes of a device over its queries'": peak / (TOKENS * HEADS * WIDTH * 2),
        "permutes in loops that overlap": float(np.mean(loop_permutes(text) or [1.0])),
    }


def try_program(name: str, gradient: bool, kv_heads: int, libraries: str) -> dict[str, Any]:
    """Returns a row of the table, of a process of its own."""
    row = {"program": name, "direction": "gradient" if gradient else "forward", "key/value heads": kv_heads}
    arguments = name, str(int(gradient)), str(kv_heads)
    try:
        found = run_module("benchmarks.deviceless", *arguments, environment="cudnn", libraries=libraries)
    except subprocess.CalledProcessError as error:
        if "hidden_dim" not in error.stderr and "cudnn" not in error.stderr.lower():
            raise RuntimeError(error.stderr) from error
        found = {"has an engine": "no", "kernels": 0}
        found |= dict.fromkeys(("peak bytes of a device over its queries'", "permutes in loops that overlap"), 0.0)
    return row | found


def find_libraries() -> str:
    """Returns where the libraries are, with the one that stands in for the driver's."""
    folder = folder_of("cudnn")
    (packages,) = folder.glob("lib/python*/site-packages/nvidia")
    driver = folder / "driver" / "libcuda.so.1"
    if not driver.exists():
        driver.parent.mkdir(exist_ok=True)
        named = re.compile(rb"\bcu[A-Z]\w+")
        names = {
            name.decode() for path in packages.glob("cudnn/lib/*.so*") for name in named.findall(path.read_bytes())
        }
        source = driver.parent / "driver.c"
        lines = [f"int {name}() {{ return 100; }}" for name in sorted(names - DRIVER.keys())]
        source.write_text("\n".join([*lines, *(f"int {name}{body}" for name, body in DRIVER.items())]))
        command = ["cc", "-w", "-shared", "-fPIC", "-o", driver, source]
        subprocess.run(command, check=True)
    return os.pathsep.join([str(driver.parent), *(str(packages / folder) for folder in SEARCHED)])


def main() -> None:
    """Compiles everything, or what a process was asked for."""
    if sys.argv[1:]:
        name, gradient, kv_heads = sys.argv[1:]
        print(json.dumps(compile_program(name, bool(int(gradient)), int(kv_heads))))
        return
    cases = [(name, gradient, HEADS) for name in (*PROGRAMS, CONTROL) for gradient in (False, True)]
    cases += [(f"a ring {DOCUMENTS}", gradient, HEADS // 2) for gradient in (False, True)]
    libraries = find_libraries()
    save("deviceless", [try_program(*case, libraries) for case in cases])


if __name__ == "__main__":
    main()
