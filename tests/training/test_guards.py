"""What the guards detect during training: collapsing answers, unchanged weights, a flat loss."""
import json
from unittest.mock import patch

import torch
from learner import notes, small, small_qlora, weights

from sft_nb.model.generation import Generation
from sft_nb.runs.status import environment
from sft_nb.training import guards as guarding   # the module
from sft_nb.training.guards import loss_is_flat, SampleProbe, unchanged_weights, worse_than_before
from sft_nb.training.train import resume, train

DECODING = "sft_nb.training.guards.continue_tokens"


def answers(text:str, *, ended:bool=False):
    "A model that gives this answer to every prompt"
    def answer(model, tokenizer, prompts, **how): return [Generation(text, 80, ended)] * len(prompts)
    return patch(DECODING, answer)


def test_a_collapse_is_seen(tmp_path):
    with answers("!" * 80): run = train(small(tmp_path, sample_steps=2))
    note = notes(run)["collapse"]
    assert run.status.state == "finished" and note.status == "fail" and "'!!!'" in note.says
    assert (note.step, note.until) == (2, 10) and str(note).startswith("✗ collapse: step 2 to 10: ")


def test_a_collapse_of_random_weights_under_an_adapter(tmp_path):
    "Neither a lower rate nor other labels would help: what is trained is too little"
    with answers("!" * 80): run = train(small(tmp_path, sample_steps=2, max_steps=2))
    note = notes(run)["collapse"]
    assert note.fix.settings == dict(method="full") and "the base is random" in note.says


def test_a_collapse_can_end_the_run(tmp_path):
    with answers("!" * 80): run = train(small(tmp_path, sample_steps=2, on_collapse="stop"))
    assert (run.status.state, run.status.step, run.status.stopped_by) == ("stopped", 4, "guard")
    assert "'!!!'" in run.status.reason and run.checkpoints()[-1].name == "checkpoint-4"


def test_answers_that_never_end(tmp_path):
    with answers("on and off it goes, and never the same"): run = train(small(tmp_path, sample_steps=2))
    assert notes(run)["never_ends"].status == "warn" and notes(run)["never_ends"].step == 4   # at the second sample


def test_a_collapse_that_is_over_is_no_longer_noted(tmp_path):
    samples = iter(["!" * 80, "fine"] * 9)
    def answer(*args, **how):
        text = next(samples)
        return [Generation(text, 3, text == "fine")] * 4
    with patch(DECODING, answer): run = train(small(tmp_path, sample_steps=5))
    assert "collapse" not in notes(run)   # the last sample was fine


