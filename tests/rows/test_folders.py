"""Files of a folder that are not read are counted with the reason; a file in another encoding is told what it is in."""
import subprocess

import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.extras.encodings import _frequent_letters, plausible_encoding
from sft_nb.rows.sources import open_rows
from sft_nb.tokens.prepare import prepare


def report_of(folder, **more):
    settings = dict(model="tiny", task="chat", eval_samples=0, train_file=str(folder))
    return prepare(load_config("default", **settings, **more)).report


def finding(report): return next((f for f in report.findings if f.check == "train_files"), None)


def fill(folder, **files):
    for name, (n, suffix) in files.items():
        for k in range(n): (folder/f"{name}{k}{suffix}").write_text(f"{name} {k}: Oslo lies in Norway.\n")


def test_a_folder_of_notes_a_paper_and_texts(tmp_path):
    fill(tmp_path, note=(30, ".md"), text=(10, ".txt"), paper=(1, ".pdf"))
    (tmp_path/"README.md").write_text("About these texts.")
    (tmp_path/".DS_Store").write_text("x")
    report = report_of(tmp_path)
    assert report.figures["train"]["rows_read"] == 40
    assert report.figures["files_not_read"] == "1 (hidden), 1 (about the rows), 1 (.pdf is not supported)"
    assert finding(report).status == "warn" and "1 file of the folder is not read: 1 (.pdf" in finding(report).says


def test_texts_beside_rows_are_a_warning(tmp_path):
    fill(tmp_path, note=(3, ".md"), text=(2, ".txt"))
    (tmp_path/"rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    assert "5 (text beside rows): note0.md" in finding(report_of(tmp_path)).says


def test_files_about_the_rows_are_none(tmp_path):
    (tmp_path/"rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    for name in ("README.md", "LICENSE", "dataset_infos.json", "load.py", ".gitattributes"): (tmp_path/name).touch()
    report = report_of(tmp_path)
    assert finding(report) is None
    assert report.figures["files_not_read"] == "1 (hidden), 3 (about the rows), 1 (code or settings)"


def test_kept_copies_are_not_read_and_no_warning(tmp_path):
    for name in ("a.jsonl", "a.jsonl.cp1252", "a.jsonl.bak", "a.jsonl.orig", "a.jsonl~", "earlier.old"):
        (tmp_path/name).write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path/"other.cp1252").touch()
    report = report_of(tmp_path)
    assert report.figures["train"]["rows_read"] == 1
    assert report.figures["files_not_read"] == "5 (a kept copy), 1 (.cp1252 is not supported)"
    assert "1 file of the folder is not read: 1 (.cp1252" in finding(report).says


def test_files_of_other_splits_and_domains(tmp_path):
    for name in ("law_train", "law_val", "law_test", "art_train"):
        (tmp_path/f"{name}.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    first, *others = open_rows(tmp_path, domain="law")
    assert first.not_read == {"art_train.jsonl": "of another domain", "law_test.jsonl": "of the test split"}
    assert not others and finding(report_of(tmp_path, domain="law")) is None


def test_only_a_readme(tmp_path):
    (tmp_path/"README.md").write_text("Oslo lies in Norway.")
    assert [s.name for s in open_rows(tmp_path)] == ["README.md"]


TEXTS = dict(
    cp1252="Où est mon colis ? Für Köln, bitte. ¿Mañana? Ça va très bien, à l'été.",
    big5="我的包裹在哪裡？訂單號是12345。",
    cp1250="Proszę o pomoc. Gdzie jest paczka? Źle się czuję, później, wysłałem już, dziękuję",
    cp1251="Здравствуйте! Где моя посылка? Она из США.", cp1253="Πού είναι το πακέτο μου; Είναι στην Αθήνα.",
    cp1255="איפה החבילה שלי? היא בתל אביב.", cp1256="أين طردي؟ لقد وصل إلى القاهرة أمس، شكراً لكم.",
    gbk="您好，我的包裹在哪里？订单号是12345，请帮我查询一下，谢谢。", cp949="안녕하세요, 제 소포는 어디에 있나요?",
    shift_jis="こんにちは、荷物はどこですか？カタログを送ってください。")
TEXTS["koi8-r"], TEXTS["euc-jp"] = TEXTS["cp1251"], TEXTS["shift_jis"]


@pytest.mark.parametrize("encoding", TEXTS)
def test_the_encoding_of_a_text(encoding, tmp_path):
    line = f'{{"prompt": "{TEXTS[encoding]}", "completion": "{TEXTS[encoding]}"}}\n'.encode(encoding)
    assert plausible_encoding(line) == encoding
    (tmp_path/"rows.jsonl").write_bytes(b'{"prompt": "a", "completion": "b"}\n' * 300 + line)
    with pytest.raises(SftError, match="it is not UTF-8") as e: list(open_rows(tmp_path/"rows.jsonl")[0])
    fix = str(e.value).partition(" Fix: ")[2]
    assert f"iconv -f {encoding} " in fix
    done = subprocess.run(fix, shell=True, capture_output=True, text=True)   # typed as it stands, in a folder of files
    if "cannot convert" in done.stderr or "not supported" in done.stderr: return   # an encoding this iconv lacks
    assert done.returncode == 0, done.stderr
    assert len([*open_rows(tmp_path)[0]]) == 301


@pytest.mark.parametrize("content", [
    "Grüße aus Köln".encode() + b"\xff", "您好，我的包裹在哪里".encode()[:-1] + b"\xff", bytes(range(128, 256)) * 9])
def test_no_encoding_is_proposed_where_none_gives_text(content, tmp_path):
    assert plausible_encoding(content) is None
    (tmp_path/"a.txt").write_bytes(content)
    with pytest.raises(SftError, match="it is not UTF-8") as e: list(open_rows(tmp_path/"a.txt")[0])
    assert "iconv" not in str(e.value.fix)


def test_frequent_characters_are_those_of_the_standards():
    "3,755 of level 1 of GB 2312, and 5,401 of level 1 of Big5"
    assert len(_frequent_letters("gb2312", 0xb0, 0xd7)) == 3755
    assert len(_frequent_letters("big5", 0xa4, 0xc6)) == 5401


def test_a_folder_of_runs_has_no_rows(tmp_path):
    (tmp_path/"runs/one/adapter").mkdir(parents=True)
    (tmp_path/"runs/one/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path/"runs/one/adapter/adapter_config.json").write_text('{"r": 16}')
    with pytest.raises(SftError, match="it holds a run or a model: one/adapter/adapter_config.json; a folder"):
        prepare(load_config(task="chat", train_file=str(tmp_path/"runs")))
