"""The site's API reference: signatures and docstrings of every public function and class.

A page is a package. The site's search leaves these pages out, or they would fill its answers; the first one, a list
of all names, has a search of its own. scripts/site_hook.py adds them to the site; nothing of jppo is imported.
"""

import ast
import html
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = "reference"  # of the site
Function = ast.FunctionDef | ast.AsyncFunctionDef
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"
NAMES = """# Search functions and classes

Every public name of the package, with the first line of its docstring. The search above covers the pages, not these.

<input class="names" type="search" placeholder="Words of a name or a docstring" aria-label="Words" autofocus>
<p class="names" aria-live="polite"></p>
<ul class="names" data-search-exclude>
{}
</ul>
<script>
{{
  const [box, count, list] = document.querySelectorAll(".names");
  const texts = Array.from(list.children, (entry) => entry.textContent.toLowerCase());
  const filter = () => {{
    const words = box.value.toLowerCase().split(/\\s+/);
    const shown = texts.map((text) => words.every((word) => text.includes(word)));
    shown.forEach((show, i) => {{ list.children[i].hidden = !show; }});
    count.textContent = shown.filter(Boolean).length + " of " + texts.length;
  }};
  box.addEventListener("input", filter);
  filter();
}}
</script>
"""


def pages() -> dict[str, str]:
    """Returns the text of each page by its path in the site."""
    packages = sorted({path.parent for path in modules(ROOT / "jppo")})
    return {f"{FOLDER}/index.md": names()} | {f"{FOLDER}/{p.name}.md": NOT_SEARCHED + page(p) for p in packages}


def names() -> str:
    """Returns the page that lists every public function and class, with its search."""
    entries = []
    for path in modules(ROOT / "jppo"):
        for node in public(ast.parse(path.read_text(encoding="utf-8"))):
            link = f"{path.parent.name}.html#{dotted(path)}.{node.name}"
            said = (ast.get_docstring(node) or "").partition("\n")[0]
            entry = f'<li><a href="{link}">{node.name}</a> <code>{dotted(path)}</code> {html.escape(said)}</li>'
            entries.append((node.name.lower(), entry))
    return NAMES.format("\n".join(entry for _, entry in sorted(entries)))


def page(package: pathlib.Path) -> str:
    """Joins the modules of a package."""
    parts = [f"# {dotted(package)}\n"]
    init = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    if docstring := ast.get_docstring(init):
        parts.append(prose(docstring))
    for path in modules(package):
        if path.parent == package:
            parts += module(path)
    return "\n".join(parts)


def module(path: pathlib.Path) -> Iterator[str]:
    """A module: its docstring and its public names."""
    source, name = path.read_text(encoding="utf-8"), dotted(path)
    tree, lines = ast.parse(source), source.splitlines()
    yield f"## {name} {{ #{name} }}\n"
    if docstring := ast.get_docstring(tree):
        yield prose(docstring)
    for node in public(tree):
        yield f"### {node.name} {{ #{name}.{node.name} }}\n"
        yield "```python\n" + "\n".join(outline(node, lines)) + "\n```\n"


def public(tree: ast.Module) -> list[Function | ast.ClassDef]:
    """Returns the public functions and classes of a module."""
    return [node for node in tree.body if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")]


def outline(node: Function | ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """Yields the lines of a function up to its docstring's end; for a class also fields and public methods."""
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    yield from lines[first - 1 : node.body[0].lineno - 1 if docstring is None else docstring.end_lineno]
    if isinstance(node, ast.ClassDef):
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign | ast.Assign)]
        yield from [""] * (bool(fields) and docstring is not None)
        for part in node.body:
            if part in fields:
                yield from lines[part.lineno - 1 : part.end_lineno]
            elif isinstance(part, Function) and (part.name == "__init__" or not part.name.startswith("_")):
                yield ""
                yield from outline(part, lines)


def prose(text: str) -> str:
    """Returns a docstring with its line breaks."""
    return f'<pre class="said">{html.escape(text)}</pre>\n'


def modules(package: pathlib.Path) -> list[pathlib.Path]:
    """Returns the modules of a package and its subpackages."""
    return [path for path in sorted(package.rglob("*.py")) if path.name not in ("__init__.py", "__main__.py")]


def dotted(path: pathlib.Path) -> str:
    """Returns the dotted module name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)
