"""Splits stay apart, separators are detected and columns matched to fields, with realistic files."""
import csv
import json
import random

import pyarrow
import pyarrow.parquet
import pytest
from conftest import shared

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, SftError
from sft_nb.rows.sources import open_rows, read_rows
from sft_nb.tasks.core import get_task, task_of
from sft_nb.tokens.conversations import conversation, read_split, open_split

ARABIC = [("The network is fast.", "الشبكة سريعة."), ("Memory, \"cheap\"; a|b", "ذاكرة، «رخيصة»؛ 12%"),
          ("Code\u200f", "رمز\u200f")]


def read(split:str, task=None, **settings)->list[dict]:
    cfg = load_config(**settings)
    return list(read_split(cfg, task or task_of(cfg), split).values())


def names(split:str, **settings)->list[str]:
    cfg = load_config(task="chat", **settings)
    found = open_split(cfg, get_task("chat"), split)
    return [s.name for s in found.sources] if found else []


def fill(folder, *files):
    for file in files:
        (folder/file).parent.mkdir(parents=True, exist_ok=True)
        (folder/file).write_text(json.dumps(dict(question=f"{file}?", answer="1")) + "\n")
    return str(folder)


DOMAINS = [f"{d}_{s}.jsonl" for d in ("technology", "economic", "education") for s in ("train", "val", "test")]


def test_a_folder_never_mixes_its_splits(tmp_path):
    folder = fill(tmp_path, *DOMAINS)
    assert names("train", train_file=folder) == sorted(n for n in DOMAINS if "train" in n)
    assert names("eval", train_file=folder) == sorted(n for n in DOMAINS if "val" in n)
    assert names("train", data_dir=folder, domain="technology") == ["technology_train.jsonl"]
    assert names("eval", data_dir=folder, domain="technology") == ["technology_val.jsonl"]
    assert names("eval", train_file=folder, eval_file=folder, domain="economic") == ["economic_val.jsonl"]
    assert names("eval", train_file=folder, eval_file=f"{folder}/economic_test.jsonl") == ["economic_test.jsonl"]
    assert list(read_rows(folder)) == [f"{n} line 1" for n in sorted(DOMAINS) if "train" in n]


