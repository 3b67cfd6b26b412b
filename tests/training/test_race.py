"""Several configs on one base: each run is what it is alone, to the last bit."""
import json
from dataclasses import replace

import pytest
import torch
from learner import weights_of_learner

from sft_nb.cli.results import race_command
from sft_nb.config import load_config
from sft_nb.model import load
from sft_nb.model.load import load_base, one_base, twin
from sft_nb.report import ConfigError, SftError
from sft_nb.results import answers
from sft_nb.results.evaluate import evaluate
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.training import race as race_module
from sft_nb.training.race import race
from sft_nb.training.train import train


def small(tmp_path, **more):
    how = dict(max_steps=4, eval_samples=4, eval_steps=2, logging_steps=1, preflight=False, max_samples=60,
               model=weights_of_learner(), tokenizer="tiny", runs_dir=str(tmp_path/"runs"),
               cache_dir=str(tmp_path/"cache"))
    return load_config("demo", **how | more)


@pytest.fixture
def loaded(monkeypatch):
    "How often a base is read from its files"
    from transformers import AutoModelForCausalLM
    times, real = [], AutoModelForCausalLM.from_pretrained

    def counting(*args, **how):
        times.append(args)
        return real(*args, **how)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counting)
    return times


def said(run):
    "Loss, gradient norm and held-out loss of each step"
    return [{k: v for k, v in m.items() if "loss" in k or "norm" in k} for m in run.metrics()]


def weights(run): return (run.adapter/"adapter_model.safetensors").read_bytes()


DORA, TRAINED_HEAD = dict(lora_r=4, use_dora=True), dict(modules_to_save=("lm_head",))
DROPS = dict(learning_rate=3e-3, lora_dropout=.2, gradient_checkpointing=True)
OTHERWISE = dict(kernels="none", per_device_train_batch_size=2, lora_target_modules=("attention",), seed=7)


@pytest.mark.parametrize("how, others", [
    (dict(method="lora"), [TRAINED_HEAD, DROPS, OTHERWISE]), (dict(method="qlora"), [DORA, DROPS]),
    (dict(method="lora", dtype="bfloat16", max_steps=2), [OTHERWISE]),
    (dict(method="lora", init="random"), [dict(init_lora_weights="gaussian")])])
def test_each_run_is_what_it_is_alone(tmp_path, loaded, how, others):
    cfgs = [small(tmp_path, **how | other) for other in [{}, *others]]
    together = race(cfgs)
    assert len(loaded) == 1
    for run, cfg in list(zip(together, cfgs))[-2:]:
        alone = train(cfg)
        assert said(run) == said(alone) and weights(run) == weights(alone)


def test_with_a_preflight_and_a_new_token(tmp_path, loaded):
    how = dict(model="tiny", method="lora", preflight=True, train_tokens=("<|new|>",))
    cfgs = [small(tmp_path, **how, seed=seed) for seed in (1, 2)]
    together = race(cfgs)
    assert len(loaded) == 1
    alone = train(cfgs[1])
    assert said(together[1]) == said(alone) and weights(together[1]) == weights(alone)


def test_a_training_that_changes_the_base_has_one_of_its_own(tmp_path, loaded):
    "And nobody else's is in memory beside it"
    lora = dict(method="lora", max_steps=2)
    ways = (lora, dict(method="full", max_steps=2), lora | dict(init_lora_weights="pissa"), lora | dict(seed=2))
    cfgs = [small(tmp_path, **how) for how in ways]
    together = race(cfgs)
    assert len(loaded) == 4
    for cfg, run in list(zip(cfgs, together))[2:]: assert said(run) == said(train(cfg))
    tok = load_tokenizer(load_config())
    assert load._key(load_config(method="qlora", load_in_8bit=True), tok) is None


