"""Equal rows give equal data from every source, and a broken file raises our own error."""
import csv, gzip, inspect, itertools, json, pathlib, random, shlex

import datasets, pandas, pyarrow, pyarrow.parquet, pytest
from conftest import shared
from hypothesis import HealthCheck, given, settings as how, strategies as st

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, SftError
from sft_nb.rows import files
from sft_nb.rows.files import SUFFIXES, file_source
from sft_nb.rows.sources import hash_to_unit, Mixture, open_rows, read_rows
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


@pytest.mark.parametrize("columns, says", [
    (["question", "question"], "two columns are called 'question'"),
    (pandas.MultiIndex.from_tuples([("a", "question"), ("a", "answer")]), "its columns have several levels")])
def test_a_data_frame_whose_columns_have_no_name_each_is_refused(columns, says):
    "pandas would leave one out, or make rows with tuples as keys"
    frame = pandas.DataFrame([["1+1?", "2"]], columns=columns)
    with pytest.raises(SftError, match=f"train rows: {says}.*Fix: rename them"): open_rows(frame, name="train rows")


def test_a_data_frame_is_rows(tokenizer):
    assert fingerprint(tokenizer, pandas.DataFrame(pairs(5))) == fingerprint(tokenizer, pairs(5))


def test_an_endless_generator_ends_where_no_more_rows_are_wanted(tokenizer):
    asked = []
    def endless():
        for k in itertools.count():
            asked.append(k)
            yield dict(question=f"{k}?", answer=str(k))
    data = prepare(load_config(eval_samples=0, max_samples=100), tokenizer, train=endless())
    assert data.train.n_read == 100 and len(asked) == 100 and data.train.row(99)[1]["answer"] == "99"
    both = prepare(load_config(eval_samples=5, eval_fraction=.2, max_samples=30), tokenizer, train=endless())
    assert (both.train.n_read, both.eval.n_read) == (30, 5)