def test_a_sample_that_runs_out_of_memory_is_the_last_one(tmp_path, undisturbed):
    no_room = patch(DECODING, side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with no_room as decoding: run = train(small(tmp_path, sample_steps=2))
    assert weights(run) == weights(undisturbed) and decoding.call_count == 1
    assert notes(run)["sample_out_of_memory"].status == "warn"


def test_a_sample_that_fails_is_the_last_one_and_the_training_goes_on(tmp_path, undisturbed):
    with patch(DECODING, side_effect=ValueError("no such cache")) as decoding:
        run = train(small(tmp_path, sample_steps=2))
    assert weights(run) == weights(undisturbed) and decoding.call_count == 1
    found = notes(run)["sample_failed"]
    assert found.status == "fail" and "(ValueError: no such cache), so no more samples are decoded" in found.says


def test_a_sample_that_is_cut_short_is_not_blamed_for_having_no_end(tokenizer):
    rows = [dict(input_ids=[5, 6, 2], labels=[-100, 6, 2])]
    probe = SampleProbe(tokenizer, rows, [2])
    with answers("fine", ended=False):
        assert [f.check for f in probe(None)] == ["never_ends"]
        assert probe(None, at_most=3) == []


def test_weights_that_do_not_move(tmp_path):
    cfg = small(tmp_path, learning_rate=0., max_steps=24, num_train_epochs=9, on_collapse="stop")
    with answers("fine", ended=True): run = train(cfg)
    assert (run.status.state, run.status.step) == ("stopped", 20) and notes(run)["nothing_moves"].status == "fail"
    assert run.status.fix.says("shell").startswith("--learning-rate above 0")
    assert str(run.status.fix).startswith("learning_rate above 0")


def test_a_curve_that_stays_flat(tmp_path):
    run = train(small(tmp_path, learning_rate=1e-8, max_steps=51, num_train_epochs=20, save_steps=100))
    assert notes(run)["flat_loss"].step == 50


def test_a_loss_that_ends_above_its_start(tmp_path):
    "A learning rate twenty times too high, without clipping, for a base that knew its task a little"
    run = train(small_qlora(tmp_path, max_steps=4, learning_rate=.1, lr_scheduler_type="constant", warmup_steps=0,
                            max_grad_norm=1e9))
    finding = notes(run)["worse_than_before"]
    assert finding.status == "warn" and "worse than before training" in finding.says
    assert finding.fix.says("shell").startswith("a lower --learning-rate")


def test_a_loss_counts_as_worse_from_two_standard_errors_on():
    "The quarters vary by .1 around their means: standard errors of .1 / 2**.5, so .1 of their difference"
    def quarters(first, last): return [first - .1, first + .1, *[3.] * 4, last - .1, last + .1]
    assert worse_than_before(quarters(1.1, 1.3)) == []                              # 1.01 * 1.1 + 2 * .1 = 1.311
    for last in (1.33, 1.6): assert [f.check for f in worse_than_before(quarters(1.1, last))] == ["worse_than_before"]
    assert worse_than_before([1.]) == [] and worse_than_before([1., 1.4]) == []    # single values vary by themselves
    assert worse_than_before([1., 1.6])


def test_more_than_a_quarter_of_the_tensors_must_not_stay():
    before = torch.zeros(8)
    def moved(n): return unchanged_weights(before, torch.arange(8) < n, 20)
    assert moved(8) == moved(6) == []
    assert [f.check for f in moved(5)] == ["some_do_not_move"] and "3 of 8" in moved(5)[0].says
    assert [f.check for f in moved(0)] == ["nothing_moves"]


def test_a_loss_is_flat_if_it_falls_by_less_than_half_a_percent():
    def falling(last, n=21): return loss_is_flat([1.] * (n // 3) + [2.] * (n // 3) + [last] * (n - n // 3 * 2))
    assert falling(.994) == [] and [f.check for f in falling(.996)] == ["flat_loss"]
    assert falling(1., n=18) == []   # fewer than 20 lines


def test_the_guards_are_silent_in_a_good_run(trained):
    assert notes(trained) == {}
    receipt = json.loads((trained.path/"receipt.json").read_text())
    figures = receipt["figures"]
    assert receipt["status"] == "ok" and figures["steps"] == 60
    assert figures["versions"]["torch"] == environment()["packages"]["torch"]
    data = json.loads((trained.path/"data.json").read_text())
    assert figures["fingerprint_of_the_labels"] == data["figures"]["train"]["fingerprint"]


def test_a_sample_changes_nothing(tmp_path, undisturbed_qlora):
    "In 4 bits, where bitsandbytes likes to rearrange its weights between training and generation"
    assert weights(train(small_qlora(tmp_path, sample_steps=1))) == weights(undisturbed_qlora)


def test_answers_that_could_not_end_within_the_limit_are_given_more_tokens(tokenizer):
    "The row's own answer takes 40 tokens, and the limit is 16"
    rows = [dict(input_ids=[5] * 10 + [6] * 39 + [2], labels=[-100] * 10 + [6] * 39 + [2])]
    probe = SampleProbe(tokenizer, rows, [2], max_new_tokens=16)
    with patch(DECODING, lambda *args, **how: [Generation("on it goes", 16, False)]): found, = probe(None)
    assert found.says == "none of 1 answers ends within 16 tokens; those of the rows have up to 40"
    assert found.fix.says("shell") == "--max-new-tokens 80"


def test_a_resumed_part_knows_the_losses_from_before(tmp_path):
    "A loss that fell in the first part and stays low in the second is not flat"
    run = train(small(tmp_path, max_steps=8, logging_steps=1, max_time=0., save_steps=4))
    assert run.state == "stopped"
    made = []
    begin = guarding.Guards.on_train_begin
    def watched(self, *args, **how):
        begin(self, *args, **how)
        made.append(list(self.losses))
    with patch.object(guarding.Guards, "on_train_begin", watched): resume(run)
    before = [line["loss"] for line in run.metrics() if "loss" in line][:len(made[0])]
    assert made[0] and made[0] == before and run.state == "finished"


def labelled(tmp_path, n:int=48)->str:
    "Rows whose answer is one of two labels, which no question decides"
    rows = [dict(question=f"{k}?", answer=("yes", "no")[k % 3 == 0]) for k in range(n)]
    file = tmp_path/"labels.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_one_answer_to_all_questions_is_seen_during_training_and_the_loss_is_that_of_an_answer(tmp_path):
    "A finding, and no reason to stop: a model learns how often labels occur before it knows them"
    files = dict(train_file=labelled(tmp_path), eval_fraction=.25, eval_samples=40, task="classify")
    steps = dict(max_steps=8, sample_steps=2, eval_steps=4, logging_steps=2)
    with answers("yes", ended=True): run = train(small(tmp_path, on_collapse="stop", **steps, **files))
    assert run.state == "finished"
    assert notes(run)["one_answer"].says == "12 of 12 answers are 'yes', which is the answer of 8 of these rows"
    assert "nats a token" in notes(run)["format_only"].says
    lines = [line for line in run.metrics() if "eval_loss" in line]
    assert lines and all(line["eval_loss_per_answer"] > line["eval_loss"] for line in lines)
    assert .5 < lines[0]["label_entropy"] < .7
    assert "loss_per_answer" in next(line for line in run.metrics() if "loss" in line)


def test_a_receipt_that_differs_by_rounding_is_decided_by_all_tokens(monkeypatch):
    rows, wrong = [dict(input_ids=[5, 6, 7, 8], labels=[-100, -100, -100, 8])], [False]
    def loss(model, batches, collate, *, supervised):   # one supervised token is rounded, three are not
        is_rounded = wrong[0] or sum(label != -100 for label in batches[0][0]["labels"]) == 1
        return 8.9 if collate == "padded" and is_rounded else 8.7
    monkeypatch.setattr(guarding, "step_loss", loss)
    layouts = dict(flattened="own", padded="padded")
    def made(): return guarding.receipt(None, [rows], layouts, supervised=True, tolerance=.02)
    assert made().status == "ok" and made().figures["loss_padded"] == 8.9
    wrong[0] = True
    assert made().status == "warn"
