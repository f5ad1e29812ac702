"""The examples run as they are shipped."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_quickstart(capsys):
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLES / "quickstart.py")
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    quickstart.main()
    out = capsys.readouterr().out
    assert "17 + 25 = 42" in out
    assert 'calls get_weather({"city":"Paris"})' in out
    assert "Ada is in the garden." in out
    assert re.search(r"6 requests, \d+ prompt \+ \d+ completion tokens in \d+ decode rounds", out)


def test_notebook_runs_top_to_bottom_and_every_cell_again():
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    for cell in list(notebook.cells):
        notebook.cells.insert(notebook.cells.index(cell), nbformat.from_dict(dict(cell) | {"id": f"{cell.id}again"}))
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    shown = "\n".join(
        output.get("text", "") + str(output.get("data", {}))
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )
    for expected in ("17 + 25 = 42", "<details>", "garden", "get_weather", "'3 + 4 = 7'", "False"):
        assert expected in shown, expected


@pytest.mark.parametrize("page", ["README.md", "docs/artifact.md"])
def test_python_in_the_documentation_runs(page, tmp_path, monkeypatch, capsys):
    text = (EXAMPLES.parent / page).read_text()
    monkeypatch.chdir(EXAMPLES.parent)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block.replace('"model.ninfer"', '"examples/tiny/tiny.ninfer"'), page, "exec"), {})
    assert capsys.readouterr().out
