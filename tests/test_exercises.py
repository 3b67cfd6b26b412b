"""The exercises at the end of twelve chapters: their checks tell a right answer from none and from a usual mistake."""
import ast
import importlib
import json
import re

import pytest
from conftest import ROOT


def read_exercises(path)->tuple[list[str],list[tuple[str,...]]]:
    "The cells that exercises need, and of each its answer cell, its check, its solution and a wrong answer"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    kinds = [cell["cell_type"] for cell in cells]
    first = next(k for k, source in enumerate(sources) if source.startswith("## Exercises"))

    def only_imports(source):
        return all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in ast.parse(source).body)
    imports = [source for source, kind in zip(sources[:first], kinds)
               if kind == "code" and "#| export" not in source and only_imports(source)]
    code = [source for source, kind in zip(sources[first:], kinds[first:]) if kind == "code"]
    prose = "\n".join(source for source, kind in zip(sources[first:], kinds[first:]) if kind == "markdown")
    answers = [source for source in code if source.startswith("# exercise ")]
    checks = [source for source in code if source.startswith("#| code-fold: true\n# check ")]
    needed = imports + [source for source in code if source not in answers + checks]
    folded = re.findall(r"<details><summary>Solution</summary>(.*?)</details>", prose, re.S)
    solutions = [re.findall(r"```python\n(.*?)```", text, re.S) for text in folded]
    assert len(answers) == len(checks) == len(solutions) and all(len(found) == 2 for found in solutions)
    return needed, [(answer, check, *found) for answer, check, found in zip(answers, checks, solutions)]


BOOKS = [path for path in sorted((ROOT/"nbs").glob("*/*.ipynb")) if '"## Exercises' in path.read_text(encoding="utf-8")]


def test_twelve_chapters_have_three_exercises():
    assert [len(read_exercises(path)[1]) for path in BOOKS] == [3] * 12


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_solutions_are_right_and_usual_mistakes_are_not(path, number, capsys):
    part, chapter = (re.sub(r"^\d+_", "", name) for name in (path.parent.name, path.stem))
    exported = vars(importlib.import_module(f"sft_nb.{part}.{chapter}"))
    needed, exercises = read_exercises(path)
    answer, check, solution, wrong = exercises[number - 1]

    def verdict(*given:str)->str:
        "What the check prints, in a notebook of its own"
        names = dict(exported)
        for source in (*needed, answer, *given): exec(source, names)
        capsys.readouterr()
        exec(check, names)
        return capsys.readouterr().out

    assert verdict() == "not answered yet\n"
    assert verdict(solution).startswith("right")
    assert verdict(wrong).startswith("no: ")
