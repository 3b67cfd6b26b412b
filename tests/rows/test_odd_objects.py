"""Objects that are no ordinary rows: each is learned as it is meant, or refused by a sentence."""
import collections, datetime, decimal, enum, functools, pathlib, types, uuid

import datasets
import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from PIL import Image

from sft_nb.base.report import SftError
from sft_nb.config.load import load_config
from sft_nb.rows.sources import hash_to_unit
from sft_nb.tokens.prepare import keep_rows, prepare

HUGE = 10**5000


def pair(answer="2", **more)->dict: return dict(question="1+1?", answer=answer) | more


def talk(content="2", **more)->dict:
    return dict(messages=[dict(role="user", content="1+1?", **more), dict(role="assistant", content=content)])


def call(**arguments)->dict:
    calls = [dict(type="function", function=dict(name="f", arguments=arguments))]
    return dict(messages=[dict(role="user", content="f"), dict(role="assistant", content="", tool_calls=calls)])


def column(name)->pd.DataFrame: return pd.DataFrame([["x", "1+1?", "2"]], columns=[name, "question", "answer"])


def answers(values)->pd.DataFrame: return pd.DataFrame(dict(question=["1+1?"] * len(values), answer=values))


def saved(row:dict)->datasets.Dataset: return datasets.Dataset.from_list([row])


def nested(depth:int, inside=lambda x: [x]): return functools.reduce(lambda x, _: inside(x), range(depth), "x")


def circular(x): return x.update(itself=x) or x


class Hostile:
    "An object that fails whatever is asked of it"
    def __repr__(self): raise ValueError("no text")
    __str__ = __hash__ = __eq__ = __len__ = __bool__ = __iter__ = __repr__


class Text(str): pass
class Two(enum.StrEnum): two = "2"
Row = collections.namedtuple("Row", "question answer")


def fails_late():
    yield pair()
    raise OSError("the connection is gone")


