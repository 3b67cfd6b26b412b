"""Screenshots of all panels, drawn by their own JavaScript in Chromium: `python scripts/screenshots.py --out FOLDER`.

`--site` writes the six used by the pages to nbs/images. It needs only Chromium and playwright, no Jupyter server:
`show_panel` passes a panel's messages to a page, and the user's actions there back to the panel.
"""
import argparse
import shutil
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
COLOURS = dict(light=("#ffffff", "#1f2328"), dark=("#111418", "#e6e6e6"))   # background and text
SITE = ("batches", "data", "run", "evaluation", "plan", "generation")

START = """async ({ js, traits }) => {
  const handlers = {};
  window.traits = traits;
  const fire = (name, value) => (handlers[name] ?? []).forEach((f) => f(value));
  const take = ({ traits, messages }) => {
    const view = JSON.stringify(traits.view) !== JSON.stringify(window.traits.view);
    const beat = traits.beat !== window.traits.beat;
    window.traits = traits;
    if (view) fire("change:view");
    if (beat) fire("change:beat");
    for (const m of messages) fire("msg:custom", m);
  };
  const send = (m) => window.toPython(m).then(take);
  const model = { get: (name) => window.traits[name], on: (name, f) => (handlers[name] ??= []).push(f),
    off: (name, f) => handlers[name] = handlers[name].filter((g) => g !== f), send };
  const url = URL.createObjectURL(new Blob([js], { type: "text/javascript" }));
  (await import(url)).default.render({ model, el: document.getElementById("panel") });
  setInterval(() => send({}), 250);   // what a panel draws by itself
}"""


def show_panel(page, panel, theme:str="light")->None:
    "Draw a panel in an empty page, with clicks and updates connected in both directions"
    sent = []
    panel.send = lambda message, buffers=None: sent.append(message)
    def traits(): return {name: getattr(panel, name) for name in ("title", "view", "saved_id", "beat", "beat_seconds")}

    def receive(message):
        if message: panel._receive_event(None, message, [])
        messages, sent[:] = [*sent], []
        return dict(traits=traits(), messages=messages)

    page.expose_function("toPython", receive)
    ground, ink = COLOURS[theme]
    page.set_content(
        f"<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<style>{panel._css}</style><style>body {{ margin: 8px; background: {ground}; color: {ink}; "
        f"--jp-layout-color0: {ground}; --jp-ui-font-color1: {ink} }}</style><div id='panel'></div>")
    page.evaluate(START, dict(js=str(panel._esm), traits=traits()))
    page.locator(".sft-panel").wait_for()


# ---- panels: name -> state -> a function that creates the panel

