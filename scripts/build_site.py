"""The documentation as a static site: `python scripts/build_site.py --out _docs` (needs the extra `docs`).

Each notebook becomes a page of MyST Markdown with its saved outputs, which Sphinx renders: nothing is executed or
imported, so the build needs no torch. Groups and titles are those of `nbs/sidebar.yml`. Addresses are nbdev's: the name
of a page has no number, so `04_tokens/04_encode.ipynb` is `04_tokens/encode.html`.
"""
import argparse
import json
import os
import posixpath
import re
import shutil
import tempfile
from configparser import ConfigParser
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath

import yaml

from page_cells import code_cell, defined, directives

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Page:
    "A notebook: where it stands, its cells, and the module that it exports"
    source:PurePosixPath   # in nbs, with its suffix
    cells:list[dict]
    module:str             # "" if it exports none

    @cached_property
    def name(self)->str: return str(self.source.with_name(re.sub(r"^\d+_", "", self.source.stem)))
    @property
    def prefix(self)->str: return f"sft_nb.{self.module}" if self.module else PurePosixPath(self.name).name
    @property
    def title(self)->str: return "".join(self.cells[0]["source"]).split("\n")[0].lstrip("# ")
    @property
    def about(self)->str: return "".join(self.cells[0]["source"]).strip().partition("\n> ")[2]

    def link(self, target:str)->str:
        "An address in the site, relative to this page"
        return os.path.relpath(target, self.source.parent).replace(os.sep, "/")


def read_page(nbs:Path, path:Path)->Page:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    module = next((m for c in cells if (m := directives(c).get("default_exp"))), "")
    return Page(PurePosixPath(path.relative_to(nbs).as_posix()), cells, module)


