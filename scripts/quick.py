"""Run what is worth checking before a commit: style, layers, and the tests and notebooks of changed files.

    python scripts/quick.py            # changes since the last commit, and untracked files
    python scripts/quick.py main       # changes since this branch left `main`
    python scripts/quick.py --list     # show what would run

A changed notebook selects itself, the test file named after it and tests matching its module; a changed test file
selects itself. Slow tests (two processes, kills, the browser, the demo) are left to `make test`."""
import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from mutate import SLOW

ROOT = Path(__file__).parents[1]
ALWAYS = ["tests/test_style.py", "tests/test_layers.py"]
LISTS = {   # chapters -> tests that look at all of them
    r"nbs/03_tasks/": ["tests/tasks/test_tasks.py"],
    r"nbs/09_checks/": ["tests/checks/test_checks.py"],
    r".*/00_settings\.": ["tests/test_config.py", "tests/training/test_arguments.py"]}


def changed_files(since:str)->list[str]:
    "Paths from the root that differ from a commit, including new files"
    def git(*words): return subprocess.check_output(["git", *words], cwd=ROOT, text=True).split("\n")
    base = git("merge-base", since, "HEAD")[0]
    found = [*git("diff", "--name-only", "--diff-filter=d", base), *git("ls-files", "--others", "--exclude-standard")]
    return sorted({path for path in found if path})


def find_tests(path:str)->list[str]:
    "The quick tests of a changed file"
    if path.startswith("tests/") and Path(path).name.startswith("test_"): found = [path]
    elif path.startswith("nbs/") and path.endswith(".ipynb"):
        name = re.sub(r"^\d+_", "", Path(path).stem)
        found = [str(p.relative_to(ROOT)) for p in (ROOT/"tests").rglob(f"test_*{name}*.py")]
        found += [test for pattern, tests in LISTS.items() if re.match(pattern, path) for test in tests]
    else: found = []
    return [test for test in found if test.endswith(".py") and not any(word in test for word in SLOW)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("since", nargs="?", default="HEAD", help="commit or branch")
    parser.add_argument("--list", action="store_true", help="show what would run, and run nothing")
    options = parser.parse_args()
    changed = changed_files(options.since)
    tests = list(dict.fromkeys([*ALWAYS, *(test for path in changed for test in find_tests(path))]))
    notebooks = [path for path in changed if path.startswith("nbs/") and path.endswith(".ipynb")]
    print(f"{len(changed)} changed files: {' '.join(tests)}" + "".join(f"\n  {path}" for path in notebooks))
    if options.list: return
    env = os.environ | dict(OMP_NUM_THREADS="1")
    codes = [subprocess.call([sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *tests],
                             cwd=ROOT, env=env)]
    if notebooks:
        codes.append(subprocess.call([sys.executable, "scripts/test_notebooks.py", *notebooks], cwd=ROOT, env=env))
    sys.exit(max(codes))


if __name__ == "__main__": main()
