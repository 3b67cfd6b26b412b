"""Every row is accounted for, whatever file it comes from and whatever is wrong with it."""
import csv, gzip, json, random, shutil

import pytest
from conftest import shared
from hypothesis import HealthCheck, given, settings as how, strategies as st

from sft_nb.config import load_config
from sft_nb.data import prepare, task_of
from sft_nb.formats import FORMATS
from sft_nb.labels import encode_prompts, load_tokenizer
from sft_nb.report import ConfigError, SftError
from sft_nb.rows import SUFFIXES, file_source, open_rows, read_rows


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def pairs(n, seed=0):
    r = random.Random(seed)
    return [dict(question=f"{k}: {r.randint(0, 99)} and {r.randint(0, 99)}?" + " well" * r.randint(0, 30), answer=f"#### {r.randint(0, 99)}" + " so" * r.randint(0, 30)) for k in range(n)]


def no_eval(**kw): return load_config(eval_samples=0, **kw)


# figures of real rows

def test_gsm8k_in_qwen_tokens_has_its_known_figures():
    "77.4% of the training rows are longer than 128 tokens of question and answer; 2 rows than 512"
    cfg = load_config("gsm8k", tokenizer=str(shared("tokenizers/qwen3")), train_file=str(shared("data/gsm8k/train.jsonl")), eval_samples=0)
    data = prepare(cfg)
    assert (data.train.n_read, data.train.n_kept) == (7473, 7471)
    assert [d["reason"] for d in data.dropped] == ["longer than max_length 512"] * 2
    assert abs(sum(n > 128 for n in data.train.lengths) / 7473 - .774) < .01


REAL = [("qwen3", "qwen3_training.jinja"), ("qwen3", "qwen2_5.jinja"), ("smollm2", None), ("gpt2", None), ("mistral-v3-hf", None), ("phi-3-hf", None), ("oasst-tiny", None)]

@pytest.mark.parametrize("name,template", REAL)
def test_real_rows_through_real_tokenizers(name, template):
    "GSM8K with a chat template that trl ships and without one: prompts are those of inference, one end, one BOS"
    from pathlib import Path
    import trl
    rows = [json.loads(l) for l in shared("data/gsm8k/train.jsonl").open()][:300]
    cfg = no_eval(tokenizer=str(shared(f"tokenizers/{name}")), max_length=2000, chat_template=str(Path(trl.__file__).parent/"chat_templates"/template) if template else None)
    tok = load_tokenizer(cfg)
    data = prepare(cfg, tok, train=rows)
    assert len(data.train.tokens) == 300 and data.train.duplicates() == 0
    for x, row in zip(data.train.tokens, rows):
        ids, labels = x["input_ids"], x["labels"]
        n = next(i for i, l in enumerate(labels) if l != -100)
        assert encode_prompts([[dict(role="user", content=row["question"])]], tok)[0] == ids[:n]
        assert tok.decode(labels[n:]).endswith(row["answer"] + tok.eos_token)
        assert labels[-1] == tok.eos_token_id and labels.count(tok.eos_token_id) == 1
        if tok.bos_token_id not in (None, tok.eos_token_id): assert ids.count(tok.bos_token_id) == (ids[0] == tok.bos_token_id)


def test_the_prompt_is_a_prefix_where_the_tokenizer_alone_would_not_make_it_one():
    "Without a separator the tokens of the question are no prefix of those of question + answer in 75 of the first 2000 rows; here they always are"
    rows = [json.loads(l) for l in shared("data/gsm8k/train.jsonl").open()][:2000]
    cfg = no_eval(tokenizer=str(shared("tokenizers/qwen3")), prompt_separator="", max_length=2000)
    tok = load_tokenizer(cfg)
    together = tok([r["question"] + r["answer"] for r in rows])["input_ids"]
    alone = tok([r["question"] for r in rows])["input_ids"]
    assert sum(t[:len(a)] != a for t, a in zip(together, alone)) == 75
    for x, a, r in zip(prepare(cfg, tok, train=rows).train.tokens, alone, rows):
        assert x["input_ids"][:len(a)] == a and x["labels"][:len(a)] == [-100] * len(a) and tok.decode(x["labels"][len(a):]) == r["answer"] + tok.eos_token


