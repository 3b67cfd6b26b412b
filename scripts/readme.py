"""Write README.md from nbs/index.ipynb with nbconvert, so that it equals the first page of the docs."""
import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

root = Path(__file__).parents[1]


def readme()->str:
    "The index notebook as Markdown: without hidden cells and directives, links to notebooks pointing into nbs/"
    nb = nbformat.read(root/"nbs/index.ipynb", as_version=4)
    nb.cells = [c for c in nb.cells if "#| hide" not in c.source]
    for c in nb.cells: c.source = re.sub(r"^#\|.*\n", "", c.source, flags=re.M)
    nb.metadata["language_info"] = dict(name="python", pygments_lexer="python")
    text, _ = MarkdownExporter().from_notebook_node(nb)
    text = re.sub(r"\]\((?!https?:|#|nbs/|\.\./)([\w/]+\.(?:ipynb|png))\)", r"](nbs/\1)", text)
    text = text.replace("](../", "](")
    made = "<!-- made from nbs/index.ipynb by scripts/readme.py: edit the notebook -->"
    return made + "\n\n" + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


if __name__ == "__main__": (root/"README.md").write_text(readme(), encoding="utf-8")
