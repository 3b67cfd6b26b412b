"""Plant small faults in the code, one at a time, and print those that no test catches.

    python scripts/mutate.py --record                     # once: which test executes which line; half an hour
    python scripts/mutate.py                              # 100 faults in the whole package: an hour on two cores
    python scripts/mutate.py --count 10 --seed 1 --module evaluation/statistics --module tokens/encode
    python scripts/mutate.py --again                      # those that were not caught, after tests were added

Each fault is planted in a throw-away copy of the tree, in the module and in the notebook that the module comes from.
The tests that execute its line run until one fails: those of the file named after the module, the module's notebook,
then the others, the quickest first. A test counts only if it passes on the untouched tree. A fault whose tests exceed
the time limit is counted as out of time. The result is written to benchmarks/results/mutate.json.

Recorded lines are kept in .mutate, a file for each test file; `--record` runs those that are missing or have changed.
Where a module has changed since, its lines are matched with those of now. Tests that train in child processes, need a
browser or take minutes are not recorded: a line that only these execute is tested by the files that import it."""
import argparse
import ast
import difflib
import gc
import hashlib
import importlib
import inspect
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ["base", "config", "rows", "tasks", "tokens", "batches", "model", "planning", "workbench", "checks", "runs",
         "training", "evaluation", "proof", "panels", "cli", "extras"]
RECORDED = ROOT/".mutate"
SLOW = ("browser", "widths", "kill", "together", "launch", "plain_install", "newcomer", "test_demo", "test_site",
        "test_walk", "test_compile", "test_contributing", "gpu/", "real/")
SECONDS_OF_A_FILE = 60    # when its tests are recorded; later ones are left out
SECONDS_OF_A_FAULT = 60    # of tests, by CPU time; those that take longer together are left out
OPERATORS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
             ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
             ast.NotIn: ("not in", "in"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"),
             ast.Div: ("/", "*"), ast.And: ("and", "or"), ast.Or: ("or", "and")}


@dataclass(frozen=True)
class Fault:
    "One replacement of a piece of a module's source"
    module:str   # tokens/encode.py
    kind:str
    start:int    # characters
    end:int
    new:str

    def describe(self, source:str)->dict:
        "Its place and its change, in readable form"
        first, last = source.rfind("\n", 0, self.start) + 1, (source + "\n").find("\n", self.end)
        after = source[first:self.start] + self.new + source[self.end:last]
        return dict(module=self.module, line=source.count("\n", 0, self.start) + 1, kind=self.kind,
                    before=source[first:last].strip(), after=after.strip())


class Finder(ast.NodeVisitor):
    "Finds every fault that can be planted in a module, except in text, annotations and display code"
    def __init__(self, module:str, source:str):
        self.module, self.source, self.faults = module, source, []
        self.lines = [0]
        for line in source.splitlines(keepends=True): self.lines.append(self.lines[-1] + len(line))

    def offset(self, line:int, column:int)->int:
        text = self.source[self.lines[line - 1]:self.lines[line]]
        return self.lines[line - 1] + len(text.encode()[:column].decode())

    def start(self, node)->int: return self.offset(node.lineno, node.col_offset)
    def end(self, node)->int: return self.offset(node.end_lineno, node.end_col_offset)
    def add(self, kind:str, start:int, end:int, new:str): self.faults.append(Fault(self.module, kind, start, end, new))

    def replace_operator(self, kind:str, operator, left, right):
        old, new = OPERATORS.get(type(operator), (None, None))
        if old is None: return
        a, b = self.end(left), self.start(right)
        found = re.search(rf"(?<![\w*/=<>!]){re.escape(old)}(?![\w*/=])", self.source[a:b])
        if found: self.add(kind, a + found.start(), a + found.end(), new)

    def visit_JoinedStr(self, node): pass
    def visit_Raise(self, node): pass

    def visit_FunctionDef(self, node):
        if re.match(r"__(str|repr)__|_repr_|plot|_?draw", node.name): return
        body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        if len(body) > 1 and body[-1].lineno > body[0].lineno:
            at = self.start(body[-1])
            self.add("early return", at, at, "return None\n" + " " * body[-1].col_offset)
        for statement in body: self.visit(statement)

    def visit_AnnAssign(self, node):
        if node.value is not None: self.visit(node.value)

    def visit_Compare(self, node):
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            self.replace_operator("flipped comparison", operator, left, right)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        texts = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict)
        literal = any(isinstance(x, texts) or isinstance(x, ast.Constant) and isinstance(x.value, str)
                      for x in (node.left, node.right))
        if not literal: self.replace_operator("other operator", node.op, node.left, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.replace_operator("and for or", node.op, node.values[0], node.values[1])
        self.generic_visit(node)

    def visit_If(self, node):
        leaves = isinstance(node.body[-1], (ast.Raise, ast.Return, ast.Continue, ast.Break))
        if leaves: self.add("dropped guard", self.start(node.test), self.end(node.test), "False")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, (ast.Not, ast.USub)):
            is_label = isinstance(node.operand, ast.Constant) and node.operand.value == 100
            if is_label: self.add("wrong label", self.start(node), self.end(node), "0")
            else:   # the operand may stand in parentheses
                at = self.start(node)
                self.add("sign or not dropped", at, at + len("not" if isinstance(node.op, ast.Not) else "-"), "")
            return
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.add("wrong constant", self.start(node), self.end(node), str(not node.value))
        elif isinstance(node.value, int) and abs(node.value) <= 16:   # off by one in a large number is no fault
            self.add("off by one", self.start(node), self.end(node), str(node.value + 1))

    def visit_Call(self, node):
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            new = "max" if node.func.id == "min" else "min"
            self.add("min for max", self.start(node.func), self.end(node.func), new)
        self.generic_visit(node)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            self.add("dropped call", self.start(node), self.end(node), "pass")
        self.generic_visit(node)


