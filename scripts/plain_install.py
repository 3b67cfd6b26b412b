"""Install the wheel without extras into a fresh environment outside the repository, and use it as a new user would.

    python scripts/plain_install.py                     # the versions of constraints.txt
    python scripts/plain_install.py --newest            # the newest releases that pip finds
    python scripts/plain_install.py --environment DIR   # into DIR, which is kept and reused
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = "setup.py settings.ini pyproject.toml MANIFEST.in README.md LICENSE constraints.txt".split()
OPTIONAL = """deepspeed flash_attn wandb tensorboard trackio gguf kernels playwright nbdev jupyterlab
    pytest hypothesis""".split()
SHORT = 'load_config("demo", max_steps=5, eval_samples=4)'


def run(*command, cwd, env=None)->str:
    "Run a command and return its output; if it fails, exit with the output"
    began = time.monotonic()
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    name = Path(command[0]).name
    print(f"{time.monotonic() - began:6.1f} s  {name} {' '.join(map(str, command[1:]))[:90]}", flush=True)
    if done.returncode: sys.exit(f"{done.stdout}\n{name} ended with exit code {done.returncode}")
    return done.stdout


def build_wheel(folder:Path)->Path:
    "Build from a copy of the source, so that the wheel can contain nothing else"
    source = folder/"source"
    shutil.copytree(ROOT/"sft_nb", source/"sft_nb", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCE: shutil.copy(ROOT/name, source)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source, cwd=folder)
    return next(folder.glob("*.whl"))


def install(wheel:Path, environment:Path, newest:bool)->Path:
    "Create an environment with the wheel and its requirements; return the folder of its programs"
    programs = environment/"bin"
    if not (programs/"python").exists(): run(sys.executable, "-m", "venv", environment, cwd=wheel.parent)
    pip = [programs/"python", "-m", "pip", "install", "-q"]
    versions = ["--upgrade", "--upgrade-strategy", "eager"] if newest else ["-c", ROOT/"constraints.txt"]
    run(*pip, *versions, wheel, cwd=wheel.parent)
    run(*pip, "--no-deps", "--force-reinstall", wheel, cwd=wheel.parent)   # a kept environment has an older wheel
    return programs


def ten_lines()->str:
    "The README's program, with a short training"
    blocks = re.findall(r"```python\n(.*?)```", (ROOT/"README.md").read_text(encoding="utf-8"), re.S)
    code = next(block for block in blocks if "from sft_nb import *" in block)
    if 'load_config("demo")' not in code: sys.exit('README.md: its ten lines do not begin with load_config("demo")')
    return code.replace('load_config("demo")', SHORT)


def use(programs:Path, folder:Path)->None:
    "Run what a new user tries first; exit at the first command that fails"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "SFT_NB"))}
    env |= dict(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
                SFT_NB_CACHE=str(folder/"cache"), HOME=str(folder))
    python, sft_nb = programs/"python", programs/"sft_nb"
    look = ("from importlib.util import find_spec; import sft_nb, sys; "
            f"found = [name for name in {OPTIONAL} if find_spec(name)]; "
            "sys.exit(f'installed without being asked for: {found}' if found else 0)")
    run(python, "-c", look, cwd=folder, env=env)
    names = run(python, "-c", "from sft_nb.cli.console import COMMANDS; print(*COMMANDS)", cwd=folder, env=env).split()
    for name in names: run(sft_nb, name, "--help", cwd=folder, env=env)
    run(sft_nb, "--help", cwd=folder, env=env)

    for name in ("config", "data", "plan", "check"): run(sft_nb, name, "--config", "demo", cwd=folder, env=env)
    printed = run(sft_nb, "train", "--config", "demo", "--max-steps", 5, cwd=folder, env=env)
    trained = re.findall(r"run directory: (.+)", printed)[-1].strip()
    run(sft_nb, "evaluate", trained, cwd=folder, env=env)
    run(sft_nb, "merge", trained, cwd=folder, env=env)
    run(sft_nb, "report", trained, cwd=folder, env=env)
    run(sft_nb, "runs", cwd=folder, env=env)
    (folder/"ten_lines.py").write_text(ten_lines(), encoding="utf-8")
    run(python, "ten_lines.py", cwd=folder, env=env)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--newest", action="store_true", help="without constraints.txt: the newest releases")
    parser.add_argument("--environment", type=Path, help="a folder for the environment; it is kept")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sft_nb-plain-") as name:
        folder = Path(name)
        environment = (options.environment or folder/"environment").absolute()
        programs = install(build_wheel(folder), environment, options.newest)
        work = folder/"work"
        work.mkdir()
        use(programs, work)
    print(f"a plain install works: {time.monotonic() - began:.0f} s")


if __name__ == "__main__": main()