def test_a_text_that_carries_its_own_bos_gets_no_second_one():
    "The 100 rows of this sample begin with a literal <s> and end with </s>; the plain tokenizer makes [1, 1, ...] of all of them"
    file, name = shared("data/mistral_nli_sample/sample_ft.jsonl"), str(shared("tokenizers/mistral-v3-hf"))
    tok = load_tokenizer(load_config(tokenizer=name))
    assert sum(tok(json.loads(l)["text"])["input_ids"][:2] == [1, 1] for l in file.open()) == 100
    data = prepare(no_eval(tokenizer=name, train_file=str(file), max_length=1000), tok)
    assert all(x["input_ids"].count(1) == 1 and x["input_ids"][0] == 1 and x["labels"][0] == -100 for x in data.train.tokens)
    assert all(x["input_ids"].count(tok.eos_token_id) == 1 and x["labels"][-1] in (tok.eos_token_id, tok.convert_tokens_to_ids("\u2581")) for x in data.train.tokens)
    answers = prepare(no_eval(tokenizer=name, train_file=str(file), max_length=1000, response_template="[/INST]"), tok)
    first = answers.train.tokens[0]
    assert tok.decode([l for l in first["labels"] if l != -100]).strip().startswith("{")


ALL = dict(gsm8k="gsm8k/train.jsonl", nli="mistral_nli_sample/sample_ft.jsonl", units="unit_conversion_deepmind/train.jsonl", chats="fastchat_chat/dummy_conversation.json", tools="glaive_toolcall/glaive_toolcall_en_demo.json")

@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tokenizer,template", [("qwen3", "qwen3.jinja"), ("smollm2", None), ("mistral-v3-hf", None)])
def test_every_real_set_of_a_known_format_goes_in(name, tokenizer, template):
    from pathlib import Path
    import trl
    file = shared("data/" + ALL[name])
    cfg = no_eval(tokenizer=str(shared(f"tokenizers/{tokenizer}")), train_file=str(file), max_length=4096, chat_template=str(Path(trl.__file__).parent/"chat_templates"/template) if template else None, max_samples=300)
    data = prepare(cfg)
    assert data.train.n_read == data.train.n_kept + data.train.meta["count"].get("rows dropped", 0) and data.train.n_kept > .9 * data.train.n_read
    assert next(f for f in data.report.findings if f.check == "train_ends").status == "ok" or name == "nli"


def test_tool_calls_are_learned_also_where_the_template_has_no_place_for_them(tokenizer):
    rows = json.loads(shared("data/glaive_toolcall/glaive_toolcall_en_demo.json").read_text())
    row = next(r for r in rows if any(m["from"] == "function_call" for m in r["conversations"]))
    name = json.loads(next(m["value"] for m in row["conversations"] if m["from"] == "function_call"))["name"]
    data = prepare(no_eval(max_length=10_000), tokenizer, train=[row])
    learned = [tokenizer.decode([l for l in x["labels"] if l != -100]) for x in data.train.tokens]
    assert any(f'"name": "{name}"' in l for l in learned) and name in tokenizer.decode(data.train.tokens[0]["input_ids"])


# formats and files

