"""`make run`: a notebook with the outputs that its page shows, and nothing else."""
import subprocess
import sys

import nbformat
from conftest import ROOT
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook


def execute(path):
    return subprocess.run([sys.executable, ROOT/"scripts/run_notebook.py", path], capture_output=True, text=True)


def test_what_a_page_shows_is_kept(tmp_path):
    cells = ["import warnings\nfrom pathlib import Path\nfrom IPython.display import display, HTML",
             "display(HTML(''))\ndisplay(HTML('<b>7</b>'))\n"
             "warnings.warn('of a library', FutureWarning)\nPath.cwd().name"]
    path = tmp_path/"pages"/"a.ipynb"
    path.parent.mkdir()
    metadata = dict(widgets={"application/vnd.jupyter.widget-state+json": {}})
    nbformat.write(new_notebook(cells=[new_markdown_cell("# a"), *map(new_code_cell, cells)], metadata=metadata), path)
    done = execute(path)
    assert done.returncode == 0, done.stderr
    book = nbformat.read(path, 4)
    first, second = book.cells[1:]
    assert first.outputs == [] and "widgets" not in book.metadata and "execution" not in second.metadata
    shown, result = second.outputs
    assert shown.data["text/html"] == "<b>7</b>" and result.data["text/plain"] == "'pages'"


def test_what_libraries_write_and_paths_of_this_machine_are_not_kept(tmp_path):
    cells = ["import sys\nprint('Loading weights:   0%|     | 0/46 [00:00<?, ?it/s]\\r'\n"
             "      'Loading weights: 100%|#####| 46/46 [00:00<00:00, 9it/s]\\n'\n"
             "      '[transformers] a note\\nmine', file=sys.stderr)",
             "import tqdm.notebook\nfor _ in tqdm.notebook.tqdm(range(3)): pass",
             f"print({str(ROOT/'nbs')!r})"]
    path = tmp_path/"a.ipynb"
    nbformat.write(new_notebook(cells=[*map(new_code_cell, cells)]), path)
    done = execute(path)
    assert done.returncode == 0, done.stderr
    noise, bar, place = (cell.outputs for cell in nbformat.read(path, 4).cells)
    assert [output["text"] for output in noise] == ["mine\n"] and bar == []
    assert place[0]["text"] == "/home/you/sft_nb/nbs\n"


def test_an_error_leaves_the_file_as_it_is(tmp_path):
    path = tmp_path/"a.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0")]), path)
    before = path.read_bytes()
    done = execute(path)
    assert done.returncode and "ZeroDivisionError" in done.stderr and path.read_bytes() == before
