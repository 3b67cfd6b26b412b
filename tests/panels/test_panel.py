"""The widget of all panels: what it builds, receives from browsers and sends to them, without a browser."""
import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import ipywidgets
import pytest
from matplotlib.colors import to_rgba

import sft_nb
from sft_nb.config.load import load_config
from sft_nb.panels.panel import (
    Button, chart, Choice, columns, common_place, Control, controls_row, error_html, html_block, Number, Panel, Range,
    SortOrder, Table, Text)
from sft_nb.base.report import SftError
from sft_nb.runs.metrics import draw_curves
from sft_nb.tokens.display import ALL_TOKENS, spans_html, SUPERVISED
from sft_nb.tokens.prepare import prepare

ASSETS = Path(sft_nb.__file__).parent/"assets"/"panels"
JS = Path(sft_nb.__file__).parents[1]/"js"


def test_what_is_committed_is_built_from_the_sources():
    digest = hashlib.sha256()
    for file in (JS/"package-lock.json", *sorted((JS/"src").iterdir())): digest.update(file.read_bytes())
    built = (ASSETS/"panel.js").read_text(encoding="utf-8")
    assert f"sources {digest.hexdigest()[:16]}" in built[:200], "run `npm ci && npm run build` in js/"
    assert (ASSETS/"panel.css").read_text(encoding="utf-8").endswith((JS/"src/panel.css").read_text(encoding="utf-8"))


def test_supervised_tokens_have_one_colour_in_text_charts_and_pictures():
    built = (ASSETS/"panel.js").read_text(encoding="utf-8")
    assert f'supervised:"{SUPERVISED}"' in built and f'"all tokens":"{ALL_TOKENS}"' in built
    drawn = to_rgba(SUPERVISED)
    assert ",".join(str(round(255 * c)) for c in drawn[:3]) in spans_html([("a", "supervised")])
    patches = prepare(load_config("demo", max_samples=4, eval_samples=0)).plot().axes[0].patches
    assert drawn[:3] in {patch.get_facecolor()[:3] for patch in patches}


def test_series_have_one_palette_in_charts_and_pictures():
    built = (ASSETS/"panel.js").read_text(encoding="utf-8")
    lines = draw_curves({"loss": {name: [(1, 1.), (2, 2.)] for name in "abcdef"}}).axes[0].lines
    assert "[" + ",".join(f'"{line.get_color()}"' for line in lines) + "]" in built


def test_it_is_small_has_its_licence_and_asks_no_network():
    assert sum(file.stat().st_size for file in ASSETS.iterdir()) < 300_000
    assert "Permission is hereby granted" in (ASSETS/"uPlot-LICENSE.txt").read_text()
    written = (ASSETS/"panel.js").read_text(encoding="utf-8") + (ASSETS/"panel.css").read_text(encoding="utf-8")
    assert not re.search(r"https?://|fetch\(|XMLHttpRequest|import\(|@import|url\(", written)


class Picks(Panel):
    "A button, a chip, a table, and a chart that is clicked"
    def __init__(self):
        super().__init__(self)
        self.did, self.numbers = [], [*range(1000)]
        self.button, self.chip = Button("go"), Choice("way", options=["left", "right"], value="left", as_chips=True)
        self.place, self.sorts = Control(), SortOrder()
        numbers = [dict(name="n", number=True)]
        self.table = Table(numbers, lambda a, b: [[n] for n in self.numbers[a:b]], sorts=self.sorts)
        self.button.on_click(self.did.append)
        for control in (self.chip, self.place, self.table, self.sorts):
            control.observe(lambda change: self.did.append(change["new"]), "value")
        self.draw()
    def html(self): return "<b>all</b>"
    def blocks(self):
        self.table.fill(len(self.numbers), self.numbers[0], None)
        curve = chart("loss", {"a": [(1, 2.), (2, float("inf"))]}, click=self.place)
        return [controls_row(self.button, self.chip), columns([curve], [self.table]), html_block(self.html())]


@pytest.fixture
def sent(monkeypatch):
    "Messages that the panel sends to every window, besides its traits"
    messages = []
    monkeypatch.setattr(Panel, "send", lambda self, content, buffers=None: messages.append(content))
    return messages


def message(panel, control, value=None, event="set", **more):
    panel._handle_custom_msg(dict(id=control.id, event=event, value=value) | more, [])