def test_all_spellings_of_a_conversation_are_the_same_tokens(tmp_path, tokenizer):
    talk = [dict(role="user", content="1+1?"), dict(role="assistant", content="2")]
    rows = [dict(messages=talk), dict(conversations=[{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]), dict(instruction="1+1?", input="", output="2"), dict(prompt="1+1?", completion="2"),
            dict(prompt=talk[:1], completion=talk[1:]), dict(prompt="1+1?", response="2"), dict(question="1+1?", answer="2")]
    ids = prepare(no_eval(), tokenizer, train=[rows[0]]).train.tokens[0]
    data = prepare(no_eval(task="chat"), tokenizer, train=rows + [dict(input_ids=ids["input_ids"], labels=ids["labels"])])
    assert all(x == ids for x in data.train.tokens) and len(data.train.tokens) == 8
    assert tokenizer.decode([l for l in ids["labels"] if l != -100]) == "2<|im_end|>"


def test_all_files_of_the_same_rows_are_the_same_data(tmp_path, tokenizer):
    import datasets, pyarrow, pyarrow.parquet
    rows = pairs(50)
    write(tmp_path/"a.jsonl", rows)
    (tmp_path/"b.json").write_text(json.dumps(rows))
    (tmp_path/"c.json").write_text(json.dumps(dict(data=rows)))
    for name, quoting in (("d.csv", csv.QUOTE_MINIMAL), ("e.tsv", csv.QUOTE_NONE)):
        with (tmp_path/name).open("w", newline="") as f:
            w = csv.DictWriter(f, ["question", "answer"], delimiter="," if name[0] == "d" else "\t", quoting=quoting)
            w.writeheader(), w.writerows(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path/"f.parquet")
    with gzip.open(tmp_path/"g.jsonl.gz", "wt") as f: f.write((tmp_path/"a.jsonl").read_text())
    prints = {p.name: prepare(no_eval(train_file=str(p)), tokenizer).train.fingerprint for p in sorted(tmp_path.iterdir())}
    prints |= {"list": prepare(no_eval(task="chat"), tokenizer, train=rows).train.fingerprint, "Dataset": prepare(no_eval(task="chat"), tokenizer, train=datasets.Dataset.from_list(rows)).train.fingerprint,
               "generator": prepare(no_eval(task="chat"), tokenizer, train=(r for r in rows)).train.fingerprint, "streamed": prepare(no_eval(task="chat"), tokenizer, train=datasets.IterableDataset.from_generator(lambda: iter(rows))).train.fingerprint}
    assert len(prints) == 11 and len(set(prints.values())) == 1, prints


def test_med_nli_is_read_without_quoting():
    source = file_source(shared("data/med_nli/MED.tsv"))
    assert sum(1 for _ in source) == 5382


def test_a_hub_dataset_is_named_with_its_split(monkeypatch):
    import datasets
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **kw: asked.append((a, kw)) or datasets.Dataset.from_list(pairs(3)))
    for name in ("openai/gsm8k", "openai/gsm8k:test", "openai/gsm8k:main:test"): assert len(read_rows(name)) == 3
    assert asked == [(("openai/gsm8k", None), dict(split="train")), (("openai/gsm8k", None), dict(split="test")), (("openai/gsm8k", "main"), dict(split="test"))]


def test_a_hub_that_cannot_be_reached_is_an_error_of_ours(monkeypatch):
    import datasets
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **kw: (_ for _ in ()).throw(ConnectionError("no route")))
    with pytest.raises(SftError, match="dataset 'openai/gsm8k'.*ConnectionError: no route"): open_rows("openai/gsm8k")


def test_files_are_mixed_by_weight(tmp_path, tokenizer):
    a, b = write(tmp_path/"a.jsonl", pairs(100)), write(tmp_path/"b.jsonl", pairs(400, seed=1))
    count = lambda **kw: prepare(no_eval(train_file=(a, b), **kw), tokenizer).train.n_read
    assert count() == 500 and count(train_weights=(3., 1.)) == 700 and 150 < count(train_weights=(1., .25)) - 0 < 250
    assert count(train_weights=(1., .25)) == count(train_weights=(1., .25))


def test_a_cut_share_is_no_training_row_and_duplicates_stay_together(tmp_path, tokenizer):
    rows = pairs(300)
    random.Random(3).shuffle(twice := rows + rows)
    data = prepare(load_config(train_file=write(tmp_path/"a.jsonl", twice), eval_fraction=.2, eval_samples=1000), tokenizer)
    assert data.train.n_read + data.eval.n_read == 600 and 60 < data.eval.n_read < 180 and data.eval.n_read % 2 == 0
    assert next(f for f in data.report.findings if f.check == "held_out").status == "ok"
    assert data.train.duplicates() == data.train.n_read // 2


def test_held_out_rows_that_are_trained_on_are_found(tmp_path, tokenizer):
    a = write(tmp_path/"a.jsonl", [dict(question="1+1?", answer="2"), dict(question="1+2?", answer="3")])
    data = prepare(load_config(train_file=a, eval_file=a), tokenizer)
    finding = next(f for f in data.report.findings if f.check == "held_out")
    assert (finding.status, finding.says[:9]) == ("warn", "2 held-ou")


# length, filters, account

def test_every_row_is_kept_cut_or_dropped_with_its_reason(tokenizer):
    rows = pairs(200) + [dict(question="?", answer=" "), dict(question="Q " * 300, answer="A")]
    for on_long in ("drop", "cut", "split"):
        s = prepare(no_eval(task="chat", max_length=60, min_length=12, on_long=on_long), tokenizer, train=rows).train
        assert s.n_read == 202 == s.n_kept + len(s.dropped) and sum(s.meta["reasons"].values()) == len(s.dropped)
        assert all(d["row"] == rows[int(d["where"].split()[-1]) - 1] and d["reason"] for d in s.dropped)
        assert all(12 <= n <= 60 for n in s.lengths) and (s.stats["learn"] > 0).all() or on_long == "split"
        whole = prepare(no_eval(task="chat", max_length=100_000), tokenizer, train=rows).train
        if on_long != "split": assert int(s.lengths.sum()) + s.meta["count"]["tokens lost"] == int(whole.lengths.sum()) + sum(d["tokens"] for d in whole.dropped)
        assert bool(s.cut) == (on_long != "drop")