def test_there_is_memory_for_one(tmp_path, loaded):
    tok = load_tokenizer(load_config())
    with one_base():
        a, b = (load_base(load_config(method="lora"), tok) for _ in range(2))
        assert len(loaded) == 1 and len(load._KEPT.get()) == 1
        assert all(p is q for p, q in zip(a.parameters(), b.parameters()))
        assert not {id(m) for m in a.modules()} & {id(m) for m in b.modules()}
        load_base(load_config(method="qlora"), tok)
        assert len(loaded) == 2 and len(load._KEPT.get()) == 1
        load_base(load_config(method="full"), tok)
        assert not load._KEPT.get()   # also for one that is nobody else's
    assert load._KEPT.get() is None


def test_a_twins_hooks_are_its_own():
    model = load_base(load_config(method="lora"), load_tokenizer(load_config()))
    other, seen = twin(model), []
    other.model.norm.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        ids = torch.tensor([[5, 6, 7]])
        assert torch.equal(model(ids).logits, twin(model)(ids).logits) and not seen
        other(ids)
    assert seen == [1]


def test_a_run_that_fails_stops_no_other(tmp_path):
    cfgs = [small(tmp_path, run_name="a"), small(tmp_path, run_name="b", max_length=2), small(tmp_path, run_name="c")]
    with pytest.raises(SftError, match="config 2, .*none is left") as caught: race(cfgs)
    assert [run.name for run in caught.value.runs] == ["a", "c"]
    states = {p.name: json.loads((p/"status.json").read_text())["state"] for p in (tmp_path/"runs").iterdir()}
    assert states == dict(a="finished", c="finished")


def test_an_error_that_nobody_foresaw_stops_no_other(tmp_path, monkeypatch):
    def breaks(cfg):
        if cfg.run_name == "b": raise RuntimeError("boom")
        return train(cfg)
    monkeypatch.setattr(race_module, "train", breaks)
    with pytest.raises(SftError, match="config 2: RuntimeError: boom; .*train that config alone") as caught:
        race(small(tmp_path, run_name=name, max_steps=1) for name in "abc")
    assert [run.name for run in caught.value.runs] == ["a", "c"]


@pytest.mark.parametrize("stopped, done", [("a", None), ("b", ["a"])])
def test_ctrl_c_before_a_run_has_begun(tmp_path, monkeypatch, capsys, stopped, done):
    "What was trained is not lost"
    def interrupted(cfg):
        if cfg.run_name == stopped: raise KeyboardInterrupt
        return train(cfg)
    monkeypatch.setattr(race_module, "train", interrupted)
    cfgs = [small(tmp_path, run_name=name, max_steps=1) for name in "abc"]
    if done is None:
        with pytest.raises(KeyboardInterrupt): race(cfgs)
    else:
        assert [run.name for run in race(cfgs)] == done
        assert "not begun: 2 of 3" in "".join(capsys.readouterr())


def test_who_is_told_to_stop_begins_no_other(tmp_path, monkeypatch):
    begun = []

    def stopped(cfg):
        begun.append(cfg.run_name)
        run = train(cfg)
        run.set_status("stopped", stopped_by="Ctrl-C" if cfg.run_name == "b" else "max_time")
        return run
    monkeypatch.setattr(race_module, "train", stopped)
    assert [run.name for run in race(small(tmp_path, run_name=name) for name in "abc")] == ["a", "b"] == begun


def test_what_is_wrong_is_said_before_the_first_begins(tmp_path):
    good = small(tmp_path, model="tiny", tokenizer=None)
    for cfgs, says in (([], "race: there is no config"),
                       ([good, replace(good, num_processes=2)], "config 2, num_processes: 2.*Fix: num_processes=1"),
                       ([good, replace(good, model=str(tmp_path/"no"), tokenizer="tiny")], "config 2, model .*no"),
                       ([replace(good, run_name="a"), replace(good, run_name="a")], "two of them are called a")):
        with pytest.raises(ConfigError, match=says): race(cfgs)
    with pytest.raises(SftError, match="2 problems: (?s:.*)config 1, .*no.jsonl(?s:.*)config 3, tokenizer"):
        race([replace(good, task="chat", train_file=(str(tmp_path/"no.jsonl"),)), good, replace(good, model="./no")])
    assert not (tmp_path/"runs").exists() or not list((tmp_path/"runs").iterdir())


