"""Panels in a real JupyterLab and a real browser, used like a user would."""
import json, os, shutil, signal, socket, subprocess, sys, time, urllib.request
from pathlib import Path

import nbformat
import pytest
from learner import learner
from nbformat.v4 import new_code_cell, new_notebook

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
SETTINGS = {"notebook-extension/tracker": dict(windowingMode="none"),
            "apputils-extension/notification": dict(fetchNews="false", checkForUpdates=False)}
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (apt-get install chromium)")


# Sixteen rows, 204,000 tokens together; the settings leave nothing to plan
LONG = """from sft_nb import *
cfg = load_config('demo', max_length=20_000, padding_free=True, method='lora', gradient_checkpointing=False,
                  eval_samples=0, per_device_train_batch_size=16)
words = ' '.join(f'word{k} is number {k}.' for k in range(492))
rows = [dict(question=f'{k} {words}', answer=f'{words} #### {k}') for k in range(16)]
BatchPanel(Workbench(cfg, data=prepare(cfg, train=rows), is_resolved=True))"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory, trained):
    "A JupyterLab server with one notebook that opens panels; yields its address and its file"
    root, home = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("home")
    cells = ["from sft_nb import *\n"
             "cfg = load_config('demo', max_samples=40, eval_samples=8, num_train_epochs=1, padding_free=False)\n"
             "BatchPanel(prepare(cfg), batch_size=3)",
             f"GenerationPanel({str(trained.path)!r})",
             f"RunPanel({str(trained.path)!r})"]
    _notebook(root/"panels.ipynb", cells)
    _notebook(root/"long.ipynb", [LONG, f"""from sft_nb.runs.directory import create_run