def test_a_disk_that_takes_no_more_rows_is_an_error_of_ours(monkeypatch):
    source = open_rows((r for r in pairs(3)), name="stream")[0]
    kept = inspect.getclosurevars(source.read).nonlocals["rows"]
    monkeypatch.setattr(kept.file, "flush", lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(SftError, match="it cannot hold more .No space left on device"): list(source)


def saved(folder):
    datasets.Dataset.from_list(pairs(3)).save_to_disk(folder/"saved")
    datasets.DatasetDict(train=datasets.Dataset.from_list(pairs(3))).save_to_disk(folder/"both")
    return folder


def test_what_save_to_disk_wrote_is_read(tmp_path, tokenizer):
    file = str(saved(tmp_path)/"saved")
    assert fingerprint(tokenizer, train_file=file) == fingerprint(tokenizer, pairs(3))
    assert fingerprint(tokenizer, train_file=str(tmp_path/"both/train")) == fingerprint(tokenizer, pairs(3))
    (tmp_path/"saved/dataset_info.json").write_text("{")
    with pytest.raises(SftError, match="written by save_to_disk and cannot be loaded"): open_rows(file)


def refused(*a, **k): raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("name, content, says", [
    ("u.jsonl", '{"question": "1?", "answer": "2"}'.encode("utf-16"), "it is UTF-16 text.*iconv -f utf-16 -t utf-8"),
    ("u.csv", "question,answer\n1,2".encode("utf-16le"), "it is UTF-16LE text"),
    ("p.csv", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0", "it is a PNG image, not text"),
    ("g.csv", gzip.compress(b"a,b\n1,2", mtime=0), "it is packed with gzip, not text.*Fix: mv -n .*g.csv.gz"),
    ("z.csv", b"PK\x03\x04\x14\0\0\0\x08\0", "it is a ZIP archive, or an Excel workbook.*Fix: unzip .*z.csv"),
    ("x.jsonl", b"\xc3\x28\x01\x02\x9f", "it is not text: it holds bytes that no text has"),
    ("u.jsonl.gz", gzip.compress("[]".encode("utf-16"), mtime=0), "it is UTF-16 text.*zcat < .* > .*u.jsonl.gz"),
    ("u.jsonl.GZ", gzip.compress("[]".encode("utf-16"), mtime=0), "mv -n .*zcat < .* > .*u.jsonl.GZ"),
    ("a.jsonl.zst", b"(\xb5/\xfd", "zst files are not supported.*zstd -d"),
    ("a.zip", b"PK", "zip files are not supported.*unzip"),
    ("a.xls", b"PK", "xls is not a supported file type"),
    ("deep/a.jsonl.zst", b"", "zst files are not supported"),
    ("both", None, "a DatasetDict with the splits train; one split.*both/train"),
    ("", None, "the name of the file is empty"),
])
def test_each_file_that_is_not_read_has_its_sentence(tmp_path, name, content, says):
    file = saved(tmp_path)/name if name else ""
    if content is not None:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    if name.startswith("deep"): file = file.parent
    with pytest.raises(SftError, match=says) as e: read_rows(file)
    assert "Fix:" in str(e.value) and len(str(e.value).replace(str(tmp_path), "/data")) <= 300


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.tsv.gz", "a.json.gz", "a.txt.gz", "a.jsonl", "a.csv"])
def test_a_line_that_never_ends_is_read_no_further(tmp_path, name, monkeypatch):
    "A few kilobytes of gzip hold gigabytes"
    monkeypatch.setattr(files, "_MOST_CHARACTERS", 100_000)
    content = b'{"question": "' + b"0" * 300_000
    if ".csv" in name or ".tsv" in name: content = b"question,answer\n" + content
    (tmp_path/name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(SftError, match="has more than 100,000 characters.*Fix: .*head -c 300"): read_rows(tmp_path/name)


@pytest.mark.parametrize("method", ["open", "is_dir"])
def test_a_file_that_may_not_be_read_has_its_sentence(tmp_path, monkeypatch, method):
    (tmp_path/"a.jsonl").write_text("{}")
    monkeypatch.setattr(pathlib.Path, method, refused)
    monkeypatch.setattr("sft_nb.rows.files.open", refused, raising=False)
    def look(): return [s.digest() for s in open_rows(tmp_path/"a.jsonl")]
    for ask in (look, lambda: read_rows(tmp_path/"a.jsonl")):
        with pytest.raises(SftError, match="a.jsonl: it cannot be read .permission denied"): ask()


@pytest.mark.parametrize("rows, says", [
    ([dict(question="1?", answer="2"), None], "rows row 2: this is a NoneType"),
    ([3], "rows row 1: this is an int"),
    (iter([3.5]), "rows row 1: this is a float"),
    (datasets.DatasetDict(train=None, test=None), "a DatasetDict with the splits train, test; one split"),
    (dict(question="1?"), "this is a dict"),
    (3, "this is an int"),
])
def test_what_is_no_list_of_rows_has_its_sentence(rows, says):
    with pytest.raises(SftError, match=says) as e: read_rows(rows)
    assert len(str(e.value)) <= 300


@pytest.mark.parametrize("setting", ["train_file", "eval_file", "ignore_columns"])
def test_an_empty_name_is_refused(setting):
    with pytest.raises(ConfigError, match=f"a name in {setting} is empty"): load_config(**{setting: ""})


def test_arrow_invents_no_key(tmp_path):
    calls = [dict(name="f", arguments=dict(a=1)), dict(name="f", arguments=dict(unit="m"))]
    rows = [dict(messages=[dict(role="assistant", calls=[c])]) for c in calls]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path/"f.parquet")
    assert table.to_pylist() != rows
    for held in (tmp_path/"f.parquet", datasets.Dataset(table)): assert [*read_rows(held).values()] == rows


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


malformed = given(contents, st.sampled_from([*SUFFIXES, ".jsonl.gz", ".csv.gz"]))

@malformed
@how(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
def test_malformed_files_are_errors_of_ours(folder, content, suffix):
    "600 files"
    assert_read_or_refused(folder, content, suffix)

@pytest.mark.soak
@malformed
@how(max_examples=6000, deadline=None, suppress_health_check=list(HealthCheck))
def test_more_malformed_files_are_errors_of_ours(folder, content, suffix):
    "6000 files"
    assert_read_or_refused(folder, content, suffix)

def assert_read_or_refused(folder, content, suffix):
    file = folder/f"rows{suffix}"
    file.write_bytes(content)
    try: rows = read_rows(file)
    except SftError as e: assert "rows" in str(e) and "Fix:" in str(e)
    else: assert all(isinstance(r, dict) for r in rows.values())


def test_a_revision_and_a_slice_of_a_hub_dataset(monkeypatch):
    asked = []

    def load(*args, **kw):
        asked.append((args, kw))
        return datasets.Dataset.from_list(pairs(3))

    monkeypatch.setattr(datasets, "load_dataset", load)
    read_rows("openai/gsm8k@abc:main:train[:20%]")
    assert asked == [(("openai/gsm8k", "main"), dict(split="train[:20%]", revision="abc"))]


def test_the_first_rows_of_a_file(tmp_path):
    (tmp_path/"a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(10)))
    for end, n in (("[:3]", 3), ("[:50%]", 5), ("[:99]", 10)): assert len(read_rows(f"{tmp_path}/a.jsonl{end}")) == n
    three, four = (open_rows(f"{tmp_path}/a.jsonl[:{n}]")[0].digest() for n in (3, 4))
    assert three != four


def test_a_file_of_a_hub_dataset(tmp_path, monkeypatch):
    import huggingface_hub
    (tmp_path/"a.jsonl").write_text(json.dumps(pairs(1)[0]) + "\n")
    asked = []

    def download(*args, **kw):
        asked.append((args, kw))
        if len(asked) > 1: raise OSError("no network")
        return str(tmp_path/"a.jsonl")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert len(read_rows("hf://datasets/u/x@main/sub/a.jsonl")) == 1
    assert asked == [(("u/x", "sub/a.jsonl"), dict(repo_type="dataset", revision="main"))]
    with pytest.raises(SftError, match="cannot be loaded from the hub .no network"):
        read_rows("hf://datasets/u/x/a.jsonl")


def test_so_many_rows_are_held_out(tmp_path):
    (tmp_path/"a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(400)))
    more = dict(train_file=f"{tmp_path}/a.jsonl", model="tiny", task="chat", eval_samples=1000)
    data = prepare(load_config(eval_rows=100, **more))
    assert 70 < len(data.eval) < 130 and len(data.train) + len(data.eval) == 400
    file = f"{tmp_path}/a.jsonl"
    for settings, name in ((dict(eval_fraction=.1), "eval_fraction"), (dict(eval_file=file), "eval_rows")):
        with pytest.raises(ConfigError, match=f"{name}: "): prepare(load_config(eval_rows=9, **settings, **more))


def test_the_first_rows_of_a_few_domains_are_of_each_and_those_of_many_documents_are_the_first(tmp_path):
    "A folder of documents is no set of domains: reading them in turn would open all files at once"
    def first(n_files, n):
        folder = tmp_path/str(n_files)
        folder.mkdir()
        for k in range(n_files):
            (folder/f"{chr(97 + k // 26)}{chr(97 + k % 26)}x.jsonl").write_text('{"text": "a"}\n' * 3)
        return [place.split(".")[0] for place, _ in Mixture(open_rows(folder), n=n)]
    assert first(3, 4) == ["aax", "abx", "acx", "aax"]
    assert first(30, 4) == ["aax", "aax", "aax", "abx"]


@pytest.mark.parametrize("names", [("a/val.jsonl", "b/val.jsonl"), ("law/en/test.jsonl", "news/en/test.jsonl")])
def test_a_place_names_one_row(tmp_path, names):
    for name in names:
        (tmp_path/name).parent.mkdir(parents=True)
        (tmp_path/name).write_text('{"text": "a"}\n' * 3)
    mixed = Mixture([source for name in names for source in open_rows(tmp_path/name)])
    assert len(dict(mixed)) == 6 and [*dict.fromkeys(d for _, _, d in mixed.with_domains())] == [
        name.split("/")[0] for name in names]


TABLE = pandas.DataFrame(dict(question=["1+1?", "2+2?", "3+3?"], answer=["2", "04", "6"]))
ROWS = TABLE.to_dict("records")

@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "my rows.json.gz"])
def test_json_by_columns_is_refused_with_the_line_that_converts_it(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TABLE.to_json(name)
    with pytest.raises(SftError, match=r"it holds columns \(question, answer\), as df.to_json\(\) writes it") as e:
        read_rows(name)
    assert "orient='records', lines=True" in e.value.fix.says("python")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["-c"])
        exec(shlex.split(e.value.fix.says("shell"))[2])   # what follows python -c
    assert [*read_rows(next(tmp_path.glob("*-rows.jsonl"))).values()] == ROWS


def test_lists_by_columns_are_refused_and_one_row_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("rows.json").write_text(json.dumps(TABLE.to_dict("list")))
    with pytest.raises(SftError, match="it holds columns .question, answer., each a list of values") as e:
        read_rows("rows.json")
    exec(shlex.split(e.value.fix.says("shell"))[2])
    assert [*read_rows("rows-rows.jsonl").values()] == ROWS
    for one in (ROWS[0], dict(input_ids=[1, 2], labels=[3, 4]), dict(words=["a"]), dict(meta={"0": "a"}, text="b"),
                dict(messages=[dict(role="user", content="a"), dict(role="assistant", content="b")])):
        pathlib.Path("one.json").write_text(json.dumps(one))
        assert [*read_rows("one.json").values()] == [one]


@pytest.mark.parametrize("orient", ["records", "split", "index"])
def test_json_of_pandas_that_holds_rows(tmp_path, orient):
    TABLE.to_json(tmp_path/"rows.json", orient=orient)
    assert [*read_rows(tmp_path/"rows.json").values()] == ROWS


def test_a_missing_file_proposes_only_what_is_there_and_alike(tmp_path, monkeypatch):
    "A suffix in common says nothing; from a folder inside the project, the same path may be right from outside it"
    for path in ("project/d/kto.jsonl", "project/d/alpaca.json", "project/sub/x.jsonl"):
        (tmp_path/path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/path).write_text('{"question": "a", "answer": "b"}\n')
    def fix(path):
        with pytest.raises(SftError, match="there is no such file") as e: open_rows(path)
        return e.value.fix.says("shell")
    monkeypatch.chdir(tmp_path/"project")
    assert fix("d/none.jsonl") == "ls d" and fix("d/alpaca.jsonl") == "--train-file d/alpaca.json"
    assert fix("d/kto.csv") == "--train-file d/kto.jsonl" and fix("e/none.jsonl") == "ls ."
    assert fix("d/alpacas.jsn") == "--train-file d/alpaca.json"   # its suffix is no name of a hub's dataset
    assert fix("d/otks.jsonl") == "ls d"
    monkeypatch.chdir(tmp_path/"project/sub")
    assert fix("d/alpaca.json") == "--train-file ../d/alpaca.json" and fix("d/none.jsonl") == "ls ."
    assert open_rows("../d/alpaca.json")


def test_a_dict_of_columns_is_rows():
    columns = dict(question=["1+1?", "1+2?"], answer=pandas.Series([2, 3]))
    assert [*read_rows(columns).values()] == [dict(question="1+1?", answer=2), dict(question="1+2?", answer=3)]
    talks = dict(messages=[[dict(role="user", content="a")], [dict(role="user", content="b")]])
    assert len(read_rows(talks)) == 2
    talk = dict(messages=[dict(role="user", content="a"), dict(role="assistant", content="b")])
    for rows, found, fix in (({}, "an empty dict", "[row]"), (talk, "of one conversation", "[row]"),
                             (dict(a=[1], b=[1, 2]), "a 1, b 2", "a value for every row"),
                             (dict(train=[dict(text="a")]), "lists of rows", "rows['train']")):
        with pytest.raises(SftError, match=found) as e: open_rows(rows)
        assert fix in str(e.value.fix)


def test_columns_may_be_named_by_numbers_and_texts():
    rows = [{"question": f"{k}?", "answer": str(k), 0: "x"} for k in range(4)]
    data = prepare(load_config(task="chat", eval_samples=2), train=rows, eval=rows[:2])
    assert len(data.train) == 4
    assert len({hash_to_unit(row, 1) for row in rows}) == 4 and hash_to_unit(rows[0], 1) == hash_to_unit({**rows[0]}, 1)
