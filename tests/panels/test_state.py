"""A panel shows exactly the batches that the training's loader passes to the model."""
from itertools import accumulate

import pytest
from learner import learner

from sft_nb.config.load import load_config
from sft_nb.panels.batches import BatchState
from sft_nb.base.report import ConfigError
from sft_nb.tokens.prepare import prepare
from sft_nb.training.train import train
from sft_nb.training.trainer import SupervisedTrainer
from sft_nb.workbench import Workbench

# 22 rows make 6 micro-batches of 4, or 5 of 280 tokens: an epoch ends with a step of fewer micro-batches
SMALL = learner() | dict(
    preflight=False, max_samples=22, eval_samples=5, per_device_train_batch_size=4, per_device_eval_batch_size=2,
    gradient_accumulation_steps=4, num_train_epochs=2, save_steps=100, sample_steps=100)
WAYS = {
    "padded": dict(padding_free=False),
    "flattened": dict(padding_free=True),
    "packed": dict(max_tokens_per_batch=280),
    "grouped, more steps than epochs": dict(padding_free=False, group_by_length=True, max_steps=5, num_train_epochs=1),
    "as planned, a part of an epoch": dict(num_train_epochs=1.5),
}


@pytest.fixture
def handed(monkeypatch):
    "The batches that training passes to the model: (step, batch), and those of its evaluations"
    trained, evaluated = [], []
    step, prediction = SupervisedTrainer.training_step, SupervisedTrainer.prediction_step

    def training_step(self, model, inputs, *args, **kwargs):
        trained.append((self.state.global_step + 1, dict(inputs)))
        return step(self, model, inputs, *args, **kwargs)

    def prediction_step(self, model, inputs, *args, **kwargs):
        evaluated.append(dict(inputs))
        return prediction(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(SupervisedTrainer, "training_step", training_step)
    monkeypatch.setattr(SupervisedTrainer, "prediction_step", prediction_step)
    return trained, evaluated


def borders(batch)->list[int]:
    "Where the documents of a batch begin and end, according to the model's inputs"
    if "attention_mask" in batch: return [0, *accumulate(row.sum().item() for row in batch["attention_mask"])]
    positions = batch["position_ids"].flatten()
    return [*(positions == 0).nonzero().flatten().tolist(), len(positions)]


def assert_shown(state:BatchState, batch:dict)->None:
    documents = state.documents()
    assert [id for d in documents for id in d.ids] == batch["input_ids"].flatten().tolist()
    assert [label for d in documents for label in d.labels] == batch["labels"].flatten().tolist()
    assert [0, *accumulate(d.n for d in documents)] == borders(batch)
    positions = [p for d in documents for p in d.positions]
    if "position_ids" in batch: assert positions == batch["position_ids"].flatten().tolist()
    else: assert positions == [*range(batch["input_ids"].shape[1])] * len(batch["input_ids"])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_the_panel_shows_what_the_model_is_given(handed, tmp_path, way):
    cfg = load_config("demo", runs_dir=str(tmp_path), eval_steps=2, **SMALL | way)
    data = prepare(cfg)
    before, of_bench = BatchState(data), BatchState(Workbench(cfg))
    run = train(cfg, data=data)
    trained, evaluated = handed
    steps = [step for step, _ in trained]
    assert steps[0] == 1 and 2 in steps and steps[-1] == run.step == before.schedule.steps
    for state in (before, of_bench, BatchState(run)):
        assert "model" not in vars(state.workbench)   # nothing was loaded for it
        assert state.n_batches == len(trained)
        for k, (step, batch) in enumerate(trained):
            assert_shown(state.move(index=k), batch)
            assert state.schedule.step(k) + 1 == step
            assert f"optimiser step {step} of {steps[-1]}" in state.caption()
        state.move(split="eval")
        assert state.n_batches == 3
        for k in range(3): assert_shown(state.move(index=k), evaluated[k])


def test_the_layout_is_the_one_of_the_config():
    for padding_free, name in ((True, "flattened"), (False, "padded")):
        state = BatchState(prepare(load_config("demo", max_samples=9, padding_free=padding_free)), 3)
        assert f"3 rows {name}" in state.caption() and len(state.rows()) == len(state.names()) == 3


def test_each_document_has_a_border_and_the_name_of_its_row():
    data = prepare(load_config("demo", max_samples=9))
    state = BatchState(data, 3)
    html = state.html()
    assert html.count("class='sft-document'") == 3 and html.count("dashed") == 3
    for name, number in zip(state.names(), state.numbers):
        place, _ = data.train.row(number)
        assert place.endswith(name) and f">{name}</div>" in html


def test_what_a_token_says_is_escaped():
    rows = [dict(question="<script>alert(1)</script>", answer="<img src=x onerror=alert(1)> #### 2")] * 3
    html = BatchState(prepare(load_config("demo", task="chat"), train=rows), 2).html()
    assert "<script" not in html and "<img" not in html and "&lt;" in html


def test_a_row_that_only_fills_a_batch_says_so(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    cfg = load_config("demo", max_samples=3, per_device_train_batch_size=1, num_processes=2)
    state = BatchState(prepare(cfg)).move(index=1)   # three rows, two processes: the fourth batch repeats a row
    assert state.numbers[0] < 0 and state.names()[0].endswith(", without its labels")
    assert {label for document in state.documents() for label in document.labels} == {-100}


def test_a_split_that_is_not_there():
    state = BatchState(prepare(load_config("demo", max_samples=9, eval_samples=0)))
    assert state.splits == ["train"]
    with pytest.raises(ConfigError, match="there is no split 'eval'; one of train. Fix: eval_samples=200"):
        state.move(split="eval")
