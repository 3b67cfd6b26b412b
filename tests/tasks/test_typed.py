"""Command-line values: fields, a folder by domain, a task in a file."""
import json

from sft_nb.cli import main


def test_fields_domain_and_a_file_are_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"data").mkdir()
    for side in ("train", "val", "test"):
        row = dict(Problem=f"{side}?", Solution="#### 1")
        (tmp_path/f"data/technology_{side}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path/"mine.py").write_text(
        "from sft_nb.tasks.core import task\n@task('question', 'answer')\ndef mine(text, row): return True\n")
    typed = "data --task mine.py --data_dir data --domain technology --fields question=Problem answer=Solution --json"
    assert main(typed.split()) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert (figures["train"]["rows_read"], figures["eval"]["rows_read"]) == (1, 1)
    assert main("config --data-dir data --domain technology --fields question=Problem".split()) == 0
    assert "question=Problem" in capsys.readouterr().out
    assert main("data --model Qwen/Qwen3-4B".split()) == 2
    assert "there are no rows to train Qwen/Qwen3-4B on" in capsys.readouterr().err