def test_cutting_the_start_keeps_the_answers(tokenizer):
    rows = [dict(question="long " * 50, answer="#### 7")]
    x = prepare(no_eval(task="chat", max_length=30, on_long="cut", cut_side="start"), tokenizer, train=rows).train.tokens[0]
    assert len(x["input_ids"]) == 30 and tokenizer.decode([l for l in x["labels"] if l != -100]) == "#### 7<|im_end|>"
    end = prepare(no_eval(task="chat", max_length=30, on_long="cut"), tokenizer, train=[dict(question="hm", answer="7 " * 50)])
    assert next(f for f in end.report.findings if f.check == "train_ends").status == "warn" and "1 of 1" in str(end.report)
    with pytest.raises(SftError, match="none is left: 1 prompt longer than max_length 30"): prepare(no_eval(task="chat", max_length=30, on_long="cut"), tokenizer, train=rows)


def test_a_turn_that_is_left_out_is_counted_though_its_row_stays(tokenizer):
    "A template that gives one example a turn, and a last turn that is too long"
    tok = load_tokenizer(load_config())
    tok.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last or m.role == 'user' else '...' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    talk = [dict(role="user", content="a"), dict(role="assistant", content="b"), dict(role="user", content="c"), dict(role="assistant", content="d " * 90)]
    data = prepare(no_eval(max_length=60), tok, train=[dict(messages=talk)])
    assert len(data.train.tokens) == 1 and data.train.n_kept == 1 and data.train.meta["reasons"] == {"a turn longer than max_length 60": 1}
    assert [d["reason"] for d in data.dropped] == ["a turn longer than max_length 60"] and data.report.figures["train: rows dropped"] == 0
    assert next(f for f in data.report.findings if f.check == "train_dropped").status == "warn"


def test_lines_that_cannot_be_read_are_left_out_when_asked(tmp_path, tokenizer):
    (tmp_path/"a.jsonl").write_text('{"question": "1?", "answer": "2"}\n{"question":\n5\n')
    (tmp_path/"b.csv").write_text("question,answer\n1?,2\n1,2,3\n")
    for name, bad in (("a.jsonl", ["a.jsonl line 2", "a.jsonl line 3"]), ("b.csv", ["b.csv line 3"])):
        with pytest.raises(SftError, match=bad[0]): prepare(no_eval(train_file=str(tmp_path/name)), tokenizer)
        data = prepare(no_eval(train_file=str(tmp_path/name), on_bad_row="drop"), tokenizer)
        again = prepare(no_eval(train_file=str(tmp_path/name), on_bad_row="drop"), tokenizer)   # found again
        assert data.train.n_kept == 1 and [d["where"] for d in data.dropped] == bad and again.train.row(0) == data.train.row(0)


def test_what_a_small_file_or_two_settings_at_once_say(tmp_path, tokenizer):
    a = write(tmp_path/"a.jsonl", pairs(4))
    with pytest.raises(SftError, match="none of the rows falls into a held-out share of 0.001"): prepare(load_config(train_file=a, eval_fraction=.001), tokenizer)
    with pytest.raises(ConfigError, match="eval_file is set too"): prepare(load_config(train_file=a, eval_file=a, eval_fraction=.1), tokenizer)
    foreign = load_tokenizer(load_config())
    foreign.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    data = prepare(no_eval(), foreign, train=[*pairs(3), dict(messages=[dict(role="user", content="a"), dict(role="assistant", content="b"), dict(role="user", content="bye")])])
    assert {"template_end", "train_more"} <= {f.check for f in data.report.findings if f.status == "warn"} and "<|eot_id|>" in str(data.report)


def test_a_data_frame_is_rows(tokenizer):
    import pandas
    assert prepare(no_eval(), tokenizer, train=pandas.DataFrame(pairs(5))).train.fingerprint == prepare(no_eval(), tokenizer, train=pairs(5)).train.fingerprint


