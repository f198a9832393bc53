"""Imports run downwards only, and every module says its one job in its first line."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ringjax"

# What each module may import of this package. A reference must not share bugs: it sees the pattern, which weights are
# dropped, which is part of the definition, and what is refused.
ALLOWED = {
    "_branch": {"_counts"},
    "_counts": set(),
    "_traits": set(),
    "_warning": set(),
    "_pattern": {"_branch", "_counts", "_warning"},
    "_dropout": set(),
    "_sinks": set(),
    "_reference": {"_arguments", "_branch", "_dropout", "_pattern", "_promotion"},
    "_side": {"_branch"},
    "_schedule": {"_branch", "_pattern", "_side", "_traits"},
    "_cost": {"_pattern", "_schedule", "_side"},
    "_strategy": {"_counts", "_schedule"},
    "_mask": set(),
    "_block": {"_dropout", "_mask"},
    "_rows": {"_schedule", "_side"},
    "_meeting": {"_branch", "_dropout", "_mask", "_rows", "_schedule", "_side"},
    "_protocol": {"_block", "_meeting", "_schedule", "_side", "_traits"},
    "_xla": {"_block", "_meeting", "_protocol", "_schedule", "_side", "_traits"},
    "_spans": set(),
    "_pieces": {"_block", "_branch", "_meeting", "_schedule", "_spans"},
    "_fused": {"_block", "_meeting", "_pieces", "_protocol", "_schedule", "_side", "_traits"},
    "_cudnn": {"_block", "_fused", "_pieces", "_spans", "_warning"},
    "_tile_list": {"_mask"},
    "_operands": {"_block", "_mask"},
    "_tpu_call": {"_mask", "_operands", "_tile_list"},
    "_tpu": {"_block", "_dropout", "_mask", "_operands", "_tile_list", "_tpu_call"},
    "_gpu_call": {"_operands", "_tile_list"},
    "_gpu": {"_block", "_dropout", "_gpu_call", "_mask", "_operands"},
    "_mosaic": {
        "_block",
        "_gpu",
        "_mask",
        "_meeting",
        "_operands",
        "_protocol",
        "_schedule",
        "_side",
        "_tpu",
        "_traits",
    },
    "_implementation": {"_cudnn", "_fused", "_mosaic", "_protocol", "_schedule", "_warning", "_xla"},
    "_axes": set(),
    "_mesh": set(),
    "_placement": {"_axes", "_mesh"},
    "_mesh_warning": {"_mesh", "_placement", "_warning"},
    "_sharded": {"_axes", "_placement"},
    "_order": set(),
    "_promotion": set(),
    "_exchange": {"_order"},
    "_plan": {
        "_block",
        "_exchange",
        "_implementation",
        "_meeting",
        "_pattern",
        "_placement",
        "_protocol",
        "_rows",
        "_schedule",
    },
    "_layout": {"_block", "_exchange", "_meeting", "_order", "_plan", "_protocol", "_rows", "_schedule", "_side"},
    "_ring": {"_cost", "_layout", "_meeting", "_order", "_schedule"},
    "_gather": {"_layout", "_meeting", "_ring"},
    "_addition": {"_layout", "_plan"},
    "_shard": {"_addition", "_block", "_gather", "_layout", "_meeting", "_plan", "_ring", "_rows"},
    "_device": {"_block", "_implementation", "_order", "_plan", "_shard"},
    "_rule": {"_device", "_plan", "_promotion"},
    "_arguments": {"_branch", "_counts", "_dropout"},
    "_machine": {"_cost"},
    "_call": {"_block", "_cost", "_implementation", "_pattern", "_protocol", "_schedule", "_strategy"},
    "_memory": {"_cost", "_schedule", "_strategy"},
    "_forecast": {"_call", "_cost", "_machine", "_memory", "_schedule", "_strategy"},
    "_planner": {
        "_arguments",
        "_branch",
        "_call",
        "_counts",
        "_forecast",
        "_implementation",
        "_machine",
        "_pattern",
        "_protocol",
        "_strategy",
    },
    "_pictures": {"_branch", "_pattern", "_schedule"},
    "_hlo": set(),
    "_compiled": {"_attention", "_device_order", "_forecast", "_hlo", "_mesh", "_planner"},
    "_measure": {"_machine", "_mesh"},
    "_command": {"_branch", "_compiled", "_machine", "_measure", "_pattern", "_pictures", "_planner"},
    "__main__": {"_command"},
    "_explain": {"_attention", "_call", "_forecast", "_machine", "_mesh_warning", "_pattern", "_placement", "_planner"},
    "_attention": {
        "_arguments",
        "_block",
        "_branch",
        "_call",
        "_device",
        "_forecast",
        "_implementation",
        "_machine",
        "_mesh",
        "_mesh_warning",
        "_pattern",
        "_placement",
        "_plan",
        "_promotion",
        "_protocol",
        "_rule",
        "_schedule",
        "_sinks",
        "_strategy",
    },
    "_weights": {"_arguments", "_block", "_branch", "_pattern", "_promotion", "_sharded", "_sinks"},
    "_attention_fn": {"_attention", "_branch", "_pattern"},
    "_padding": {"_arguments", "_axes", "_counts", "_mesh"},
    "_cache": {"_branch", "_counts", "_mesh", "_pattern", "_sharded"},
    "_decode": {"_block", "_branch", "_cache", "_order", "_pattern", "_placement", "_sinks"},
    "_rotary": set(),
    "_device_order": {"_counts"},
    "_heads": {
        "_arguments",
        "_attention",
        "_block",
        "_cache",
        "_counts",
        "_decode",
        "_implementation",
        "_mesh",
        "_pattern",
        "_placement",
        "_promotion",
        "_rotary",
        "_sharded",
        "_strategy",
    },
    "nn": {"_branch", "_cache", "_heads", "_implementation", "_pattern", "_strategy"},
    "linen": {"_branch", "_cache", "_heads", "_implementation", "_pattern", "_strategy"},
    "__init__": {
        "_attention",
        "_attention_fn",
        "_branch",
        "_device_order",
        "_explain",
        "_mesh_warning",
        "_padding",
        "_pattern",
        "_planner",
        "_reference",
        "_weights",
        "linen",
        "nn",
    },
}
# The modules that are integers alone, and those that may name a mesh axis.
WITHOUT_JAX = {"_branch", "_pattern", "_side", "_traits", "_schedule", "_cost", "_strategy", "_machine", "_memory"}
WITHOUT_JAX |= {"_pictures", "_command"}
WITH_AXES = {"_axes", "_mesh", "_placement", "_sharded", "_plan", "_exchange", "_cache", "_heads", "_padding"}
WITH_AXES |= {"_measure", "_compiled", "_device_order"}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {
                f"{node.module}.{alias.name}" if node.module == "ringjax" else node.module for alias in node.names
            }
    return names


def test_the_table_is_complete():
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(ALLOWED)


@pytest.mark.parametrize("module", ALLOWED)
def test_imports_run_downwards(module):
    names = imports(PACKAGE / f"{module}.py")
    own = {name.removeprefix("ringjax.") for name in names if name.startswith("ringjax")}
    assert own <= ALLOWED[module]
    foreign = {name.split(".")[0] for name in names} - {"ringjax"}
    if module in WITHOUT_JAX:
        assert "jax" not in foreign
    if module not in WITH_AXES | {"_attention"}:
        assert not any(name.startswith("jax.sharding") for name in names)


@pytest.mark.parametrize("module", ALLOWED)
def test_modules_state_their_job(module):
    source = (PACKAGE / f"{module}.py").read_text()
    assert ast.get_docstring(ast.parse(source)).splitlines()[0].endswith((".", ":"))


@pytest.mark.parametrize("module", ALLOWED)
def test_functions_inside_others_have_no_shapes(module):
    """The tests check the shapes of functions that are defined once, see `shape_checks`."""
    is_function = lambda node: isinstance(node, ast.FunctionDef)
    for outer in filter(is_function, ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text()))):
        for inner in filter(is_function, ast.walk(outer)):
            arguments = [argument.annotation for argument in ast.walk(inner.args) if isinstance(argument, ast.arg)]
            annotations = filter(None, [*arguments, inner.returns] if inner is not outer else [])
            parts = (part for annotation in annotations for part in ast.walk(annotation))
            assert not any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts), inner.name
