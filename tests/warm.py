"""Warm starts of Python processes. A test that starts `python -m sft_nb ...` waits about eight seconds until torch,
transformers, trl and peft are imported. Here one server per pytest worker imports them once, and a new process
is a fork of it, with the arguments, folder, environment, signal mask and files passed to `subprocess.Popen`.

The child is adopted by the requesting process (PR_SET_CHILD_SUBREAPER), so that `pid`, `wait`, signals and exit
codes work as for an ordinary child. A call that a fork cannot reproduce starts cold, as without
this module: another program, interpreter options, variables that a library reads on import.

Use it with `pytestmark = pytest.mark.usefixtures("warm_processes")`. Do not use it to test how a process starts:
forks of one server share the seed of hash(), and have imported modules that their command would not."""
import atexit
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
IMPORTED = ("trl", "peft", "bitsandbytes", "datasets", "torch.distributed.run", "sft_nb.cli", "sft_nb.training.train",
            "sft_nb.training.launch", "sft_nb.evaluation.evaluate", "transformers.models.qwen3.modeling_qwen3")
# further modules that the first training of a process loads, if installed; takes about a second
OF_A_TRAINING = ("sft_nb.training.trainer", "deepspeed", "wandb", "matplotlib.pyplot", "peft.tuners.lora.bnb",
                 "transformers.integrations.bitsandbytes")
# a new process may have these variables, and all others that no library reads on import
READ_AT_IMPORT = ("ACCELERATE_", "BNB_", "CUDA_", "DATASETS_", "HF_", "HOME", "LD_", "MKL_", "MPL", "OMP_", "PYTHON",
                  "TOKENIZERS_", "TRANSFORMERS_", "TRITON_", "XDG_")


def import_all(names)->None:
    "Import modules, skipping those that are not installed"
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]): importlib.import_module(name)


def set_subreaper(on:bool)->None:
    "Set whether orphaned descendants become children of this process"
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def matters_at_import(environment:dict)->dict:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT) and k != "PYTHONSAFEPATH"}


def program_of(args)->dict|None:
    "What an interpreter should run: code, a module or a script; None if a fork cannot run it"
    if isinstance(args, (str, bytes, os.PathLike)): return None
    executable, *rest = map(os.fspath, args)
    if executable != sys.executable: return None
    unbuffered = rest[:1] == ["-u"]
    if unbuffered: rest = rest[1:]
    if rest[:1] in (["-c"], ["-m"]) and len(rest) > 1: kind, what, argv = rest[0], rest[1], rest[2:]
    elif rest and not rest[0].startswith("-"): kind, what, argv = "script", rest[0], rest[1:]
    else: return None
    return dict(kind=kind, what=what, argv=argv, unbuffered=unbuffered)


