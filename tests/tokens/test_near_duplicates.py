"""Rows that nearly repeat others: which are left out, which are not, and questions that should be new."""
import json
import re
import subprocess

import numpy as np
import pytest

from sft_nb.base.report import ConfigError
from sft_nb.config.load import load_config
from sft_nb.extras.near_duplicates import benchmark_leaks, find_near, held_out_twins, near_duplicates, parts_of_words
from sft_nb.panels.rows import DataPanel
from sft_nb.tokens.conversations import source_weights
from sft_nb.tokens.prepare import prepare

SYLLABLES = "ka lo mi nu pe ra so ti va zo bren dok fal gim hur jat".split()
WORDS = [a + b + c for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES]


def text(seed:int, n:int=40)->str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, n))


def changed(words:str, k:int=2)->str:
    words = words.split()
    for at in np.random.default_rng(len(words)).choice(len(words), k, replace=False): words[at] = "another"
    return " ".join(words)


def rows(*pairs, **how):
    made = [dict(question=q, answer=a) for q, a in pairs]
    return prepare(load_config(task="chat", eval_samples=0, max_length=2048, **how), train=made)


def repeats(data, **how)->list: return np.flatnonzero(near_duplicates(data.train, **how) >= 0).tolist()


FEW = [(text(k), text(100 + k, 20)) for k in range(30)]


def test_a_few_changed_words_are_found_and_the_first_is_kept():
    again = [(changed(FEW[4][0]), FEW[4][1]), (FEW[9][0], changed(FEW[9][1], 1)), FEW[2]]
    data = rows(*FEW, *again)
    assert repeats(data) == [30, 31] and repeats(data, exact=True) == [30, 31, 32]
    assert near_duplicates(data.train)[[30, 31]].tolist() == [4, 9]
    assert repeats(data, most=30) == []
    assert repeats(rows(*again, *FEW)) == [7, 12]   # whatever the order, the later of two


def test_rows_that_differ_in_what_counts_are_kept():
    long = text(7, 200)
    templates = [(f"{long} {text(k, 24)}", f"{k}") for k in range(30)]   # a long instruction and a short input
    assert repeats(rows(*templates)) == []
    other_answers = [(FEW[3][0], text(200, 20)), (changed(FEW[5][0]), "yes"), (FEW[6][0], FEW[7][1])]
    assert repeats(rows(*FEW, *other_answers)) == []
    labels = [(f"{WORDS[k % 7]} {WORDS[k % 5]}", ("yes", "no")[k % 2]) for k in range(35)]
    assert repeats(rows(*labels), exact=True) == []


def test_they_are_left_out_counted_and_kept():
    again = (changed(FEW[4][0]), FEW[4][1])
    data = rows(*FEW, again, FEW[2], drop_near_duplicates=.8)
    assert data.train.n_kept == 30 and data.train.reasons == {"near duplicate of an earlier row": 2}
    assert [d["row"]["question"] for d in data.dropped] == [again[0], FEW[2][0]]
    assert {d["kind"] for d in data.dropped} == {"near_duplicate"}
    assert "left out as requested: 2 near duplicates of an earlier row" in data.report.text(everything=True)
    assert rows(*FEW, drop_near_duplicates=.8).train.fingerprint == rows(*FEW).train.fingerprint
    assert rows(*FEW, again, drop_near_duplicates=.8).train.fingerprint == rows(*FEW).train.fingerprint


def test_what_is_lower_is_found_at_a_lower_threshold():
    again = (changed(FEW[4][0], 8), FEW[4][1])
    data = rows(*FEW, again)
    assert repeats(data) == [] and repeats(data, threshold=.5) == [30]


def test_copies_by_weight_are_not_dropped_again():
    with pytest.raises(ConfigError, match="drop_near_duplicates: a weight of 2 repeats rows"):
        source_weights(load_config(train_file=("a.jsonl",), train_weights=(2.,), drop_near_duplicates=.8))


def test_findings_name_a_row_and_what_to_do():
    data = rows(*FEW, (changed(FEW[4][0]), FEW[4][1]))
    assert str(find_near(data)[0]) == (
        "! near_duplicates: 1 of 31 examples nearly repeat an earlier one, as train rows row 31 repeats train "
        "rows row 5; 30 would remain without repetitions  Fix: drop_near_duplicates=0.8")
    few = [(changed(q, k), a) for q, a in FEW[:6] for k in (1, 2)]
    found = find_near(rows(*FEW[:6], *few))[0]
    assert "12 of 18" in found.says and "; 6 would remain" in found.says and not found.fix.settings
    assert "add rows to train_file that differ from these" in str(found.fix)
    many = [(text(k), text(1000 + k, 20)) for k in range(150)]
    assert [f.status for f in find_near(rows(*many, (changed(many[4][0]), many[4][1])))] == ["ok"]   # 1 of 151
    held_out = [dict(question=changed(FEW[8][0]), answer="?"), dict(question=text(999), answer="?")]
    both = prepare(load_config(task="chat"), train=[dict(question=q, answer=a) for q, a in FEW], eval=held_out)
    leak, = find_near(both)
    assert leak.status == "warn" and "1 held-out question of 2 nearly stands in the training rows, as " in str(leak)
    assert "as that of eval rows row 1 in train rows row 9  Fix: take them out of train_file or eval_file" in str(leak)