def find_faults(module:str)->list[Fault]:
    source = (ROOT/"sft_nb"/module).read_text()
    finder = Finder(module, source)
    finder.visit(ast.parse(source))
    return finder.faults


def sources(parts:list[str])->list[str]:
    "The modules of the given parts: tokens, or tokens/encode"
    files = [str(p.relative_to(ROOT/"sft_nb")) for p in sorted((ROOT/"sft_nb").rglob("*.py")) if "__" not in p.name]
    found = [f for f in files if any(f == f"{p}.py" or f.startswith(f"{p}/") for p in parts)]
    if not found: sys.exit(f"no module is named {', '.join(parts)}. Fix: --module tokens/encode, as under sft_nb/.")
    return found


def choose_faults(modules:list[str], count:int, seed:int)->list[Fault]:
    "Choose faults from modules in turn, so that a short one counts as much as a long one"
    draw = random.Random(seed)
    left = {m: find_faults(m) for m in modules}
    for faults in left.values(): draw.shuffle(faults)
    chosen = []
    while len(chosen) < count and any(left.values()):
        turn = [m for m in modules if left[m]]
        draw.shuffle(turn)
        chosen += [left[m].pop() for m in turn][:count - len(chosen)]
    return chosen


def test_files()->list[str]:
    found = [str(p.relative_to(ROOT)) for p in sorted((ROOT/"tests").rglob("test_*.py"))]
    return [name for name in found if not any(part in name for part in SLOW)]


def importing(module:str)->list[str]:
    "Test files that import a module, the smallest first; if there are none, those of the modules that import it"
    dotted = "sft_nb." + module.removesuffix(".py").replace("/", ".")
    parent, stem = dotted.rpartition(".")[::2]
    imports = re.compile(rf"\b{re.escape(dotted)}\b|from {re.escape(parent)} import .*\b{stem}\b")
    found = [name for name in test_files() if imports.search((ROOT/name).read_text())]
    if not found:
        relative = re.compile(rf"from \.+{re.escape(dotted.removeprefix('sft_nb.'))} import ")
        users = [m for m in sources(PARTS) if m != module and relative.search((ROOT/"sft_nb"/m).read_text())]
        found = {name for m in users for name in importing(m)}
    return sorted(found, key=lambda name: (ROOT/name).stat().st_size)


def digest(text:str)->str: return hashlib.sha256(text.encode()).hexdigest()[:16]


