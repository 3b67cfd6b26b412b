"""One view, three renderers: what is shown is harmless, and JSON has types, names in snake_case and no NaN."""
import json
import math
import re

import numpy as np
import pytest

from sft_nb.base.display import Drawn, Shown, Table, with_bar
from sft_nb.base.report import Report, edit, fail, named_figures, ok, read_figures, skipped, warn
from sft_nb.base.view import SCHEMA_VERSION, as_json, RecordTable, View, view_html, view_json, view_text
from sft_nb.tasks.metrics import ClassTable

HOSTILE = "<script>alert(1)</script> \x1b[2J \u202e gnp.exe"
EVERY_SLOT = View(HOSTILE, HOSTILE, HOSTILE, "warn", HOSTILE, [warn(HOSTILE, HOSTILE, check=HOSTILE)],
                  [HOSTILE, {HOSTILE: HOSTILE}, Table([{HOSTILE: HOSTILE, "b": with_bar(HOSTILE, .5)}], HOSTILE),
                   View(HOSTILE), RecordTable([{HOSTILE: HOSTILE}], HOSTILE)])


def test_what_others_wrote_is_harmless_in_every_slot():
    html, text = view_html(EVERY_SLOT), view_text(EVERY_SLOT)
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "\x1b" not in html + text and "\u202e" not in html + text


def test_a_wide_table_leaves_columns_out_where_the_terminal_is_narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    table = Table([dict(run="a" * 20, loss="1.234", notes="b" * 30)], left=["run", "notes"], optional=["notes"])
    lines = view_text(View("t", "x", parts=[table])).splitlines()
    assert max(map(len, lines)) <= 40 and "not shown: notes" in lines[-1]


def test_the_badge_does_not_repeat_the_headline():
    view = View("demo-1", "finished at step 40", "finished", "ok")
    assert view_text(view) == "demo-1: finished at step 40"
    assert "✓ finished</span> at step 40" in view_html(view)


def test_json_has_values_and_not_their_texts():
    figures = dict(kept=Shown("3 (of 4)", dict(rows=3, of=4)), n=np.int64(7), share=np.float32(.5), ids=(1, 2))
    found = json.loads(json.dumps(view_json(View("t", parts=[figures, Drawn("a", "b"), "a note"]))))
    assert found["figures"] == dict(kept=dict(rows=3, of=4), n=7, share=.5, ids=[1, 2]) and found["notes"] == ["a note"]


@pytest.mark.parametrize("name, figures", [
    ("train: rows read", dict(train=dict(rows_read=1))), ("loss of guessing, ln(V)", dict(loss_of_guessing_ln_v=1)),
    ("held-out loss", dict(held_out_loss=1)), ("other: rows", dict(other_rows=1))])
def test_figures_of_older_versions_get_the_names_of_today(tmp_path, name, figures):
    (tmp_path/"data.json").write_text(json.dumps(dict(title="t", figures={name: 1}, findings=[])))
    assert named_figures({name: 1}) == read_figures(tmp_path/"data.json") == figures
    assert Report.load(tmp_path/"data.json").figures == figures
    (tmp_path/"data.json").write_text('{"figures": []}')
    assert read_figures(tmp_path/"data.json") == {}


def keys_of(found)->set[str]:
    if isinstance(found, list): return set().union(*map(keys_of, found)) if found else set()
    if not isinstance(found, dict): return set()
    return {*found}.union(*map(keys_of, found.values()))


def test_the_command_line_prints_typed_json(tmp_path, capsys):
    from sft_nb.cli import main
    rows = [dict(messages=[dict(role="user", content=f"Say {k}"), dict(role="assistant", content=str(k))], note="x")
            for k in range(9)]
    (tmp_path/"rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "--train-file", str(tmp_path/"rows.jsonl"), "--eval-samples", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found["schema_version"], found["kind"]] == [SCHEMA_VERSION, "report"]
    assert {type(n) for n in found["figures"]["train"]["tokens_per_row"].values()} == {int}
    assert found["figures"]["rows_are"] == [dict(format="messages", rows=9)]
    assert not [key for key in keys_of(found) if not re.fullmatch("[a-z0-9_]+", key)]


def test_json_of_the_command_line_has_no_nan(capsys):
    from sft_nb.cli.commands import _print_json
    _print_json(as_json(dict(loss=math.nan, gain=[math.inf, 1.5])))
    assert json.loads(capsys.readouterr().out) == dict(loss=None, gain=[None, 1.5])


def test_a_report_is_the_same_after_a_round_trip(tmp_path):
    findings = [ok("a", check="a"), warn("b", edit(lora_r=4), check="b")]
    report = Report("t", {"train: rows": 3, "share of all": .5}, findings)
    assert Report.load(report.save(tmp_path/"t.json")) == report
    assert json.loads((tmp_path/"t.json").read_text())["figures"] == dict(train=dict(rows=3), share_of_all=.5)


def test_figures_whose_names_become_the_same_are_all_kept():
    assert named_figures({"a b": 1, "a-b": 2, "%": 3, "train: rows": 4}) == dict(a_b=1, a_b_1=2, figure=3,
                                                                                 train=dict(rows=4))


def test_a_figure_that_resembles_a_histogram_is_shown_as_it_is():
    text = str(Report("t", dict(middle=dict(median=3), seen=dict(counts=2))))
    assert "median 3" in text and "counts 2" in text


def test_each_label_has_a_column_even_if_labels_begin_alike():
    one, two = (f"a very long label that begins alike {k}" for k in ("one", "two"))
    table = ClassTable.of([one, two] * 6, [one] * 11 + [two])
    column = table.view().parts[0].lines
    assert [column[0][f"→ {name}"] for name in (one, two, "other")] == table.confusion[0]
    both = ClassTable.of(["other", "no label"] * 6, ["other"] * 11 + [None])
    assert [*both.view().parts[0].lines[1].values()][-3:] == both.confusion[1]


def test_a_proof_has_the_findings_of_all_stages():
    from sft_nb.proof.folder_checks import failed, passed, ProofStage
    from sft_nb.proof.prove import Proof
    stages = [passed("adapter", "effect", "it changes answers"),
              ProofStage("server", warn("it samples", edit(temperature=0), check="sampling"))]
    found = Proof("demo-1", "adapter", stages).to_dict()
    seen = {f["check"]: f["status"] for f in found["findings"]}
    assert seen == {"adapter effect": "ok", "server sampling": "warn"}
    assert found["findings"][1]["fix"] == "--temperature 0" and found["status"] == "ok" and found["same"]
    found = Proof("demo-1", "adapter", [*stages, failed("server", "context", "too short", "-c 93")]).to_dict()
    assert found["broken"] == found["findings"][2]["check"] == "server context" and found["status"] == "fail"


def test_findings_that_are_one_line_are_counted_once():
    same = [warn("rows repeat", "remove them", check=f"{side}_repeats") for side in ("train", "eval")]
    report = Report("data", findings=[*same, warn("rows end early", check="ends"), fail("none is left", check="rows")])
    lines = [line for line in str(report).splitlines() if line.lstrip().startswith(("!", "✗"))]
    assert report.verdict == "1 failure, 2 warnings" and sum("repeat" in line for line in lines) == 1


def test_only_findings_without_a_fault_are_folded():
    page = view_html(View("data", findings=[warn("rows repeat", check="repeats"), ok("all end", check="ends"),
                                            skipped("no rows", check="held_out")]))
    shown, _, folded = str(page).partition("<details")
    assert "rows repeat" in shown and "rows repeat" not in folded and "2 findings without a fault" in folded
    assert "all end" in folded and "no rows" in folded and "all end" not in shown