def test_one_config_and_names(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(race_module, "check_race", lambda cfgs: seen.extend(cfgs) or exit())
    for cfgs in (small(tmp_path), "demo", ["demo"]):
        with pytest.raises(SystemExit): race(cfgs)
    assert [cfg.task for cfg in seen] == ["arithmetic"] * 3


def test_the_same_name_in_another_folder(tmp_path):
    a, b = small(tmp_path, run_name="a"), small(tmp_path, run_name="a", runs_dir=str(tmp_path/"others"))
    race_module.check_race([a, b])
    with pytest.raises(ConfigError, match="two of them are called a"):
        race_module.check_race([a, replace(b, runs_dir=str(tmp_path/"others/../runs"))])


def test_the_command_scores_and_lists_what_was_trained(tmp_path, capsys):
    "Settings of other programs count; a config that fails takes nothing from the others"
    for name, more in (("one", ""), ("bad", "max_length: 2\n"), ("two", f"runs_dir: {tmp_path}/others\n")):
        (tmp_path/f"{name}.yaml").write_text(
            f"task: arithmetic\nmax_steps: 2\neval_samples: 4\nmax_new_tokens: 8\nmax_samples: 40\npreflight: false\n"
            f"run_name: {name}\n" + (more if "runs_dir" in more else f"runs_dir: {tmp_path}/runs\n{more}"))
    names = [str(tmp_path/f"{name}.yaml") for name in ("one", "bad", "two")]
    with pytest.raises(SftError, match="config 2, .*none is left"): race_command([*names, "--use-peft", "False"])
    out = capsys.readouterr().out
    assert out.count("held-out rows") == 2 and "one" in out and "two" in out
    for folder, name in (("runs", "one"), ("others", "two")):
        assert json.loads((tmp_path/folder/name/"config.json").read_text())["config"]["method"] == "full"


def test_the_command_with_an_output_dir_and_a_run_that_was_stopped(tmp_path, monkeypatch, capsys):
    def stopped(cfgs):
        runs = [train(replace(cfg, max_time=.001)) for cfg in cfgs]
        return runs
    monkeypatch.setattr(race_module, "race", stopped)
    line = f"demo --output-dir {tmp_path}/x/y --max-steps 3 --no-preflight --max-samples 40 --eval-samples 4"
    assert race_command(line.split()) == 0
    out = capsys.readouterr().out
    assert (tmp_path/"x/y/config.json").exists() and f'Go on with: resume("{tmp_path}/x/y")' in out


def texts(scores)->list[str]: return [a.text for a in scores.answers]


def test_the_base_is_asked_once(tmp_path, monkeypatch):
    "By those whose answers would be the same; each keeps them, and outside nothing is taken over"
    asked, real = [], answers.continue_tokens
    def counting(model, tokenizer, prompts, **how):
        asked.append(how["progress"])
        return real(model, tokenizer, prompts, **how)
    monkeypatch.setattr(answers, "continue_tokens", counting)
    others = [dict(seed=5, learning_rate=1e-3), dict(per_device_eval_batch_size=2), dict(kernels="none"), dict(seed=6)]
    runs = race(small(tmp_path, method="lora", **how) for how in [{}, *others])
    with one_base():
        found = [evaluate(run) for run in runs]
        assert asked.count("base answers") == 3 and asked.count("tuned answers") == 5
        evaluate(runs[1], reuse=False)
        assert asked.count("base answers") == 4
    assert all(texts(e.base) == texts(found[0].base) for e in found)
    (runs[4].path/"eval/answers.jsonl").unlink()
    again = evaluate(runs[4])
    assert asked.count("base answers") == 5 and texts(again.base) == texts(found[4].base)
    assert again.tuned.accuracy == evaluate(runs[4]).tuned.accuracy and asked.count("base answers") == 5
