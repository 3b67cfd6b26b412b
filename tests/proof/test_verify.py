"""A tampered card is contradicted, an honest one is not, and a card from a stranger can do no harm."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from learner import small, weights_of_learner
from safetensors.torch import load_file, save_file

from sft_nb.base.report import SftError
from sft_nb.config.load import load_config
from sft_nb.evaluation.evaluate import evaluate
from sft_nb.extras import verify as checking   # the module
from sft_nb.extras.card import Card, readme_text, text_hash, write_card
from sft_nb.extras.verify import CardEvidence, verify
from sft_nb.proof.merge import merge
from sft_nb.runs.checkpoint import weights_digest, write_checksums
from sft_nb.training.train import train


@pytest.fixture(scope="module")
def evaluated(train_once):
    "A real run with an evaluation"
    def make(folder):
        few = dict(max_steps=60, eval_samples=20, save_steps=30, max_samples=600, per_device_train_batch_size=8,
                   preflight=False, method="lora", runs_dir=str(folder), run_name="first")
        run = train(load_config("demo", **few))
        evaluate(run, general=True, progress=False)
        return run
    return train_once("card", make)


@pytest.fixture
def run(evaluated, tmp_path)->Path: return Path(shutil.copytree(evaluated.path, tmp_path/"first"))


def contradicted(run:Path, sample:int=0)->dict:
    "Claim -> what contradicts it"
    found = verify(run, sample=sample)
    assert (found.exit_code == 1) == bool(found.contradicted)
    return {c.name: c.why for c in found.contradicted}


def changed(*keys, to):
    "A forger who writes one value into a JSON file"
    file, *keys = keys
    def forge(run:Path):
        content = json.loads((run/file).read_text())
        inner = content
        for key in keys[:-1]: inner = inner[key]
        assert inner[keys[-1]] != to
        inner[keys[-1]] = to
        (run/file).write_text(json.dumps(content))
    return forge


def in_card(*keys, to): return changed("adapter/card.json", *keys, to=to)


def with_readme(run:Path)->None:
    "A forger who knows that README.md is compared writes it again"
    card = Card.load(run/"adapter/card.json")
    (run/"adapter/README.md").write_text(readme_text(card))


def card_of(run:Path)->dict: return json.loads((run/"adapter/card.json").read_text())


def keep(run:Path, said:dict)->None: (run/"adapter/card.json").write_text(json.dumps(said))


def swapped(*models):
    def forge(run:Path):
        said = card_of(run)
        for model in models:
            answers = said["scores"][model]["answers"]
            answers[0], answers[1] = answers[1], answers[0]
        keep(run, said)
    return forge


def without_a_loss(run:Path):
    said = card_of(run)
    said["training"]["logged"] -= 1
    for values in said["training"]["curve"].values(): del values[2]
    keep(run, said)


def of_another_checkpoint(run:Path):
    in_card("scores", "weights", to=weights_digest(run/"checkpoints/checkpoint-30"))(run)


def more_in_card(run:Path, *keys, **values):
    said = card_of(run)
    inner = said
    for key in keys: inner = inner[key]
    inner |= values
    keep(run, said)


FORGED = {   # in card.json, with a README.md that follows: who, the claim that notices
    "a score": (in_card("scores", "tuned", "accuracy", to=.9), "score"),
    "an interval": (in_card("scores", "tuned", "interval", to=[.8, .99]), "score"),
    "right answers": (in_card("scores", "tuned", "correct", to=19), "score"),
    "number of rows": (in_card("scores", "tuned", "n", to=200), "score"),
    "half an answer that counts": (in_card("scores", "tuned", "answers", 3, "credit", to=.5), "score"),
    "a worse base": (in_card("scores", "base", "accuracy", to=-.1), "score of the base"),
    "a gain": (in_card("scores", "difference", "gain", to=.9), "gain over the base"),
    "a p-value": (in_card("scores", "difference", "p", to=1e-9), "gain over the base"),
    "an interval of the gain": (in_card("scores", "difference", "low", to=.5), "gain over the base"),
    "a trivial answer": (in_card("scores", "baselines", "trivial", 0, "figures", "accuracy", to=-.5),
                         "best trivial answer"),
    "its rows": (in_card("scores", "baselines", "trivial", 0, "parts", to=[0.] * 19), "best trivial answer"),
    "a base with examples": (in_card("scores", "baselines", "few_shot", "accuracy", to=.01), "base with examples"),
    "forgetting": (in_card("scores", "forgotten", "rise", to=-.2), "forgetting"),
    "a generation": (in_card("scores", "tuned", "answers", 3, "text", to=text_hash("a", "b")), "answers"),
    "a row that was asked": (in_card("scores", "base", "answers", 3, "expected", to=text_hash("a", "b")),
                             "score of the base"),
    "a changed order": (swapped("tuned"), "score of the base"),
    "a changed order of both": (swapped("tuned", "base"), "answers"),
    "scores of another checkpoint": (of_another_checkpoint, "score"),
    "the name of another checkpoint": (in_card("scores", "checkpoint", to="checkpoint-30"), "score"),
    "a hash of the base": (in_card("base", "files", "model.safetensors", "digest", to="0123456789abcdef"), "base"),
    "a learning rate": (in_card("config", "learning_rate", to=1e-4), "settings"),
    "a seed": (in_card("config", "seed", to=7), "settings"),
    "the source of a setting": (in_card("sources", "seed", to="command line"), "settings"),
    "a fingerprint": (in_card("rows", "train", "fingerprint", to="0123456789abcdef"), "rows, train"),
    "a fingerprint of held-out rows": (in_card("rows", "eval", "fingerprint", to="0123456789abcdef"), "rows, eval"),
    "rows kept": (in_card("rows", "train", "rows_kept", to=6000), "rows, train"),
    "a template": (in_card("template", "sha256", to="0" * 64), "chat template"),
    "a hash of weights": (in_card("files", "adapter_model.safetensors", "sha256", to="0" * 64),
                          "file adapter_model.safetensors"),
    "a rank": (in_card("adapter", "r", to=64), "adapter"),
    "a version": (in_card("versions", "packages", "torch", to="2.0.0"), "versions"),
    "a package more": (lambda run: more_in_card(run, "versions", "packages", flash_attn="3.0"), "versions"),
    "a curve more": (lambda run: more_in_card(run, "training", "curve", accuracy=[1.]), "training loss"),
    "a loss by a billionth": (lambda run: more_in_card(run, "training", seconds=card_of(run)["training"]["seconds"]
                                                       * (1 + 1e-12)), "training loss"),
    "a run": (in_card("run_id", to="0a0b0c0d"), "versions"),
    "steps": (in_card("step", to=600), "versions"),
    "a loss": (in_card("training", "curve", "loss", 3, to=.01), "training loss"),
    "a removed loss": (without_a_loss, "training loss"),
    "a held-out loss": (in_card("training", "lowest_held_out_loss", to=.01), "training loss"),
    "the cost": (in_card("training", "seconds", to=.1), "training loss"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_card_is_contradicted(run, what):
    forge, claim = FORGED[what]
    forge(run)
    with_readme(run)
    assert claim in contradicted(run)


def replaced(file:str, old:str, new:str):
    def forge(run:Path):
        text = (run/file).read_text()
        assert old in text
        (run/file).write_text(text.replace(old, new, 1))
    return forge


def with_another_tensor(run:Path):
    file = run/"adapter/adapter_model.safetensors"
    tensors = load_file(file)
    first = next(name for name in tensors if "lora_B" in name)
    save_file(tensors | {first: tensors[first] + .5}, file, metadata={"format": "pt"})


def without_a_line(run:Path):
    lines = (run/"metrics.jsonl").read_text().splitlines(keepends=True)
    (run/"metrics.jsonl").write_text("".join(lines[:2] + lines[3:]))


def with_weights_of_checkpoint(run:Path):
    shutil.copy(run/"checkpoints/checkpoint-30/adapter_model.safetensors", run/"adapter/adapter_model.safetensors")


CHANGED = {   # files that the card refers to
    "a figure in README.md": (replaced("adapter/README.md", "| score | ", "| score | 9"), "README.md"),
    "the first line of README.md": (replaced("adapter/README.md", "**", "**far better: "), "README.md"),
    "the result for the hub": (replaced("adapter/README.md", "value: 0.", "value: 0.9"), "README.md"),
    "a tensor": (with_another_tensor, "file adapter_model.safetensors"),
    "weights of another step": (with_weights_of_checkpoint, "file adapter_model.safetensors"),
    "more weights": (lambda run: shutil.copy(run/"adapter/adapter_model.safetensors", run/"adapter/more.safetensors"),
                     "weights"),
    "a tokenizer": (replaced("adapter/tokenizer.json", '"version"', ' "version"'), "file tokenizer.json"),
    "adapter_config.json": (changed("adapter/adapter_config.json", "lora_alpha", to=64), "adapter"),
    "a template": (lambda run: (run/"adapter/chat_template.jinja").write_text("{{ messages }}"),
                   "file chat_template.jinja"),
    "a setting": (changed("config.json", "config", "weight_decay", to=.5), "settings"),
    "figures of rows": (changed("data.json", "figures", "train", "tokens", to=3), "rows, train"),
    "a line of the log": (without_a_line, "training loss"),
    "a checkpoint's log": (changed("checkpoints/checkpoint-60/trainer_state.json", "log_history", 1, "loss", to=.1),
                           "training loss"),
    "a text": (changed("eval/adapter.json", "tuned", "answers", 2, "text", to="#### 5"), "answers"),
    "an expected answer": (changed("eval/adapter.json", "tuned", "answers", 2, "expected", to="5"), "answers"),
    "environment.json": (changed("environment.json", "packages", "torch", to="2.0.0"), "versions"),
    "origin.json": (changed("origin.json", "base", "files", "model.safetensors", "digest", to="00"), "base"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_file_that_was_changed_contradicts_the_card(run, what):
    forge, claim = CHANGED[what]
    forge(run)
    assert claim in contradicted(run)


def test_the_card_of_another_checkpoint_is_noticed(run):
    write_card(run, checkpoint="checkpoint-30")
    for name in ("card.json", "README.md"): shutil.copy(run/"checkpoints/checkpoint-30"/name, run/"adapter"/name)
    assert "file adapter_model.safetensors" in contradicted(run)


# Forgers who change all files that belong together: only the rows, the model or the training can tell

def everywhere(run:Path, change, *, models=("tuned",)):
    "Change answers in the run's evaluation, and write the card anew from it"
    file = run/"eval/adapter.json"
    saved = json.loads(file.read_text())
    for model in models:
        answers = saved[model]["answers"]
        change(answers)
        saved[model]["figures"]["accuracy"] = sum(a["correct"] for a in answers) / len(answers)
        saved[model]["figures"]["answered"] = sum(a["got"] is not None for a in answers) / len(answers)
    file.write_text(json.dumps(saved))
    write_card(run)   # recomputes all that follows


def counted_as_right(answers):
    for a in answers: a["correct"] = True


def answered_right(answers):
    for a in answers: a |= dict(correct=True, got=a["expected"], text=f"#### {a['expected']}")


def answered_nothing(answers):
    for a in answers: a |= dict(correct=False, got=None, text="")


def without_wrong_ones(run:Path):
    file = run/"eval/adapter.json"
    saved = json.loads(file.read_text())
    right = [k for k, a in enumerate(saved["tuned"]["answers"]) if a["correct"]]
    for model in ("base", "tuned"): saved[model]["answers"] = [saved[model]["answers"][k] for k in right]
    for trivial in saved["baselines"]["trivial"]:
        trivial["parts"] = [trivial["parts"][k] for k in right if trivial["parts"]]
    saved["baselines"]["few_shot"] = None
    file.write_text(json.dumps(saved))
    write_card(run)


def all_hashes(run:Path):
    "Another tensor, with all hashes of it, also in the checkpoint and in the scores"
    was = weights_digest(run/"adapter")
    with_another_tensor(run)
    shutil.copy(run/"adapter/adapter_model.safetensors", run/"checkpoints/checkpoint-60")
    for folder in (run/"checkpoints/checkpoint-60", run/"adapter"): write_checksums(folder)
    replaced("eval/adapter.json", was, weights_digest(run/"adapter"))(run)
    (run/"adapter/card.json").unlink()
    write_card(run)


def another_seed(run:Path):
    for file in ("config.json", "origin.json"): changed(file, "config", "seed", to=7)(run)
    write_card(run)


def a_higher_learning_rate(run:Path):
    for file in ("config.json", "origin.json"): changed(file, "config", "learning_rate", to=2e-2)(run)
    write_card(run)


def a_lower_loss(run:Path):
    lines = [json.loads(line) for line in (run/"metrics.jsonl").read_text().splitlines()]
    for line in lines[2:]: line["loss"] = line.get("loss", 1) / 2
    (run/"metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_card(run)


CONSISTENT = {
    "scores of the same answers": (lambda run: everywhere(run, counted_as_right), "answers", 0),
    "better answers": (lambda run: everywhere(run, answered_right), "answers of the model", 20),
    "a worse base": (lambda run: everywhere(run, answered_nothing, models=["base"]), "answers of the base", 20),
    "fewer rows": (without_wrong_ones, "answers", 0),
    "another tensor": (all_hashes, "answers of the model", 20),
    "another seed": (another_seed, "rows, train", 0),
    "a lower loss": (a_lower_loss, "training loss", 0),
    "a higher learning rate": (a_higher_learning_rate, "steps of training", 1),
}


@pytest.mark.parametrize("what", CONSISTENT)
def test_a_forger_who_changes_all_files_alike_is_contradicted_by_rows_and_model(run, what):
    forge, claim, sample = CONSISTENT[what]
    forge(run)
    assert claim in contradicted(run, sample)


# Honest cards

def levels(what, **how)->dict:
    "Claim -> level of a card that nothing contradicts"
    found = verify(what, **how)
    assert not found.contradicted and found.exit_code == 0, str(found)
    return {c.name: c.level for c in found.claims}


def alone(run:Path, tmp_path)->Path:
    "The folder with the weights, somewhere else under another name"
    return Path(shutil.copytree(run/"adapter", tmp_path/"elsewhere"/"a b"))


def test_of_a_run_all_but_the_written_is_derived_again(run):
    found = levels(run, sample=20)
    again = ("base", "rows, train", "rows, eval", "chat template", "score", "gain over the base", "answers",
             "forgetting, again", "steps of training")
    assert {found[name] for name in again} == {"re-derived"} and "stated" not in found.values()


def test_of_a_folder_alone_in_another_place_with_other_threads(run, tmp_path, monkeypatch):
    folder = alone(run, tmp_path)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try: found = levels(folder/"card.json", sample=20)
    finally: torch.set_num_threads(threads)
    assert [found[name] for name in ("score", "rows, train", "steps of training", "settings", "training loss")] == [
        *["re-derived"] * 3, "stated", "stated"]


def test_a_run_of_another_torch_whose_answers_differ_is_not_accused(run):
    changed("environment.json", "packages", "torch", to="2.9.1")(run)
    everywhere(run, answered_right)
    made = verify(run, sample=20)
    found = {c.name: c for c in made.claims}
    assert [found[name].level for name in ("answers of the model", "score", "score of the base")] == [
        "not reproduced", "not reproduced", "re-derived"]
    assert "with torch 2.9.1, here" in found["answers of the model"].why and not made.contradicted
    assert made.exit_code == 3 and "nothing contradicts it, but not all was reproduced" in str(made)


def test_words_of_ones_own_and_a_place_of_the_base(run):
    replaced("adapter/README.md", "library_name", "license: apache-2.0\nlibrary_name")(run)
    (run/"adapter/README.md").write_text((run/"adapter/README.md").read_text() + "\n## Use\nAsk it for sums.\n")
    changed("adapter/adapter_config.json", "base_model_name_or_path", to="org/base")(run)
    assert levels(run, sample=0)["README.md"] == "consistent"
    write_card(run)
    text = (run/"adapter/README.md").read_text()
    assert "Ask it for sums." in text and text.count("<!-- sft_nb card") == 1


def test_a_check_that_a_disk_stops_is_no_verdict(run):
    said = card_of(run)
    keep(run, said | dict(files=said["files"] | {"x" * 5000: dict(bytes=1, sha256="0")}))
    assert levels(run, sample=0)["files"] == "stated"


def test_one_answer_that_is_counted_as_right_is_noticed_without_the_texts(run, tmp_path, monkeypatch):
    "A near tie may explain another text, and never another score of the same text"
    monkeypatch.setattr(checking, "_has_tie", lambda *a: True)
    def count_one(answers): next(a for a in answers if not a["correct"])["correct"] = True
    everywhere(run, count_one)
    why = contradicted(alone(run, tmp_path), 20)["answers of the model"]
    assert why.startswith("19 of 20 answers are equal; ") and why.endswith("has another score for the same text")


def a_rate_that_fits_the_log(said):
    said["config"]["learning_rate"] /= 2
    curve = said["training"]["curve"]
    curve["learning_rate"] = [rate / 2 for rate in curve["learning_rate"]]


def a_loss_that_falls_faster(said):
    losses = said["training"]["curve"]["loss"]
    losses[:] = [loss * .7 for loss in losses]


UNCHECKABLE = dict(   # of a folder alone: what was changed, and why its first steps are not taken
    an_older_card=(lambda said: said["training"].pop("changed"), "its settings may have changed after its first step"),
    a_longer_run=(lambda said: said["training"].update(changed=["max_steps"]), "its settings may have changed"),
    an_earlier_adapter=(lambda said: said["config"].update(adapter_name_or_path="a"), "it began with the adapter a"))


@pytest.mark.parametrize("forge", [a_rate_that_fits_the_log, a_loss_that_falls_faster])
def test_the_first_steps_of_a_folder_alone_are_taken_again(run, tmp_path, forge):
    folder = alone(run, tmp_path)
    said = json.loads((folder/"card.json").read_text())
    forge(said)
    (folder/"card.json").write_text(json.dumps(said))
    (folder/"README.md").write_text(readme_text(Card.load(folder/"card.json")))
    found, = verify(folder, sample=1).contradicted
    assert (found.name, found.value) == ("steps of training", "steps 1 to 10 of 60")


@pytest.mark.parametrize("what", UNCHECKABLE)
def test_first_steps_that_are_not_taken_accuse_nobody(run, tmp_path, what):
    folder, (change, why) = alone(run, tmp_path), UNCHECKABLE[what]
    said = json.loads((folder/"card.json").read_text())
    change(said)
    (folder/"card.json").write_text(json.dumps(said))
    found = next(c for c in checking.check_step(CardEvidence(*checking.find_card(folder))))
    assert found.level == "stated" and why in found.why


def test_each_level_is_explained(run, tmp_path):
    text = str(verify(alone(run, tmp_path), sample=0))
    assert text.startswith("card of first in a b: ") and "not reproduced" not in text
    assert "stated: only written; nothing here can check it: settings, versions, training loss, answers" in text


def test_a_score_of_which_a_sample_was_asked_is_only_consistent(run):
    found = {c.name: c for c in verify(run, sample=4).claims}
    assert (found["score"].level, found["answers of the model"].level) == ("consistent", "re-derived")
    assert found["score"].why == "4 of 20 rows asked: 4 of 4 answers are equal (sample=20 asks all)"


def test_an_empty_folder_of_a_base_accuses_nobody_and_another_name_of_it_is_said(on_a_file, tmp_path):
    folder = alone(on_a_file.path, tmp_path)
    changed("adapter_config.json", "base_model_name_or_path", to="org/base")(folder)
    (tmp_path/"empty").mkdir()
    rows_file(tmp_path)
    found = {c.name: c for c in verify(folder, base=tmp_path/"empty", rows=tmp_path, sample=0).claims}
    assert (found["base"].level, found["base"].why) == ("stated", "its weights are not here")
    assert found["adapter"].level == "consistent" and found["adapter"].why.endswith("names the base org/base")


def test_a_contradiction_says_what_is_there(run):
    in_card("scores", "tuned", "accuracy", to=.9)(run)
    changed("config.json", "config", "weight_decay", to=.5)(run)
    replaced("adapter/README.md", "| score | ", "| score | 9")(run)
    why = contradicted(run)
    assert why["score"].startswith("its answers have accuracy 0.") and "0.5" in why["settings"]
    assert "card.json does not say '| score | 9" in why["README.md"] and ", but '| score | " in why["README.md"]


def test_a_renamed_run_and_an_older_card(run):
    run = run.rename(run.with_name("renamed"))
    said = card_of(run)
    for name in ("template", "warned", "overridden", "commands", "not_scored"): del said[name]
    keep(run, said | dict(schema_version=0))
    (run/"adapter/README.md").unlink()
    assert levels(run, sample=0)["rows, train"] == "re-derived"


def test_a_merged_folder(run, tmp_path):
    folder = merge(run, out=tmp_path/"merged", dtype="float32", prompts=2)
    found = levels(folder, sample=20)
    assert found["answers of the model"] == "re-derived"
    assert found["file model.safetensors"] == "consistent"


def rows_file(folder:Path)->Path:
    file = folder/"my rows.jsonl"
    file.write_text("".join(json.dumps(dict(question=f"{k}+1?", answer=f"{k + 1}")) + "\n" for k in range(40)))
    return file


@pytest.fixture(scope="module")
def on_a_file(tmp_path_factory):
    "A run on a file of rows, with a base in a folder"
    folder = tmp_path_factory.mktemp("card of ada")
    cfg = small(folder, model=weights_of_learner(), init="pretrained", task="auto", train_file=str(rows_file(folder)),
                eval_samples=6, eval_fraction=.2, max_samples=None, run_name="r", max_steps=4)
    run = train(cfg)
    evaluate(run, progress=False)
    return run


def test_rows_and_a_base_that_are_not_here(on_a_file, tmp_path, monkeypatch):
    folder = alone(on_a_file.path, tmp_path)
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path)   # in the working folder, which a card does not name
    found = {c.name: c for c in verify(folder).claims}
    assert [found[name].level for name in ("rows, train", "base", "score", "answers of the model")] == [
        "stated", "stated", "consistent", "stated"]
    assert "my rows.jsonl is not in" in found["rows, train"].why
    given = levels(folder, rows=tmp_path, base=weights_of_learner())
    assert [given[name] for name in ("rows, train", "base", "score")] == ["re-derived"] * 3
    (tmp_path/"my rows.jsonl").write_text((tmp_path/"my rows.jsonl").read_text().replace('"3"', '"4"'))
    assert "rows, train" in {c.name for c in verify(folder, rows=tmp_path, sample=0).contradicted}


def test_rows_of_the_hub_are_not_downloaded_unless_asked(on_a_file, tmp_path):
    folder = alone(on_a_file.path, tmp_path)
    said = json.loads((folder/"card.json").read_text())
    said["config"]["train_file"] = ["org/rows"]
    (folder/"card.json").write_text(json.dumps(said))
    (folder/"README.md").unlink()
    found = {c.name: c for c in verify(folder, sample=0).claims}
    assert found["rows, train"].level == "stated" and "org/rows is not in" in found["rows, train"].why


def test_a_run_without_an_evaluation_and_one_that_was_continued(tmp_path):
    run = train(small(tmp_path, run_name="r", max_steps=4))
    assert levels(run.path, sample=0)["score"] == "stated"
    text = (run.adapter/"README.md").read_text()
    assert "**not evaluated: no score is known**" in text and "model-index" not in text
    run.record(dict(step=9, loss=1.))
    assert levels(run.path, sample=0)["training loss"] == "stated"


def test_a_whole_model(tmp_path):
    run = train(small(tmp_path, run_name="r", max_steps=4, method="full", eval_samples=6))
    evaluate(run, progress=False)
    found = levels(run.path)
    assert found["score"] == "re-derived" and found["file model.safetensors"] == "consistent"
    assert levels(alone(run.path, tmp_path))["answers of the model"] == "re-derived"


def test_scores_by_loss(tmp_path):
    rows = [[dict(role="user", content=f"say {k}"), dict(role="assistant", content=f"it is {k}")] for k in range(30)]
    for name, some in dict(a=rows[:15], b=rows[15:]).items():   # two domains
        (tmp_path/f"{name}.jsonl").write_text("".join(json.dumps(dict(messages=m)) + "\n" for m in some))
    files = (str(tmp_path/"a.jsonl"), str(tmp_path/"b.jsonl"))
    run = train(small(tmp_path, run_name="r", max_steps=4, task="chat", train_file=files, eval_samples=6,
                      eval_fraction=.3, max_samples=None))
    evaluate(run, by="loss", progress=False)
    assert levels(run.path)["score"] == "re-derived"
    everywhere(run.path, lambda answers: [a["figures"].update(loss=a["figures"]["loss"] / 2) for a in answers])
    assert "answers of the model" in contradicted(run.path, 6)


# Cards from strangers

def test_a_mistyped_run_is_not_looked_for_on_the_hub(run, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    monkeypatch.setattr(checking, "_download_card", lambda name: pytest.fail(name))
    with pytest.raises(SftError, match="there is no such path"): verify(f"{run.parent.name}/fisrt")


def test_odd_json_is_a_sentence(run):
    whole = card_of(run)
    odd = [b"", b"[]", b"3", b"{}", b"null", b"[" * 100_000, bytes(range(256)),
           b'{"kind": "card", "schema_version": 1}',
           json.dumps(whole | dict(schema_version=99)).encode()]
    for content in odd:
        (run/"adapter/card.json").write_bytes(content)
        with pytest.raises(SftError, match="it cannot be read .* a card that sft_nb wrote. Fix: "): verify(run)
    values = [[], 3, {"a": 1}, None, "x" * 100, float("nan"), 10**30, {"tuned": {"answers": 3}}]
    for k, name in enumerate(name for name in whole if name not in ("figures", "findings", "notes")):
        keep(run, whole | {name: values[k % len(values)]})
        try: str(verify(run, sample=0))
        except SftError as e: assert "cannot be read" in str(e)


ODD_PARTS = [
    ("scores", "tuned", "answers"), ("scores", "by"), ("scores", "difference"), ("scores", "baselines", "trivial"),
    ("training", "curve"), ("training", "held_out"), ("rows", "train"), ("config", "train_file"), ("config", "seed"),
    ("files", "tokenizer.json"), ("versions", "packages"), ("base", "name"), ("base", "files"), ("template", "sha256")]


@pytest.mark.parametrize("names", ODD_PARTS, ids="/".join)
def test_an_odd_part_is_contradicted(run, tmp_path, names):
    folder = alone(run, tmp_path)
    for value in ({"a": [1]}, 10**400, "\x1b[2J<script>"):
        said = json.loads((folder/"card.json").read_text())
        inner = said
        for name in names[:-1]: inner = inner[name]
        inner[names[-1]] = value
        (folder/"card.json").write_text(json.dumps(said))
        found = verify(folder, sample=0)
        assert found.exit_code == 1 and "\x1b" not in str(found) and "<script>" not in found._repr_html_()


def test_paths_of_a_card_never_leave_its_folder(run, tmp_path, monkeypatch):
    folder = alone(run, tmp_path)
    secret = tmp_path/"secret.jsonl"
    secret.write_text('{"question": "q", "answer": "a"}\n' * 40)
    (folder/"link.jsonl").symlink_to(secret)
    opened = []
    monkeypatch.setattr(checking, "file_sha256", lambda file: opened.append(str(file)) or "")
    for name in ("../../secret.jsonl", str(secret), "link.jsonl"):
        said = json.loads((folder/"card.json").read_text())
        said["files"][name] = dict(bytes=1, sha256="0" * 64)
        said["config"] |= dict(task="auto", train_file=[name], eval_file=[name])
        (folder/"card.json").write_text(json.dumps(said))
        found = {c.name: c for c in verify(folder, sample=0).claims}
        assert found[f"file {name}"].level == "contradicted" and found["rows, train"].level != "re-derived"
        for claim in (f"file {name}", "rows, train"): assert "which is not in its folder" in found[claim].why
        del said["files"][name]
    assert opened and not any("secret" in file or "link" in file for file in opened)


def test_code_that_a_card_names_does_not_run(run, tmp_path):
    folder = alone(run, tmp_path)
    (folder/"evil.py").write_text(f"open({str(tmp_path/'ran')!r}, 'w')\nTASK = None\n")
    said = json.loads((folder/"card.json").read_text())
    said["config"] |= dict(task="evil.py:TASK", trust_remote_code=True)
    (folder/"card.json").write_text(json.dumps(said))
    found = {c.name: c for c in verify(folder, sample=20).claims}
    assert not (tmp_path/"ran").exists() and found["rows, train"].level == "stated"


def test_a_billion_rows_are_not_made(run, tmp_path):
    folder = alone(run, tmp_path)
    said = json.loads((folder/"card.json").read_text())
    said["config"]["max_samples"] = 10**9
    (folder/"card.json").write_text(json.dumps(said))
    assert "1,000,000,000 rows are not made" in {c.name: c.why for c in verify(folder).claims}["rows, train"]


def test_an_adapter_that_is_called_a_merged_model(run, tmp_path):
    "Of a merged model the digest of the scored weights cannot be known"
    in_card("result", to="merged")(run)
    assert "adapter" in contradicted(run)


def test_files_that_are_too_large_or_no_files(run, monkeypatch):
    (run/"adapter/README.md").unlink()
    (run/"adapter/README.md").mkdir()
    assert {c.name: c.level for c in verify(run, sample=0).claims}["README.md"] == "stated"
    monkeypatch.setattr("sft_nb.extras.card.LARGEST_CARD_BYTES", 100)
    with pytest.raises(SftError, match="it is larger than"): verify(run)
