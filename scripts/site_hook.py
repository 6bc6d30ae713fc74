"""mkdocs hook: README.md as the first page, the API reference, rewritten links, and equations as MathML.

The pages link to each other, to README.md and to files of the repository as a code host shows them. Here such a link
becomes one within the site: to the page that the file is, or to a copy of the file.
"""

import pathlib
import posixpath
import re

import reference  # in this folder, where mkdocs looks
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Files outside docs/ that are pages, and the page that each is.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
# A link's or a picture's target, in Markdown or in HTML.
TARGET = re.compile(r"""(\]\(|<(?:img|a)\b[^>]*?\b(?:src|href)=")([^)"#\s]*)(#[^)"\s]*)?(?=[)"])""", re.S)
# A displayed or an inline equation, in the notation of code hosts; code between backquotes is skipped.
EQUATION = re.compile(r"`[^`]*`|\$\$(.+?)\$\$|(?<![\w$\\])\$(?=\S)([^$\n`]+?)(?<=\S)\$(?!\w)", re.S)
FENCE = re.compile(r"^(```.*?^```)$", re.S | re.M)


def on_files(files: Files, config) -> Files:
    """Adds those pages, and copies of files that the pages link to."""
    for page in PAGES.values():
        files.append(File.generated(config, page, content=""))  # read in on_page_read_source
    for page in [file for file in files if file.is_documentation_page()]:
        source = source_of(page.src_uri)
        for target in targets((ROOT / source).read_text(encoding="utf-8"), source):
            if files.get_file_from_path(target) is None:
                content = (ROOT / target).read_bytes()
                files.append(File.generated(config, target, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    for name, text in reference.pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_read_source(page, config) -> str | None:
    """Returns the text of a page stored elsewhere."""
    source = source_of(page.file.src_uri)
    return (ROOT / source).read_text(encoding="utf-8") if source in PAGES else None


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Rewrites the links of a page for the site."""
    here = page.file.src_uri
    source = source_of(here)

    def rewritten(match: re.Match) -> str:
        before, target, anchor = match[1], match[2], match[3] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        there = posixpath.relpath(place(resolve(target, source)), posixpath.dirname(here) or ".")
        return f"{before}{there}{anchor}"

    parts = FENCE.split(markdown)  # every other one is code
    return "".join(part if i % 2 else EQUATION.sub(mathml, TARGET.sub(rewritten, part)) for i, part in enumerate(parts))


def on_post_page(output: str, page, config) -> str:
    """Marks pages that are opened from the disk, where browsers forbid the search its index: site.css hides it."""
    script = "<script>if (location.protocol === 'file:') document.documentElement.classList.add('from-disk')</script>"
    return output.replace("</head>", f"{script}</head>", 1)


def mathml(match: re.Match) -> str:
    """Returns an equation as MathML, which browsers draw without a script or a font."""
    if match[1]:
        return f'<div class="equation">{convert(match[1].strip(), display="block")}</div>'
    return f"<span>{convert(match[2])}</span>" if match[2] else match[0]


def source_of(page: str) -> str:
    """Returns the repository file of a page of the site."""
    return next((source for source, name in PAGES.items() if name == page), f"docs/{page}")


def place(source: str) -> str:
    """Returns the path of a repository file in the site."""
    return PAGES.get(source, source.removeprefix("docs/"))


def resolve(target: str, source: str) -> str:
    """Returns the repository file that a link in `source` names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def targets(text: str, source: str) -> set[str]:
    """Returns the repository files outside docs/ that a page links to, except pages."""
    prose = FENCE.sub("", text)
    linked = {resolve(match[2], source) for match in TARGET.finditer(prose) if match[2] and "://" not in match[2]}
    return {name for name in linked if not name.startswith("docs/") and name not in PAGES and (ROOT / name).is_file()}