def test_a_split_row_loses_nothing(tokenizer):
    s = prepare(no_eval(task="chat", max_length=30, on_long="split"), tokenizer, train=[dict(text="word " * 200)]).train
    assert len(s.tokens) > 5 and s.meta["count"]["tokens lost"] == len(s.tokens) - 1 and len(s.cut) == 1   # the first token of each piece is read, not learned
    assert sum(s.lengths) == sum(prepare(no_eval(task="chat", max_length=10_000), tokenizer, train=[dict(text="word " * 200)]).train.lengths)


def test_duplicates_are_dropped_when_asked_and_counted_when_not(tokenizer):
    rows = pairs(20) * 3
    plain, once = (prepare(no_eval(task="chat", drop_duplicates=d), tokenizer, train=rows) for d in (False, True))
    assert plain.train.duplicates() == 40 and "train_duplicates" in [f.check for f in plain.report.findings]
    assert once.train.n_kept == 20 and once.train.meta["reasons"] == {"duplicate of an earlier row": 40}


def test_which_answers_are_learned(tokenizer):
    talk = [m for k in range(3) for m in (dict(role="user", content=f"q{k}"), dict(role="assistant", content=f"a{k}"))]
    learned = lambda talk=talk, **kw: [tokenizer.decode([l for l in x["labels"] if l != -100]) for x in prepare(no_eval(task="chat", **kw), tokenizer, train=[dict(messages=talk)]).train.tokens]
    assert learned() == ["a0<|im_end|>a1<|im_end|>a2<|im_end|>"] and learned(train_on_turns="last") == ["a2<|im_end|>"]
    assert learned([m | (dict(train=False) if m["content"] == "a1" else {}) for m in talk]) == ["a0<|im_end|>a2<|im_end|>"]
    assert learned([m | (dict(weight=0) if m["content"] == "a2" else {}) for m in talk], train_on_turns="all") == ["a0<|im_end|>a1<|im_end|>"]
    whole, = learned(train_on_prompt=True)
    assert "q0" in whole and "a2" in whole
    with pytest.raises(SftError, match="none is left: 1 no answer that is trained"): learned([m | (dict(train=False) if m["role"] == "assistant" else {}) for m in talk])


def test_a_bad_row_stops_or_is_counted(tmp_path, tokenizer):
    rows = pairs(5) + [dict(a=1), dict(messages=[dict(role="user", content="?")]), dict(question="\ud800", answer="2"), dict(input_ids=[10**6], labels=[10**6])]
    for bad, says in ((rows[5], "it has the fields a"), (rows[7], "lone surrogate"), (rows[8], "not in the vocabulary")):
        with pytest.raises(SftError, match=says): prepare(no_eval(task="chat"), tokenizer, train=[*rows[:5], bad])
    data = prepare(no_eval(task="chat", on_bad_row="drop"), tokenizer, train=rows)
    assert data.train.n_kept == 5 and [d["where"] for d in data.dropped] == [f"train rows row {k}" for k in (6, 7, 8, 9)]


def test_the_row_behind_an_example(tokenizer):
    rows = pairs(30)
    rows[3] = dict(question="?", answer="")
    s = prepare(no_eval(task="chat"), tokenizer, train=rows).train
    assert s.row(2) == ("train rows row 3", rows[2]) and s.row(3) == ("train rows row 5", rows[4])


# found again

def test_what_was_prepared_is_found_and_what_changed_is_not(tmp_path, tokenizer, monkeypatch):
    import sft_nb.data as d
    work = []
    monkeypatch.setattr(d, "_run", lambda *a, _f=d._run: work.append(1) or _f(*a))
    file = tmp_path/"a.jsonl"
    write(file, pairs(10))
    def runs(tok=tokenizer, **kw):
        work.clear()
        data = prepare(no_eval(train_file=str(file), cache_dir=str(tmp_path/"cache"), **kw), tok)
        return len(work), data.train.fingerprint
    first = runs()
    assert first[0] == 1 and runs() == (0, first[1])
    assert runs(max_length=400)[0] == 1 and runs(train_on_prompt=True)[0] == 1
    other = load_tokenizer(load_config())
    other.chat_template = other.chat_template.replace("<|im_start|>", "<|im_start|> ")
    assert runs(other)[0] == 1 and runs(other)[1] != first[1]
    again = load_tokenizer(load_config())
    assert runs(again) == (0, first[1])
    write(file, pairs(11))
    assert runs()[0] == 1 and runs()[0] == 0
    moved = tmp_path/"b.jsonl"
    shutil.copy(file, moved)
    file = moved
    assert runs()[0] == 0   # the same rows under another name


