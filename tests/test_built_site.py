"""The static site of scripts/build_site.py, crawled: links, anchors, titles, pictures, signatures, and no text lost."""
import fcntl
import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
pytest.importorskip("sphinx", reason="the site needs the extra docs")
from build_site import Site   # noqa: E402
from page_cells import code_cell, definitions, reference   # noqa: E402

ATTRIBUTE = r"""\s%s=(?:"([^"]*)"|'([^']*)')"""
SITE = Site(ROOT/"nbs", ROOT/"settings.ini")


def attributes(text:str, tag:str, name:str)->list[str|None]:
    "The attribute of every such tag, None where it has none"
    found = [re.search(ATTRIBUTE % name, t) for t in re.findall(rf"<{tag}\b[^>]*>", text)]
    return [html.unescape(m[1] or m[2] or "") if m else None for m in found]


def faults(site:Path)->list[str]:
    "What a reader would stumble over: pages without a title, pictures without a text, links that lead nowhere"
    texts = {p.relative_to(site).as_posix(): p.read_text(encoding="utf-8") for p in site.rglob("*.html")}
    ids = {name: {a or b for a, b in re.findall(ATTRIBUTE % "id", text)} for name, text in texts.items()}
    found = []
    for name, text in texts.items():
        if not re.search(r"<title>[^<]*\w[^<]*</title>", text): found.append(f"{name}: no title")
        found += [f"{name}: a picture without text" for alt in attributes(text, "img", "alt") if not alt]
        found += [f"{name}: id {x} stands twice" for x in ids[name] if text.count(f' id="{x}"') > 1]
        loaded = [x for x in attributes(text, "script", "src") + attributes(text, "img", "src") if x]
        found += [f"{name}: {x} comes from elsewhere" for x in loaded if x.startswith(("http", "//"))]
        for link in {*attributes(text, "a", "href"), *attributes(text, "link", "href"), *loaded} - {None}:
            if re.match(r"[a-z]+:", link): continue
            target, _, anchor = unquote(link).partition("#")
            there = os.path.normpath(Path(name).parent/target.split("?")[0]) if target else name
            if not (site/there).is_file(): found.append(f"{name}: {link}: no such file")
            elif anchor and there in ids and anchor not in ids[there]: found.append(f"{name}: {link}: no such anchor")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory)->Path:
    "The whole site, built without warnings, once for all workers"
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ: shared = shared.parent
    out, said = shared/"site", shared/"site.txt"
    with open(shared/"site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            command = [sys.executable, str(ROOT/"scripts/build_site.py"), "--out", str(out)]
            done = subprocess.run(command, capture_output=True, text=True)
            said.write_text(f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    assert said.read_text().startswith("exit code 0\n"), said.read_text()
    return out


def test_a_reader_stumbles_over_nothing(site): assert faults(site) == []


@pytest.mark.parametrize("body, fault", [
    ("<title> </title>", "no title"),
    ("<title>a</title><img src='x.png'>", "a picture without text"),
    ("<title>a</title><a href='b.html'>b</a>", "b.html: no such file"),
    ("<title>a</title><a href='#x'>x</a>", "#x: no such anchor"),
    ("<title>a</title><a href='index.html#y'>y</a><p id='x'>", "index.html#y: no such anchor"),
    ('<title>a</title><p id="x"><p id="x">', "id x stands twice"),
    ("<title>a</title><script src='https://a.org/x.js'></script>", "https://a.org/x.js comes from elsewhere"),
])
def test_what_a_reader_would_stumble_over_is_seen(tmp_path, body, fault):
    (tmp_path/"index.html").write_text(body)
    assert f"index.html: {fault}" in faults(tmp_path)
    (tmp_path/"index.html").write_text("<title>a</title><a href='#x'>x</a><a href='https://a.org'>y</a><p id=\"x\">")
    assert faults(tmp_path) == []


MARKUP = r"^```\w*|^\s*\d+\. |</?(?:details|summary)>|!\[[^\]]*(?=\]\()|\]\((?:[^()]|\([^)]*\))*\)|\|[-:|]+\|"

def letters(text:str)->str: return re.sub(r"[\W_]+", "", text)


def test_no_page_loses_text(site):
    "Every paragraph of a notebook is on its page, and its title"
    lost = []
    for page in SITE.pages.values():
        text = (site/f"{page.name}.html").read_text(encoding="utf-8")
        article = re.search(r"<article.*</article>", text, re.S)[0]
        shown = letters(html.unescape(re.sub(r"<[^>]*>", "", article)))
        for cell in (c for c in page.cells if c["cell_type"] == "markdown"):
            plain = re.sub(MARKUP, "", "".join(cell["source"]), flags=re.M)
            blocks = [b for b in plain.split("\n\n") if "$" not in b]   # formulas are drawn
            lost += [f"{page.source}: {b[:80]}" for b in blocks if letters(b) not in shown]
    assert lost == []


def test_the_bar_has_the_version_and_the_groups_of_sidebar_yml(site):
    text = (site/"recipes/quickstart.html").read_text(encoding="utf-8")
    groups = yaml.safe_load((ROOT/"nbs/sidebar.yml").read_text())["website"]["sidebar"]["contents"][1:]
    bar = re.search(r'<div class="sidebar-tree">(.*?)</div>\s*</div>', text, re.S)[1]
    assert re.findall(r'class="caption-text">([^<]*)<', bar) == [g["section"] for g in groups]
    linked = re.findall(r'<a class="[^"]*" href="([^"]*)"', bar)
    here = '<li class="toctree-l1 current current-page"><a class="current reference internal" href="#">Quickstart</a>'
    assert here in bar and bar.count("current-page") == 1
    assert len(linked) == len(SITE.pages) - 1 + sum("section" in x for g in groups for x in g["contents"])
    assert f"sft_nb {SITE.ini['version']}" in text.partition("<article")[0]


def test_every_setting_and_every_public_name_can_be_linked_to(site):
    import sft_nb
    from sft_nb.config.settings import defaults
    settings = (site/"reference/settings.html").read_text(encoding="utf-8")
    assert [name for name in defaults() if f'id="settings.{name}"' not in settings] == []
    assert [name for name in sft_nb.__all__ if not name.isupper() and name not in SITE.targets] == []
    page = (site/"04_tokens/prepare.html").read_text(encoding="utf-8")
    assert 'id="sft_nb.tokens.prepare.prepare"' in page and ">prepare</span><span class=\"p\">(</span>" in page


SOURCE = '''
@patch
def cut(self:Rows,
    ids:list[int],  # token ids
    *, most:int=8,  # tokens | words
    **more,
)->tuple[int,bool]:  # how many are left
    "Keep `most` of <ids>"
'''

def test_a_signature_has_types_defaults_and_comments():
    (name, node), = definitions(SOURCE)
    text = reference(name, node, SOURCE, "###", "a.b")
    assert name == "Rows.cut" and '<span class="anchor" id="a.b.Rows.cut"></span>' in text
    assert "Rows.cut(ids:list[int], *, most:int=8, **more)->tuple[int, bool]" in text
    rows = ["| parameter | type | default | meaning |", "| `ids` | `list[int]` |  | token ids |",
            r"| `most` | `int` | `8` | tokens \| words |", "| `**more` |  |  |  |",
            "| `returns` | `tuple[int, bool]` |  | how many are left |"]
    assert all(row in text for row in rows) and "Keep `most` of &lt;ids&gt;" in text
    private = "def _f(): pass", "@patch\ndef _f(self:Rows): pass", "@patch\ndef f(self:_Rows): pass", "x = 1"
    assert definitions("\n".join(private)) == []


def cell(source:str, outputs=(), **metadata)->dict:
    return dict(cell_type="code", source=[source], outputs=[*outputs], metadata=metadata)


def test_a_cell_is_shown_as_its_directives_say():
    def shown(source, outputs=(), **metadata):
        return code_cell(cell(source, outputs, **metadata), "##", "Two words", "a.b", set())
    said = [dict(output_type="stream", text=["1 < 2\x1b[1m"])]
    assert shown("#| hide\nx = 1") == shown("#| default_exp a.b") == ""
    assert shown("x = 1") == "````python\nx = 1\n````"
    folded = shown("x = 1", jupyter=dict(source_hidden=True))
    assert folded == shown("#| code-fold: true\nx = 1") and folded.startswith("<details") and "x = 1" in folded
    assert "Source" in shown("#| export\n_x = 1") and "#|" not in shown("#| export\n_x = 1")
    assert "1 &lt; 2<" in shown("print()", said) and "print" not in shown("#| echo: false\nprint()", said)
    assert "&lt;" not in shown("#| hide_output\nprint()", said)
    picture = [dict(output_type="display_data", data={"image/png": "QUJD\n", "text/plain": ["<Figure>"]})]
    assert "<img alt=\"Two words\" src='data:image/png;base64,QUJD'>" in shown("plot()", picture)
    widget = {"application/vnd.jupyter.widget-view+json": dict(model_id="a"), "text/plain": ["Panel()"]}
    assert "Panel" not in shown("panel", [dict(output_type="display_data", data=widget)])
    rows = [dict(output_type="execute_result", data={"text/markdown": ["| `lr` | 1 |\n", "| `lr` | 2 |"]})]
    assert shown("#| echo: false\nx", rows).count('id="a.b.lr"') == 1
    with pytest.raises(SystemExit, match=r"unknown directives \['folded'\].*Fix: code_cell"): shown("#| folded\nx = 1")


# What is wider than the window, unless it scrolls in a box of its own; a page scrolls as a whole at 390 px
TOO_WIDE = """(boxes) => [document.documentElement.scrollWidth,
                        ...[...document.querySelectorAll("article *")].filter((e) => {
  const { width, right } = e.getBoundingClientRect();
  return width && right > innerWidth + 1 && !e.parentElement.closest(boxes);
}).map((e) => `${e.tagName} ${e.className} ${e.textContent.trim().slice(0, 40)}`)]"""
BOXES = "pre, .table-wrapper, .cell-output, p:has(> math)"


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    from screenshots import CHROMIUM, FLAGS
    if CHROMIUM is None: pytest.skip("no Chromium")
    with sync_api.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


def wide(browser, file:Path, width:int, boxes:str=BOXES)->list:
    "The width of a page, and what is wider"
    tab = browser.new_page(viewport=dict(width=width, height=800))
    tab.goto(file.as_uri())
    found = tab.evaluate(TOO_WIDE, boxes)
    tab.close()
    return found


PAGES = ("index", "recipes/quickstart", "reference/settings", "04_tokens/encode", "05_batches/layout",
         "14_panels/batches", "failures/never_stops")

@pytest.mark.parametrize("width", (390, 1280))
def test_pages_fit_the_window(site, browser, width):
    found = {name: wide(browser, site/f"{name}.html", width) for name in PAGES}
    assert found == dict.fromkeys(PAGES, [width])
    assert wide(browser, site/"reference/settings.html", width, "pre") == [width]   # not even in a box that scrolls


def test_what_is_too_wide_is_seen(tmp_path, browser):
    page = "<body style='margin: 0'><article style='overflow-x: auto'>{}<p style='width: 500px'>long</p></article>"
    (tmp_path/"a.html").write_text(page.format(""))
    assert wide(browser, tmp_path/"a.html", 390) == [390, "P  long"]
    (tmp_path/"a.html").write_text(page.format("<pre style='overflow-x: auto'>").replace("</p>", "</p></pre>"))
    assert wide(browser, tmp_path/"a.html", 390) == [390]
