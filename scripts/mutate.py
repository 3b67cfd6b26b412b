"""Plant small faults in the code, one at a time, and print those that no test catches.

    python scripts/mutate.py                                      # 100 faults in all modules below: hours
    python scripts/mutate.py --count 10 --seed 1 --module evaluation/statistics --module tokens/encode

Each fault is planted in a throw-away copy of the tree, in the module and in the notebook that the module comes from.
The tests of that module run, the cheapest first, until one fails: the test file named after it, its notebook, then the
test files that import it. A fault counts as caught only if the test that failed passes on the untouched tree. One that
exceeds the time limit is counted separately as unknown. The result is written to benchmarks/results/mutate.json."""
import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = ("tokens", "batches", "model/loss", "training/guards", "runs/checkpoint", "runs/process",
           "evaluation/statistics", "proof/merge", "checks")
SLOW = ("browser", "kill", "together", "launch", "plain_install", "newcomer", "test_demo", "test_site",
        "test_walk", "gpu/")
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
            else: self.add("sign or not dropped", self.start(node), self.start(node.operand), "")
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


def targets(module:str)->list[str]:
    "Test files and notebooks of a module, cheapest first"
    dotted = "sft_nb." + module.removesuffix(".py").replace("/", ".")
    parent, stem = dotted.rpartition(".")[::2]
    imports = re.compile(rf"\b{re.escape(dotted)}\b|from {re.escape(parent)} import .*\b{stem}\b")
    tests = [p for p in sorted((ROOT/"tests").rglob("test_*.py")) if not any(s in str(p) for s in SLOW)]
    files = [p for p in tests if imports.search(p.read_text())]
    files.sort(key=lambda p: (stem not in p.stem, p.parent.name != module.split("/")[0], p.stat().st_size))
    named = [p for p in files if stem in p.stem]
    book = notebook_of(module)
    ordered = [*named, *([book] if book else []), *files[len(named):]]
    return [str(p.relative_to(ROOT)) for p in ordered]


def notebook_of(module:str)->Path|None:
    found = re.search(r"File to edit: (?:\.\./)+(nbs/\S+\.ipynb)", (ROOT/"sft_nb"/module).read_text())
    return ROOT/found[1] if found else None


def copy_tree(to:Path):
    "Copy tracked files, and untracked ones that git does not ignore"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True,
                            text=True).stdout
    for name in listed.splitlines():
        if (ROOT/name).is_file():
            (to/name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT/name, to/name)


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


def run_target(target:str, tree:Path, seconds:float)->tuple[str,str]:
    "Run a test file, test or notebook in a fork: (passed, failed or time; the test that failed)"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(read)
        failed = "the process ended"
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")
            for number in (1, 2): os.dup2(sys.stdout.fileno(), number)
            os.chdir(tree)
            sys.path[:0] = [str(tree), str(tree/"tests")]
            os.environ["PYTHONPATH"] = str(tree)
            failed = run_notebook(tree/target) if target.endswith(".ipynb") else run_pytest(target)
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
    if timed_out: return "time", target
    return ("failed", said.decode()) if said else ("passed", "")


def run_pytest(target:str)->str:
    "Run pytest and return the first test that fails; empty if all pass"
    import pytest

    class First:
        failed = ""
        def pytest_runtest_logreport(self, report):
            if report.failed and not self.failed: self.failed = report.nodeid
    first = First()
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", target], plugins=[first])
    return first.failed or ("" if code in (0, 5) else target)


def run_notebook(path:Path)->str:
    from nbdev.test import test_nb
    passed, _ = test_nb(path, skip_flags=[], force_flags=[], basepath=path.parent)
    return "" if passed else str(path.name)


def preload():
    "Import what every test needs once before forking, but nothing of the package itself"
    os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TQDM_DISABLE="1",
                       SFT_NB_SHARED=os.environ.get("SFT_NB_SHARED", str(ROOT.parent/"shared")))
    import hypothesis, nbdev.test, peft, pytest, scipy.stats, torch, transformers   # noqa: F401
    from trl import SFTTrainer   # noqa: F401


class Mutations:
    "Runs faults, and remembers which tests pass on the untouched tree"
    def __init__(self, seconds:float):
        self.seconds, self.clean = seconds, {}

    def passes_untouched(self, test:str)->bool:
        if test not in self.clean:
            with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
                copy_tree(Path(folder))
                self.clean[test] = run_target(test, Path(folder), self.seconds)[0] == "passed"
        return self.clean[test]

    def run(self, fault:Fault)->dict:
        "The outcome of a fault: caught (by which test), survived, or out of time"
        began, outcome, by = time.monotonic(), "survived", ""
        with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
            tree = Path(folder)
            copy_tree(tree)
            plant(fault, tree)
            for target in targets(fault.module):
                left = self.seconds - (time.monotonic() - began)
                found, test = run_target(target, tree, left) if left > 0 else ("time", target)
                if found == "time":
                    outcome, by = "out of time", target
                    break
                book = target.endswith(".ipynb")
                if found == "failed" and self.passes_untouched(target if book else test):
                    outcome, by = "caught", target if book else test
                    break
        source = (ROOT/"sft_nb"/fault.module).read_text()
        return fault.describe(source) | dict(outcome=outcome, by=by, seconds=round(time.monotonic() - began, 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", action="append", help="tokens, or tokens/encode; can be repeated")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of the tests of one fault")
    parser.add_argument("--out", type=Path, default=ROOT/"benchmarks/results/mutate.json")
    args = parser.parse_args()
    parts = args.module or [*MODULES]
    chosen = choose_faults(sources([p.removesuffix(".py") for p in parts]), args.count, args.seed)
    preload()
    mutations, results = Mutations(args.seconds), []
    for k, fault in enumerate(chosen, 1):
        results.append(mutations.run(fault))
        r = results[-1]
        print(f"{k}/{len(chosen)} {r['outcome']}: {r['module']}:{r['line']} {r['kind']}")
        print(f"    {r['before']}\n    {r['after']}\n    {r['by']} ({r['seconds']} s)", flush=True)
        n = {name: sum(r["outcome"] == name for r in results) for name in ("caught", "survived", "out of time")}
        summary = dict(modules=parts, seed=args.seed, date=time.strftime("%Y-%m-%d"), faults=len(results), **n)
        args.out.write_text(json.dumps(summary | dict(results=results), indent=1) + "\n")
    print(f"{n['caught']} of {len(results)} caught, {n['survived']} survived, {n['out of time']} out of time")


if __name__ == "__main__": main()