LEARNED = dict(   # name -> rows with the answer 2, or rows and their answers
    column_0=lambda: column(0), column_of_reset_index=lambda: column("answer2").set_index("answer2").reset_index(),
    column_none=lambda: column(None), column_nan=lambda: column(float("nan")), column_float=lambda: column(1.5),
    column_date=lambda: column(pd.Timestamp("2026-01-01")), column_true=lambda: column(True),
    concatenated=lambda: pd.concat([pd.Series([1], name=0), pd.DataFrame([pair()])], axis=1),
    categories=lambda: pd.DataFrame([pair()]).astype("category"),
    strings=lambda: pd.DataFrame([pair()]).astype("string"), sparse=lambda: answers(pd.arrays.SparseArray(["2"])),
    nullable=lambda: answers(pd.array([2, pd.NA], dtype="Int64")),
    na=lambda: answers(pd.array(["2", pd.NA], dtype="string")), nan=lambda: answers(["2", float("nan")]),
    nat=lambda: answers(["2", pd.NaT]), mixed=lambda: (answers(["2", 3, 4.5, True]), ["2", "3", "4.5", "True"]),
    messages_in_array=lambda: pd.DataFrame(dict(messages=[np.array(talk()["messages"], dtype=object)])),
    series=lambda: pd.Series([pair()]), array_of_rows=lambda: np.array([pair()], dtype=object),
    numpy_text=lambda: [pair(np.str_("2"))], numpy_0d=lambda: [pair(np.array("2"))],
    numpy_5=lambda: [pair(np.array(2))], numpy_half=lambda: ([pair(np.float16(2.5))], ["2.5"]),
    numpy_nat=lambda: [pair(np.datetime64("NaT")), pair()],
    numpy_inside=lambda: (
        [call(n=np.int64(3), of=np.array([1, 2]))], ['{"name": "f", "arguments": {"n": 3, "of": [1, 2]}}']),
    numpy_objects=lambda: [pair(more=np.array([dict(a=1), None, {1}], dtype=object))],
    numpy_ids=lambda: ([dict(input_ids=np.array([1, 2, 70]), labels=np.array([-100, -100, 70]))], None),
    tensor=lambda: [pair(torch.tensor(2))], tensor_beside=lambda: [pair(more=torch.zeros(3))],
    tensor_ids=lambda: ([dict(input_ids=torch.tensor([1, 2, 70]), labels=torch.tensor([-100, -100, 70]))], None),
    decimals=lambda: ([pair(decimal.Decimal("2.50")), pair(decimal.Decimal("NaN"))], ["2.50", "NaN"]),
    signalling=lambda: [pair(score=decimal.Decimal("sNaN"))], nan_beside=lambda: [pair(score=float("nan"))],
    bytes_beside=lambda: [pair(raw=b"\xff")], time=lambda: [pair(at=datetime.time(1, 2))],
    uuid=lambda: [pair(id=uuid.UUID(int=5))], sets=lambda: [pair(tags={"a", "b"}, more=frozenset("ab"))],
    object_beside=lambda: [pair(more=object())], image_beside=lambda: [pair(photo=Image.new("RGB", (2, 2)))],
    text_class=lambda: [pair(Text("2"))], enum=lambda: [pair(Two.two)], tuple_answer=lambda: [pair(("2",))],
    int_key=lambda: [pair() | {0: "x"}], tuple_key=lambda: [pair() | {(1, 2): "x"}],
    none_key=lambda: [pair() | {None: "x"}], keys_inside=lambda: [pair(more={0: 1, "a": 2})],
    key_of_message=lambda: [talk(**{"0": 1}, more={1: 2, None: 3})],
    messages_in_tuple=lambda: [dict(messages=tuple(talk()["messages"]))], messages_alone=lambda: [talk()["messages"]],
    ordered=lambda: [collections.OrderedDict(pair())], defaults=lambda: [collections.defaultdict(str, pair())],
    user_dict=lambda: [collections.UserDict(pair())], read_only=lambda: [types.MappingProxyType(pair())],
    chain=lambda: [collections.ChainMap(pair())], deque=lambda: collections.deque([pair()]),
    user_list=lambda: collections.UserList([pair()]), values=lambda: dict(a=pair()).values(),
    map=lambda: map(dict, [pair()]),
    generator=lambda: iter([pair(tags={"a"}, raw=b"x", at=datetime.date(2026, 1, 2), n=[float("nan")])]),
    generator_keys=lambda: iter([pair() | {(1, 2): "x", 0: "y"}]),
    surrogate_beside=lambda: iter([pair(more="\ud800")]), nested_300=lambda: [pair(more=nested(300))],
    columns=lambda: dict(question=pd.Series(["1+1?"]), answer=np.array(["2"])),
    dataset=lambda: datasets.Dataset.from_list([pair(n=[1, 2])]).with_format("numpy"),
    dataset_of_tensors=lambda: datasets.Dataset.from_list([pair()]).with_format("torch"),
    dataset_of_tables=lambda: saved(pair()).with_format("arrow"),
    dataset_of_frames=lambda: saved(pair()).with_format("pandas"),
    dataset_of_columns=lambda: saved(pair() | dict(text="x")).with_format("numpy", columns=[*pair()]),
    dataset_transformed=lambda: saved(pair("3")).with_transform(lambda b: b | dict(answer=["2"])),
    dataset_streamed=lambda: saved(pair()).to_iterable_dataset().with_format("arrow"),
    dataset_column=lambda: saved(talk())["messages"],
    decimals_of_arrow=lambda: datasets.Dataset.from_dict(dict(question=["1+1?"], answer=[decimal.Decimal("2")])),
    table=lambda: pyarrow.table(dict(question=["1+1?"], answer=["2"])), arrow_array=lambda: pyarrow.array([pair()]))