def test_a_preparation_that_fails_leaves_nothing_behind(tmp_path, tokenizer):
    write(tmp_path/"a.jsonl", [*pairs(2000), dict(a=1)])
    with pytest.raises(SftError): prepare(no_eval(train_file=str(tmp_path/"a.jsonl"), cache_dir=str(tmp_path/"cache")), tokenizer)
    assert list((tmp_path/"cache").rglob("*.arrow")) == []


def test_a_wrong_skeleton_is_noticed_and_everything_done_again(tokenizer, monkeypatch):
    monkeypatch.setattr("sft_nb.labels._read", lambda template: (set(), set()))   # blind, so that only the rows that are done both ways can tell
    tok = load_tokenizer(load_config())
    tok.chat_template = ("{% for m in messages %}{% set x = '' ~ m.content %}<|im_start|>{{ m.role }}{% if x | length < 12 %} short{% endif %}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}")
    rows = [dict(question="a question that is long", answer="an answer that is long"), *[dict(question="q", answer="a")] * 5, *pairs(300)]
    for x, r in zip(prepare(no_eval(task="chat"), tok, train=rows).train.tokens, rows):
        assert tok.decode(x["input_ids"]) == tok.apply_chat_template([dict(role="user", content=r["question"]), dict(role="assistant", content=r["answer"])], tokenize=False).rstrip("\n")


def test_the_size_of_the_batches_changes_nothing(tokenizer, monkeypatch):
    rows = pairs(150) + [dict(question="?", answer="")]
    prints = set()
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr("sft_nb.data._BATCH", size)
        data = prepare(no_eval(task="chat", max_length=70, on_long="cut"), tokenizer, train=(r for r in rows))
        prints.add((data.train.fingerprint, str(data.report)))
    assert len(prints) == 1


# what is malformed never gives another error than ours

junk = st.recursive(st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats(allow_nan=True) | st.text(max_size=8) | st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "Hi", "{", "[]", "\ud800"]),
                    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from("role content from value name arguments function tool_calls train weight text type".split()), x, max_size=4), max_leaves=8)
fields = sorted({f for names in FORMATS.values() for f in names} | {"response", "chosen", "labels", "tools", "system", "history", "input", "completion_mask", "extra"})
bad_rows = st.lists(st.dictionaries(st.sampled_from(fields), junk, max_size=4), min_size=20, max_size=20)
slow = how(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))


@given(bad_rows)
@slow
def test_malformed_rows_are_errors_of_ours(tokenizer, rows):
    "600 times 20 rows"
    work = _work(tokenizer)
    for k, row in enumerate(rows):
        try: batch = next(work.batches([(f"row {k}", row)]))
        except SftError as e:
            assert f"row {k}" in str(e) and "Fix:" in str(e)
            continue
        try: work.encode(batch)
        except SftError as e: assert f"row {k}" in str(e)


_kept = {}
def _work(tokenizer):
    from sft_nb.data import _Prepare
    from sft_nb.labels import Template
    if "w" not in _kept: _kept["w"] = _Prepare(no_eval(task="chat"), task_of(load_config(task="chat")), Template(tokenizer))
    return _kept["w"]


pieces = st.lists(st.sampled_from([b'{"question": "a", "answer": "b"}', b"\n", b"{", b"}", b"[", b"]", b'"', b",", b"\t", b"question", b"\xff", b"\x00", b"\r", b"PAR1", b"\xef\xbb\xbf", b"1", b"null", b'{"a": 1}', b"[" * 3000, b"\x1f\x8b"]), max_size=12).map(b"".join) | st.binary(max_size=60)

@given(pieces, st.sampled_from([*SUFFIXES, ".jsonl.gz", ".csv.gz"]))
@how(max_examples=8000, deadline=None, suppress_health_check=list(HealthCheck))
def test_malformed_files_are_errors_of_ours(tmp_path_factory, content, suffix):
    "8000 files"
    if "f" not in _kept: _kept["f"] = tmp_path_factory.mktemp("f")
    file = _kept["f"]/f"rows{suffix}"
    file.write_bytes(content)
    try: rows = read_rows(file)
    except SftError as e: assert "rows" in str(e) and "Fix:" in str(e)
    else: assert all(isinstance(r, dict) for r in rows.values())
