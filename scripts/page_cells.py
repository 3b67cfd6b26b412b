"""Cells of a notebook as Markdown: code, outputs, and the public names of exported cells with signature, docstring and
parameters. All is read from the source and nothing is imported, so pages can be made where torch is not installed."""
import ast
import html
import io
import re
import tokenize

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DIRECTIVES = {"export", "exporti", "hide", "default_exp", "code-fold", "echo", "eval", "hide_output", "slow"}
FENCE = "`" * 12


def directives(cell:dict)->dict[str,str]:
    "The `#|` lines of a cell: name -> value"
    found = re.findall(r"^#\|\s*([\w-]+):?[ \t]*(.*)$", "".join(cell["source"]), re.M)
    if cell["cell_type"] != "code": return {}
    if unknown := {name for name, _ in found} - DIRECTIVES:
        raise SystemExit(f"unknown directives {sorted(unknown)}; expected: {sorted(DIRECTIVES)}. "
                         "Fix: code_cell in scripts/page_cells.py")
    return dict(found)


def defined(cell:dict)->list:
    "The public names of an exported cell, each with its syntax tree"
    return definitions("".join(cell["source"])) if {"export", "exporti"} & {*directives(cell)} else []


# ---- public names

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


def reference(name:str, node:ast.AST, source:str, level:str, prefix:str)->str:
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
    anchor = f'<span class="anchor" id="{prefix}.{name}"></span>'
    doc = html.escape(ast.get_docstring(node) or "", quote=False)
    return "\n\n".join([anchor, f"{level} `{name}`", fenced(signature(name, node)), doc, *parts])


# ---- cells

def raw(text:str)->str: return f"{FENCE}{{raw}} html\n{text}\n{FENCE}"
def fenced(code:str)->str: return f"````python\n{code.strip()}\n````" if code.strip() else ""
def folded(code:str, title:str)->str:
    return f"<details class='code'><summary>{title}</summary>\n\n{fenced(code)}\n\n</details>"


def show_output(output:dict, before:str, prefix:str, anchors:set[str], link)->str:
    "An output in its richest form that needs no kernel"
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items() if isinstance(text, (str, list))}
    if "application/vnd.jupyter.widget-view+json" in output.get("data", {}): return ""   # its picture follows
    if "text/html" in data: return raw(f"<div class='cell-output cell-output-html'>{data['text/html']}</div>")
    if "image/png" in data:
        picture = "".join(data["image/png"].split())
        alt = html.escape(before, quote=True)
        return raw(f"<div class='cell-output'><img alt=\"{alt}\" src='data:image/png;base64,{picture}'></div>")
    if "text/markdown" in data:
        def anchor(m):
            if m[1] in anchors: return m[0]
            anchors.add(m[1])
            return f'| <a class="anchor" id="{prefix}.{m[1]}" href="#{prefix}.{m[1]}"><code>{m[1]}</code></a> |'
        return link(re.sub(r"^\| `([a-z]\w*)` \|", anchor, data["text/markdown"], flags=re.M))
    text = data.get("text/plain") or "".join(output.get("text", ""))
    text = re.sub(r"\x1b\[[\d;]*m", "", text).rstrip()
    return raw(f"<div class='cell-output'><pre>{html.escape(text)}</pre></div>") if text else ""


def code_cell(
    cell:dict,
    level:str,          # of the headings of public names
    before:str,         # the sentence before the cell: the text of its pictures
    prefix:str,         # of the ids of names: unlike those of headings, they have a dot
    anchors:set[str],   # those that the page has; new ones are added
    link=str,           # makes links in Markdown
)->str:
    "A cell of code and its outputs, as its directives and its metadata ask"
    given = directives(cell)
    if {"hide", "default_exp"} & {*given}: return ""
    source = re.sub(r"^#\|.*\n?", "", "".join(cell["source"]), flags=re.M)
    hidden = cell["metadata"].get("jupyter", {}).get("source_hidden")
    parts = [reference(name, node, "".join(cell["source"]), level, prefix) for name, node in defined(cell)]
    if "export" in given or "exporti" in given: parts.append(folded(source, "Source"))
    elif hidden or given.get("code-fold") == "true": parts.append(folded(source, "Code"))
    elif given.get("echo") != "false": parts.append(fenced(source))
    outputs = [] if "hide_output" in given else cell.get("outputs", [])
    parts += [show_output(output, before, prefix, anchors, link) for output in outputs]
    return "\n\n".join(p for p in parts if p)
