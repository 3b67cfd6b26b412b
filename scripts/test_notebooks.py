"""Run the notebooks as `nbdev_test` does, each in a fork of one process that has imported the libraries.

    python scripts/test_notebooks.py                   # all, two at a time
    python scripts/test_notebooks.py nbs/recipes -n 1  # notebooks, or folders of them
    python scripts/test_notebooks.py --verbose         # CPU seconds of each when it ends

Each notebook runs in its own process, so that it sees nothing of the one before it. What it launches is a fork too
(`tests/warm.py`), except for `python -c`, which shows how a new process starts. Notebooks that train start
first: otherwise a slow one would run alone at the end."""
import argparse
import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT/"tests")]
# import the package first: it sets variables that torch reads on import
IMPORTED = ("sft_nb.cli", "sft_nb.training.train", "sft_nb.evaluation.evaluate", "sft_nb.proof.merge", "trl", "peft",
            "datasets", "transformers.models.qwen3.modeling_qwen3", "matplotlib.pyplot", "matplotlib_inline", "pandas",
            "ipywidgets", "anywidget", "hypothesis", "scipy.stats", "torch.distributed.run", "fastcore.test",
            "nbdev.test")


def import_libraries()->None:
    "Import libraries once for all notebooks, without initialising CUDA, which forks could not use then"
    from warm import OF_A_TRAINING, WarmPopen, import_all
    subprocess.Popen = WarmPopen   # before torchrun imports it
    import_all(IMPORTED)
    import torch
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"   # answers the check below without initialising CUDA
    if not torch.cuda.is_available(): import_all(["bitsandbytes", *OF_A_TRAINING])
    gc.collect()
    gc.freeze()


def find_notebooks(places:list[Path])->list[Path]:
    "All notebooks in `places`, starting with those that train"
    from fastcore.xtras import globtastic
    def trainings(path): return -path.read_text().count("train(")
    found = []
    for place in map(Path.absolute, places):
        if place.is_dir():
            folder = globtastic(place, file_glob="*.ipynb", skip_file_re="^[_.]", skip_folder_re="^[_.]")
            found += map(Path, folder)
        else: found.append(place)
    return sorted(found, key=lambda path: (trainings(path), path))


def run_notebook(path:Path)->int:
    "Run a notebook in this process and return the exit code"
    from nbdev.config import get_config
    from nbdev.test import test_nb
    from warm import ForkedServer, WarmPopen
    WarmPopen.server, WarmPopen.forked, WarmPopen.kinds = ForkedServer(), False, ("-m",)
    os.chdir(ROOT/"nbs")
    code = 1
    try:
        passed, _ = test_nb(path, skip_flags=get_config().tst_flags.split(), basepath=ROOT)
        threading._shutdown()
        atexit._run_exitfuncs()
        code = int(not passed)
    except BaseException: traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def start(path:Path)->int:
    "Fork a process that runs the notebook and return its pid"
    child = os.fork()
    if child == 0: os._exit(run_notebook(path))
    return child


def run_notebooks(
    paths:list[Path],
    at_once:int=2,       # number of parallel processes
    verbose:bool=False,  # print the CPU seconds of each notebook when it ends
)->tuple[dict[Path,float],list[Path]]:  # CPU seconds of each with its children, and those that failed
    waiting, running, seconds, failed = paths[::-1], {}, {}, []
    while waiting or running:
        while waiting and len(running) < at_once:
            path = waiting.pop()
            running[start(path)] = path
        child, status, used = os.wait4(-1, 0)
        path = running.pop(child)
        seconds[path] = used.ru_utime + used.ru_stime
        if verbose: print(f"{seconds[path]:8.1f} {path}", flush=True)
        if status: failed.append(path)
        if os.WIFSIGNALED(status): print(f"{path}: ended by signal {os.WTERMSIG(status)}", file=sys.stderr)
    return seconds, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", type=Path, default=[ROOT/"nbs"], help="notebooks or folders of them")
    parser.add_argument("-n", "--at-once", type=int, default=2, help="notebooks beside each other")
    parser.add_argument("--verbose", action="store_true", help="print the CPU seconds of each when it ends")
    options = parser.parse_args()
    paths = find_notebooks(options.places)
    home = None
    if not os.access(Path.home(), os.W_OK):   # matplotlib and IPython write files there
        home = os.environ["HOME"] = tempfile.mkdtemp(prefix="sft_nb-home-")
    try:
        import_libraries()
        seconds, failed = run_notebooks(paths, options.at_once, options.verbose)
    finally:   # not with atexit: each notebook's process would remove it
        if home: shutil.rmtree(home, ignore_errors=True)
    gc.unfreeze()   # objects still frozen at exit are reported as leaks
    print(f"{len(seconds)} notebooks, {sum(seconds.values()):.0f} CPU seconds, {len(failed)} failed")
    for path in failed: print(f"failed: {path}", file=sys.stderr)
    if failed or not paths: sys.exit(1)


if __name__ == "__main__": main()
