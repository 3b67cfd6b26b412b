"""Panels drawn by their own JavaScript in Chromium, without a notebook: on a phone, with the keyboard, reopened."""
import re, shutil, sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
import screenshots   # noqa: E402
from sft_nb.panels.panel import Button, Number   # noqa: E402

pytestmark = pytest.mark.skipif(screenshots.CHROMIUM is None, reason="no chromium on this machine")
STATES = ("empty", "running", "full", "error")
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


def test_all_panels_are_tried_in_all_states(panels):
    assert [*panels] == NAMES and all({*states} == {*STATES} for states in panels.values())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_sticks_out_of_a_phone_and_everything_has_a_name(panels, browser, name):
    for state in STATES:
        made = panels[name][state]()
        page = browser.new_page(viewport=dict(width=390, height=900))
        screenshots.show_panel(page, made, "dark" if state == "running" else "light")
        for width in (390, 800, 1440) if state == "full" else (390,):
            page.set_viewport_size(dict(width=width, height=900))
            assert _wait(page, WIDE, []), (state, width, page.evaluate(WIDE))
            assert page.evaluate(UNNAMED) == [], state
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
    from sft_nb.panels.batches import BatchPanel
    panel = BatchPanel(panels["batches"]["full"]().source)
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
        assert _wait(again, lambda: panel.state.step > step)
        again.get_by_text(f"{panel.state.step:,}", exact=True).first.wait_for()
        live.set_status("finished")
    assert _wait(again, lambda: not panel.follower.is_alive())
    again.get_by_text("finished").first.wait_for()
    again.close()


def test_the_pictures_of_the_pages_are_there_and_small():
    for name in screenshots.SITE:
        file = ROOT/"nbs"/"images"/f"panel-{name}.png"
        assert file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size <= 150 * 1024
        pages = [p for p in (ROOT/"nbs").glob("*/*.ipynb") if f"../images/{file.name}" in p.read_text()]
        assert len(pages) == 1


# What is operated in turn, whether it can be pressed now or not
OPERATE = """(k) => {
  const e = document.querySelectorAll('.sft-panel :is(button, input, select, textarea)')[k];
  e.disabled = false;
  if (e.tagName === 'BUTTON') return e.click();
  if (e.tagName === 'SELECT') e.selectedIndex = (e.selectedIndex + 1) % e.options.length;
  else e.value = e.type === 'number' ? String(Number(e.value || 0) + 1) : e.value + 'x';
  e.dispatchEvent(new Event('change', { bubbles: true }));
}"""
# Controls whose value is read when Generate is pressed
READ_LATER = {"prompt", "system prompt", "tokens at most", "temperature", "top-p", "seed"}


def _wait(page, holds, value=True, seconds=60):
    "Messages and drawings come when they come: True as soon as a function, or a script of the page, gives the value"
    for _ in range(50 * seconds):
        if (page.evaluate(holds) if isinstance(holds, str) else bool(holds())) == value: return True
        page.wait_for_timeout(20)
    return False


def _wait_until_drawn(page):
    "The page has as many elements as 100 ms ago"
    seen = -1
    while seen != (seen := page.locator(".sft-panel *").count()): page.wait_for_timeout(100)


def _is_bound(control)->bool:
    "Does Python react when the browser sends a value or a press?"
    if isinstance(control, Button): return bool(control.actions)
    return control.label in READ_LATER or bool(control._trait_notifiers.get("value", {}).get("change"))


@pytest.mark.parametrize("name", NAMES)
def test_every_control_sends_a_message_that_is_handled(panels, browser, name):
    panel, got = panels[name]["full"](), []
    panel._receive_event = lambda _, message, buffers: got.append(message)   # nothing is done, so nothing changes
    page = browser.new_page(viewport=dict(width=1000, height=900))
    screenshots.show_panel(page, panel)
    _wait_until_drawn(page)
    heard = set()
    controls = page.locator(".sft-panel").locator("button, input, select, textarea")
    for k in range(controls.count()):
        got.clear()
        page.evaluate(OPERATE, k)
        assert _wait(page, lambda: any(m.get("id") for m in got)), controls.nth(k).evaluate("e => e.outerHTML")
        heard |= {m["id"] for m in got if "id" in m}
    for row in page.locator("tbody tr[role=row]:not(.sft-none)").all()[:1]:
        got.clear()
        row.click()
        assert _wait(page, lambda: any(m.get("event") == "set" for m in got))
        heard |= {m["id"] for m in got if "id" in m}
    for figure in page.locator(".sft-chart").all():   # what a click on a point does, Enter does
        if "Enter" not in figure.get_attribute("aria-label"): continue
        got.clear()
        figure.focus()
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        assert _wait(page, lambda: any(m.get("event") == "set" for m in got))
        heard |= {m["id"] for m in got if "id" in m}
    assert heard <= {*panel.live}, heard - {*panel.live}
    unbound = [c.label or c.id for c in panel.live.values() if not _is_bound(c) and c.kind != "tokens"]
    assert unbound == []
    operated = ("button", "select", "chips", "number", "range", "text", "lines")
    assert {c.id for c in panel.live.values() if c.kind in operated} <= heard
    assert not any("_" in getattr(c, "label", "") for c in panel.live.values())   # words, not names of settings
    page.close()


