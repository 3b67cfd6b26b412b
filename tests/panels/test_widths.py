"""Panels drawn by their own JavaScript in Chromium, without a notebook: on a phone, with the keyboard, reopened."""
import re, shutil, sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
import screenshots   # noqa: E402

pytestmark = pytest.mark.skipif(screenshots.CHROMIUM is None, reason="no chromium on this machine")
NAMES = ["batches", "data", "losses", "run", "plan", "generation", "evaluation"]

# What sticks out of the window, and what is cut inside a box that would have to be scrolled sideways
WIDE = """() => {
  const found = [];
  const scroller = document.scrollingElement;
  if (scroller.scrollWidth > innerWidth) found.push(`the page is ${scroller.scrollWidth} pixels wide`);
  for (const e of document.querySelectorAll('.sft-panel, .sft-panel *')) {
    const box = e.getBoundingClientRect();
    if (!box.width || e.closest('.uplot') || e.closest('details:not([open])')) continue;
    if (box.right > innerWidth + 1 || box.left < -1) found.push(`${e.tagName} .${e.className} ends at ${box.right}`);
    const scrolls = ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
    if (scrolls && e.scrollWidth > e.clientWidth + 1) found.push(`${e.className} holds ${e.scrollWidth} pixels`);
    if (e.tagName === 'BUTTON' && e.scrollWidth > e.clientWidth + 1) found.push(`cut: ${e.textContent}`);
  }
  return found;
}"""
# Whatever can be operated has a name that a screen reader reads
UNNAMED = """() => [...document.querySelectorAll('.sft-panel :is(button, input, select, textarea, [tabindex])')]
  .filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim() || e.title || e.placeholder))
  .map((e) => e.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def panels(trained, tmp_path_factory):
    from sft_nb.evaluation.sweep import sweep
    from sft_nb.runs.directory import open_run
    folder = tmp_path_factory.mktemp("panels")
    run = open_run(shutil.copytree(trained.path, folder/"swept"))
    sweep(run, eval_samples=8, general=False, progress=False)
    with screenshots.running(folder, run) as live: yield screenshots.all_panels(run, live, folder)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=screenshots.CHROMIUM, args=screenshots.FLAGS)
        yield browser
        browser.close()


def test_all_panels_are_tried(panels): assert [*panels] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_nothing_sticks_out_of_a_phone_and_everything_has_a_name(panels, browser, name):
    made = panels[name]["full"]()
    for width in (390, 800, 1440):
        page = browser.new_page(viewport=dict(width=width, height=900))
        screenshots.show_panel(page, made, "dark" if width == 800 else "light")
        page.wait_for_timeout(300)
        assert page.evaluate(WIDE) == [], width
        assert page.evaluate(UNNAMED) == []
        assert "None" not in re.split(r"\W+", page.locator(".sft-panel").inner_text())
        page.close()


def test_a_batch_is_walked_through_with_the_keyboard_alone(panels, browser):
    panel = panels["batches"]["full"]()
    page = browser.new_page(viewport=dict(width=390, height=900))
    screenshots.show_panel(page, panel)
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "next ▶": break
    page.keyboard.press("Enter")
    page.get_by_text("train batch 2 of").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "next ▶"   # the focus stays
    page.get_by_role("button", name="on", exact=True).click()
    page.locator("bdi[title*=', loss ']").first.wait_for()   # under the mouse, of each supervised token
    assert page.locator(".sft-supervised bdi:not([title*=', loss '])").count() == 1   # the legend
    page.close()


def test_a_panel_that_no_front_end_has_drawn_draws_when_a_window_opens(panels, browser):
    "as marimo, which does not call `_ipython_display_`"
    panel = panels["batches"]["empty"]()
    assert panel.view == []
    page = browser.new_page()
    screenshots.show_panel(page, panel)
    page.get_by_text("train batch 1 of").wait_for()
    page.close()


def test_a_run_that_trains_on_while_the_tab_is_closed_is_followed_when_it_is_opened_again(trained, tmp_path, browser):
    with screenshots.running(tmp_path, trained) as live:
        from sft_nb.panels.run import RunPanel
        panel = RunPanel(live, every=.1)
        page = browser.new_page()
        screenshots.show_panel(page, panel)
        lines = (trained.path/"metrics.jsonl").read_text().splitlines()
        step = panel.state.step
        page.get_by_text("step of").wait_for()
        page.close()                                               # the run goes on
        with (live.path/"metrics.jsonl").open("a") as file:
            file.write("\n".join(lines[len(lines) // 2:]) + "\n")
        again = browser.new_page()
        screenshots.show_panel(again, panel)
        again.get_by_text(re.compile(r"training \d+ of|at step")).first.wait_for()
        for _ in range(100):
            if panel.state.step > step: break
            again.wait_for_timeout(100)
        assert panel.state.step > step
        again.get_by_text(f"{panel.state.step:,}", exact=True).first.wait_for()
        live.set_status("finished")
    for _ in range(100):
        if not panel._thread.is_alive(): break
        again.wait_for_timeout(100)
    again.get_by_text("finished").first.wait_for()
    assert not panel._thread.is_alive()
    again.close()


def test_the_pictures_of_the_pages_are_there_and_small():
    for name in screenshots.SITE:
        file = ROOT/"nbs"/"images"/f"panel-{name}.png"
        assert file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size <= 150 * 1024
        pages = [p for p in (ROOT/"nbs"/"14_panels").glob("*.ipynb") if f"../images/{file.name}" in p.read_text()]
        assert len(pages) == 1