class Recorder:
    "A pytest plugin: CPU seconds of each test, and lines of the package that it and its fixtures execute"
    def __init__(self):
        import coverage
        self.coverage = coverage.Coverage(data_file=None, source=[str(ROOT/"sft_nb")], config_file=False)
        self.began, self.context = time.process_time(), ""
        self.seconds, self.fixtures, self.failed = {}, {}, set()
        self.coverage.start()

    def switch(self, context:str):
        self.coverage.switch_context(context)
        self.context = context

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        began = time.process_time()   # hardly depends on what else the machine does
        self.switch(item.nodeid)
        self.fixtures[item.nodeid] = {f"fixture {name}" for name in item.fixturenames}
        done = yield
        self.switch("")
        self.seconds[item.nodeid] = round(time.process_time() - began, 2)
        if time.process_time() - self.began > SECONDS_OF_A_FILE: item.session.shouldstop = "enough is recorded"
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before = self.context
        if fixturedef.scope != "function": self.switch(f"fixture {fixturedef.argname}")
        try: return (yield)
        finally: self.switch(before)

    def pytest_runtest_logreport(self, report):
        if not report.passed: self.failed.add(report.nodeid)

    def lines(self)->dict[str,dict[str,list[int]]]:
        "Lines of each module by test, for tests that passed"
        self.coverage.stop()
        data, found = self.coverage.get_data(), {}
        for file in data.measured_files():
            module = str(Path(file).relative_to(ROOT/"sft_nb"))
            by_line = data.contexts_by_lineno(file)
            for test in self.seconds.keys() - self.failed:
                contexts = {test, *self.fixtures[test]}
                lines = sorted(line for line, of in by_line.items() if contexts.intersection(of))
                if lines: found.setdefault(test, {})[module] = lines
        return found


def record_file(name:str):
    "Run a test file in this process, and write what its tests execute"
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT/"tests"))
    os.environ["PYTHONPATH"] = str(ROOT)
    recorder = Recorder()
    pytest.main(["-q", "-p", "no:cacheprovider", name], plugins=[recorder])
    lines = recorder.lines()
    modules = {module: (ROOT/"sft_nb"/module).read_text() for of in lines.values() for module in of}
    for source in modules.values(): (RECORDED/"sources"/digest(source)).write_text(source)
    made = dict(file=digest((ROOT/name).read_text()), modules={m: digest(source) for m, source in modules.items()},
                tests={test: dict(seconds=recorder.seconds[test], lines=of) for test, of in lines.items()})
    (RECORDED/(digest(name) + ".json")).write_text(json.dumps(made))


def record(folders:list[str], processes:int):
    "Record the test files of folders that have no record, or have changed since"
    (RECORDED/"sources").mkdir(parents=True, exist_ok=True)
    (RECORDED/".gitignore").write_text("*")
    def is_recorded(name:str)->bool:
        file = RECORDED/(digest(name) + ".json")
        return file.exists() and json.loads(file.read_text())["file"] == digest((ROOT/name).read_text())
    names = [n for f in folders for n in test_files() if n.startswith(f) and not is_recorded(n)]
    import_package()   # once: only lines of functions are of interest
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for k, line in enumerate(pool.imap_unordered(record_apart, names, 1), 1):
            print(f"{k}/{len(names)} {line}", flush=True)


def record_apart(name:str)->str:
    began = time.monotonic()
    outcome, _ = in_fork(lambda: record_file(name) or "", 3 * SECONDS_OF_A_FILE)
    return f"{name} {outcome} {time.monotonic() - began:.0f} s"


class Records:
    "What was recorded, for the lines of now"
    def __init__(self):
        self.files = {}
        for name in test_files():
            file = RECORDED/(digest(name) + ".json")
            if file.exists(): self.files[name] = json.loads(file.read_text())

    def is_current(self, name:str)->bool:
        return name in self.files and self.files[name]["file"] == digest((ROOT/name).read_text())

    def tests_of(self, module:str, lines:set[int])->dict[str,float]:
        "Seconds of the tests that execute one of the lines of a module"
        now, found, matched = (ROOT/"sft_nb"/module).read_text(), {}, {}
        for made in self.files.values():
            old = made["modules"].get(module)
            if old is None: continue
            if old not in matched: matched[old] = lines if old == digest(now) else old_lines(old, now, lines)
            for test, of in made["tests"].items():
                if not matched[old].isdisjoint(of["lines"].get(module, ())): found[test] = of["seconds"]
        return found


def old_lines(old:str, now:str, lines:set[int])->set[int]:
    "The numbers that lines of now had in the source of a record"
    before = (RECORDED/"sources"/old).read_text().splitlines()
    blocks = difflib.SequenceMatcher(None, before, now.splitlines(), autojunk=False).get_matching_blocks()
    return {line - b + a for line in lines for a, b, size in blocks if b < line <= b + size}


