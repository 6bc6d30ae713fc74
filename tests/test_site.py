"""The site of docs/: it builds without a warning, its links lead somewhere, and it asks the network for nothing."""

import ast
import html.parser
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import urllib.parse

import pytest
import yaml

from tests.make import ROOT, script
from tests.plugins.report import browser

LOADED = {"link": "href", "script": "src", "img": "src", "source": "src", "iframe": "src"}


class Page(html.parser.HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, text: str):
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.add(found["href"])
        if found.get(LOADED.get(tag, "")) and found.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.add(found[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of the site by their files."""
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    assert len(pages) > 18
    return folder, pages


def local(target: str, page: pathlib.Path) -> tuple[pathlib.Path, str] | None:
    """The file in the site and the anchor that a link in a page names; None where it leads elsewhere."""
    parts = urllib.parse.urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    path = urllib.parse.unquote(parts.path)
    return (page.parent / path).resolve() if path else page, urllib.parse.unquote(parts.fragment)


@pytest.mark.slow
def test_every_link_and_anchor_leads_somewhere(site):
    folder, pages = site
    checked, broken = 0, []
    for file, page in pages.items():
        if file.name == "404.html":  # which stands at no place: its links are those of a root
            continue
        for target in page.links | page.loaded:
            if (found := local(target, file)) is None:
                continue
            there, anchor = found
            there = there / "index.html" if there.is_dir() else there
            checked += 1
            if not there.is_file() or (anchor and there in pages and anchor not in pages[there].anchors):
                broken.append(f"{file.relative_to(folder)}: {target}")
    assert checked > 500 and not broken


@pytest.mark.slow
def test_every_public_function_and_class_is_there(site):
    folder, pages = site
    named = 0
    for path in sorted((ROOT / "jppo").rglob("*.py")):
        if path.name in ("__init__.py", "__main__.py"):
            continue
        code = re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.S)
        public = re.findall(r"^(?:async def|def|class) ([a-zA-Z]\w*)", code, re.M)
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        page = pages[folder / "reference" / f"{module.split('.')[-2]}.html"]
        assert {module, *(f"{module}.{name}" for name in public)} <= page.anchors
        named += len(public)
    assert named > 500


@pytest.fixture(scope="module")
def reference():
    return script("scripts/reference.py")


def test_a_function_is_shown_without_its_body_and_a_class_with_its_fields(reference):
    source = """
        @dataclasses.dataclass
        class Cut:
            \"\"\"Where it ends.\"\"\"

            at: int  # in tokens

            def __init__(self, at: int) -> None:
                self.at = at

            async def wait(
                self, seconds: float
            ) -> None:
                \"\"\"Until then.\"\"\"
                await sleep(seconds)

            def _own(self) -> None:
                pass
        """
    lines = textwrap.dedent(source).strip().splitlines()
    [node] = ast.parse("\n".join(lines)).body
    assert list(reference.outline(node, lines)) == [*lines[:5], "", lines[6], "", *lines[9:13]]


@pytest.mark.slow
def test_the_search_finds_pages_and_not_the_reference(site):
    index = json.loads((site[0] / "search/search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {place for place in places if place.startswith("reference/")} == {"reference/index.html"}
    assert {"configuration.html", "troubleshooting.html", "index.html"} <= places
    parts = re.split(index["config"]["separator"], "model.lora_rank, 0.5")
    assert {"model", "lora_rank", "0.5"} <= set(filter(None, parts))


def test_the_list_of_functions_is_searched_by_words(reference, tmp_path):
    if browser.find() is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is installed")
    (tmp_path / "names.html").write_text(f"<html data-drawn><meta charset=utf-8>{reference.names()}</html>", "utf-8")
    shown = "Array.from(document.querySelectorAll('li:not([hidden]) a'), (link) => link.getAttribute('href'))"
    with browser.browser(tmp_path / "browser") as tab:
        tab.open(tmp_path / "names.html")
        everything = tab.ask(shown)
        tab.ask("{ const box = document.querySelector('input'); box.value = 'GAE advantage'; }")
        tab.ask("document.querySelector('input').dispatchEvent(new Event('input'))")
        found = tab.ask(shown)
        assert not tab.errors
    assert len(everything) > 1000 and "algorithms.html#jppo.algorithms.advantage.gae" in found
    assert 0 < len(found) < 20


@pytest.mark.slow
def test_it_loads_nothing_from_elsewhere(site):
    folder, pages = site
    elsewhere = {target for page in pages.values() for target in page.loaded if "//" in target}
    assert not elsewhere
    assert {"start", "hardware"} <= pages[folder / "index.html"].anchors  # README.md
    assert "from-disk" in (folder / "index.html").read_text(encoding="utf-8")  # hides the search there
    assert {path.name for path in folder.rglob("*.py")} == {"nano_ppo.py", "http_reward.py"}  # linked, to be read
    sheets = "".join(file.read_text(encoding="utf-8") for file in folder.rglob("*.css"))
    assert "@import" not in sheets and "url(http" not in sheets and "url(//" not in sheets


def test_every_page_is_in_the_navigation(reference):
    named = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    said = {
        page for entry in named for pages in entry.values() for page in ([pages] if isinstance(pages, str) else pages)
    }
    packages = set(reference.pages())
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} | packages
    assert pages <= said, "name it under nav in mkdocs.yml"
    assert {page for page in said if page.startswith("reference/")} == packages, "these are no packages"
