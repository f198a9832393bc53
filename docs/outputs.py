"""Runs the notebooks and stores their outputs, without times and paths: `python docs/outputs.py`, where Sphinx is."""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).parent
# As conf.py has them, for the site.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "TF_CPP_MIN_LOG_LEVEL": "3"}


def main() -> None:
    """Writes all notebooks anew."""
    os.environ |= ENVIRONMENT
    os.environ["PYTHONPATH"] = os.pathsep.join([str(DOCS), str(DOCS.parent / "examples")])
    for path in sorted((DOCS / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
        for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
            cell.execution_count = number + 1
            cell.metadata.pop("execution", None)
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = number + 1
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