def lines_of(fault:Fault)->set[int]:
    "The lines of the statement that a fault changes; of the whole function for its defaults, else of all functions"
    tree = ast.parse((ROOT/"sft_nb"/fault.module).read_text())
    line = (ROOT/"sft_nb"/fault.module).read_text().count("\n", 0, fault.start) + 1
    def spans(node): return node.lineno <= line <= node.end_lineno
    def body(node): return {k for s in node.body for k in range(s.lineno, s.end_lineno + 1)}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    inside = [f for f in functions if spans(f)]
    if not inside: return {k for f in functions for k in body(f)}
    function = max(inside, key=lambda f: f.lineno)
    if line not in body(function) or function.lineno == line: return body(function)
    statement = max((n for n in ast.walk(function) if isinstance(n, ast.stmt) and spans(n)), key=lambda n: n.lineno)
    inner = getattr(statement, "body", None)
    last = max(statement.lineno, inner[0].lineno - 1) if inner else statement.end_lineno
    return {*range(statement.lineno, last + 1)}


def targets(fault:Fault, records:Records)->list[list[str]]:
    "Groups of tests and a notebook, in the order in which they run"
    module, stem = fault.module, Path(fault.module).stem
    book = notebook_of(module)
    books = [[str(book.relative_to(ROOT))]] if book else []
    found = records.tests_of(module, lines_of(fault))
    if not found: return [*books, *([name] for name in importing(module))]
    def is_named(test:str)->bool: return stem in Path(test.split("::")[0]).stem
    quickest = sorted(found, key=lambda test: (not is_named(test), found[test]))
    chosen, seconds = [], 0.
    for test in quickest:
        seconds += found[test]
        if chosen and seconds > SECONDS_OF_A_FAULT: break
        chosen.append(test)
    changed = [name for name in importing(module) if not records.is_current(name)]   # it may have new tests
    if not is_imported: changed = importing(module)   # what importing executes is not recorded
    named = [test for test in chosen if is_named(test)]
    others = [test for test in chosen if not is_named(test)]
    first = [test for test in others if found[test] < 1][:20]   # a fault is often caught by the quickest ones
    rest = [test for test in others if test not in first]
    return [g for g in (named, first, *books, rest, *([name] for name in changed)) if g]


def notebook_of(module:str)->Path|None:
    found = re.search(r"File to edit: (?:\.\./)+(nbs/\S+\.ipynb)", (ROOT/"sft_nb"/module).read_text())
    return ROOT/found[1] if found else None


def take_snapshot(folder:Path):
    "Copy tracked files, and untracked ones that git does not ignore; from now on everything is read from the copy"
    global ROOT
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True,
                            text=True).stdout
    for name in listed.splitlines():
        if (ROOT/name).is_file():
            (folder/name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT/name, folder/name)
    ROOT = folder


