"""A card tells what a run's files hold: no path, no secret and no text of a row, and the worst first."""
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from learner import small, weights_of_learner

from sft_nb.base.report import Report, SftError, warn
from sft_nb.cli import main
from sft_nb.config.load import load_config
from sft_nb.evaluation.evaluate import evaluate, Evaluation
from sft_nb.evaluation.generations import Answer, Scores
from sft_nb.extras.card import (
    card_page, Card, evaluation_in_card, hash_answers, hub_metadata, keep_card, last_names, make_card, readme_block,
    write_card)
from sft_nb.evaluation.sweep import Sweep
from sft_nb.extras.compare import Comparison
from sft_nb.evaluation.verdict import decide, judge
from sft_nb.runs.directory import Run
from sft_nb.training.train import train

SECRET = "sk-abcdefghijklmnop123456"


@pytest.fixture(scope="module")
def of_ada(tmp_path_factory):
    "A run in a home folder with a name, a space and a user's name; its base states a license and a language"
    home = tmp_path_factory.mktemp("home")/"ada lovelace"
    home.mkdir()
    base = Path(shutil.copytree(weights_of_learner(), home/"my base"))
    (base/"README.md").write_text("---\nlicense: apache-2.0\nlanguage:\n- en\n---\n# A base\n")
    row = [json.dumps(dict(question=f"What is the code of {k}?", answer=f"yes {k % 2}")) + "\n" for k in range(40)]
    (home/"my rows.jsonl").write_text("".join(row))
    cfg = small(home/"runs", model=str(base), init="pretrained", task="auto", train_file=str(home/"my rows.jsonl"),
                eval_samples=6, eval_fraction=.2, max_samples=None, run_name="codes", max_steps=4)
    run = train(cfg)
    hostile = f"{home}/x.py says <script> | {SECRET}\n| a | b |"
    Report("guards", {}, [warn(hostile, check="collapse")]).save(run.path/"guards.json")
    evaluate(run, by="accuracy", progress=False)
    return run


def test_it_tells_no_path_no_secret_and_no_text(of_ada):
    for name in ("card.json", "README.md"):
        text = (of_ada.adapter/name).read_text()
        for private in ("ada lovelace", "lovelace", SECRET, "What is the code", "yes 1", str(of_ada.path.parent)):
            assert private not in text, (name, private)
        assert "my rows.jsonl" in text and "my base" in text
    assert "<script>" not in (of_ada.adapter/"README.md").read_text()


def test_paths_of_any_form_keep_their_last_name():
    for text, left in (("/a/b/c.py:3", "c.py:3"), ("file:///home/ada/x", "x"), ("in ~/x/y and ../z", "in y and ../z"),
                       ("https://a.org/b/c, 3/4, and/or </think>", "https://a.org/b/c, 3/4, and/or </think>"),
                       ("('/home/ada/rows.jsonl',)", "('rows.jsonl',)")):
        assert last_names(text) == left


def test_license_and_language_are_those_that_the_base_states(of_ada, tmp_path):
    data = hub_metadata(make_card(of_ada)).to_dict()
    assert [data["license"], data["language"], data["library_name"]] == ["apache-2.0", ["en"], "peft"]
    assert "base_model" not in data and "datasets" not in data   # neither is of the hub
    run = train(small(tmp_path, max_steps=1))
    card = make_card(run)
    assert "license" not in hub_metadata(card).to_dict() and "so none is given here" in readme_block(card)


def test_a_model_that_is_not_better_than_a_trivial_answer_says_so(of_ada):
    "The learner has learned nothing, and always the same answer is right for half of the rows"
    first, status = make_card(of_ada).result_in_words
    assert re.match(r"accuracy \d+\.\d% \(95% interval [^)]+\); (not better|worse) than always the same answer$", first)
    assert status == "warn"
    assert f"**{first}**" in (of_ada.adapter/"README.md").read_text()


def test_a_lower_loss_without_right_answers_is_no_success(of_ada):
    def scores(loss, text, f1=.1):
        figures = [dict(loss=loss + k / 100, f1=f1) for k in range(40)]
        answers = [Answer(f"{k}", f"{k}?", text, False, None, f"word {k}", 4, True, f) for k, f in enumerate(figures)]
        return Scores("tuned", answers, dict(loss=loss + .195, f1=f1))
    e = Evaluation.load(of_ada.path/"eval/adapter.json")
    e = replace(e, base=scores(9., "a"), tuned=scores(3., "b"), by="loss", baselines=None, stored=None, forgotten=None)
    card = replace(make_card(of_ada), scores=evaluation_in_card(hash_answers(e)), warned=[])
    first, status = card.result_in_words
    assert first.startswith("0 of 40 answers as expected, word for word, f1 0.1, loss 3.195 (95% interval ")
    assert "; lower than its base: loss -6" in first and status == "warn"
    alike = [dict(check=f.check, status=f.status, says=f.says, of="scores") for f in e.findings]
    told, status = replace(card, warned=alike).result_in_words
    assert "; not enough: loss -6" in told and "40 of 40 answers are 'b'" in told and status == "warn"
    fallen = replace(e, base=scores(9., "a", f1=.5))
    first, status = replace(card, scores=evaluation_in_card(hash_answers(fallen))).result_in_words
    assert "; the loss is lower, and the answers are worse: f1 -" in first and status == "warn"
    assert [f.check for f in fallen.findings] == ["answers_worse", *(f.check for f in e.findings)]
    for of, remark in ((fallen, "the answers are worse: f1 -"), (e, "40 of 40 answers are 'b'")):
        better, made = decide(of.difference), judge(of.base, of.tuned, "loss", of.difference)
        assert (better.says, made.says, made.exit_code) == ("better", "not enough", 1) and remark in made.reason
        compared = Comparison(replace(of, tuned=of.base), of, of.difference)
        assert compared.headline == "B is not better than A" and remark in str(compared)
        swept = Sweep("r", "loss", of.base, {"checkpoint-1": of.base, "checkpoint-2": of.tuned})
        assert swept.best == "checkpoint-2" and remark in str(swept)
    half = replace(e, base=scores(9., "a", f1=.1), tuned=replace(e.tuned, answers=[
        replace(a, text=f"word {k}", correct=True) for k, a in enumerate(e.tuned.answers)]))
    for n, says in ((0, "better"), (2, "better"), (3, "cannot tell")):   # of 40 rows
        assert judge(half.base, half.tuned, "loss", half.difference, trained_on=n).says == says
    assert "3 of 40 rows ask what a training row asks: not held out" in str(replace(swept, trained_on=3))