JSON, TEXT, ROW = "cannot be written as JSON", "the answer is .*; a string", "with named fields"
REFUSED = dict(   # name -> rows, and words of the error
    int_columns=(lambda: pd.DataFrame([["1+1?", "2"]]), "fields 0, 1, and no format.*question=0"),
    same_columns=(lambda: [pair() | {0: 1, "0": 2}], "two columns have the same name"),
    wide=(lambda: [{f"c{k}": "" for k in range(9_999)} | pair()], "row 1: there are 10,001 columns; at most 10,000"),
    no_columns=(pd.DataFrame, "it is empty"),
    no_rows=(lambda: pd.DataFrame(columns=["question", "answer"]), "it is empty"),
    timestamp=(lambda: answers([pd.Timestamp("2026-01-02")]), TEXT), delta=(lambda: answers([pd.Timedelta(1)]), TEXT),
    period=(lambda: answers([pd.Period("2026-01")]), TEXT), frame_bytes=(lambda: answers([b"2"]), TEXT),
    series_row=(lambda: pd.Series(pair()), ROW), numpy_number=(lambda: np.array(5), "this is .* ndarray"),
    numpy_row=(lambda: np.array(pair(), dtype=object), "this is .* ndarray"),
    numpy_texts=(lambda: np.array(["a"]), ROW), numpy_table=(lambda: np.array([["1+1?", "2"]]), ROW),
    numpy_empty=(lambda: np.array([]), "it is empty"),
    numpy_record=(lambda: np.array([("1+1?", "2")], dtype=[("question", "U9"), ("answer", "U9")]), ROW),
    numpy_answers=(lambda: [pair(np.array(["2", "3"]))], TEXT),
    numpy_date=(lambda: [pair(np.datetime64("2026-01-02"))], TEXT),
    numpy_bytes=(lambda: [pair(np.bytes_(b"2"))], TEXT), tensors=(lambda: torch.zeros(3), ROW),
    tensor_set=(lambda: torch.utils.data.TensorDataset(torch.zeros(3)), "this is a TensorDataset"),
    deep=(lambda: [pair(more=nested(10_000))], f"{JSON} .it is nested too deeply"),
    deep_dicts=(lambda: [pair(more=nested(10_000, lambda x: dict(x=x)))], JSON),
    deep_tuples=(lambda: [pair(more=nested(10_000, lambda x: (x,)))], JSON),
    deep_answer=(lambda: [pair(nested(10_000))], JSON), deep_messages=(lambda: [dict(messages=nested(10_000))], JSON),
    deep_message=(lambda: [talk(more=nested(10_000))], JSON), deep_call=(lambda: [call(x=nested(10_000))], JSON),
    deep_later=(lambda: iter([pair(more=nested(10_000))]), JSON),
    deep_kept=(lambda: iter([pair(more=nested(700))]), "cannot be kept in a file.*pass a list"),
    circular=(lambda: [circular(pair())], f"{JSON} .Circular"), circular_call=(lambda: [call(x=circular({}))], JSON),
    circular_later=(lambda: iter([circular(pair())]), JSON), huge=(lambda: [pair(HUGE)], f"{JSON} .Exceeds the limit"),
    huge_beside=(lambda: [pair(id=HUGE)], JSON), huge_inside=(lambda: [pair(ids=[HUGE])], JSON),
    huge_name=(lambda: [pair() | {HUGE: 1}], JSON), huge_call=(lambda: [call(x=HUGE)], JSON),
    huge_content=(lambda: [talk(HUGE)], JSON), huge_ids=(lambda: [dict(input_ids=[1, HUGE], labels=[1, 2])], JSON),
    hostile=(lambda: [pair(Hostile())], f"{JSON} .no text"), hostile_beside=(lambda: [pair(more=Hostile())], JSON),
    hostile_inside=(lambda: [pair(more=[dict(a=Hostile())])], JSON), hostile_content=(lambda: [talk(Hostile())], JSON),
    hostile_role=(lambda: [dict(messages=[dict(role=Hostile(), content="x")])], JSON),
    hostile_call=(lambda: [call(x=Hostile())], JSON), hostile_row=(lambda: [Hostile()], ROW),
    hostile_later=(lambda: iter([pair(more=Hostile())]), JSON),
    hostile_rows=(Hostile, "cannot be read as rows .no text"),
    hostile_column=(lambda: dict(question=[Hostile()], answer=["2"]), JSON),
    tuple_key_inside=(lambda: [pair(more={(0, 1): 1})], "keys must be str"),
    set_key=(lambda: [pair(more={frozenset(): 1})], JSON),
    fails=(fails_late, "failed after row 1 .the connection is gone"),
    divides=(lambda: (pair(1 / k) for k in (1, 0)), "failed after"),
    transform_fails=(lambda: saved(pair()).with_transform(lambda b: 1 / 0), "failed after row 0"),
    stream_fails=(lambda: datasets.IterableDataset.from_generator(fails_late), "failed after row 1 .the connection"),
    dataset_info=(lambda: datasets.DatasetInfo(), "not iterable"),
    to_dicts_fails=(lambda: types.SimpleNamespace(to_dicts=lambda: 1 / 0), "cannot be read as rows .division"),
    not_kept=(lambda: iter([pair(more=lambda: 1)]), "cannot be kept in a file"),
    bytes_answer=(lambda: [pair(b"2")], TEXT), bytes_later=(lambda: iter([pair(b"2")]), TEXT),
    view=(lambda: [pair(memoryview(b"2"))], TEXT),
    bytes_names=(lambda: [{b"question": "1+1?", b"answer": "2"}], "no format has those"),
    bytes=(lambda: b"abc", "this is a bytes"), date=(lambda: [pair(datetime.date(2026, 1, 2))], TEXT),
    date_later=(lambda: iter([pair(datetime.date(2026, 1, 2))]), TEXT),
    date_of_arrow=(lambda: pyarrow.table(dict(question=["q"], answer=[datetime.datetime(2026, 1, 2)])), TEXT),
    set_answer=(lambda: [pair({"2"})], TEXT), object=(lambda: [pair(object())], TEXT),
    path=(lambda: [pair(pathlib.Path("2"))], TEXT), image=(lambda: [pair(Image.new("RGB", (2, 2)))], TEXT),
    image_row=(lambda: [Image.new("RGB", (2, 2))], ROW),
    images=(lambda: [pair(image=Image.new("RGB", (2, 2)))], "only text is learned"),
    surrogate=(lambda: [pair("\ud800")], "half a character"), named=(lambda: [Row("1+1?", "2")], "question=0"),
    zipped=(lambda: zip(["1+1?"], ["2"]), "question=0"), name_space=(lambda: [types.SimpleNamespace(**pair())], ROW),
    none=(lambda: [None], ROW), texts=(lambda: ["a"], ROW), number=(lambda: 5, "this is an int"),
    numbers=(lambda: range(3), ROW), function=(lambda: len, "this is a builtin"),
    module=(lambda: types, "this is a module"), empty=(lambda: [{}], "the fields none"),
    nested=(lambda: [[pair()]], ROW))