def copy_tree(to:Path): shutil.copytree(ROOT, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def plant(fault:Fault, tree:Path):
    "Write the fault into the module and into the cell that it was exported from"
    file = tree/"sft_nb"/fault.module
    source = file.read_text()
    changed = source[:fault.start] + fault.new + source[fault.end:]
    compile(changed, fault.module, "exec")
    file.write_text(changed)
    heads = [m for m in re.finditer(r"^# %% \S+ #(\w+)\n", source, re.M) if m.end() <= fault.start]
    book = notebook_of(fault.module)
    if not heads or book is None: return
    begin = heads[-1].end()
    old = source[source.rfind("\n", 0, fault.start) + 1:(source + "\n").find("\n", fault.end)]
    nth = source[begin:fault.start].count(old)
    notebook = tree/book.relative_to(ROOT)
    content = json.loads(notebook.read_text())
    cell = next(c for c in content["cells"] if c.get("id") == heads[-1][1])
    text = "".join(cell["source"])
    at = -1
    for _ in range(nth + 1): at = text.find(old, at + 1)
    if at < 0: return   # an import, which is written differently in the notebook
    shift = at - (source.rfind("\n", 0, fault.start) + 1)
    cell["source"] = text[:fault.start + shift] + fault.new + text[fault.end + shift:]
    notebook.write_text(json.dumps(content))


def code_at(code, line:int):
    "The code of the outermost function of a module or class whose lines include this one; None: there is none"
    for part in code.co_consts:
        if not isinstance(part, type(code)): continue
        last = max((n for *_, n in part.co_lines() if n), default=0)
        if not part.co_firstlineno <= line <= max(last, last_line(part)): continue
        return part if part.co_flags & inspect.CO_OPTIMIZED else code_at(part, line)
    return None


def last_line(code)->int:
    parts = [part for part in code.co_consts if isinstance(part, type(code))]
    return max([n for *_, n in code.co_lines() if n] + [last_line(part) for part in parts], default=0)


def is_inside(fault:Fault)->bool:
    "Is it in the body of a function, whose code can be replaced in a process that has imported the module?"
    source = (ROOT/"sft_nb"/fault.module).read_text()
    line = source.count("\n", 0, fault.start) + 1
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    return any(n.body[0].lineno <= line <= n.end_lineno and n.body[0].lineno > n.lineno for n in functions)


def swap(fault:Fault)->bool:
    "Give the functions of an imported module the code with the fault"
    file = Path(importlib.import_module("sft_nb").__file__).parent/fault.module
    source = file.read_text()
    line = source.count("\n", 0, fault.start) + 1
    changed = source[:fault.start] + fault.new + source[fault.end:]
    old, new = (code_at(compile(text, str(file), "exec"), line) for text in (source, changed))
    found = [f for f in gc.get_objects() if isinstance(f, types.FunctionType) and f.__code__ == old]
    for f in found: f.__code__ = new
    return bool(found)


is_imported = False   # is the package imported in this process?

def in_fork(work, seconds:float)->tuple[str,str]:
    "Call a function that returns a text in a fork: (passed, failed or time; the text, empty if it passed)"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(read)
        failed = "the process ended"
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")
            for number in (1, 2): os.dup2(sys.stdout.fileno(), number)
            failed = work()
        finally:
            os.write(write, failed.encode())
            os._exit(0)
    os.close(write)
    until = time.monotonic() + seconds
    while time.monotonic() < until and os.waitpid(child, os.WNOHANG)[0] == 0: time.sleep(.05)
    timed_out = time.monotonic() >= until
    try: os.killpg(child, signal.SIGKILL)   # including processes it left running
    except ProcessLookupError: pass
    if timed_out: os.waitpid(child, 0)
    said = b"" if timed_out else os.read(read, 4096)
    os.close(read)
    if timed_out: return "time", ""
    return ("failed", said.decode()) if said else ("passed", "")


def run_target(target:list[str], tree:Path, seconds:float, fault:Fault|None=None)->tuple[str,str]:
    "Run tests or a notebook in a fork: (passed, failed or time; the test that failed)"
    def work()->str:
        if fault is not None and is_imported and not swap(fault): return "no function has this code"
        os.chdir(tree)
        sys.path[:0] = [str(tree), str(tree/"tests")]
        os.environ["PYTHONPATH"] = str(tree)
        return run_notebook(tree/target[0]) if target[0].endswith(".ipynb") else run_pytest(target)
    outcome, text = in_fork(work, seconds)
    return outcome, target[0] if outcome == "time" else text


def run_pytest(target:list[str])->str:
    "Run pytest and return the first test that fails; empty if all pass"
    class First:
        failed = ""
        def pytest_runtest_logreport(self, report):
            if report.failed and not self.failed: self.failed = report.nodeid
    first = First()
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *target], plugins=[first])
    return first.failed or ("" if code in (0, 5) else target[0])


def run_notebook(path:Path)->str:
    from nbdev.test import test_nb
    passed, _ = test_nb(path, skip_flags=[], force_flags=[], basepath=path.parent)
    return "" if passed else str(path.name)


def preload():
    "Import what every test needs once before forking, but nothing of the package itself"
    os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TQDM_DISABLE="1",
                       SFT_NB_SHARED=os.environ.get("SFT_NB_SHARED", str(ROOT.parent/"shared")))
    import hypothesis, nbdev.test, peft, scipy.stats, torch, transformers   # noqa: F401
    from trl import SFTTrainer   # noqa: F401


def import_package()->dict[str,set[int]]:
    "Import every module, so that forks need not; the lines of each that this executes"
    import coverage
    global is_imported
    is_imported = True
    sys.path.insert(0, str(ROOT))
    watch = coverage.Coverage(data_file=None, source=[str(ROOT/"sft_nb")], config_file=False)
    watch.start()
    for module in sources(PARTS): importlib.import_module("sft_nb." + module.removesuffix(".py").replace("/", "."))
    watch.stop()
    data = watch.get_data()
    return {str(Path(f).relative_to(ROOT/"sft_nb")): {*data.lines(f)} for f in data.measured_files()}