def test_a_base_that_no_server_knows_is_served_merged(of_ada):
    assert make_card(of_ada).commands["vllm"] == "vllm serve MERGED --generation-config auto"


def test_the_terminal_tells_the_warnings_of_the_evaluation_and_of_the_training(of_ada, capsys):
    assert main(["card", str(of_ada.path)]) == 0
    out = capsys.readouterr().out
    found = Evaluation.load(of_ada.path/"eval/adapter.json").findings
    assert [f.check for f in found if f.status == "warn"] and all(f"! {f.check}: " in out for f in found)
    assert "collapse" in out and str(of_ada.adapter/"card.json") in out


def test_scores_of_fewer_rows_do_not_replace_those_of_more(of_ada, tmp_path, capfd):
    run = Run(shutil.copytree(of_ada.path, tmp_path/"r"))
    before = Evaluation.load(run.path/"eval/adapter.json")
    assert evaluate(run, eval_samples=3, by="accuracy").tuned.n == 3 < before.tuned.n
    assert f"the card keeps the scores of {before.tuned.n} rows; these: eval/adapter-" in capfd.readouterr().err
    assert Evaluation.load(run.path/"eval/adapter.json").tuned.n == before.tuned.n
    assert Evaluation.load(run.path/"eval/adapter-3-rows.json").tuned.n == 3


def test_scores_of_other_weights_are_not_told(of_ada, tmp_path):
    run = Run(shutil.copytree(of_ada.path, tmp_path/"r"))
    file = run.path/"eval/adapter.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | dict(weights="0123456789abcdef")))
    said = "not evaluated: the known scores are outdated: adapter has changed since"
    assert make_card(run).result_in_words[0] == said


def test_a_card_that_cannot_be_made_stops_nothing(of_ada, tmp_path, capfd, monkeypatch):
    run = Run(shutil.copytree(of_ada.path, tmp_path/"r"))
    (run.path/"eval/adapter.json").write_text("{")
    keep_card(run)
    assert "no card of r was written (" in capfd.readouterr().err
    with pytest.raises(SftError, match="it cannot be read"): write_card(run)
    with pytest.raises(SftError, match="it cannot be written"): card_page(of_ada, tmp_path/"none"/"page.html")


def test_findings_of_another_form_are_left_out(of_ada, tmp_path):
    run = Run(shutil.copytree(of_ada.path, tmp_path/"r"))
    for odd in ({"new": []}, [3, {"status": "warn"}], "x"):
        (run.path/"preflight.json").write_text(json.dumps(dict(findings=odd)))
        assert "collapse" in str(make_card(run).to_dict()["warned"])


def test_the_page_has_its_figures_pictures_and_answers(of_ada, tmp_path):
    page = card_page(of_ada, tmp_path/"page.html").read_text()
    assert page.count("<img ") == 2 and "What is the code" in page and "<script" not in page
    assert SECRET not in page


def test_the_commands(of_ada, tmp_path, capsys):
    assert main(["card", str(of_ada.path), "--html", str(tmp_path/"page.html")]) == 0
    out = capsys.readouterr().out
    assert "fingerprint of the rows" in out and (tmp_path/"page.html").exists()
    assert main(["card", str(of_ada.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "card"
    folder = shutil.copytree(of_ada.adapter, tmp_path/"theirs")
    assert main(["verify", str(folder), "--sample", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found["kind"], found["exit_code"]] == ["verification", 0] and found["claims"][0]["level"] == "consistent"
    card = json.loads((folder/"card.json").read_text())
    card["scores"]["tuned"]["accuracy"] = 1.
    (folder/"card.json").write_text(json.dumps(card))
    assert main(["verify", str(folder), "--sample", "0"]) == 1
    assert load_config(folder/"card.json").max_steps == 4


def test_what_is_no_card(tmp_path, capsys, of_ada):
    for line, says in ((["verify", str(tmp_path)], "there is no card.json in it. Fix: sft_nb card"),
                       (["verify", str(tmp_path/"none")], "there is no such path"),
                       (["verify", "org/no-such-model"], "it cannot be loaded from the hub"),
                       (["verify", str(of_ada.adapter), "--rows", "none"], "rows is 'none', which is no folder")):
        assert main(line) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("names, odd", [(("rows", "eval"), 1e999), (("training", "curve", "loss"), [10**400]),
                                        (("training", "peak_memory_gib"), "x"), (("scores", "tuned"), None)])
def test_a_card_with_an_odd_value_is_shown_without_its_figures(of_ada, names, odd):
    said = json.loads((of_ada.adapter/"card.json").read_text())
    inner = said
    for name in names[:-1]: inner = inner[name]
    inner[names[-1]] = odd
    card = Card.from_dict(said)
    for shown in (str(card), card._repr_html_(), card.to_dict()["headline"]):
        assert "its figures cannot be read: a value has another type" in shown
