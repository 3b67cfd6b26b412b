"The outputs that are committed, as GitHub and JupyterLab show them untrusted: without SVG, styles, classes and scripts"
import base64, json, re
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]/"nbs"
INLINE = {"a", "b", "bdi", "code", "i", "img", "ins", "s", "small", "span", "sub", "sup", "u", "wbr"}
REMOVED = {"style", "script", "svg", "title"}


class Dead(HTMLParser):
    "What is left of an output: its words, with a line for each block, and `[[ ]]` around what `<ins>` underlines"
    def __init__(self, html:str):
        super().__init__()
        self.words, self.removed, self.images, self.joined = "", 0, [], []
        self.border = ""   # the inline tag that began or ended after the last text
        self.answers = 0   # inside <pre> an answer is written token by token
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag in REMOVED: self.removed += 1
        if tag == "img": self.images.append(attributes)
        if tag == "ins": self.words += "[["
        if tag == "pre": self.answers += 1
        self._border(tag)
    def handle_endtag(self, tag):
        if tag in REMOVED: self.removed -= 1
        if tag == "ins": self.words += "]]"
        if tag == "pre": self.answers -= 1
        self._border(tag)
    def _border(self, tag):
        if tag not in INLINE: self.words += "\n"
        else: self.border = tag
    def handle_data(self, text):
        if self.removed: return
        is_part = not self.answers and self.border not in ("", "bdi", "ins")
        both = f"{self.words[-20:]}|{text[:20]}"
        if is_part and self.words[-1:].isalnum() and text[:1].isalnum(): self.joined.append(both)
        self.words, self.border = self.words + text, ""


def saved():
    "Every output with HTML: notebook and cell, HTML, all data"
    for file in sorted(ROOT.rglob("*.ipynb")):
        if ".ipynb_checkpoints" in file.parts: continue
        for k, cell in enumerate(json.loads(file.read_text(encoding="utf-8"))["cells"]):
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if "text/html" in data: yield f"{file.relative_to(ROOT)} cell {k}", "".join(data["text/html"]), data


SAVED = [*saved()]


def test_supervised_text_is_underlined_without_styles():
    marked = [(where, html) for where, html, _ in SAVED if "sft-supervised" in html]
    assert len(marked) > 15
    for where, html in marked:
        assert "<span class='sft-supervised'" not in html, f"{where}: run the notebook again"
        assert re.search(r"\[\[[^\]]", Dead(html).words), where


def test_words_of_different_parts_do_not_run_together():
    assert Dead("<b>loss</b><span>1.2</span>").joined and not Dead("<b>loss</b> <span>1.2</span>").joined
    joined = {where: found for where, html, _ in SAVED if (found := Dead(html).joined)}
    assert not joined


def test_each_chart_is_an_image_with_its_figures_in_words():
    assert [where for where, html, _ in SAVED if "<svg" in html] == []
    images = [(where, image) for where, html, _ in SAVED for image in Dead(html).images]
    assert len(images) >= 5
    for where, image in images:
        assert re.search(r"\d", image["alt"]) and len(image["alt"]) > 20, where
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/png;base64" and base64.b64decode(data).startswith(b"\x89PNG"), where


def test_a_panel_is_its_picture_and_no_name_above_it():
    pictures = [(where, html, data) for where, html, data in SAVED if "class='sft-picture'" in html]
    assert len(pictures) > 10
    assert [where for where, _, data in pictures if "IPython.core" in "".join(data["text/plain"])] == []
    for file in ROOT.rglob("*.ipynb"):
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if "application/vnd.jupyter.widget-view+json" in data: assert "".join(data["text/plain"]) == "", file