class Mutations:
    "Runs faults, and remembers which tests pass on the untouched tree"
    def __init__(self, seconds:float):
        self.seconds, self.clean, self.records = seconds, {}, Records()

    def passes_untouched(self, test:str)->bool:
        if test not in self.clean:
            with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
                copy_tree(Path(folder))
                self.clean[test] = run_target([test], Path(folder), self.seconds)[0] == "passed"
        return self.clean[test]

    def run(self, fault:Fault)->dict:
        "The outcome of a fault: caught (by which test), survived, or out of time"
        began, outcome, by, tried = time.monotonic(), "survived", "", 0
        with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
            tree = Path(folder)
            copy_tree(tree)
            plant(fault, tree)
            for target in targets(fault, self.records):
                left = self.seconds - (time.monotonic() - began)
                found, test = run_target(target, tree, left, fault) if left > 0 else ("time", target[0])
                tried += len(target)
                if found == "time":
                    outcome, by = "out of time", test
                    break
                if found == "failed" and self.passes_untouched(target[0] if target[0].endswith(".ipynb") else test):
                    outcome, by = "caught", target[0] if target[0].endswith(".ipynb") else test
                    break
        source = (ROOT/"sft_nb"/fault.module).read_text()
        return fault.describe(source) | dict(outcome=outcome, by=by, tests=tried,
                                             seconds=round(time.monotonic() - began, 1))


def run_fault(fault:Fault)->dict: return mutations.run(fault)   # `mutations` is made before the workers are forked


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="*", metavar="FOLDER", help="record tests: all, or those of tests/FOLDER")
    parser.add_argument("--again", action="store_true", help="plant again what was not caught, as --out has it")
    parser.add_argument("--count", type=int, default=100, help="faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", action="append", help="tokens, or tokens/encode; can be repeated")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of the tests of one fault")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT/"benchmarks/results/mutate.json")
    args = parser.parse_args()
    preload()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        take_snapshot(Path(folder))
        if args.record is not None: record(args.record or ["tests"], args.processes)
        else: run_faults(args.module or PARTS, args)


def not_caught(results:list[dict])->list[Fault]:
    "The faults of a result that no test caught, where the code of now still has them"
    def about(found:dict)->tuple: return tuple(found[name] for name in ("module", "kind", "before", "after"))
    wanted, found = {about(r) for r in results if r["outcome"] != "caught"}, []
    for module in sorted({module for module, *_ in wanted}):
        source = (ROOT/"sft_nb"/module).read_text()
        found += [fault for fault in find_faults(module) if about(fault.describe(source)) in wanted]
    return found


def run_faults(parts:list[str], args):
    global mutations
    old = json.loads(args.out.read_text()) if args.again else {}
    results = [r for r in old.get("results", []) if r["outcome"] == "caught"]
    if old: chosen, args.seed, parts = not_caught(old["results"]), old["seed"], old["modules"]
    else: chosen = choose_faults(sources([p.removesuffix(".py") for p in parts]), args.count, args.seed)
    mutations, fork = Mutations(args.seconds), multiprocessing.get_context("fork")
    with fork.Pool(args.processes) as fresh:
        executed = import_package()
        def needs_import(f): return not is_inside(f) or not lines_of(f).isdisjoint(executed.get(f.module, ()))
        with fork.Pool(args.processes) as warm:   # most faults need no new import of the package
            pools = {False: warm, True: fresh}
            outcomes = (r for needs, pool in pools.items() for r in pool.imap_unordered(
                run_fault, [f for f in chosen if needs_import(f) == needs], 1))
            for k, r in enumerate(outcomes, 1):
                results.append(r)
                print(f"{k}/{len(chosen)} {r['outcome']}: {r['module']}:{r['line']} {r['kind']}")
                print(f"    {r['before']}\n    {r['after']}\n    {r['by']} ({r['seconds']} s)", flush=True)
                n = {name: sum(r["outcome"] == name for r in results) for name in ("caught", "survived", "out of time")}
                summary = dict(modules=parts, seed=args.seed, date=time.strftime("%Y-%m-%d"), faults=len(results), **n)
                args.out.write_text(json.dumps(summary | dict(results=results), indent=1) + "\n")
    print(f"{n['caught']} of {len(results)} caught, {n['survived']} survived, {n['out of time']} out of time")


if __name__ == "__main__": main()