def test_the_view_is_json_and_names_its_controls():
    panel = Picks()
    assert json.loads(json.dumps(panel.view, allow_nan=False)) == panel.view
    row, two, picture = panel.view
    assert [item["id"] for item in row["items"]] == [panel.button.id, panel.chip.id]
    assert two["groups"][0][0]["click"] == panel.place.id and two["groups"][1][0]["sorts"] == panel.sorts.id
    assert two["groups"][0][0]["series"][0]["points"] == [[1, 2.]] and picture["html"] == "<b>all</b>"
    assert set(panel.get_state()) >= {"view", "title", "saved_id", "beat"}   # what a reloaded window is given


def test_what_a_person_does_arrives_and_is_acknowledged(sent):
    panel = Picks()
    message(panel, panel.button, event="click", n=1)
    message(panel, panel.chip, 1, n=2)
    message(panel, panel.place, 7, n=3)
    message(panel, panel.table, 12, n=4)
    message(panel, panel.sorts, [0, True], n=5)
    assert panel.did == [panel.button, "right", 7, 12, [0, True]] and [m["ack"] for m in sent] == [1, 2, 3, 4, 5]
    message(panel, Control(), 1, n=6)   # of a view that is no longer there
    assert len(panel.did) == 5 and sent[-1] == dict(ack=6)
    panel._receive_event(panel, dict(event="click", id=[], n=7), [])   # of no control
    assert len(panel.did) == 5 and sent[-1] == dict(ack=7)


def test_rows_are_asked_for_and_an_old_list_is_not_answered(sent):
    panel = Picks()
    message(panel, panel.table, [990, 2000], "ask", rev="0")
    assert sent == [{"id": panel.table.id, "rev": "0", "rows": [[str(n)] for n in range(990, 1000)], "from": 990}]
    panel.numbers = [*range(5, 10)]
    panel.draw()
    message(panel, panel.table, [0, 3], "ask", rev="0")
    assert len(sent) == 1


@pytest.mark.parametrize("control, odd, expected", [
    (Choice("way", options=["left", "right"], value="left"), [None, 1.0, "1", [], {}], "the place of an option"),
    (Choice("ways", options=["left", "right"], value=(), several=True), [None, 1, "1", [1.0], {}], "list of places"),
    (Number("batch", value=1), ["1", [1], {}], "a number"),
    (Range("tokens", value=(0, 9)), [5, [1], [1, 2, 3], [1, "x"], [None, 1], {}], "two whole numbers"),
    (Text("prompt", value="x"), [None, 5, ["x"], {}], "a text"),
    (SortOrder(columns=2), [0, [0], [2, True], [-1, True], ["n", True]], "a column"),
    (Table([dict(name="n")], lambda a, b: []), ["1", 1.5, [1], {}], "the number of a row"),
], ids=lambda x: type(x).__name__)
def test_a_message_of_another_kind_is_answered_by_a_sentence(sent, control, odd, expected):
    "As from a page whose scripts are older; the control keeps its value"
    panel, before = Picks(), control.value
    for value in odd:
        panel.live[control.id], panel.failure = control, None
        message(panel, control, value, n=1)
        assert expected in str(panel.failure) and "Fix: reload the page" in str(panel.failure)
        assert control.value == before and sent[-1] == dict(ack=1)


def test_a_message_that_asks_for_no_rows_is_no_error_of_python(sent):
    panel = Picks()
    for value in (None, 5, "x", ["x"], {}):
        message(panel, panel.table, value, "ask", rev="0", n=1)
        assert "numbers of rows" in str(panel.failure)
    panel.failure = None
    for control, rev in ((panel.chip, None), (panel.chip, "0"), (panel.table, None)): message(
        panel, control, [0, 3], "ask", rev=rev, n=1)
    message(panel, panel.table, [], "ask", rev="0", n=1)
    for odd in (None, 5, "x", []): panel._handle_custom_msg(odd, [])
    assert panel.failure is None and [m["rows"] for m in sent if "rows" in m] == [[]]


def test_an_error_is_shown_and_acknowledged(sent):
    panel = Picks()
    def fail(_): raise SftError("batch 9", "there are 4 batches", "a number below 4", "index=3")
    panel.button.on_click(fail)
    message(panel, panel.button, event="click", n=1)
    assert "there are 4 batches" in panel.view[0]["html"] and "there are 4 batches" in panel.to_html()
    assert sent == [dict(ack=1)]


