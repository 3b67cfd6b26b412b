"""Typical mistakes of newcomers, and the answer to each: it names the right setting, function or place."""
import inspect

import pytest

import sft_nb
from sft_nb import Data, Run, compare, evaluate, generate, load_config, plan, prepare, preflight, sweep, verdict
from sft_nb.cli import main
from sft_nb.config.settings import SETTINGS
from sft_nb.base.report import SftError

ROW = '{"question": "1+1?", "answer": "2"}\n'
LINES = [   # a wrong line -> words of its answer
    ("train rows.jsonl", "--train-file rows.jsonl"), ("train Qwen/Qwen3-4B", "--model Qwen/Qwen3-4B"),
    ("train runs/a", "--resume runs/a"), ("check runs/a", "Fix: --config runs/a."),
    ("train model", "--model model"), ("train demo", "--config demo"),
    ("train --data rows.jsonl", "--train-file"),
    ("train --peft-config x", "--lora-alpha"), ("train --lora", "--method lora"),
    ("train --full-finetune", "--method full"),
    ("train --method dpo", "12_from_here_to_preferences"), ("train --grpo", "12_from_here_to_preferences"),
    ("train --gpus 2", "--num-processes 2"), ("train --steps 9", "--max-steps"), ("train --output x", "--output-dir"),
    ("train --max-time soon", "90s, 30m, 5h, 1:30:00"), ("train --max-samples 10k", "--max-samples 10000"),
    ("train --max-samples many", "leave --max-samples out, or write an integer"), ("train --resume", "runs/NAME"),
    ("train --resume runs/a --lr 1e-4", "--learning-rate is also given"),
    ("stop runs/a --timeout soon", "seconds, or a duration"),
    ("train --train-file row.jsonl", "--train-file rows.jsonl"), ("data --train-file no.csv", "no such file in"),
    ("data --config no/such.py", "no/such.py' in"),
    ("data --train-file rows.jsonl --chat-template bad.jinja", "line 2"),
    ("train --model ./modell --train-file rows.jsonl", "--model model"), ("generate runs/a", "--prompt 'A question?'"),
    ("generate runs/b hello", "there is no such directory"), ("chat runs/a hello", "sft_nb generate runs/a hello"),
    ("evaluate", "no run is named")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Rows, an invalid template, a model's folder, and a run"
    home = tmp_path_factory.mktemp("newcomer")
    (home/"rows.jsonl").write_text(ROW * 20)
    (home/"bad.jinja").write_text("{% for m in messages %}\n{{ m.role }\n{% endfor %}")
    for name in ("model", "runs/a"):
        (home/name).mkdir(parents=True)
        (home/name/"config.json").write_text('{"config": {}}')
    (home/"runs/a/status.json").write_text('{"state": "stopped", "step": 3}')
    return home


@pytest.mark.parametrize("line, says", LINES, ids=[line for line, _ in LINES])
def test_a_wrong_line(folder, monkeypatch, capsys, line, says):
    monkeypatch.chdir(folder)
    assert main(line.split()) != 0
    err = capsys.readouterr().err
    assert says in err and len(err) < 800 and "This is unexpected" not in err


def test_durations_and_words_after_a_switch(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main("config --json --max-time 1h30m".split()) == 0
    assert '"max_time": 5400.0' in capsys.readouterr().out
    assert main("stop --timeout 2m runs/c".split()) == 2   # a run that is not there, and no fault in the line
    assert "there is no such directory" in capsys.readouterr().err


@pytest.fixture(scope="module")
def data(): return prepare(load_config("demo", max_samples=32, eval_samples=0))


WRONG = {   # what is called -> words of the error
    "train(data, 'rows.jsonl')": "data: it is of type str", "launch(3)": "cfg: it is of type int",
    "plan(data, 3)": "data: it is of type int", "preflight(data.cfg, data.cfg)": "data: it is of type Config",
    "prepare(data.cfg, data)": "this is of type Data", "train(data, model='gpt2')": "model='gpt2'",
    "train(data, callbacks=[3])": "callbacks: one is of type int",
    "load_config(tokenizer=data.tokenizer)": "prepare(cfg, tokenizer)",
    "load_config(train_dataset=[1])": "prepare(cfg, train=rows)", "load_config(peft_config=3)": "lora_alpha",
    "load_config(method='orpo')": "12_from_here_to_preferences", "load_config(max_time='soon')": "1:30:00",
    "resume(run, learning_rate=1e-5)": "learning_rate=1e-05))", "run.resume(lora_r=4)": "lora_r=4))"}


def code_names(code:str)->list[str]: return [name for name in sft_nb.__all__ if f"{name}(" in code]


@pytest.mark.parametrize("code", WRONG)
def test_a_wrong_call(folder, data, code):
    names = {name: getattr(sft_nb, name) for name in code_names(code)} | dict(data=data, run=Run(folder/"runs/a"))
    with pytest.raises(SftError) as e: eval(code, names)
    assert WRONG[code] in str(e.value) and len(str(e.value)) < 500


def test_data_and_config_are_taken_in_either_order(data):
    other = load_config(data.cfg, learning_rate=1e-4)
    assert plan(data, other).reasons == plan(other, data).reasons and isinstance(prepare("demo"), Data)


def test_signatures_name_every_setting():
    shown = inspect.signature(load_config).parameters
    assert all(shown[f.name].default == f.default and shown[f.name].annotation == f.type for f in SETTINGS.values())
    for f in (load_config, evaluate, sweep, verdict, compare, generate):
        assert all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(f).parameters.values()), f
    assert {"eval_samples", "max_new_tokens", "cluster"} <= {*inspect.signature(compare).parameters}


def test_jupyter_completes_settings():
    completer = pytest.importorskip("IPython.core.completer")
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    shell.user_ns |= dict(load_config=load_config, evaluate=evaluate)
    for text, name in (("load_config('demo', lear", "learning_rate="), ("evaluate('x', max_new", "max_new_tokens=")):
        with completer.provisionalcompleter():
            assert name in [c.text for c in shell.Completer.completions(text, len(text))]


def test_reports_show_themselves_in_plain_python(data):
    assert repr(data.report) == str(data.report) and len(repr(preflight(data))) < 2000
