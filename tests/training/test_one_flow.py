"""One flow from rows to a run: what `prepare` returned is planned, checked and trained, and nothing else."""
import json
from dataclasses import replace
from unittest.mock import patch

import pytest
from learner import learner

from sft_nb import evaluate, launch, load_config, plan, prepare, preflight, train
from sft_nb.base.report import ConfigError, SftError
from sft_nb.tokens import prepare as prepare_module
from sft_nb.tokens.dataset import Data
from sft_nb.tokens.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("warm_processes")

SUMS = [dict(prompt=f"{a} plus {b}?", completion=str(a + b)) for a in range(8) for b in range(8)]


def small(tmp_path, **changes):
    few = dict(max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=1, max_length=64,
               logging_steps=1, max_new_tokens=4, eval_samples=4)
    folders = dict(runs_dir=str(tmp_path/"runs"), cache_dir=str(tmp_path/"cache"))
    return load_config(**folders | learner() | few | changes)


@pytest.fixture(autouse=True)
def nothing_prepared(monkeypatch): monkeypatch.setattr(prepare_module, "_PREPARED_IN_MEMORY", {})


def test_a_launched_run_trains_the_rows_that_were_checked_and_checks_them_once(tmp_path):
    cfg = small(tmp_path)
    data = prepare(cfg, train=SUMS[:60], eval=SUMS[60:])
    made, checked = plan(cfg, data), preflight(cfg, data)
    run = launch(cfg, data)
    assert run.wait(timeout=1200) == "finished"
    report = json.loads((run.path/"data.json").read_text())
    assert report["figures"]["train"]["rows_read"] == 60
    assert report["figures"]["train"]["fingerprint"] == data.train.fingerprint
    kept = json.loads((run.path/"preflight.json").read_text())
    assert kept["figures"] == json.loads(json.dumps(checked.to_dict()["figures"]))   # not made again
    assert {"seconds", "seconds_of_the_first_step"} <= kept["figures"].keys()
    assert json.loads((run.path/"plan.json").read_text())["settings"] == made.settings
    assert run.config.attn_implementation == made.settings["attn_implementation"]
    entries = list((tmp_path/"cache"/"data").iterdir())
    assert len(entries) == 4    # two sides, by the rows in memory and by the files that keep them
    scores = evaluate(run)
    assert [a.where for a in scores.tuned.answers] == [f"eval.jsonl line {k}" for k in range(1, 5)]
    assert len(list((tmp_path/"cache"/"data").iterdir())) == 4


def test_data_carries_its_config(tmp_path):
    data = prepare(small(tmp_path, preflight=False), train=SUMS)
    run = train(data)
    assert (run.state, run.config.task) == ("finished", "chat")
    assert run.metrics() and plan(data).fits


@pytest.mark.parametrize("use", [plan, preflight, train, launch], ids=lambda f: f.__name__)
def test_a_config_whose_rows_were_handed_over_is_not_used_without_them(use, tmp_path):
    cfg = small(tmp_path)
    prepare(cfg, train=SUMS)
    if use is preflight:   # every failure is a finding
        assert any("prepare() was given rows" in f.says for f in preflight(cfg).failed)
        return
    with pytest.raises(ConfigError, match="prepare.. was given rows in this process.*pass what prepare"): use(cfg)
    with pytest.raises(ConfigError, match="prepare.. was given rows"): use(replace(cfg, max_length=50))   # nor another
    assert not (tmp_path/"runs").exists()


def test_a_config_that_names_its_rows_stays_as_it_is(tmp_path):
    (tmp_path/"rows.jsonl").write_text("\n".join(map(json.dumps, SUMS)))
    prepare(small(tmp_path), train=SUMS)
    assert plan(small(tmp_path, train_file=str(tmp_path/"rows.jsonl"))).fits
    assert plan(small(tmp_path, task="arithmetic", max_samples=16)).fits


def test_other_row_settings_than_the_data_has_are_refused(tmp_path):
    cfg = small(tmp_path)
    data = prepare(cfg, train=SUMS)
    for use in (plan, train, launch):
        with pytest.raises(ConfigError, match="prepared with max_length 64, and this config has max_length 32"):
            use(replace(cfg, max_length=32), data)
    tokenizer = load_tokenizer(cfg)
    tokenizer.add_tokens(["a word that no other tokenizer has"])
    tokenizer.save_pretrained(tmp_path/"tokenizer")
    other = replace(cfg, tokenizer=str(tmp_path/"tokenizer"))
    with pytest.raises(ConfigError, match="tokens for the model that is trained"): train(other, data)


def test_rows_that_change_between_preparation_and_launch_are_refused(tmp_path):
    file = tmp_path/"rows.jsonl"
    file.write_text("\n".join(map(json.dumps, SUMS)))
    cfg = small(tmp_path, train_file=str(file))
    data = prepare(cfg)
    file.write_text("\n".join(map(json.dumps, SUMS[:32])))
    run = launch(cfg, data)
    with pytest.raises(SftError, match="have changed since the run started"): run.wait(timeout=1200)


def test_renamed_columns_and_handed_over_rows(tmp_path):
    rows = [dict(Ask=r["prompt"], Reply=r["completion"]) for r in SUMS]
    cfg = small(tmp_path, fields=("prompt=Ask", "completion=Reply"), preflight=False)
    run = train(prepare(cfg, train=rows[:60], eval=rows[60:]))
    assert len(evaluate(run).tuned.answers) == 4


def test_a_failed_preflight_is_not_reused(tmp_path):
    cfg = small(tmp_path)
    data = prepare(cfg, train=SUMS)
    checked = preflight(cfg, data)
    assert isinstance(data, Data) and not checked.failed
    with patch.object(type(checked), "failed", [object()]):
        from sft_nb.training.train import passed_preflight
        from sft_nb.workbench import Workbench
        assert passed_preflight(Workbench(cfg, data=data)) is None
    assert passed_preflight(Workbench(cfg, data=data)) is checked
    assert passed_preflight(Workbench(replace(cfg, learning_rate=1e-4), data=data)) is None