@pytest.fixture
def prepared(tokenizer, tmp_path):
    def prepared(rows, **settings):
        cfg = load_config(model="tiny", cache_dir=str(tmp_path), **dict(eval_samples=0) | settings)
        return prepare(cfg, tokenizer, train=rows)
    return prepared


@pytest.mark.parametrize("name", LEARNED)
def test_an_odd_object_is_learned_as_it_is_meant(name, prepared, tmp_path, tokenizer):
    made = LEARNED[name]()
    rows, expected = made if isinstance(made, tuple) else (made, ["2"])
    data = prepared(rows)
    found = [tokenizer.decode([i for i in x["labels"] if i != -100]) for x in data.train.tokens]
    assert found == ([tokenizer.decode([70])] if expected is None else [f"{text}<|im_end|>" for text in expected])
    keep_rows(data, tmp_path)   # as a run does


@pytest.mark.parametrize("name", REFUSED)
def test_an_odd_object_is_refused_by_a_sentence(name, prepared):
    make, words = REFUSED[name]
    with pytest.raises(SftError, match=words) as e: prepared(make())
    assert str(e.value).startswith("train rows") and "Fix:" in str(e.value)
    with pytest.raises(SftError): prepared(make(), eval_fraction=.5, eval_samples=4)   # where rows are hashed


def test_an_odd_row_is_left_out_where_rows_may_be(prepared):
    rows = [pair(), circular(pair()), pair(HUGE), pair(b"2"), pair("3")]
    for given in (rows, iter(rows)):
        data = prepared(given, on_bad_row="drop")
        assert len(data.train.tokens) == 2 and sum(data.train.reasons.values()) == 3


def test_a_hash_depends_on_the_content_alone():
    "The order of names, and of a set, is none of it"
    tags = [f"tag {k}" for k in range(20)]
    assert hash_to_unit(dict(a={*tags}, b=1), 1) == hash_to_unit(dict(b=1, a={*reversed(tags)}), 1)
    assert 0 <= hash_to_unit({0: 1, "a": 2}, 1) < 1   # names that cannot be sorted
