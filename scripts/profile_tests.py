"""Profile the test suite: CPU seconds of each test, file and notebook, including child processes.

    python scripts/profile_tests.py                          # all tests, two at a time, then all notebooks
    python scripts/profile_tests.py tests/tokens -n 0        # arguments go to pytest
    python scripts/profile_tests.py --notebooks nbs/recipes  # notebooks alone

CPU seconds hardly depend on other load; wall time does. A child process is counted with the
test that waits for it, so processes of a detached run are missing. `imports` is the time that
children spend importing torch, transformers, trl and the libraries below, which a warm process would save."""
import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOOK = '''
import os, sys, time
HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "bitsandbytes", "accelerate", "deepspeed"}

class ImportTimer:
    "Writes the CPU seconds of each outermost import of a heavy library into a file"
    depth = 0
    def find_spec(self, name, path=None, target=None):
        if name not in HEAVY: return None
        from importlib.machinery import PathFinder
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not hasattr(spec.loader, "exec_module"): return spec
        execute = spec.loader.exec_module
        def exec_module(module):
            began = time.process_time()
            ImportTimer.depth += 1
            try: execute(module)
            finally:
                ImportTimer.depth -= 1
                if not ImportTimer.depth:
                    with open(os.environ["SFT_NB_IMPORT_LOG"], "a") as file:
                        file.write(f"{os.getpid()} {time.process_time() - began:.3f}\\n")
        spec.loader.exec_module = exec_module
        return spec

if "SFT_NB_IMPORT_LOG" in os.environ: sys.meta_path.insert(0, ImportTimer())
'''


def cpu_seconds()->tuple[float,float]:
    "CPU seconds of this process, and of the children it has waited for"
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


def count_imports(folder:Path)->Path:
    "Make every new Python process log its heavy imports; return the file they write to"
    (folder/"sitecustomize.py").write_text(HOOK)
    log = folder/"imports.txt"
    log.touch()
    old = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([old] if old else [])])
    os.environ["SFT_NB_IMPORT_LOG"] = str(log)
    return log


class Profile:
    "A pytest plugin: `used[test]` is its own CPU seconds, those of its children, and those of imports in children"
    def __init__(self): self.used = defaultdict(lambda: [0., 0., 0.])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        log = Path(os.environ["SFT_NB_IMPORT_LOG"])
        own, children = cpu_seconds()
        size = log.stat().st_size
        yield
        own_after, children_after = cpu_seconds()
        with log.open() as file:
            file.seek(size)
            lines = [line.split() for line in file]
        imports = sum(float(seconds) for pid, seconds in lines if int(pid) != os.getpid())
        line = f"{item.nodeid}\t{own_after - own:.3f}\t{children_after - children:.3f}\t{imports:.3f}\n"
        with open(log.with_name("tests.txt"), "a") as file: file.write(line)

    def read(self, folder:Path)->dict[str,list[float]]:
        for line in (folder/"tests.txt").read_text().splitlines():
            name, *seconds = line.split("\t")
            self.used[name] = [float(s) for s in seconds]
        return dict(self.used)


def run_tests(arguments:list[str])->dict[str,list[float]]:
    "Run pytest with the plugin in every worker"
    with tempfile.TemporaryDirectory(prefix="sft_nb-profile-") as name:
        folder = Path(name)
        count_imports(folder)
        (folder/"profile_plugin.py").write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT/'scripts')!r})\nfrom profile_tests import Profile\n"
            "def pytest_configure(config): config.pluginmanager.register(Profile())\n")
        sys.path.insert(0, str(folder))
        code = pytest.main(["-p", "profile_plugin", *arguments])
        if code not in (0, 1): sys.exit(code)
        return Profile().read(folder)


def profile_notebooks(places:list[Path])->dict[str,list[float]]:
    "Run notebooks as `make test` does; the children they wait for are included"
    from test_notebooks import find_notebooks, import_libraries, run_notebooks
    paths = find_notebooks(places)
    import_libraries()
    seconds, failed = run_notebooks(paths)
    return {f"{path}{' (failed)' if path in failed else ''}": [seconds[path], 0., 0.] for path in paths}


def print_table(used:dict[str,list[float]], title:str, rows:int)->None:
    "Print the `rows` slowest entries, and the sum of all"
    print(f"\n{title:68} {'own':>8} {'children':>9} {'imports':>8}")
    for name, (own, children, imports) in sorted(used.items(), key=lambda x: -x[1][0] - x[1][1])[:rows]:
        print(f"{name[-68:]:68} {own:8.1f} {children:9.1f} {imports:8.1f}")
    own, children, imports = (sum(column) for column in zip(*used.values())) if used else (0, 0, 0)
    print(f"{f'all {len(used)}':68} {own:8.1f} {children:9.1f} {imports:8.1f}")


def by_file(used:dict[str,list[float]])->dict[str,list[float]]:
    files = defaultdict(lambda: [0., 0., 0.])
    for name, seconds in used.items():
        file = name.split("::")[0]
        files[file] = [a + b for a, b in zip(files[file], seconds)]
    return dict(files)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notebooks", nargs="*", type=Path, help="notebooks or folders of them; alone: all")
    parser.add_argument("--rows", type=int, default=40, help="rows of each table")
    options, arguments = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)
    environment = dict(os.environ)
    began = time.monotonic()
    if options.notebooks is None:
        used = run_tests(arguments or ["tests", "-q", "-n", "2", "--dist", "worksteal"])
        print_table(by_file(used), "file", options.rows)
        print_table(used, "test", options.rows)
    if options.notebooks is not None:
        print_table(profile_notebooks(options.notebooks or [ROOT/"nbs"]), "notebook", options.rows)
    elif not arguments:   # in a separate process without pytest's settings
        command = [sys.executable, __file__, "--rows", str(options.rows), "--notebooks"]
        subprocess.run(command, env=environment, check=True)
    print(f"\n{time.monotonic() - began:.0f} s of wall time")


if __name__ == "__main__": main()
