"""A visitor's walk through the pages, in a real browser: home, a recipe, a failure, the reference."""
import re
import shutil
import sys

import nbformat
import pytest
from conftest import ROOT
from nbconvert import HTMLExporter

sys.path.insert(0, str(ROOT/"tests/panels"))
from test_browser import CHROMIUM, FLAGS   # noqa: E402

NBS = ROOT/"nbs"
WALK = [("index", "recipes"), ("recipes/01_quickstart", "failures"), ("failures/00_index", "04"),
        ("failures/04_never_stops", None)]
SAID = {"01_settings": "lora_target_modules", "02_commands": "--min-gain", "03_objects": "resume("}
HIDDEN = re.compile(r"^#\| *(hide|exporti?|default_exp)\b", re.M)


def html_of(name:str)->str:
    "A page as on the site, by nbconvert: no hidden cells, links to pages instead of notebooks"
    book = nbformat.read(NBS/f"{name}.ipynb", as_version=4)
    book.cells = [c for c in book.cells if not HIDDEN.search(c.source)]
    for c in book.cells:
        if "#| echo: false" in c.source: c.source = ""
        if c.cell_type == "markdown": c.source = re.sub(r"\.ipynb([)#])", r".html\1", c.source)
        for o in c.get("outputs", []):
            text = o.get("data", {}).get("text/markdown")
            if text: o.data["text/markdown"] = text.replace(".ipynb)", ".html)")
    text, _ = HTMLExporter().from_notebook_node(book)
    return text


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "The pages of the walk, and the pictures that they show"
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(NBS/"images", folder/"images")
    for name in [*(name for name, _ in WALK), "reference/01_settings", "reference/02_commands", "reference/03_objects"]:
        (folder/name).parent.mkdir(exist_ok=True)
        (folder/f"{name}.html").write_text(html_of(name), encoding="utf-8")
    return folder


def looks_whole(page)->list[str]:
    "What is visibly wrong with a page"
    page.wait_for_function("[...document.images].every(i => i.complete)")
    broken = page.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
    text = page.inner_text("body")
    return broken + [w for w in ("Error displaying widget", "Loading widget", "Traceback") if w in text]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (apt-get install chromium)")
def test_a_visitor_walks_from_home_to_the_reference(site):
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport=dict(width=1280, height=900))
        page.set_default_timeout(60_000)
        page.goto((site/"index.html").as_uri(), wait_until="domcontentloaded")
        for name, link in WALK:
            page.wait_for_url(f"**/{name}.html", wait_until="domcontentloaded")   # there is an address before a text
            page.locator("h1").first.wait_for()
            assert looks_whole(page) == []
            page.screenshot(path=str(site/f"{name.replace('/', '-')}.png"))
            if link: page.get_by_role("link", name=link, exact=True).first.click()
        page.goto((site/"failures/00_index.html").as_uri(), wait_until="domcontentloaded")
        page.get_by_role("link", name="settings", exact=True).first.click()
        page.wait_for_url("**/reference/01_settings.html", wait_until="domcontentloaded")
        for name, says in SAID.items():
            page.goto((site/f"reference/{name}.html").as_uri(), wait_until="domcontentloaded")
            page.locator("td code", has_text=says).first.wait_for()
            page.screenshot(path=str(site/f"reference-{name}.png"), full_page=False)
        browser.close()
