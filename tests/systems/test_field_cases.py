"""Small inputs that strangers had, each with the command and what it should give, in `../shared/field_cases`."""
import re, shlex


from sft_nb.cli import main

from conftest import shared


def run_case(name, capsys, monkeypatch):
    "Output of each command of a case, run in its folder"
    folder = shared(f"field_cases/{name}")
    monkeypatch.chdir(folder)
    outputs = []
    for line in re.split(r"[;\n]", (folder/"cmd.txt").read_text()):
        if not line.strip(): continue
        main(shlex.split(line)[1:])
        captured = capsys.readouterr()
        outputs.append(captured.out + captured.err)
    return outputs


def test_xlam_rows_are_learned_by_their_calls(capsys, monkeypatch):
    first, second = run_case("07-proposal-xlam", capsys, monkeypatch)
    assert "Fix: --fields question=query answer=answers," in first and "answer=tools" not in first


def test_a_transcript_is_no_answer(capsys, monkeypatch):
    [output] = run_case("09-proposal-glaive", capsys, monkeypatch)
    assert "--fields" not in output and "chat, a transcript of several turns" in output