@pytest.mark.parametrize("files,train,held", [
    (["train.jsonl", "validation.jsonl", "test.jsonl"], ["train.jsonl"], ["validation.jsonl"]),
    (["train.jsonl", "dev.jsonl"], ["train.jsonl"], ["dev.jsonl"]),
    (["train.jsonl", "test.jsonl"], ["train.jsonl"], []),
    (["train/a.jsonl", "train/b.jsonl", "valid/a.jsonl", "test/a.jsonl"], ["a.jsonl", "b.jsonl"], ["a.jsonl"]),
    (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "validation-00000-of-00001.jsonl"],
     ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"], ["validation-00000-of-00001.jsonl"]),
    (["rows.jsonl", "test.jsonl"], ["rows.jsonl"], []),
    (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"], []),
    (["train_a.jsonl", "train_b.jsonl"], ["train_a.jsonl", "train_b.jsonl"], []),
    (["latest.jsonl", "contest.jsonl", "evaluator.jsonl"], ["contest.jsonl", "evaluator.jsonl", "latest.jsonl"], []),
    (["en-ar.train.jsonl", "TEST.jsonl"], ["TEST.jsonl", "en-ar.train.jsonl"], None),
], ids=lambda x: None)
def test_sides_of_a_folder(tmp_path, files, train, held):
    folder = fill(tmp_path, *files)
    if held is None:   # a name ends at its first point
        assert names("train", train_file=folder) == ["en-ar.train.jsonl"]
        return
    assert names("train", train_file=folder) == train and names("eval", train_file=folder) == held


@pytest.mark.parametrize("files,says", [
    (["train.jsonl", "test.jsonl", "all.jsonl"], "all.jsonl is next to train.jsonl"),
    (["val.jsonl", "test.jsonl"], "it has no training file"),
    (["train_test.jsonl", "val.jsonl"], "its name says train and test"),
])
def test_what_could_stand_on_any_side_is_refused(tmp_path, files, says):
    with pytest.raises(SftError, match=says): names("train", train_file=fill(tmp_path, *files))


def test_a_folder_without_validation_files_cannot_be_evaluated_on(tmp_path):
    folder = fill(tmp_path, "train.jsonl", "test.jsonl")
    with pytest.raises(SftError, match="no file in it is called validation"): names("eval", eval_file=folder)
    with pytest.raises(SftError, match="one of technology"): names("train", train_file=fill(tmp_path/"d", *DOMAINS[:3]),
                                                                  domain="medicine")


def test_a_test_file_is_proposed_and_the_hub_is_not_asked_instead(tmp_path, monkeypatch):
    "A folder with train and test, and a task that has its own held-out rows"
    import datasets
    from sft_nb.tokens.prepare import prepare
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    folder = fill(tmp_path, "train.jsonl", "test.jsonl")
    for path in tmp_path.glob("*.jsonl"): path.write_text(json.dumps(dict(question=f"{path.stem}?", answer="#### 2")))
    cfg = load_config(model="tiny", task="gsm8k", train_file=folder)
    with pytest.raises(ConfigError, match="has no validation file, and its test file") as e: prepare(cfg)
    assert e.value.fix.settings == dict(eval_file=f"{folder}/test.jsonl")
    data = prepare(load_config(model="tiny", task="gsm8k", train_file=folder, eval_file=f"{folder}/test.jsonl"))
    assert (data.train.n_kept, data.eval.n_kept) == (1, 1)
    chat = prepare(load_config(model="tiny", task="chat", train_file=folder))   # a task without its own rows
    held_out = next(f for f in chat.report.findings if f.check == "held_out")
    assert held_out.status == "skipped" and held_out.fix.settings == dict(eval_file=f"{folder}/test.jsonl")
    (tmp_path/"valid.jsonl").write_text((tmp_path/"test.jsonl").read_text())
    assert prepare(cfg).eval.n_kept == 1


def test_there_is_one_way_to_hold_out(tmp_path):
    folder = fill(tmp_path, "train.jsonl", "val.jsonl")
    with pytest.raises(ConfigError, match="there is a validation file: val.jsonl"):
        names("train", train_file=folder, eval_fraction=.5)


def write_table(file, rows, separator, quoting):
    with file.open("w", newline="", encoding="utf-8") as f:
        table = csv.writer(f, delimiter=separator, quoting=quoting)
        table.writerows([list(rows[0]), *(list(r.values()) for r in rows)])


@pytest.mark.parametrize("separator", [",", ";", "|", "\t"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_real_rows_come_back_whatever_separates_them(tmp_path, separator, quoting):
    "Commas, semicolons, quotes and line breaks in questions and answers"
    lines = shared("data/gsm8k/train.jsonl").read_text().splitlines()[:400]
    rows = [json.loads(line) for line in lines]
    write_table(tmp_path/"rows.csv", rows, separator, quoting)
    assert list(read_rows(tmp_path/"rows.csv").values()) == rows


@pytest.mark.parametrize("text,columns", [
    ("text\nOne, two; three\n", None), ("a;b\n1,5;2,5\n", ["a", "b"]), ("a,b\n1;5,2;5\n", ["a", "b"]),
    ("q|a\n\"1,2\n3\"|x\n", ["q", "a"]), ("q,a\nx,y\nbroken\n", None),
    ("price, EUR;name\n5;x\n6;y\n", ["price, EUR", "name"]),
    ("a;b\nx;y\nx;y;z\nx;y\n", None), ("a\n1\n", ["a"]), ("", None)])
def test_odd_tables(tmp_path, text, columns):
    (tmp_path/"t.csv").write_text(text)
    if columns: assert [list(r) for r in read_rows(tmp_path/"t.csv").values()][0] == columns
    else:
        with pytest.raises(SftError, match="cells?, and the first|there is no row in it"): read_rows(tmp_path/"t.csv")


def test_a_table_with_quoted_lines_beyond_the_first_look(tmp_path):
    rows = [dict(q=f"{k}\n\"x\"; {k}, {k}|", a=str(k)) for k in range(500)]
    for separator in ",;|\t":
        write_table(tmp_path/"t.csv", rows, separator, csv.QUOTE_MINIMAL)
        assert list(read_rows(tmp_path/"t.csv").values()) == rows


def test_an_object_of_records_is_rows():
    found = read_rows(shared("data/legal_plain_english/all_v1.json"))
    assert len(found) == 446 and all("original_text" in r for r in found.values())


def test_one_object_is_one_row_and_an_object_of_records_is_many(tmp_path):
    file = tmp_path/"x.json"
    for whole, n in (({"question": "1?", "answer": "1"}, 1), ({"a": {"q": 1}, "b": {"q": 2}}, 2), ({"a": {"q": 1}}, 1),
                     ({"a": {"q": 1}, "b": {"r": 2}}, 1), ({"question": {"t": "x"}, "answer": {"t": "y"}}, 1)):
        file.write_text(json.dumps(whole))
        assert len(read_rows(file)) == n, whole


def test_columns_find_their_fields(tmp_path):
    file = tmp_path/"m.jsonl"
    file.write_text(json.dumps(dict(Problem="1+1?", Solution="#### 2", level="easy")) + "\n")
    want = dict(question="1+1?", answer="#### 2", level="easy")
    typed = ("question=Problem", "answer=Solution")
    for fields in (typed, dict(question="Problem", answer="Solution"), None):   # gsm8k knows both names
        assert read("train", task=get_task("gsm8k"), train_file=str(file), fields=fields) == [want]
    for fields in (typed, typed[:1]):
        cfg = load_config(task="arithmetic", train_file=str(file), fields=fields)
        [(place, row)] = open_split(cfg, task_of(cfg), "train")
        if len(fields) == 2: assert row == want
        else:
            with pytest.raises(SftError, match="field answer is missing"): conversation(task_of(cfg), row, place, cfg)
    assert read("train", task=get_task("chat"), train_file=str(file), fields=typed) == [want]
    with pytest.raises(ConfigError, match="there is no field qestion"):
        read("train", task=get_task("gsm8k"), train_file=str(file), fields="qestion=Problem")


@pytest.mark.parametrize("row, task, fields", [
    ({"Ticket Text": "Slow", "Resolution": "Restart"}, "chat", ("question=Ticket Text", "answer=Resolution")),
    ({"ID": 3, "CustomerMessage": "Slow", "agent_reply": "Restart", "Created Date": "2024"}, "chat",
     ("question=CustomerMessage", "answer=agent_reply")),
    ({"utterance": "Slow", "next": "Restart"}, "chat", ("question=utterance", "answer=next")),
    ({"prompt": "Slow", "resolution": "Restart"}, "chat", ("completion=resolution",)),
    ({"input": "Slow", "output": "Restart"}, "chat", ("instruction=input",)),
    ({"sentence": "Hi", "rendering": "مرحبا"}, "translate", ("source=sentence", "target=rendering")),
    ({"article": "Long", "highlights": "Short"}, "gsm8k", ("question=article", "answer=highlights"))])
def test_columns_of_other_names_are_guessed_and_the_guess_works(row, task, fields):
    from sft_nb.tokens.prepare import prepare
    settings = dict(model="tiny", task=task, eval_samples=0)
    with pytest.raises(SftError) as e: prepare(load_config(**settings), train=[row])
    assert e.value.fix.settings == dict(fields=fields)
    assert prepare(load_config(**settings, fields=fields), train=[row]).train.n_kept == 1


@pytest.mark.parametrize("row, into", [
    (dict(en="Good day", de="Guten Tag"), "English to German"),
    (dict(text_fr="Bonjour", text_en="Hello"), "French to English"),
    (dict(id="x7", translation={"pt-BR": "Bom dia", "jpn_Jpan": "おはよう"}), "Portuguese to Japanese"),
    (dict(id="selamat pagi", no="god morgen"), "Indonesian to Norwegian"), (dict(english="Hi", id="x7"), None),
    (dict(english="Hi", german="Hallo", french="Salut"), None), (dict(english="Hi", note="short"), None)])
def test_columns_that_are_languages_are_source_and_target(row, into):
    from sft_nb.tokens.prepare import prepare
    cfg = load_config(model="tiny", task="translate", eval_samples=0)
    if into is None:
        with pytest.raises(SftError, match="fields source, target are missing"): prepare(cfg, train=[row])
        return
    data = prepare(cfg, train=[row])
    assert data.report.figures["rows_are"] == f"translate from {into} (1 row)"
    prompt, answer = conversation(data.task, next(iter(data.train.source))[1], "row 1", cfg)
    assert f"text from {into}:" in prompt["content"]
    assert answer["content"] == [*row.get("translation", row).values()][-1]


def test_a_typo_in_fields_is_named(tmp_path):
    from sft_nb.tokens.prepare import prepare
    file = tmp_path/"mail.csv"
    file.write_text("subject,body,reply,persona\nSlow,It is slow.,Restart it.,Be brief.\n")
    settings = dict(model="tiny", eval_samples=0, train_file=str(file))
    for task in ("chat", "gsm8k"):
        with pytest.raises(SftError, match="line 2: there is no column bodi for question .*did you mean body") as e:
            prepare(load_config(**settings, task=task, fields=("question=bodi", "answer=reply")))
        assert e.value.fix.settings == dict(fields=("question=body", "answer=reply"))
    right = ("question=body", "answer=reply")
    with pytest.raises(SftError, match="no column persna for system"):   # the row could be read without it
        prepare(load_config(**settings, task="chat", fields=(*right, "system=persna")))
    with pytest.raises(ConfigError, match="no row has the column mood for system") as e:
        prepare(load_config(**settings, task="chat", fields=(*right, "system=mood")))
    assert e.value.fix.settings == dict(fields=right)
    with pytest.raises(ConfigError, match="there is no field qestion") as e:
        prepare(load_config(**settings, task="chat", fields=("qestion=body", "answer=reply")))
    assert e.value.fix.settings == dict(fields=right)
    for again in (right[1], "answer=body", "anser=body"):   # the second one would be learned in place of the first
        with pytest.raises(ConfigError, match="answer is given twice|no field anser") as e:
            prepare(load_config(**settings, task="chat", fields=(*right, again)))
        assert e.value.fix.settings == dict(fields=right)
    data = prepare(load_config(**settings, task="chat", fields=("question=bodi", "answer=reply"), on_bad_row="drop"),
                   train=[dict(body="Slow", reply="Restart"), dict(bodi="Slow", reply="Restart")])
    assert data.train.n_kept == 1 and data.train.counts.dropped == 1


def test_translation_by_domain(tmp_path):
    "CSV of two languages in a folder, and files that are conversations already"
    for side, rows in (("train", ARABIC), ("val", ARABIC[:1]), ("test", ARABIC[1:])):
        named = [dict(english=e, arabic=a) for e, a in rows]
        write_table(tmp_path/f"technology_{side}.csv", named, ";", csv.QUOTE_MINIMAL)
    cfg = load_config(task="translate", data_dir=str(tmp_path), domain="technology", fields="source=english")
    with pytest.raises(SftError, match="target"): read_split(cfg, task_of(cfg), "train")
    fields = ("source=english", "target=arabic")
    for how in (dict(fields=fields), {}): check_translation(load_config(
        task="translate", data_dir=str(tmp_path), domain="technology", **how))


def check_translation(cfg):
    task = task_of(cfg)
    rows = list(read_split(cfg, task, "train").values())
    assert [(r["source"], r["target"]) for r in rows] == ARABIC
    system, user, answer = conversation(task, rows[1], "row 2", cfg)
    assert "technology" in system["content"] and "text from English to Arabic" in user["content"]
    assert answer["content"] == ARABIC[1][1]
    assert len(read_split(cfg, task, "eval")) == 1
    talk = dict(messages=[dict(role="system", content="You translate."), dict(role="user", content="Translate: Hi"),
                          dict(role="assistant", content="مرحبا")])
    assert conversation(task, talk, "row 1", cfg) == talk["messages"]
    assert task.score("مرحبا", talk).correct


def test_right_to_left_text_survives_every_kind_of_file_and_the_tokens(tmp_path, tokenizer):
    from sft_nb.tokens.prepare import prepare
    rows = [dict(question=e, answer=a) for e, a in ARABIC]
    (tmp_path/"a.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    (tmp_path/"b.json").write_text(json.dumps(rows))
    write_table(tmp_path/"c.csv", rows, ";", csv.QUOTE_MINIMAL)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path/"d.parquet")
    for file in sorted(tmp_path.iterdir()):
        assert list(read_rows(file).values()) == rows
        ids = prepare(load_config(train_file=str(file)), tokenizer).train.tokens[1]["input_ids"]
        assert rows[1]["answer"] in tokenizer.decode(ids)


def test_meetings_are_a_row_for_each_query_and_held_out_whole():
    file = str(shared("data/qmsum/ALL_test.jsonl"))
    meetings = list(read_rows(file).values())
    cfg = load_config(task="summarize", train_file=file, eval_fraction=.3, max_length=10**6, eval_samples=10**6)
    task = task_of(cfg)
    sides = [list(open_split(cfg, task, split)) for split in ("train", "eval")]
    asked = sum(len(m["general_query_list"]) + len(m["specific_query_list"]) for m in meetings)
    assert len(meetings) == 35 and sum(map(len, sides)) == asked and min(map(len, sides)) > 20
    documents = [{json.dumps(row["document"]) for _, row in side} for side in sides]
    assert not documents[0] & documents[1]
    place, row = sides[0][0]
    user, answer = conversation(task, row, place, cfg)
    assert ", part 1" in place and "[{" not in user["content"] and "speaker" not in user["content"][:200]
    assert task.score(answer["content"], row).figures == dict(rouge1=1., rouge2=1., rougeL=1.)


def test_legal_texts_and_med_need_no_renaming():
    cfg = load_config(task="summarize", train_file=str(shared("data/legal_plain_english/all_v1.json")))
    rows = list(open_split(cfg, task_of(cfg), "train"))
    assert len(rows) == 446
    for place, row in rows[:20]: assert conversation(task_of(cfg), row, place, cfg)[-1]["content"] == row["summary"]
    cfg = load_config(task="nli", train_file=str(shared("data/med_nli/MED.tsv")))
    task = task_of(cfg)
    rows = open_split(cfg, task, "train")
    labels = [conversation(task, row, place, cfg)[-1]["content"][-2] for place, row in rows]
    assert (labels.count("1"), labels.count("0")) == (2705, 2677)


def test_lengths_are_judged_before_anything_is_cut(tokenizer):
    from sft_nb.tokens.prepare import prepare
    rows = [dict(document="word " * n, summary="All words.") for n in (10, 20, 900)]
    data = prepare(load_config(task="summarize", max_length=300), tokenizer, train=rows)
    assert (data.train.n_kept, data.train.counts.dropped, data.train.counts.shortened) == (2, 1, 0)
    assert all("All words." in tokenizer.decode(t["input_ids"]) for t in data.train.tokens)


def test_a_real_model_without_rows_is_refused():
    with pytest.raises(ConfigError, match="there are no rows to train Qwen/Qwen3-4B on"):
        task_of(load_config(model="Qwen/Qwen3-4B"))


def test_rows_of_records_that_cannot_be_read_are_dropped_or_stop(tokenizer):
    from sft_nb.tokens.prepare import prepare
    turns = [dict(speaker="A", content="Hi.")]
    good = dict(meeting_transcripts=turns, general_query_list=[dict(query="?", answer="Hi.")])
    bad = dict(good, general_query_list=[dict(query="?")])
    with pytest.raises(SftError, match="train rows row 2: a query is"):
        prepare(load_config(task="summarize"), tokenizer, train=[good, bad])
    data = prepare(load_config(task="summarize", on_bad_row="drop"), tokenizer, train=[good, bad])
    assert (data.train.n_kept, data.train.counts.dropped) == (1, 1)


def test_a_row_that_cannot_be_read_is_counted_on_one_side(tmp_path):
    from sft_nb.tokens.prepare import prepare
    rows = [json.dumps(dict(question=f"{k}?", answer="1")) for k in range(40)]
    (tmp_path/"rows.jsonl").write_text("\n".join([*rows[:20], "{broken", *rows[20:], "[1]"]) + "\n")
    cfg = load_config(task="chat", train_file=str(tmp_path/"rows.jsonl"), eval_fraction=.25, on_bad_row="drop")
    data = prepare(cfg)
    assert (data.train.counts.dropped, data.eval.counts.dropped) == (2, 0)
    assert data.train.n_read + data.eval.n_read == 42 and data.eval.n_kept > 3


def test_names_of_columns_with_spaces_around_them(tmp_path):
    file = tmp_path/"t.csv"
    file.write_text("id, Ticket Text ,Resolution \n1,Slow,Restart\n")
    rows = read_rows(file)
    assert [*next(iter(rows.values()))] == ["id", "Ticket Text", "Resolution"]
    cfg = load_config(task="chat", train_file=str(file), fields=("question=Ticket Text", "answer=Resolution"))
    assert [*read_split(cfg, task_of(cfg), "train").values()] == [dict(id="1", question="Slow", answer="Restart")]


def test_an_order_of_files_changes_no_side(tmp_path):
    files = DOMAINS[:]
    random.Random(0).shuffle(files)
    fill(tmp_path, *files)
    assert [s.name for s in open_rows(tmp_path, split="eval")] == sorted(n for n in DOMAINS if "val" in n)
