"Checks of ten steps: each fires on a planted defect and is quiet without it"
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planted import small

from sft_nb.checks.preflight import Evidence, preflight
from sft_nb.checks.step import _estimate_derivative, slopes
from sft_nb.checks.learning import Learned, check_learns, check_moves, learn_some, save_once
from sft_nb.checks.step import take_step
from sft_nb.base.report import SftError
from sft_nb.workbench import Workbench


@pytest.fixture
def seen(): return Evidence(Workbench(small()))


def test_learns():
    def look(before, after, rate=1e-3): return check_learns(Learned(before, after, [], 2, 10, rate)).status
    assert [look(2., x) for x in (1., 2., 2.1, 2.3, float("nan"))] == ["ok", "warn", "warn", "fail", "fail"]
    assert look(2., 1., 0.) == "fail"
    assert look(2., 1.9999) == look(8., 7.997) == "warn"   # it hardly moves
    assert look(2., 1.99) == look(8., 7.99) == "ok"


def learn(seen, **how):
    return learn_some(seen.model, seen.loss, seen.score, seen.some_batch, **how, **seen.cfg.values(learn_some))


def test_steps_that_are_too_large_on_the_way():
    told = check_learns(Learned(8., 2.4, [], 2, 10, .5, 40.))
    assert told.status == "fail" and "a peak of 40.0000" in told.says and str(told.fix) == "learning_rate=0.05"
    assert check_learns(Learned(8., 2.4, [], 2, 10, .5, 9.)).status == "ok"


def test_the_highest_loss_on_the_way_is_kept():
    "A parabola whose steps are too large first: 1 is left for 7, then a smaller rate comes back"
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1)
    def loss(batch): return model.weight.square().sum()
    def score(batch): return float(loss(batch))
    class Slower(torch.optim.SGD):
        def step(self):
            super().step()
            self.param_groups[0]["lr"] = .4
    optimizer = Slower(model.parameters(), lr=4)
    settings = small(max_grad_norm=0.).values(learn_some)
    done = learn_some(model, loss, score, {}, optimizer=optimizer, steps=3, **settings)
    assert (done.before, done.highest) == (1, pytest.approx(49)) and done.after < 49 / 20
    assert check_learns(replace(done, after=.5)).status == "fail"


def test_moves():
    def look(*still, rate=1e-3): return check_moves(Learned(2., 1., list(still), 2, 10, rate))
    assert look() is None and look("a").status == "warn" and look("a", "b").status == "fail"
    assert look("a", "b", rate=0.) is None   # reported by `check_learns`


def test_steps_that_round_away():
    "Adapters in bfloat16 at a small learning rate: loss and gradient exist, but nothing changes"
    seen = Evidence(Workbench(small(learning_rate=1e-9)))
    for p in seen.model.parameters():
        if p.requires_grad: p.data = (torch.ones_like(p) + p.data).bfloat16().float()

    class Rounded(torch.optim.SGD):
        def step(self, *args):
            super().step(*args)
            for group in self.param_groups:
                for p in group["params"]: p.data = p.data.bfloat16().float()

    optimizer = Rounded([p for p in seen.model.parameters() if p.requires_grad], lr=1e-9)
    done = learn(seen, optimizer=optimizer, steps=2)
    assert check_moves(done).status == "fail" and check_learns(done).status == "warn"


def test_nothing_to_train(seen):
    seen.model.requires_grad_(False)
    assert take_step(seen.model, seen.loss, seen.some_batch).norms == {}
    assert slopes(seen.model, seen.loss, seen.score, seen.some_batch) == []
    with pytest.raises(SftError, match="no parameter is trained"):
        learn(seen, optimizer=None)


class Breaks(torch.optim.SGD):
    "Makes one weight NaN in a step"
    at, steps = 3, 0
    def step(self):
        super().step()
        self.steps += 1
        if self.steps == self.at: self.param_groups[0]["params"][1].data.view(-1)[0] = float("nan")


@pytest.mark.parametrize("at", [1, 3, 5])
def test_the_step_that_made_weights_nan_is_named(seen, at):
    trained = {name: p for name, p in seen.model.named_parameters() if p.requires_grad}
    optimizer = Breaks(trained.values(), lr=1e-3)
    optimizer.at = at
    done = learn(seen, optimizer=optimizer, steps=5)
    assert (done.broken, done.broke_at) == ([*trained][1], at) and optimizer.steps == at
    told = check_learns(done)
    assert told.says == f"the weights are not finite after step {at} of 5 on the same rows, the first is {done.broken}"
    assert told.status == "fail" and told.fix.settings == dict(learning_rate=seen.cfg.learning_rate / 10)
    again = learn(seen, optimizer=optimizer, steps=5)
    assert again.broke_at == 0 and "not finite before the first step" in check_learns(again).says
    assert "named_parameters" in str(check_learns(again).fix)


def test_weights_that_become_nan_are_one_finding(monkeypatch):
    def make(model, **how): return Breaks([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    monkeypatch.setattr("sft_nb.checks.preflight.make_optimizer", make)
    report = preflight(small(learning_rate=5e-3))
    found = {f.check: f for f in report.findings}
    told = found["learning.learns"]
    assert told.says.startswith("the weights are not finite after step 3 of 10 on the same rows"), told
    assert told.fix.says("shell") == "--learning-rate 0.0005"
    assert found["learning.answers"].status == "skipped" and "not finite" in found["learning.answers"].says
    assert not any("could not be created" in f.says or "atol" in f.says for f in report.findings), report


def test_a_state_that_was_written_is_read_again():
    read = []
    model = SimpleNamespace(save_pretrained=lambda folder: (Path(folder)/"model.safetensors").write_bytes(b"1234"))
    optimizer = SimpleNamespace(state_dict=lambda: dict(moment=torch.arange(3)), load_state_dict=read.append)
    saved = save_once(model, optimizer)
    assert [state["moment"].tolist() for state in read] == [[0, 1, 2]]
    assert saved.files == ("model.safetensors", "optimizer.pt") and saved.mib > 4 / 2**20


@pytest.mark.parametrize("error, says", [
    (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), "ulimit -f"),
    (OSError(28, "No space left on device"), "a disk with room")])
def test_a_disk_that_takes_no_checkpoint_of_a_check_is_named(error, says):
    def fails(folder): raise error
    with pytest.raises(SftError, match=f"cannot be written to .*; .*{says}.* set TMPDIR"):
        save_once(SimpleNamespace(save_pretrained=fails), None)


def test_padding_that_is_added_is_not_attended_to():
    row = dict(input_ids=[1, 5, 7], labels=[-100, 5, 7])
    bench = SimpleNamespace(failures={}, tokenizer=SimpleNamespace(pad_token_id=9))
    seen = Evidence(bench)
    seen.__dict__["few_rows"] = [row, row]
    wide = seen.wide_batch
    assert wide["attention_mask"].sum(1).tolist() == [3, 3] and not wide["attention_mask"][:, -8:].any()
    assert (wide["labels"][:, -8:] == -100).all() and (wide["input_ids"][:, -8:] == 9).all()


def test_a_derivative_is_looked_for_no_farther_than_asked():
    asked = []
    def f(x):
        asked.append(x)
        return 3 * x + x ** 3
    for points in (2, 5):
        asked.clear()
        assert abs(_estimate_derivative(f, .1, points)[0] - 3) < 1e-6
        assert len(asked) == 2 * points and max(asked) == -min(asked) == .1
