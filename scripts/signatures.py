"""Public functions and classes of exported cells as Markdown, read from their source: signature, docstring, parameters.

Nothing is imported, so the pages can be made where torch is not installed."""
import ast
import html
import io
import tokenize

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def text_of(node:ast.AST|None)->str: return ast.unparse(node) if node else ""


def definitions(source:str)->list[tuple[str,ast.AST]]:
    "The public functions, classes and patched methods of a cell, the latter as `Class.method`"
    found = []
    for node in ast.parse(source).body:
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)): continue
        patched = any(text_of(d).startswith("patch") for d in node.decorator_list)
        name = f"{text_of(node.args.args[0].annotation)}.{node.name}" if patched else node.name
        if "_" not in (name[0], node.name[0]): found.append((name, node))
    return found


def comments(source:str)->dict[int,str]:
    "Line number -> the comment at its end"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


def parameters(node:ast.FunctionDef, notes:dict[int,str])->list[tuple[str,str,str,str]]:
    "Name, type, default and comment of each parameter and of the result; a comment belongs to the last of its line"
    a, found = node.args, []
    plain = [*a.posonlyargs, *a.args]
    defaults = [*[None] * (len(plain) - len(a.defaults)), *a.defaults, None, *a.kw_defaults, None]
    arguments = [*plain, a.vararg, *a.kwonlyargs, a.kwarg]
    for x, default in zip(arguments, defaults):
        if x is None or x.arg in ("self", "cls"): continue
        star = "*" if x is a.vararg else "**" if x is a.kwarg else ""
        found.append((star + x.arg, x.annotation, default, (default or x).end_lineno))
    if node.returns: found.append(("returns", node.returns, None, node.returns.end_lineno))
    last = {line: name for name, *_, line in found}
    return [(name, text_of(kind), text_of(default), notes.get(line, "") if last[line] == name else "")
            for name, kind, default, line in found]


def signature(name:str, node:ast.AST)->str:
    "A call as it is written, over several lines if it is long; a class as it begins"
    if isinstance(node, ast.ClassDef): return f"class {name}({', '.join(map(text_of, node.bases))})".replace("()", "")
    result = f"->{text_of(node.returns)}" if node.returns else ""
    if any("prop" in text_of(d) for d in node.decorator_list): return name + result
    keywords, args = [x.arg for x in node.args.kwonlyargs][:1], []
    for arg, kind, default, _ in parameters(node, {}):
        if [arg] == keywords and not node.args.vararg: arg = f"*, {arg}"
        if arg != "returns": args.append(arg + (kind and f":{kind}") + (default and f"={default}"))
    short = f"{name}({', '.join(args)}){result}"
    return short if len(short) <= 90 else f"{name}(\n    " + ",\n    ".join(args) + f"\n){result}"


def table(head:tuple[str,...], rows:list[tuple[str,...]])->str:
    "A Markdown table of codes, whose last column is text; columns without a value are left out"
    if not any(row[-1] for row in rows): return ""
    used = [k for k in range(len(head)) if any(row[k] for row in rows)]
    def cell(row, k): return html.escape(row[k], quote=False) if k == used[-1] else row[k] and f"`{row[k]}`"
    lines = [[cell(row, k).replace("|", r"\|") for k in used] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in ([head[k] for k in used], ["---"] * len(used), *lines))


def reference(name:str, node:ast.AST, source:str, level:str)->str:
    "Heading, signature, docstring and parameters of a function; for a class its fields and methods too"
    notes, parts = comments(source), []
    if isinstance(node, ast.ClassDef):
        methods = [n for n in node.body if isinstance(n, FUNCTIONS)]
        fields = [(text_of(n.target), text_of(n.annotation), text_of(n.value), notes.get(n.end_lineno, ""))
                  for n in node.body if isinstance(n, ast.AnnAssign) and not text_of(n.target).startswith("_")]
        for n in methods: fields += parameters(n, notes) if n.name == "__init__" else []
        public = [n for n in methods if n.name[0] != "_"]
        calls = [(signature(n.name, n), (ast.get_docstring(n) or "").split("\n")[0]) for n in public]
        parts += [table(("field", "type", "default", "meaning"), fields), table(("method", "what it does"), calls)]
    else: parts.append(table(("parameter", "type", "default", "meaning"), parameters(node, notes)))
    head = f'<span class="anchor" id="{name}"></span>\n\n{level} `{name}`\n\n```python\n{signature(name, node)}\n```'
    return "\n\n".join([head, html.escape(ast.get_docstring(node) or "", quote=False), *parts])
