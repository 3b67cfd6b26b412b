"""`transformers serve` in a separate process: a merged folder, and the base."""
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.request import urlopen

import pytest
from served import assert_named, edited

for package in ("fastapi", "uvicorn", "openai"): pytest.importorskip(package)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(url: str, process, seconds: float = 120) -> None:
    "Wait until the server answers"
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try: return urlopen(url + "/health", timeout=2).close()
        except OSError: time.sleep(.2)
    raise AssertionError(f"it did not start: {process.poll()}")


@contextmanager
def transformers_serve():
    "The server's address; the process is stopped afterwards"
    port = free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--port", str(port),
               "--host", "127.0.0.1", "--device", "cpu"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, env=os.environ | dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"), **quiet)
    try:
        wait_for(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try: process.wait(10)
        except subprocess.TimeoutExpired: process.kill()


def test_a_folder_that_transformers_serves_is_the_run_until_it_is_told_to_sample(served):
    hot = served.copy("hot")
    edited(hot/"generation_config.json", do_sample=True, temperature=1.5)
    with transformers_serve() as url:
        proof = served.prove(server=url, folder=served.merged)
        assert proof.same and "server texts" in [s.name for s in proof.stages], str(proof)
        proof = served.prove(server=url, model=str(hot))
        assert_named(proof, "sampling")
        assert "generation_config.json" in str(proof.fix)
