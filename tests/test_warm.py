"""A warm start gives the requested process."""
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("warm_processes")


def python(*args, **how):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=600)
    return subprocess.run([sys.executable, *args], **pipes | how)


def test_arguments_folder_environment_input_and_exit_code_arrive(tmp_path):
    (tmp_path/"asked.py").write_text(
        "import os, sys\nprint(os.getcwd(), sys.argv, os.environ['SFT_NB_ASKED'], sys.stdin.read())\nsys.exit(7)")
    env = os.environ | dict(SFT_NB_ASKED="yes")
    code = "import sys; print('torch' in sys.modules, __name__); print('wrong', file=sys.stderr); sys.exit('no')"
    done = python("-c", code, "a", "--b")
    assert (done.stdout, done.stderr, done.returncode) == ("True __main__\n", "wrong\nno\n", 1)
    done = python("-m", "asked", "a", cwd=tmp_path, env=env, input="typed")
    assert done.stdout == f"{tmp_path} ['{tmp_path/'asked.py'}', 'a'] yes typed\n" and done.returncode == 7
    done = python(str(tmp_path/"asked.py"), "a", env=env, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    assert done.stdout == f"{os.getcwd()} ['{tmp_path/'asked.py'}', 'a'] yes \n" and done.returncode == 7
    assert "ZeroDivisionError" in python("-c", "1/0").stderr
    with pytest.raises(FileNotFoundError): python("-c", "", cwd=tmp_path/"nowhere")


def test_it_is_a_child_that_hears_signals():
    waits = "import time; print('here', flush=True); time.sleep(600)"
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        child = subprocess.Popen([sys.executable, "-c", waits], start_new_session=True, **pipes)
        assert child.stdout.readline() == "here\n" and child.poll() is None
        assert os.getsid(child.pid) == child.pid
        child.send_signal(number)
        assert child.wait(timeout=300) == -number
        child.stdout.close()


def test_its_own_children_are_its_own():
    code = ("import os, subprocess, sys; c = subprocess.run([sys.executable, '-c', 'import os, sys; "
            "print(\"trl\" in sys.modules, os.getppid()); sys.exit(3)'], capture_output=True, text=True); "
            "print(os.getpid(), c.stdout, c.returncode)")
    pid, warm, parent, ended = python("-c", code).stdout.split()
    assert (warm, parent, ended) == ("True", pid, "3")


def test_what_a_fork_cannot_follow_starts_cold():
    code = "import sys; print('torch' in sys.modules)"
    assert python("-c", code, env=os.environ | dict(HF_HUB_OFFLINE="0")).stdout == "False\n"
    assert python("-W", "error", "-c", code).stdout == "False\n"
    assert python("-c", code).stdout == "True\n"
