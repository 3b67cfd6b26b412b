"""Run notebooks from top to bottom and keep their outputs, as they are committed.

    python scripts/run_notebook.py nbs/01_config/04_load.ipynb ...

Kept is what a page shows. Removed are the state of widgets (panels keep a picture in their output), displays that
ended empty, such as a progress bar's, and what libraries write about themselves. Paths of this machine become those of
a clone in /home/you/sft_nb."""
import argparse, json, re, site
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
PLACES = {f"{site.getsitepackages()[0]}/": "", str(ROOT): "/home/you/sft_nb"}
# progress bars, and warnings of libraries about themselves or about optional packages
OF_LIBRARIES = re.compile(r"\d+%\|.*\|.*\[|FutureWarning|^\s*warnings\.warn\(|^\[transformers\] |"
                          "Failed to load CPU gemm_4bit_forward", re.M)


def without_lines_of_libraries(text:str)->str:
    "The text a page shows; a progress bar writes over itself, with carriage returns"
    if not OF_LIBRARIES.search(text): return text
    lines = re.split(r"(?<=[\n\r])", text)
    return "".join(line for line in lines if line.strip() and not OF_LIBRARIES.search(line))


def is_shown(output:dict)->bool:
    "Does an output belong to the page?"
    if output["output_type"] == "stream": return bool(output["text"].strip())
    if output["output_type"] != "display_data": return True
    html, text = (output["data"].get(kind) for kind in ("text/html", "text/plain"))
    is_bar = html is None and OF_LIBRARIES.search(text or "") is not None
    return not is_bar and (html is None or bool(html.strip()))


def clean(book)->None:
    "Leave in a notebook that was run what its page shows"
    book.metadata.pop("widgets", None)
    for cell in book.cells:
        cell.metadata.pop("execution", None)   # when it ran
        if cell.cell_type != "code": continue
        for output in cell.outputs:
            if output.get("name") == "stderr": output["text"] = without_lines_of_libraries(output["text"])
        text = json.dumps([output for output in cell.outputs if is_shown(output)])
        for place, instead in PLACES.items(): text = text.replace(place, instead)
        cell.outputs = [nbformat.from_dict(output) for output in json.loads(text)]


def run(path:Path)->None:
    "Execute a notebook in its folder, and write it with its outputs; an error of a cell is raised, and nothing written"
    book = nbformat.read(path, 4)
    NotebookClient(book, timeout=3600, kernel_name="python3", coalesce_streams=True,
                   resources=dict(metadata=dict(path=path.parent))).execute()
    clean(book)
    nbformat.write(book, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    for path in parser.parse_args().notebooks:
        run(path)
        print(path)


if __name__ == "__main__": main()