def test_an_error_is_shown_even_if_the_panel_cannot_be_drawn(sent):
    panel = Picks()
    def fail(*_): raise ValueError("metrics.jsonl cannot be read")
    panel.button.on_click(fail)
    panel.blocks = fail
    message(panel, panel.button, event="click", n=1)
    (block,) = panel.view
    assert "metrics.jsonl cannot be read" in block["html"] and "Fix" in block["html"]
    assert sent == [dict(ack=1)]
    del panel.blocks
    panel.draw()
    assert len(panel.view) > 1   # everything is there again



def test_a_state_that_cannot_be_made_is_an_error_too(sent):
    class Late(Panel):
        @property
        def state(self): raise FileNotFoundError("rows.jsonl")
        def blocks(self): return [html_block(self.state.html())]
    panel = Late()
    panel.fail(FileNotFoundError("rows.jsonl"))
    assert "rows.jsonl" in panel.view[0]["html"]


def test_the_saved_picture_stands_beside_the_panel_under_its_name(monkeypatch):
    shown = []
    monkeypatch.setattr("sft_nb.panels.panel.display", lambda *parts, **how: shown.append((parts, how)))
    monkeypatch.setattr("sft_nb.panels.panel.update_display", lambda *parts, **how: shown.append((parts, how)))
    panel = Picks()
    panel.draw()
    assert shown == []   # no picture before there is a panel
    panel._ipython_display_()
    (widget, _), (saved, how) = shown
    assert "application/vnd.jupyter.widget-view+json" in widget[0]
    assert f"data-sft-saved='{panel.saved_id}'" in saved[0]["text/html"] and how["display_id"] == panel.saved_id
    assert widget[0]["text/plain"] == "" and saved[0]["text/plain"] == "Picks"
    panel.draw(save=False)
    assert len(shown) == 2
    panel.draw()
    assert len(shown) == 3


def test_an_error_is_words_and_a_fix_without_names_of_classes():
    html = error_html(SftError("BatchPanel", "row 9 is not there", "a number up to 4", "index=3"))
    assert "that did not work" in html and "SftError" not in html and "BatchPanel" not in html and "index=3" in html
    html = error_html(KeyError("x"))
    assert "Fix" in html and "run the cell again" in html and "Traceback" not in html
    html = error_html(PermissionError(13, "Permission denied", "/proc/marked_rows.jsonl"))
    assert "/proc/marked_rows.jsonl" in html and "cannot be read or written (Permission denied)" in html
    assert "a folder that you can write to" in html and "PermissionError" not in html
    panel = Picks()
    problem = ValueError("bad")
    panel.fail(problem)
    assert panel.failure is problem
    assert "white-space:nowrap" not in error_html(SftError("a/very/long/path.json", "it is damaged"))   # it may wrap


def test_an_empty_field_stands_for_a_value_and_places_are_short():
    number = Number("row", value=0, min=1, blank=0, placeholder="none")
    assert number.to_dict()["value"] == 0 and number.to_dict()["blank"] == 0
    number.receive("set", 5)
    number.receive("set", 0)
    assert number.value == 0
    number.receive("set", -3)
    assert number.value == 1 and "blank" not in Number("n", value=1).to_dict()
    assert common_place(["eval row 1", "eval row 12"]) == "eval row "
    assert common_place(["a.jsonl row 3"]) == "a.jsonl row "
    assert common_place(["a row 1", "b row 2"]) == "" and common_place([]) == ""


def test_a_panel_stands_in_a_layout_of_ipywidgets():
    "Why ipywidgets is required although no module imports it: anywidget makes a panel one of its widgets"
    panel = Panel(SimpleNamespace(html=lambda: "<b>here</b>"), layout=dict(width="320px", border="1px solid"))
    assert isinstance(panel, ipywidgets.DOMWidget) and panel.layout.get_state()["width"] == "320px"
    box = ipywidgets.VBox([panel, ipywidgets.IntSlider()])
    panel._receive_event(panel, dict(event="open"), [])   # as a window does that draws it inside the box
    assert box.children[0].view[0]["html"] == "<b>here</b>"
