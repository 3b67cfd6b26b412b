"""The same rows are the same data whatever holds them, and a broken file is an error of ours."""
import csv, gzip, json, random

import datasets, pandas, pyarrow, pyarrow.parquet, pytest
from conftest import shared
from hypothesis import HealthCheck, given, settings as how, strategies as st

from sft_nb.config import load_config
from sft_nb.report import SftError
from sft_nb.rows.sources import SUFFIXES, file_source, open_rows, read_rows
from sft_nb.tokens.prepare import prepare


def pairs(n):
    r = random.Random(0)
    return [dict(question=f"{k}: {r.randint(0, 99)} and {r.randint(0, 99)}?", answer=f"#### {r.randint(0, 99)}")
            for k in range(n)]


def fingerprint(tokenizer, train=None, **settings):
    return prepare(load_config(eval_samples=0, **settings), tokenizer, train=train).train.fingerprint


def write_table(path, rows, delimiter, quoting):
    with path.open("w", newline="") as f:
        table = csv.DictWriter(f, ["question", "answer"], delimiter=delimiter, quoting=quoting)
        table.writeheader()
        table.writerows(rows)


def test_all_files_of_the_same_rows_are_the_same_data(tmp_path, tokenizer):
    rows = pairs(50)
    lines = "".join(json.dumps(r) + "\n" for r in rows)
    (tmp_path/"a.jsonl").write_text(lines)
    (tmp_path/"b.json").write_text(json.dumps(rows))
    (tmp_path/"c.json").write_text(json.dumps(dict(data=rows)))
    write_table(tmp_path/"d.csv", rows, ",", csv.QUOTE_MINIMAL)
    write_table(tmp_path/"e.tsv", rows, "\t", csv.QUOTE_NONE)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path/"f.parquet")
    with gzip.open(tmp_path/"g.jsonl.gz", "wt") as f: f.write(lines)
    prints = {p.name: fingerprint(tokenizer, train_file=str(p)) for p in sorted(tmp_path.iterdir())}
    held = dict(
        list=rows, generator=(r for r in rows), Dataset=datasets.Dataset.from_list(rows),
        streamed=datasets.IterableDataset.from_generator(lambda: iter(rows)))
    prints |= {name: fingerprint(tokenizer, train, task="chat") for name, train in held.items()}
    assert len(prints) == 11 and len(set(prints.values())) == 1, prints


def test_a_data_frame_is_rows(tokenizer):
    assert fingerprint(tokenizer, pandas.DataFrame(pairs(5))) == fingerprint(tokenizer, pairs(5))


def test_med_nli_is_read_without_quoting():
    source = file_source(shared("data/med_nli/MED.tsv"))
    assert sum(1 for _ in source) == 5382


def test_a_hub_dataset_is_named_with_its_split(monkeypatch):
    asked = []

    def load(*args, **kw):
        asked.append((args, kw))
        return datasets.Dataset.from_list(pairs(3))

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("openai/gsm8k", "openai/gsm8k:test", "openai/gsm8k:main:test"): assert len(read_rows(name)) == 3
    assert asked == [
        (("openai/gsm8k", None), dict(split="train")),
        (("openai/gsm8k", None), dict(split="test")),
        (("openai/gsm8k", "main"), dict(split="test"))]


def test_a_hub_that_cannot_be_reached_is_an_error_of_ours(monkeypatch):
    def load(*_, **__): raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(SftError, match="dataset 'openai/gsm8k'.*ConnectionError: no route"): open_rows("openai/gsm8k")


PIECES = [b'{"question": "a", "answer": "b"}', b"\n", b"{", b"}", b"[", b"]", b'"', b",", b"\t", b"question", b"\xff",
          b"\x00", b"\r", b"PAR1", b"\xef\xbb\xbf", b"1", b"null", b'{"a": 1}', b"[" * 3000, b"\x1f\x8b"]
contents = st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join) | st.binary(max_size=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("f")


@given(contents, st.sampled_from([*SUFFIXES, ".jsonl.gz", ".csv.gz"]))
@how(max_examples=8000, deadline=None, suppress_health_check=list(HealthCheck))
def test_malformed_files_are_errors_of_ours(folder, content, suffix):
    "8000 files"
    file = folder/f"rows{suffix}"
    file.write_bytes(content)
    try: rows = read_rows(file)
    except SftError as e: assert "rows" in str(e) and "Fix:" in str(e)
    else: assert all(isinstance(r, dict) for r in rows.values())
