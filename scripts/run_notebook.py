"""Run notebooks from top to bottom and keep their outputs, as they are committed.

    python scripts/run_notebook.py nbs/01_config.ipynb ...

Kept is what a page shows. Removed are the state of widgets (panels keep a picture in their output), displays that ended
empty, such as a progress bar's, and warnings of libraries about themselves."""
import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def is_shown(output:dict)->bool:
    "Does an output belong to the page?"
    if output.get("name") == "stderr": return "FutureWarning" not in output["text"]
    html = output.get("data", {}).get("text/html")
    return output["output_type"] != "display_data" or html is None or bool(html.strip())


def run(path:Path)->None:
    "Execute a notebook in its folder, and write it with its outputs; an error of a cell is raised, and nothing written"
    book = nbformat.read(path, 4)
    NotebookClient(book, timeout=3600, kernel_name="python3", resources=dict(metadata=dict(path=path.parent))).execute()
    book.metadata.pop("widgets", None)
    for cell in book.cells:
        cell.metadata.pop("execution", None)   # when it ran
        if cell.cell_type == "code": cell.outputs = [output for output in cell.outputs if is_shown(output)]
    nbformat.write(book, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    for path in parser.parse_args().notebooks:
        run(path)
        print(path)


if __name__ == "__main__": main()
