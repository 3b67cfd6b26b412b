"""scripts/gpu_day.py with models that a CPU can run."""
import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
import gpu_day   # noqa: E402


@pytest.mark.parametrize("call, cases", [("correctness", 12), ("speed", 4), ("memory", 2)])
def test_a_call_prints_a_table_and_writes_its_figures(tmp_path, capsys, call, cases):
    assert gpu_day.main(["--call", call, "--size", "small", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path/f"gpu_{call}.json").read_text())
    assert result["call"] == call and len(result["rows"]) == cases and all(row["ok"] for row in result["rows"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("ok")] == ["ok"] * cases
    if call == "memory": assert all(.97 < row["ratio"] < 1.03 for row in result["rows"])


def test_what_has_no_time_is_left_out_and_what_fails_is_a_row(tmp_path, capsys, monkeypatch):
    assert gpu_day.main(["--call", "speed", "--size", "small", "--minutes", "0", "--out", str(tmp_path)]) == 0
    assert "0 s were left" in capsys.readouterr().out
    monkeypatch.setattr(gpu_day, "correctness_cases", lambda *args: [
        ("far", lambda folder: .5), ("broken", lambda folder: 1 / 0)])
    assert gpu_day.main(["--call", "correctness", "--size", "small", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "WRONG  far" in out and "ZeroDivisionError" in out