def test_rows_held_out_from_a_file_are_named_by_their_lines(tmp_path):
    file = tmp_path/"rows.jsonl"
    lines = [(q, a) for q, a in FEW for q in (q, changed(q))]
    file.write_text("".join(json.dumps(dict(question=q, answer=a)) + "\n" for q, a in lines))
    found, = [f for f in find_near(prepare(load_config(task="chat", train_file=str(file), eval_fraction=.2)))
              if f.check == "held_out_nearly"]
    assert re.search(r"as that of rows.jsonl line \d+ in rows.jsonl line \d+$", found.says), found
    fix = str(found.fix)   # a command that lists the training rows, and a setting that leaves them out
    assert re.fullmatch(r"sed -n '?[\dp;]+'? .*/rows.jsonl > leaks.jsonl, then drop_rows leaks.jsonl", fix), fix
    command, _, _ = fix.partition(",")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    cleaned = load_config(task="chat", train_file=str(file), eval_fraction=.2, drop_rows=str(tmp_path/"leaks.jsonl"))
    assert "held_out_nearly" not in [f.check for f in find_near(prepare(cleaned))]


def test_a_held_out_question_with_another_number_and_the_same_answer():
    "What a shop answers word by word; other answers, other questions and short answers are no leak"
    late = "We are sorry. Your parcel leaves our warehouse tomorrow, and you get a link to follow it by mail."
    def mail(k, text, answer): return dict(question=f"Order {k}: {text}", answer=answer)
    asked = ["it has not arrived", "can I send it back"]
    train = [mail(k, asked[0], late) for k in range(30)] + [mail(k, "how many", "two") for k in range(30)]
    held_out = [mail(91, asked[0], late), mail(92, asked[1], late), mail(93, asked[0], late + " Sorry."),
                mail(94, "how many", "two"), mail(3, asked[0], late)]
    data = prepare(load_config(task="chat"), train=train, eval=held_out)
    assert held_out_twins(data) == [(0, 0)]   # the last one is the same prompt, which another check finds
    found = {f.check: f for f in find_near(data)}
    assert "1 held-out question of 5 stands in the training rows with other numbers" in found["held_out_numbers"].says
    twice = [mail(k, "are you a bot", f"No, {by} a small shop by the river writes to you.") for by in ("we of", "I of")
             for k in range(4)]
    data = prepare(load_config(task="chat"), train=twice, eval=[mail(7, "are you a bot", twice[5]["answer"])])
    assert held_out_twins(data) == [(0, 4)]   # each number has both answers
    days = [mail(k, "how late is it", f"It is late by {k % 7} days. We are sorry that you wait.") for k in range(30)]
    assert held_out_twins(prepare(load_config(task="chat"), train=days[:20], eval=days[20:])) == []   # numbers matter
    texts = prepare(load_config(task="chat"), train=[dict(text=f"{k} {late}") for k in (1, 2)],
                    eval=[dict(text=f"3 {late}")])
    assert held_out_twins(texts) == []   # there is no question


def test_a_benchmark_in_any_format(tmp_path, capsys):
    train = tmp_path/"rows.jsonl"
    train.write_text("".join(json.dumps(dict(question=q, answer=a)) + "\n" for q, a in FEW))
    benchmark = tmp_path/"benchmark.jsonl"
    lines = [dict(problem=changed(FEW[1][0])), dict(problem=text(500)), dict(problem=FEW[3][0])]
    benchmark.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = prepare(load_config(task="chat", train_file=str(train), eval_samples=0))
    leaks, n = benchmark_leaks(data, [benchmark])
    assert n == 3 and [k for _, k in leaks] == [1, 3] and leaks[0][0] == "benchmark.jsonl line 1"
    from sft_nb.cli import main
    args = ["data", "--train-file", str(train), "--eval-samples", "0", "--benchmark", str(benchmark)]
    assert main(args) == 0
    assert "2 of 3 rows are nearly asked in the training" in " ".join(capsys.readouterr().out.split())
    assert main([*args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["benchmark"]["status"] == "warn"


def test_a_panel_lists_them():
    data = rows(*FEW, (changed(FEW[4][0]), FEW[4][1]))
    panel = DataPanel(data)
    assert ("near duplicates", "near duplicates") in panel.facet.options
    panel.facet.value = "near duplicates"
    entry, = panel.state.listed()
    assert (entry.row, entry.says) == (31, "nearly row 5") and panel.state.to_dict()["facets"]["near duplicates"] == 1


def test_numbers_that_a_vocabulary_leaves_out_before_an_added_token():
    class WithGap:
        added_tokens_decoder = {9: "<|end|>"}
        def __len__(self): return 4
        def convert_ids_to_tokens(self, ids): return [{0: "a", 1: "\u0120b", 9: "<|end|>"}.get(i) for i in ids]
    assert parts_of_words(WithGap()).tolist()[0] == [True, False, *[False] * 8]
