"""Imports run downwards only, and every module says its one job in its first line."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ringjax"

# The folders of the package from the bottom up: the folders that each may import, and what each of its modules may of
# the others in it. The folder "" is the package itself, with the faces that users see.
FOLDERS = {
    "_definition": (
        set(),
        {
            "counts": set(),
            "dropout": set(),
            "other_names": set(),
            "promotion": set(),
            "rotary": set(),
            "sinks": set(),
            "warning": set(),
            "branch": {"counts"},
            "pattern": {"branch", "counts"},
            "arguments": {"branch", "counts", "dropout"},
            # A reference must not share bugs: it sees the pattern, what is dropped, and what is refused.
            "reference": {"arguments", "branch", "counts", "dropout", "other_names", "pattern", "promotion"},
            "reach_warning": {"branch", "pattern", "warning"},
        },
    ),
    "_schedule": (
        {"_definition"},
        {
            "heads": set(),
            "side": set(),
            "traits": set(),
            "schedule": {"side", "traits"},
            "make": {"schedule", "side"},
            "cost": {"heads", "schedule", "side"},
            "pairs": {"schedule", "side"},
            "strategy": {"schedule"},
        },
    ),
    "_mesh": (
        {"_definition"},
        {
            "axes": set(),
            "device_order": set(),
            "mesh": set(),
            "order": {"axes"},
            "padding": {"axes", "mesh"},
            "placement": {"axes", "mesh"},
            "sharded": {"axes", "placement"},
            "unused": {"mesh", "placement"},
        },
    ),
    "_meeting": (
        {"_definition", "_schedule"},
        {
            "mask": set(),
            "strides": set(),
            "rows": {"strides"},
            "softmax": set(),
            "meeting": {"mask", "rows"},
            "protocol": {"meeting", "softmax", "strides"},
        },
    ),
    "_kernels": (
        {"_definition", "_schedule", "_meeting"},
        {
            "tiles": set(),
            "xla": {"tiles"},
            "spans": set(),
            "pieces": {"spans"},
            "kernel": set(),
            "fused": {"kernel", "pieces"},
            "cudnn": {"fused", "pieces", "spans"},
            "operands": set(),
            "tile_list": set(),
            "tpu_call": {"operands", "tile_list"},
            "tpu": {"operands", "tile_list", "tpu_call"},
            "tpu_strides": set(),
            "chains": set(),
            "gpu_rooms": {"chains", "operands"},
            "gpu_call": {"chains", "gpu_rooms", "operands", "tile_list"},
            "gpu": {"gpu_call", "gpu_rooms", "operands"},
            "ptxas": set(),
            "mosaic": {"gpu", "kernel", "operands", "ptxas", "tpu", "tpu_strides"},
            "implementation": {"cudnn", "fused", "mosaic", "xla"},
        },
    ),
    "_ring": (
        {"_definition", "_schedule", "_mesh", "_meeting", "_kernels"},
        {
            "exchange": set(),
            "ways": {"exchange"},
            "plan": {"exchange", "ways"},
            "layout": {"plan", "ways"},
            "ring": {"layout"},
            "gather": {"layout", "ring"},
            "addition": {"layout", "plan"},
            "shard": {"addition", "gather", "layout", "plan", "ring"},
            "device": {"plan", "shard"},
            "rule": {"device", "plan"},
        },
    ),
    "_decoding": ({"_definition", "_mesh", "_meeting"}, {"cache": set(), "decode": {"cache"}}),
    "_forecast": (
        {"_definition", "_schedule", "_meeting", "_kernels"},
        {
            "call": set(),
            "machine": set(),
            "memory": set(),
            "forecast": {"call", "machine", "memory"},
        },
    ),
    "": (
        {"_definition", "_schedule", "_mesh", "_meeting", "_kernels", "_ring", "_decoding", "_forecast"},
        {
            "_options": set(),
            "_recording": set(),
            "_attention": {"_options", "_recording"},
            "_attention_fn": {"_attention", "_options"},
            "_version": set(),
            "_weights": set(),
            "_heads": {"_attention", "_options"},
            "linen": {"_heads"},
            "nn": {"_heads"},
        },
    ),
    "_planner": (
        {
            "_definition",
            "_schedule",
            "_mesh",
            "_meeting",
            "_kernels",
            "_forecast",
            "_attention",
            "_recording",
            "_version",
        },
        {
            "hlo": set(),
            "measure": set(),
            "pictures": set(),
            "comparison": set(),
            "planner": {"comparison"},
            "compiled": {"comparison", "hlo"},
            "check": set(),
            "explain": {"comparison"},
            "command": {"check", "comparison", "compiled", "measure", "pictures", "planner"},
        },
    ),
}
MODULES = [f"{folder}/{module}".removeprefix("/") for folder, (_, modules) in FOLDERS.items() for module in modules]
# Names for users, and the command: above all folders.
ROOFS = {"__init__", "__main__"}
# The one import that runs upwards, when it is called: users ask a pattern for its picture.
UPWARDS = {"_definition/pattern": "ringjax._planner.pictures"}
# The modules that are integers alone, and those that may name a mesh axis.
WITHOUT_JAX = {"_definition/branch", "_definition/pattern", "_planner/pictures", "_planner/command"}
WITHOUT_JAX |= {f"_schedule/{module}" for module in FOLDERS["_schedule"][1]}
WITHOUT_JAX |= {f"_forecast/{module}" for module in ("machine", "memory")}
WITH_AXES = {f"_mesh/{module}" for module in ("axes", "mesh", "placement", "sharded", "padding", "device_order")}
WITH_AXES |= {"_ring/plan", "_ring/exchange", "_decoding/cache", "_heads", "_attention", "_options"}
WITH_AXES |= {"_planner/check", "_planner/measure", "_planner/compiled"}


def imports(path: Path) -> set[str]:
    """The modules, as paths without endings, and the packages of others that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            is_folder = node.module.startswith("ringjax") and (PACKAGE.parent / node.module.replace(".", "/")).is_dir()
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if is_folder else {node.module}
    return names


