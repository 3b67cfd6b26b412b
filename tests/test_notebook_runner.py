"""scripts/test_notebooks.py: the environment of a notebook, and the report of a failure."""
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.usefixtures("warm_processes")


def notebook(folder, name:str, *cells:str)->None:
    code = [dict(cell_type="code", source=c, metadata={}, outputs=[], execution_count=None) for c in cells]
    (folder/f"{name}.ipynb").write_text(json.dumps(dict(cells=code, metadata={}, nbformat=4, nbformat_minor=5)))


def run(*places, **env)->subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT/"scripts/test_notebooks.py"), *map(str, places)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | env)


def test_a_notebook_has_its_folder_its_flags_and_a_process_of_its_own(tmp_path):
    "And what it launches is a fork of one that has done nothing; a command in its own words starts cold"
    ask = "import os, sys\nprint(hasattr(os, 'mine'), 'torch' in sys.modules)"
    (tmp_path/"ask.py").write_text(ask)
    starts = "from subprocess import check_output\nimport sys\n" \
             "def said(*args): return check_output([sys.executable, *args], text=True)"
    for name in ("one", "two"):
        notebook(tmp_path, name, "import os\nassert not hasattr(os, 'mine')\nos.mine = 1",
                 "from pathlib import Path\nassert Path('one.ipynb').exists()",
                 "#| eval: false\nraise ValueError", "#| slow\nraise ValueError", "#| gpu\nraise ValueError",
                 starts, "assert said('-m', 'ask') == 'False True\\n'",
                 f"assert said('-c', {ask!r}) == 'False False\\n'")
    notebook(tmp_path, "_hidden", "raise ValueError")
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 notebooks, ") and done.stdout.endswith(" 0 failed\n")


def test_all_that_fail_are_named_with_cell_and_traceback(tmp_path):
    notebook(tmp_path, "wrong", "1", "def f(): return 1/0", "f()", "open('not reached', 'w')")
    notebook(tmp_path, "killed", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    notebook(tmp_path, "good", "1")
    done = run(tmp_path)
    assert done.returncode == 1 and " 2 failed\n" in done.stdout
    assert "While Executing Cell #3" in done.stderr and "ZeroDivisionError" in done.stderr
    assert f"{tmp_path}/killed.ipynb: ended by signal 9" in done.stderr
    assert {line for line in done.stderr.splitlines() if line.startswith("failed: ")} == {
        f"failed: {tmp_path}/{name}.ipynb" for name in ("killed", "wrong")}
    assert not (tmp_path/"not reached").exists()


def test_no_notebooks_are_no_success(tmp_path): assert run(tmp_path).returncode == 1


def test_notebooks_share_a_home_where_that_of_the_user_cannot_be_written(tmp_path):
    "The first to end leaves it to the others"
    show = "import os, tempfile\nfrom pathlib import Path\n(Path.home()/'x').touch()\nprint(Path.home())"
    keep = f"Path({str(tmp_path/'homes')!r}).open('a').write(f'{{Path.home()}}\\n')"
    for name in ("one", "two"): notebook(tmp_path, name, show, keep)
    done = run(tmp_path, "-n", 1, HOME=str(tmp_path/"nowhere"))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    home, again = (tmp_path/"homes").read_text().splitlines()
    assert home == again != str(tmp_path/"nowhere") and not os.path.exists(home)