def test_a_control_that_is_bound_to_nothing_is_found():
    assert not _is_bound(Button("go")) and not _is_bound(Number("n", value=1))
    bound = Number("n", value=1)
    bound.observe(print, "value")
    assert _is_bound(bound)


@pytest.mark.parametrize("name", NAMES)
def test_the_keyboard_reaches_everything_and_shows_where_it_is(panels, browser, name):
    panel = panels[name]["full"]()
    page = browser.new_page(viewport=dict(width=1000, height=900))
    screenshots.show_panel(page, panel)
    _wait_until_drawn(page)
    wanted = page.locator(".sft-panel").locator(
        "button:enabled, input:enabled, select:enabled, textarea:enabled, [tabindex='0']").count()
    page.evaluate("window.reached = new Set(), 0")
    for _ in range(wanted + 10):   # `details` may come, too
        page.keyboard.press("Tab")
        seen = page.evaluate("""() => {
          const e = document.activeElement;
          if (!e.closest('.sft-panel')) return null;
          window.reached.add(e);
          const rings = [e, e.closest('.sft-table')].filter(Boolean).map((x) => getComputedStyle(x));
          const isSeen = rings.some((s) => s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1);
          return isSeen ? '' : e.outerHTML.slice(0, 120);
        }""")
        assert not seen, f"no focus is seen on {seen}"
    missed = page.evaluate("""() => {
      const all = document.querySelectorAll('.sft-panel :is(button, input, select, textarea, [tabindex])');
      const there = [...all].filter((e) => !e.disabled && e.tabIndex >= 0 && e.getClientRects().length);
      return there.filter((e) => !window.reached.has(e)).map((e) => e.outerHTML.slice(0, 120));
    }""")
    assert missed == []
    if page.locator("[role=grid]").count():
        before = panel.table.value
        page.locator("[role=grid]").focus()
        page.keyboard.press("ArrowDown")
        assert _wait(page, lambda: panel.table.value == (before or 0) + 1)
        page.keyboard.press("Home")
        assert _wait(page, lambda: panel.table.value == 0)
    page.close()


def test_the_values_of_a_chart_are_read_with_the_keyboard(panels, browser):
    panel = panels["run"]["full"]()
    page = browser.new_page(viewport=dict(width=1000, height=900))
    screenshots.show_panel(page, panel)
    loss = page.get_by_role("figure", name=re.compile("^loss: "))
    loss.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    says = loss.locator(".sft-chart-values")
    assert _wait(page, lambda: re.match(r"step \d+", says.inner_text()))
    step = int(re.match(r"step (\d+)", says.inner_text())[1])
    page.keyboard.press("Enter")
    assert _wait(page, lambda: panel.state.at == step)
    page.close()


def test_a_number_that_stands_for_nothing_is_an_empty_field(panels, browser):
    panel = panels["batches"]["full"]()
    page = browser.new_page(viewport=dict(width=1000, height=900))
    screenshots.show_panel(page, panel)
    field = page.get_by_label("find row")
    assert field.input_value() == "" and field.get_attribute("placeholder") == "number"
    field.fill("26")
    page.keyboard.press("Enter")
    assert _wait(page, lambda: panel.controls.row.value == 26 and "row 26" in panel.state.names())
    page.get_by_label("batch", exact=True).fill("9")   # elsewhere: the row that was found is not in view
    page.keyboard.press("Enter")
    assert _wait(page, lambda: panel.state.index == 8 and field.input_value() == "")
    page.close()