class Site:
    "All pages, and how they refer to each other"
    def __init__(self, nbs:Path, settings:Path):
        read = ConfigParser(delimiters=["="])
        read.read(settings, encoding="utf-8")
        self.nbs, self.ini = nbs, read["DEFAULT"]
        paths = [p for p in sorted(nbs.rglob("*.ipynb")) if not {".ipynb_checkpoints", "runs"} & {*p.parts}]
        self.pages = {str(page.source): page for page in (read_page(nbs, p) for p in paths)}
        self.bar = yaml.safe_load((nbs/"sidebar.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
        self.named = {page.name: source for source, page in self.pages.items()}
        self.targets = self.find_targets()

    def find_targets(self)->dict[str,str]:
        "Public name -> its address; a name of several modules is that of `from sft_nb import *`, or none"
        public = dict(re.findall(r'"([\w.]+)": "([\w ]+)"', (ROOT/"sft_nb/__init__.py").read_text(encoding="utf-8")))
        found = {}
        for page in self.pages.values():
            exported = public.get(page.module, "").split()
            for cell in page.cells:
                for name, _ in defined(cell):
                    found.setdefault(name, []).append((name in exported, f"{page.name}.html#{page.prefix}.{name}"))
        best = {name: max(places)[1] for name, places in found.items() if len(places) == 1 or max(places)[0]}
        return best

    def linked(self, text:str, page:Page)->str:
        "Links to notebooks, to files of the repository and from names in backticks lead to where these are in the site"
        seen = set()

        def follow(m):
            target, _, anchor = m[1].partition("#")
            there = os.path.normpath(page.source.parent/target).replace(os.sep, "/")
            if there.endswith(".html"): there = self.named.get(there.removesuffix(".html"), there)
            if there in self.pages:
                return f"]({page.link(self.pages[there].name)}.md{'#' + anchor if anchor else ''})"
            if there.startswith("images/"): return m[0]
            return f"]({self.ini['git_url']}/blob/{self.ini['branch']}/{os.path.normpath('nbs/' + there)})"

        def name(m):
            target = self.targets.get(m[1])
            if target is None or target in seen or target.startswith(f"{page.name}.html#"): return m[0]
            seen.add(target)
            return f'<a href="{page.link(target)}"><code>{m[0][1:-1]}</code></a>'

        parts = re.split(r"(^```.*?^```[ \t]*$|^#+ [^\n]*$)", text, flags=re.M | re.S)   # text, and what stays as it is
        for k in range(0, len(parts), 2):
            parts[k] = re.sub(r"\]\(((?!https?:|#|mailto:)[^)\s]+)\)", follow, parts[k])
            parts[k] = re.sub(r"(?<![`\[\w])`([A-Za-z_][\w.]*)(?:\(\))?`(?![`\]])", name, parts[k])
        return "".join(parts)

    def page_text(self, page:Page)->str:
        "A page as MyST Markdown"
        first = "".join(page.cells[0]["source"]).strip()
        about = page.about.replace("`", "")
        where = f"{self.ini['git_url']}/blob/{self.ini['branch']}/nbs/{page.source}"
        line = (f"`{page.prefix}` · " if page.module else "") + f"[notebook]({where})"
        parts = [f"---\nmyst:\n  html_meta:\n    description: {json.dumps(about)}\n---", first,
                 f'<div class="where">\n\n{line}\n\n</div>']
        level, before, anchors = "##", page.title, set()
        for cell in page.cells[1:]:
            if cell["cell_type"] != "markdown":
                parts.append(code_cell(cell, level, before, page.prefix, anchors, partial(self.linked, page=page)))
                continue
            text = "".join(cell["source"])
            parts.append(self.linked(text, page))
            if re.search(r"^## ", text, re.M): level = "###"
            plain = re.sub(r"```.*?```|^#.*?$|<[^>]*>|[`*]", "", text, flags=re.M | re.S).split("\n\n")
            before = next((" ".join(x.split()) for x in reversed(plain) if x.strip()), before)
        return "\n\n".join(p for p in parts if p) + "\n"

    def toctree(self, contents:list[dict], caption:str="")->str:
        "A list of pages for Sphinx; a section within it is a page of its own, which `sections` writes"
        lines = []
        for x in contents:
            there = section_name(x["section"]) if "section" in x else self.pages[x["href"]].name
            lines.append(f"{x.get('text') or x['section']} </{there}>".replace("`", ""))
        head = [":hidden:", *([f":caption: {caption}"] if caption else [])]
        return "\n".join(["```{toctree}", *head, "", *lines, "```"])

    def sections(self, contents:list[dict])->dict[str,str]:
        "Name -> text of the page of each section within a group: its pages, each with its sentence"
        made = {}
        for x in (x for x in contents if "section" in x):
            name = section_name(x["section"])
            pages = [(y["text"], self.pages[y["href"]]) for y in x["contents"]]
            items = [f"- [{title}](/{page.name}.md): {page.about}" for title, page in pages]
            made[name] = "\n".join([f"# {x['section']}", "", *items, "", self.toctree(x["contents"])])
        return made

    def write(self, folder:Path)->None:
        "All pages as Markdown, in the folder from which Sphinx reads"
        texts = {page.name: self.page_text(page) for page in self.pages.values()}
        for group in self.bar[1:]:
            texts |= self.sections(group["contents"])
            texts["index"] += "\n" + self.toctree(group["contents"], group["section"]) + "\n"
        for name, text in texts.items():
            path = folder/f"{name}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        shutil.copytree(self.nbs/"images", folder/"images")
        (folder/"_static").mkdir()
        shutil.copy(self.nbs/"styles.css", folder/"_static")


def section_name(title:str)->str: return "sections/" + title.lower().replace(" ", "-")


def navigation(tree:str, page:str)->str:
    "The tree of all pages for another page than the first: its links from there, open where the page stands"
    lines, link = tree.split("\n"), f'<a class="reference internal" href="{page}.html">'
    here = next((k for k, line in enumerate(lines) if link in line), None)
    if here is not None:
        section = next(k for k in range(here, -1, -1) if "toctree-l1" in lines[k])
        if section != here: lines[section] = lines[section].replace("<ul>", '<ul class="current">')
        group = next(k for k in range(section, -1, -1) if lines[k] == "<ul>")
        lines[group] = '<ul class="current">'
        for k in {section, here}:
            lines[k] = re.sub(r"(toctree-l\d)", r"\1 current", lines[k], count=1)
            lines[k] = lines[k].replace(' class="toctree-checkbox"', ' checked="" class="toctree-checkbox"')
        lines[here] = re.sub(r'(<li class="[^"]*)', r"\1 current-page", lines[here], count=1)
        lines[here] = lines[here].replace(link, '<a class="current reference internal" href="#">')
    folder = posixpath.dirname(page) or "."
    def from_here(m): return m[1] + posixpath.relpath(m[2], folder)
    return re.sub(r'(<a class="reference internal" href=")([^"]*)', from_here, "\n".join(lines))


def share_navigation(app)->None:
    "Make Furo's tree of all pages once: made for each page, it takes half of the time of a build"
    tree = []

    def make(app, builder):
        from furo.navigation import get_navigation_tree
        all_pages = dict(collapse=False, titles_only=True, maxdepth=-1, includehidden=True)
        tree.append(get_navigation_tree(builder._get_local_toctree("index", **all_pages)))

    def before_furo(app, page, template, context, doctree): context["toctree"] = lambda **how: ""
    def after_furo(app, page, template, context, doctree):
        context["furo_navigation_tree"] = navigation(tree[0], page)
    app.connect("write-started", make)
    app.connect("html-page-context", before_furo, priority=100)
    app.connect("html-page-context", after_furo, priority=900)


def setup(app)->dict:
    "An extension of Sphinx: one tree of pages; formulas as MathML, drawn by browsers without a script from elsewhere"
    share_navigation(app)
    from docutils.utils.math.latex2mathml import tex2mathml
    def inline(writer, node): writer.body.append(tex2mathml(node.astext()))
    def block(writer, node): writer.body.append(f"<p>{tex2mathml(node.astext(), as_block=True)}</p>")
    def leave(writer, node): pass
    app.add_html_math_renderer("mathml", (inline, leave), (block, leave))
    return dict(parallel_read_safe=True, parallel_write_safe=True)


def build(out:Path, nbs:Path=ROOT/"nbs", settings:Path=ROOT/"settings.ini")->int:
    "Write the site; returns the number of warnings"
    from sphinx.application import Sphinx
    site = Site(nbs, settings)
    ini = site.ini
    conf = dict(
        project=ini["title"], author=ini["author"], copyright=ini["copyright"], version=ini["version"], language="en",
        highlight_language="text",
        html_title=f"{ini['title']} {ini['version']}", html_theme="furo", html_static_path=["_static"],
        html_css_files=["styles.css"], html_show_sourcelink=False, html_copy_source=False, html_show_sphinx=False,
        html_baseurl=f"{ini['doc_host']}{ini['doc_baseurl']}/", html_math_renderer="mathml", smartquotes=False,
        html_theme_options=dict(footer_icons=[dict(name="GitHub", url=ini["git_url"], html="GitHub", **{"class": ""})]),
        extensions=["myst_parser", "build_site"], myst_enable_extensions=["dollarmath"], myst_dmath_allow_digits=False,
        myst_dmath_allow_space=False, myst_heading_anchors=4, suppress_warnings=["myst.header"])
    with tempfile.TemporaryDirectory() as made:
        source, trees = Path(made)/"source", Path(made)/"trees"
        source.mkdir()
        site.write(source)
        app = Sphinx(source, None, out, trees, "html", conf, status=None, parallel=os.cpu_count() or 1)
        app.build()
    return app._warncount


def main(args=None)->int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default=str(ROOT/"_docs"), help="folder of the site")
    options = parser.parse_args(args)
    if warnings := build(Path(options.out)): raise SystemExit(f"{warnings} warnings: see above; expected: none")
    print(f"{options.out}: the site, with {len(list(Path(options.out).rglob('*.html')))} pages")
    return 0


if __name__ == "__main__": raise SystemExit(main())