class Server:
    "A process that has imported everything and forks for each new process"
    def __init__(self):
        self.environment = matters_at_import(os.environ)
        self.connection, there = socket.socketpair()
        command = [sys.executable, __file__, str(there.fileno())]
        self.process = COLD(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
        there.close()

    def start(self, request:dict, files:list[int])->int:
        "Start a process, a child of this one, and return its pid"
        message = json.dumps(request).encode()
        set_subreaper(True)
        try:
            socket.send_fds(self.connection, [len(message).to_bytes(4, "big")], files)
            self.connection.sendall(message)
            pid = int.from_bytes(receive(self.connection, 4), "big")
        finally: set_subreaper(False)
        return pid

    def close(self)->None:
        "Close the connection, which ends the server; kill it if it is still importing"
        self.connection.close()
        try: self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ForkedServer(Server):
    "A server forked from a process that has already imported everything itself"
    def __init__(self):
        self.environment = matters_at_import(os.environ)
        self.connection, there = socket.socketpair()
        if os.fork() == 0:
            self.connection.close()
            serve_forks(there)   # never returns
        there.close()


class WarmPopen(subprocess.Popen):
    "`subprocess.Popen`, but Python processes are forked from `server`, or from this process if it is a fork itself"
    server:Server|None = None
    forked = False   # True: this process is as warm as the server and forks itself
    kinds = ("-c", "-m", "script")   # programs that can start warm

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                       shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid,
                       umask, start_new_session, process_group):
        program = program_of(args)
        environment = dict(os.environ if env is None else env)
        odd = (executable, preexec_fn, gid, gids, uid) != (None,) * 5 or pass_fds or shell or umask != -1 or \
            process_group != -1
        if program is None or program["kind"] not in self.kinds or odd or not self._same_libraries(environment):
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread,
                p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, process_group)
        cwd = os.path.abspath(cwd or os.getcwd())
        if not os.path.isdir(cwd): raise FileNotFoundError(2, "no such directory", cwd)
        mask = [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        request = program | dict(cwd=cwd, environment=environment, session=start_new_session, mask=mask)
        files = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        sys.stdout.flush(), sys.stderr.flush()
        if WarmPopen.forked: self.pid = fork_here(request, files)
        else:
            if WarmPopen.server is None: WarmPopen.server = Server()
            self.pid = WarmPopen.server.start(request, files)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _same_libraries(self, environment:dict)->bool:
        base = os.environ if WarmPopen.server is None else WarmPopen.server.environment
        return matters_at_import(environment) == matters_at_import(base)


COLD = subprocess.Popen


def receive(connection:socket.socket, size:int)->bytes:
    "Receive `size` bytes; empty if the other side has closed the connection"
    got = b""
    while len(got) < size:
        more = connection.recv(size - len(got))
        if not more: return b""
        got += more
    return got


def fork_here(request:dict, files:list[int])->int:
    "Fork a child of this process, which is itself a fork of the server"
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid == 0: run(request, files)   # never returns
    signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
    return pid


def serve(connection:socket.socket)->tuple[dict,list[int]]:
    "Fork for each request until the connection closes; returns only in new processes, with their request and files"
    while True:
        head, files, _, _ = socket.recv_fds(connection, 4, 3)
        if not head: os._exit(0)
        head += receive(connection, 4 - len(head))
        request = json.loads(receive(connection, int.from_bytes(head, "big")))
        read, write = os.pipe()
        between = os.fork()
        if between == 0:   # its child is orphaned at once and adopted by the requester
            child = os.fork()
            if child == 0:
                return request, list(files)
            os.write(write, child.to_bytes(4, "big"))
            os._exit(0)
        os.waitpid(between, 0)
        connection.sendall(os.read(read, 4))
        for file in (read, write, *files): os.close(file)


def become(request:dict, files:list[int])->None:
    "Take over the request's files, session, folder, environment, arguments and blocked signals"
    aside = [os.dup(file) for file in files]   # one of them may already be 0, 1 or 2
    for own, file in enumerate(aside): os.dup2(file, own)
    os.closerange(3, 1 << 16)
    if request["session"]: os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for own, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(own, "w" if own else "r", closefd=False, errors="strict" if own < 2 else "backslashreplace")
        if own: stream.reconfigure(line_buffering=own == 2 or stream.isatty(), write_through=request["unbuffered"])
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    kind, what = request["kind"], request["what"]
    if request["environment"].get("PYTHONSAFEPATH"): del sys.path[0]
    else: sys.path[0] = {"-c": "", "-m": request["cwd"], "script": str(Path(what).parent)}[kind]
    sys.argv = [what if kind == "script" else kind, *request["argv"]]
    for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])


def execute(kind:str, what:str)->int:
    "Run code, a module or a script as __main__ and return its exit code"
    try:
        if kind == "-m":
            package = hasattr(sys.modules.get(what), "__path__")
            sys.modules.pop(f"{what}.__main__" if package else what, None)   # it was not imported as the main program
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "script": runpy.run_path(what, run_name="__main__")
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
        return 0
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int): return (e.code or 0) & 255
        print(e.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException: traceback.print_exc()
    return 1


def run(request:dict, files:list[int])->None:
    "Run the requested process to its end"
    code = 1
    try:
        become(request, files)
        code = execute(request["kind"], request["what"])
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def serve_forks(connection:socket.socket)->None:
    "Run the server, and in its forks the requested processes"
    WarmPopen.forked = True
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    run(*serve(connection))


if __name__ == "__main__":
    sys.modules["warm"] = sys.modules["__main__"]
    WarmPopen.forked, subprocess.Popen = True, WarmPopen   # before torchrun imports `Popen`
    import_all(IMPORTED)
    if not sys.modules["torch"].cuda.is_available(): import_all(OF_A_TRAINING)   # deepspeed initialises CUDA
    gc.collect()
    gc.freeze()
    serve_forks(socket.socket(fileno=int(sys.argv[1])))