running = create_run(load_config('demo', runs_dir={str(root)!r}, run_name='running'), state='running')
lock = running.locked()
lock.__enter__()   # as the process does that trains it
RunPanel(running)"""])
    run = _swept(trained, tmp_path_factory.mktemp("swept"))
    _notebook(root/"answers.ipynb", [
        f"from sft_nb import *\nEvalPanel({run!r})",
        f"LossPanel({run!r}, n=6)",
        f"PlanPanel(load_config('demo', **{learner()!r}), device='rtx4090-24gb', lengths=[40, 80, 120])",
        "prepare(load_config('demo', max_samples=20, eval_samples=0))",
        "load_config('demo', lerning_rate=1)"])
    for name, value in SETTINGS.items():
        file = home/"settings"/"@jupyterlab"/f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    folders = dict(JUPYTERLAB_SETTINGS_DIR="settings", JUPYTERLAB_WORKSPACES_DIR="workspaces",
                   JUPYTER_RUNTIME_DIR="runtime", IPYTHONDIR="ipython")
    env = os.environ | {name: str(home/folder) for name, folder in folders.items()}
    log = (home/"lab.log").open("w")
    options = ["--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1", "--IdentityProvider.token=",
               "--ServerApp.password=", "--ServerApp.open_browser=False", f"--ServerApp.root_dir={root}"]
    server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], env=env, stdout=log, stderr=log,
                              start_new_session=True)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/status", server, home/"lab.log")
        yield f"http://127.0.0.1:{port}/lab/tree", root
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try: server.wait(30)
        except subprocess.TimeoutExpired: os.killpg(server.pid, signal.SIGKILL)   # its kernels are slow to leave
        server.wait()


def _notebook(file, cells:list[str])->None:
    kernel = dict(display_name="python3", language="python", name="python3")
    nbformat.write(new_notebook(cells=[new_code_cell(c) for c in cells], metadata=dict(kernelspec=kernel)), file)


def _swept(trained, folder)->str:
    "A copy of a run whose checkpoints have answered eight rows"
    from sft_nb.evaluation.sweep import sweep
    run = shutil.copytree(trained.path, folder/"swept-1")
    sweep(run, eval_samples=8, general=False, progress=False)
    return str(run)


def _wait_for(url, server, log, seconds=300):
    end = time.time() + seconds
    while time.time() < end:
        assert server.poll() is None, log.read_text()
        try: return urllib.request.urlopen(url, timeout=5)
        except OSError: time.sleep(.5)
    raise AssertionError(log.read_text())


def _run_all(page, address, text, attempts=3):
    "Run all cells and wait for `text`; JupyterLab sometimes loses the first click while it starts"
    from playwright.sync_api import Error, expect
    for attempt in range(attempts):
        try:
            page.goto(address)
            page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for()
            expect(page.get_by_text("| Idle")).to_be_visible()
            page.get_by_role("menubar").get_by_text("Run", exact=True).click()
            page.get_by_text("Run All Cells", exact=True).click()
            shown = page.locator(".jp-NotebookPanel:visible").get_by_text(text).first
            return expect(shown).to_be_visible()
        except (AssertionError, Error):
            if attempt == attempts - 1: raise


def _soon(page, holds, seconds=120):
    "Each message of the kernel is drawn by itself: the title may be there before the tokens"
    for _ in range(10 * seconds):
        if holds(): return
        page.wait_for_timeout(100)
    assert holds()


def pictures(file)->list[str]:
    "The saved HTML that a page without a kernel shows"
    try: cells = nbformat.read(file, 4).cells
    except nbformat.reader.NotJSONError: return []   # JupyterLab is just writing it
    outputs = [o for cell in cells for o in cell.outputs]
    return [o.data["text/html"] for o in outputs if "sft-picture" in o.get("data", {}).get("text/html", "")]


def _open(browser, **how):
    from playwright.sync_api import expect
    page = browser.new_page(**how)
    page.set_default_timeout(120_000)
    expect.set_options(timeout=120_000)
    return page


def test_panels_are_used_reloaded_and_shown_in_two_windows(lab, tmp_path):
    address, file = f"{lab[0]}/panels.ipynb", lab[1]/"panels.ipynb"
    from playwright.sync_api import expect, sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = _open(browser, viewport=dict(width=1280, height=1150))
        _run_all(page, address, "train batch 1 of 14")
        batches, answers, run = (page.locator(".sft-panel").nth(k) for k in range(3))
        first = batches.locator(".sft-supervised").all_inner_texts()
        batches.get_by_role("button", name="next ▶").click()
        expect(batches.get_by_text("train batch 2 of 14")).to_be_visible()
        _soon(page, lambda: batches.locator(".sft-tokens .sft-supervised").all_inner_texts() != first
              and batches.locator(".sft-tokens .sft-padding").count() > 0)
        expect(batches.locator(".sft-document")).to_have_count(3)
        expect(batches.get_by_text("3 rows padded")).to_be_visible()
        expect(page.locator("[data-sft-saved]").first).to_be_hidden()   # never beside the living panel

        answers.get_by_placeholder("Ask something").fill("What colour is the <b>sky</b>?")
        answers.get_by_role("button", name="Generate").click()
        expect(answers.locator(".sft-tuned")).to_have_count(1)
        question = "Ada has 14 apples. Ben gives Ada 23 more. How many apples does Ada have now?"
        answers.get_by_placeholder("Ask something").fill(question)
        expect(answers.get_by_role("button", name="Generate")).to_be_enabled()   # the first answers are whole
        answers.get_by_placeholder("Ask something").press("Control+Enter")
        expect(answers.locator(".sft-tuned")).to_have_count(2)
        _soon(page, lambda: "<b>sky</b>" in answers.inner_text())   # shown, not obeyed
        chart = run.locator(".u-over").first
        chart.click(position=dict(x=chart.bounding_box()["width"] * 9 / 59, y=20))   # step 10 of 60
        expect(run.get_by_text("optimiser step 10 of 60")).to_be_visible()
        assert run.locator(".sft-chart canvas").count() >= 3
        run.locator(".u-over").first.hover(position=dict(x=2, y=20))
        expect(run.locator(".sft-chart-values").first).to_contain_text("step 1")
        def has_saved_all()->bool:   # pictures are drawn after the panels
            page.locator("[data-command='docmanager:save']").first.click()
            found = pictures(file)
            wanted = ("train batch 2 of 14", "&lt;b&gt;sky", "optimiser step 10 of 60")
            return len(found) == 3 and all(text in picture for text, picture in zip(wanted, found))
        _soon(page, has_saved_all)
        picture = os.environ.get("SFT_NB_SCREENSHOT", str(tmp_path/"panels.png"))
        page.locator(".jp-NotebookPanel").screenshot(path=picture)

        other = _open(browser, viewport=dict(width=390, height=900))   # a second window, as narrow as a phone
        other.goto(address.replace("/lab/tree", "/doc/tree"))   # without JupyterLab's side bars
        there = other.locator(".sft-panel").first
        expect(there.get_by_text("train batch 2 of 14")).to_be_visible()
        there.get_by_role("button", name="next ▶").click()
        for window in (there, batches): expect(window.get_by_text("train batch 3 of 14")).to_be_visible()
        other.close()
        page.reload()
        expect(batches.get_by_text("train batch 3 of 14")).to_be_visible()
        expect(run.get_by_text("optimiser step 10 of 60")).to_be_visible()
        batches.get_by_role("button", name="eval", exact=True).click()
        expect(batches.get_by_text("eval batch 1 of 3")).to_be_visible()
        _end_kernels(page)
        page.reload()
        expect(page.locator("[data-sft-saved]").first).to_be_visible()   # no kernel: the picture that was saved
        expect(page.get_by_text("model not found").first).to_be_hidden()
        browser.close()


def _end_kernels(page)->None:
    "As a person does who shuts kernels down; a page has the token that the server asks for"
    page.evaluate("""async () => {
      const headers = { "X-XSRFToken": document.cookie.match(/_xsrf=([^;]+)/)[1] };
      for (const { id } of await (await fetch("/api/sessions")).json())
        await fetch(`/api/sessions/${id}`, { method: "DELETE", headers });
    }""")


def test_a_batch_of_200_000_tokens_and_a_kernel_that_is_gone(lab):
    from playwright.sync_api import expect, sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = _open(browser, viewport=dict(width=1000, height=900))
        address = lab[0].replace("/lab/tree", "/lab/workspaces/long/tree")
        _run_all(page, f"{address}/long.ipynb?reset", "train batch 1 of")
        batch, run = (page.locator(".sft-panel").nth(k) for k in range(2))
        box = batch.locator(".sft-tokens")
        assert box.locator("bdi").count() < 10_000 and box.locator("[data-empty]").count() > 300
        assert box.bounding_box()["height"] <= .6 * 900 + 1
        box.evaluate("e => e.scrollTop = e.scrollHeight")
        expect(box.locator(".sft-piece").last.get_by_text("####")).to_have_count(1)
        assert box.locator("bdi").count() < 20_000   # what lies between was not drawn
        expect(run.get_by_text("running").first).to_be_visible()
        expect(run.locator(".sft-notice")).to_be_hidden()
        page.get_by_role("menubar").get_by_text("Kernel", exact=True).click()
        page.get_by_text("Restart Kernel…", exact=True).click()
        page.locator(".jp-Dialog").get_by_role("button", name="Confirm Kernel Restart").click()
        for panel in (batch, run):
            expect(panel.locator(".sft-notice")).to_contain_text("This panel belongs to an earlier kernel")
        browser.close()


# Text that is hard to read: contrast below 4.5 by WCAG's formula, colours laid over each other as the page does it
PALE = """() => {
  const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m };
  const over = (a, b) => [0, 1, 2].map(k => a[k] * a[3] + b[k] * (1 - a[3])).concat(1);
  const ground = e => { const layers = [];
    for (; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reduceRight((below, layer) => over(layer, below), [255, 255, 255, 1]) };
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b };
  const pale = [];
  for (const picture of document.querySelectorAll('.sft-panel')) {
    const walk = document.createTreeWalker(picture, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) { const e = walk.currentNode.parentElement, text = walk.currentNode.data.trim();
      if (!text || !e.getClientRects().length || e.closest('title,style')) continue;
      const back = ground(e), style = getComputedStyle(e), colour = e.closest('svg') ? style.fill : style.color;
      if (!colour.startsWith('rgb')) continue;
      const front = over(parse(colour), back), [a, b] = [light(front), light(back)].sort((x, y) => y - x);
      const ratio = (a + .05) / (b + .05);
      if (ratio < 4.5) pale.push(`${ratio.toFixed(2)} ${text.slice(0, 30)} ${colour} on ${back.map(Math.round)}`) } }
  return pale }"""


# Visible texts of saved pictures that lie over each other
OVERLAPS = """pictures => {
  const over = [];
  for (const picture of pictures) {
    const boxes = [], walk = document.createTreeWalker(picture, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) { const { data, parentElement } = walk.currentNode, range = document.createRange();
      const folded = parentElement.closest('details:not([open])') && !parentElement.closest('summary');
      if (!data.trim() || folded) continue;
      range.selectNodeContents(walk.currentNode);
      for (const box of range.getClientRects()) if (box.width > 1) boxes.push([data.trim().slice(0, 30), box]) }
    boxes.forEach(([a, p], k) => { for (const [b, q] of boxes.slice(k + 1))
      if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 2 &&
          Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > p.height / 2) over.push(`${a} | ${b}`) }) }
  return over }"""


# the rules for the outputs of all pages are in test_saved_pictures.py
@pytest.mark.parametrize("name", [
    "16_extras/61_eval_panel.ipynb", pytest.param("16_extras/07_plan_panel.ipynb", marks=pytest.mark.soak),
    pytest.param("14_panels/04_run.ipynb", marks=pytest.mark.soak)])
def test_saved_pictures_that_are_neither_trusted_nor_run_can_be_read(lab, name):
    from playwright.sync_api import expect, sync_playwright
    address, root = lab
    with sync_playwright() as p, p.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as browser:
        shutil.copy(Path(__file__).parents[2]/"nbs"/name, root)
        page, file = _open(browser, viewport=dict(width=1100, height=1000)), Path(name).name
        page.goto(f"{address.replace('/lab/', f'/lab/workspaces/{file[:4]}/')}/{file}")
        pictures = page.locator(".jp-OutputArea-output.jp-RenderedHTML")   # as the sanitizer leaves them
        expect(pictures.locator("table").first).to_be_attached()
        assert pictures.evaluate_all(OVERLAPS) == []


@pytest.mark.parametrize("name", [
    "01_quickstart.ipynb", pytest.param("03_a_run_that_went_wrong.ipynb", marks=pytest.mark.soak)])
def test_recipes_that_are_neither_trusted_nor_run_show_supervised_text_curves_and_folded_answers(lab, tmp_path, name):
    from playwright.sync_api import expect, sync_playwright
    address, root = lab
    recipes = Path(__file__).parents[2]/"nbs"/"recipes"
    with sync_playwright() as p, p.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as browser:
        shutil.copy(recipes/name, root)
        page = _open(browser)
        page.goto(f"{address.replace('/lab/', f'/lab/workspaces/{name[:2]}/')}/{name}")   # without earlier tabs
        outputs = page.locator(".jp-OutputArea-output")
        marked, images = outputs.locator("ins"), outputs.locator("img[alt*='loss']")
        expect(marked.first).to_be_attached()
        expect(images.first).to_be_attached()
        lines = marked.evaluate_all("all => all.map(e => getComputedStyle(e).textDecorationLine)")
        assert {*lines} == {"underline"}
        images.first.scroll_into_view_if_needed()
        expect(images.first).to_have_js_property("complete", True)
        assert images.first.evaluate("e => e.naturalWidth") > 300
        assert outputs.get_by_text("BatchPanel: to_text()").count() == 0
        answer = page.locator(".jp-MarkdownCell details").first   # of a question to the reader
        expect(answer.locator("p").first).to_be_hidden()
        answer.get_by_text("Answer", exact=True).click()
        expect(answer.locator("p").first).to_be_visible()
        page.screenshot(path=tmp_path/f"{name}.png")


def _go_dark(page)->None:
    page.get_by_role("menubar").get_by_text("Settings", exact=True).click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text("JupyterLab Dark", exact=True).click()
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
    page.wait_for_function("document.getAnimations().every(a => a.playState !== 'running')")   # of the colours


def test_panels_of_results_are_used_and_can_be_read_in_light_and_dark(lab, tmp_path):
    from playwright.sync_api import expect, sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = _open(browser, viewport=dict(width=1000, height=1150))
        alone = lab[0].replace("/lab/tree", "/lab/workspaces/answers/tree")   # no other notebook is open there
        _run_all(page, f"{alone}/answers.ipynb?reset", "the nearest is learning_rate")
        cells = page.locator(".jp-NotebookPanel:visible .jp-CodeCell")
        card = cells.nth(4)
        assert "config.py" not in card.inner_text() and "%tb" in card.inner_text()   # no frames of ours
        evaluation, losses, plan = (cells.nth(k).locator(".sft-panel") for k in range(3))
        evaluation.locator("tbody tr[role=row]").nth(1).click()
        expect(evaluation.get_by_text("expected (arithmetic eval row")).to_be_visible()
        before = evaluation.locator(".sft-turn b").first.inner_text()
        page.keyboard.press("ArrowDown")
        _soon(page, lambda: evaluation.locator(".sft-turn b").first.inner_text() != before)
        evaluation.get_by_role("button", name="export these rows").click()
        expect(evaluation.get_by_text("ids are in")).to_be_visible()
        losses.get_by_role("button", name="change", exact=True).click()
        expect(losses.get_by_text("the change of the loss of each token")).to_be_visible()
        losses.get_by_title("sort by tuned").click()
        expect(losses.get_by_text("sorted by the loss after training")).to_be_visible()
        expect(losses.locator("th[aria-sort=descending]")).to_have_count(1)
        expect(losses.get_by_title("sort by tuned")).to_be_focused()   # so that the keyboard goes on from there
        plan.get_by_label("longest row, tokens").fill("384")
        page.keyboard.press("Enter")
        expect(plan.get_by_text("max_length = 384")).to_be_visible()
        blank = "all => all.filter(e => !e.selectedOptions[0]?.label).length"
        assert plan.locator("select").evaluate_all(blank) == 0
        folder = os.environ.get("SFT_NB_SCREENSHOTS", str(tmp_path))
        pale = {}
        for theme in ("light", "dark"):
            if theme == "dark": _go_dark(page)
            page.locator(".jp-NotebookPanel:visible").screenshot(path=f"{folder}/answers-{theme}.png")
            pale[theme] = page.evaluate(PALE)
        assert page.locator(".sft-panel").count() >= 3 and pale == dict(light=[], dark=[])
        browser.close()