@contextmanager
def running(folder:Path, finished):
    "A run that appears to be training in another process, with the first metrics of a finished run"
    from sft_nb.config.load import load_config
    from sft_nb.runs.directory import create_run
    run = create_run(load_config("demo", runs_dir=str(folder), run_name="running"), state="running")
    lines = (finished.path/"metrics.jsonl").read_text().splitlines()
    (run.path/"metrics.jsonl").write_text("\n".join(lines[:len(lines) // 2]) + "\n")
    with run.locked(): yield run


def train_demo(folder:Path):
    "A run with four checkpoints and their scores"
    from sft_nb.config.load import load_config
    from sft_nb.evaluation.sweep import sweep
    from sft_nb.training.train import train
    run = train(load_config("demo", runs_dir=str(folder), run_name="demo", max_steps=160, save_steps=40, eval_steps=20,
                            save_total_limit=4, eval_samples=60, preflight=False))
    sweep(run, general=False, progress=False)
    return run


def asked(panel, prompt:str|None=None):
    "A generation panel whose models have answered"
    panel.controls.tokens.value = 32
    if prompt: panel.controls.prompt.value = prompt
    panel.generate()
    while panel.writing: time.sleep(.05)
    return panel


def half_written(panel):
    "A generation panel whose first model is writing"
    turn = panel.state.begin(panel.controls.prompt.value, row=panel.controls.row.value)
    reply = next(iter(turn.replies.values()))
    reply.state = "speaking"
    reply.pieces, reply.shares, reply.instead = ["Tues", "day", " comes"], [.4, .9, .8], ["'Hello' 20%", "", ""]
    reply.ids = [1, 2, 3]
    panel._enable(False)
    panel.draw()
    return panel


def all_panels(run, live, folder:Path)->dict:
    "Name of a panel -> its states, each with a function that creates it"
    from sft_nb.config.load import load_config
    from sft_nb.panels.batches import BatchPanel
    from sft_nb.extras.eval_panel import EvalPanel
    from sft_nb.panels.generation import GenerationPanel
    from sft_nb.extras.losses import LossPanel
    from sft_nb.extras.plan_panel import PlanPanel
    from sft_nb.panels.rows import DataPanel
    from sft_nb.panels.run import RunPanel
    from sft_nb.base.report import MissingFileError
    from sft_nb.runs.directory import create_run
    from sft_nb.tokens.prepare import prepare
    cfg = load_config("demo", max_samples=120, eval_samples=16, padding_free=False, max_length=70, on_long="drop")
    data = prepare(cfg)

    def shown(panel, act=lambda panel: None):
        if hasattr(panel, "show") and not panel.view: panel.show()
        act(panel)
        return panel

    def failed_run():
        from sft_nb.base.report import edit
        made = create_run(load_config("demo", runs_dir=str(folder), run_name="failed"), state="running")
        shutil.copy(run.path/"metrics.jsonl", made.path)
        made.set_status("failed", reason="the loss is not a number at step 161", fix=edit(learning_rate=1e-4))
        return RunPanel(made)

    def empty_run(name): return create_run(load_config("demo", runs_dir=str(folder), run_name=name), state="starting")
    def damaged():
        copy = shutil.copytree(run.path, folder/"damaged", dirs_exist_ok=True)
        (copy/"eval/sweep.json").write_text("{")
        return EvalPanel(copy)
    def without_weights():
        copy = shutil.copytree(run.path, folder/"without", dirs_exist_ok=True)
        panel = GenerationPanel(copy)
        shutil.rmtree(copy/"adapter", ignore_errors=True)
        shutil.rmtree(copy/"checkpoints", ignore_errors=True)
        return asked(panel)

    def planned(): return PlanPanel(load_config("demo"), device="rtx4090-24gb", lengths=[40, 80, 120])
    def preparing():
        panel = BatchPanel(data)
        panel.view, panel.begin_showing = [panel.waiting()], lambda: None
        return panel
    def one_batch():
        alone = replace(cfg, eval_samples=0)
        return shown(BatchPanel(prepare(alone, train=[dict(question="What is 1 + 1?", answer="#### 2")])))
    removed = MissingFileError("rows of train", "the file is gone", "the rows that were prepared", "prepare(cfg) again")
    def measuring():
        panel = LossPanel(run, n=12)
        drawn, measure = [], panel.state.move
        panel.state.move = lambda **how: drawn.append(panel.view)
        panel.show(checkpoint="checkpoint-40")
        panel.state.move = measure
        panel.view = drawn[0]
        return panel
    def trying():
        panel = EvalPanel(run)
        panel.try_it()
        half_written(panel.trial)
        return panel

    return dict(
        batches=dict(empty=one_batch, running=preparing, full=lambda: shown(BatchPanel(data, batch_size=4)),
                     error=lambda: shown(BatchPanel(data), lambda p: setattr(p.controls.row, "value", 9999))),
        data=dict(empty=lambda: shown(DataPanel(data), lambda p: setattr(p.text, "value", "nothing like that")),
                  running=lambda: shown(DataPanel(data), lambda p: setattr(p.range, "value", (51, 53))),
                  full=lambda: DataPanel(data), error=lambda: shown(DataPanel(data), lambda p: p.fail(removed))),
        losses=dict(empty=lambda: LossPanel(run, n=1), running=measuring, full=lambda: LossPanel(run, n=12),
                    error=lambda: shown(LossPanel(run, n=12), lambda p: p.show(checkpoint="checkpoint-7"))),
        run=dict(empty=lambda: RunPanel(empty_run("new")), running=lambda: RunPanel(live), full=lambda: RunPanel(run),
                 error=failed_run),
        plan=dict(empty=lambda: PlanPanel(load_config("demo"), device="rtx4090-24gb", lengths=[]),
                  running=lambda: shown(planned(), lambda p: setattr(p.controls["gib"], "value", .4)),
                  full=planned,
                  error=lambda: shown(planned(), lambda p: setattr(p.controls["max_length"], "value", 0))),
        generation=dict(empty=lambda: GenerationPanel(run), running=lambda: half_written(GenerationPanel(run)),
                        full=lambda: asked(GenerationPanel(run)), error=without_weights),
        evaluation=dict(empty=lambda: EvalPanel(empty_run("unswept")), running=trying, full=lambda: EvalPanel(run),
                        error=damaged))


def main(args=None)->int:
    from playwright.sync_api import sync_playwright
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="", help="folder of all pictures; without --site")
    parser.add_argument("--site", action="store_true", help="write the six of the pages into nbs/images")
    parser.add_argument("--run", default="", help="a run with a sweep; without it, the demo is trained")
    parser.add_argument("--widths", default="390,800,1440", help="in pixels, with commas; --site: 1000")
    parser.add_argument("--only", default="", help="names of panels, with commas")
    options = parser.parse_args(args)
    from sft_nb.runs.directory import open_run
    folder = Path(tempfile.mkdtemp())
    run = open_run(options.run) if options.run else train_demo(folder)
    out = ROOT/"nbs"/"images" if options.site else Path(options.out or folder)
    out.mkdir(parents=True, exist_ok=True)
    with running(folder, run) as live, sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, states in all_panels(run, live, folder).items():
            if options.only and name not in options.only.split(","): continue
            for state, make in states.items():
                if options.site and (name not in SITE or state != "full"): continue
                panel = make()
                widths = [1000] if options.site else map(int, options.widths.split(","))
                for width, theme in product(widths, ("light",) if options.site else COLOURS):
                    page = browser.new_page(viewport=dict(width=width, height=900))
                    show_panel(page, panel, theme)
                    page.wait_for_timeout(600)
                    file = out/(f"panel-{name}.png" if options.site else f"{name}-{state}-{theme}-{width}.png")
                    box = page.locator(".sft-panel").bounding_box()
                    height = min(box["height"] + 16, 900 if options.site else 2400)
                    page.set_viewport_size(dict(width=width, height=int(height)))
                    page.screenshot(path=str(file))
                    page.close()
                    print(file.name, f"{file.stat().st_size / 1024:.0f} kB", flush=True)
        browser.close()
    return 0


if __name__ == "__main__": raise SystemExit(main())