def test_the_table_is_complete():
    found = {str(path.relative_to(PACKAGE).with_suffix("")) for path in PACKAGE.rglob("*.py")}
    assert {name for name in found if not name.endswith("/__init__")} == {*MODULES} | ROOFS


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_downwards(name):
    folder, _, module = name.rpartition("/")
    folders, modules = FOLDERS[folder]
    names = imports(PACKAGE / f"{name}.py") - {UPWARDS.get(name)}
    own = [name.split(".")[1:] for name in names if name.startswith("ringjax")]
    own = [parts if len(parts) == 2 else ["", *parts] for parts in own]  # folder, module
    assert {parts[1] for parts in own if parts[0] == folder} == modules[module]
    assert {parts[0] or parts[1] for parts in own if parts[0] != folder} <= folders
    foreign = {name.split(".")[0] for name in names} - {"ringjax"}
    if name in WITHOUT_JAX:
        assert "jax" not in foreign
    if name not in WITH_AXES:
        assert not any(name.startswith("jax.sharding") for name in names)


def test_folders_import_what_the_table_says():
    for folder, (folders, modules) in FOLDERS.items():
        names = set().union(*(imports(PACKAGE / folder / f"{module}.py") for module in modules)) - {*UPWARDS.values()}
        parts = [name.split(".")[1:] for name in names if name.startswith("ringjax")]
        assert {part[0] for part in parts} - {folder, *modules} == folders


def test_folders_stand_on_folders_below():
    below = set()
    for folder, (folders, modules) in FOLDERS.items():
        assert folders <= below
        below |= {folder} if folder else {*modules}
        inside = set()
        for module, others in modules.items():
            assert others <= inside
            inside |= {module}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_state_their_job(path):
    assert ast.get_docstring(ast.parse(path.read_text())).splitlines()[0].endswith((".", ":"))


@pytest.mark.parametrize("module", MODULES)
def test_functions_inside_others_have_no_shapes(module):
    """The tests check the shapes of functions that are defined once, see `shape_checks`."""
    is_function = lambda node: isinstance(node, ast.FunctionDef)
    for outer in filter(is_function, ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text()))):
        for inner in filter(is_function, ast.walk(outer)):
            arguments = [argument.annotation for argument in ast.walk(inner.args) if isinstance(argument, ast.arg)]
            annotations = filter(None, [*arguments, inner.returns] if inner is not outer else [])
            parts = (part for annotation in annotations for part in ast.walk(annotation))
            assert not any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts), inner.name
