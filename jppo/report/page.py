"""Writes the report's HTML: page, style, scripts and data in one file without network requests."""

import html
import importlib.resources
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jppo.report.document import BUDGET, make_document
from jppo.report.samples import compact, pack
from jppo.runlog import durable_files

NAME = "report.html"
SCRIPTS = (
    "shared.js",
    "plot.js",
    "curves.js",
    "stages.js",
    "scores.js",
    "tokens.js",
    "samples.js",
    "settings.js",
    "main.js",
)


def write_report(run_dirs: Sequence[pathlib.Path], out: pathlib.Path, budget: int = BUDGET) -> pathlib.Path:
    """Writes the page about these runs atomically and returns its path."""
    text = make_page(make_document(run_dirs, budget))
    return durable_files.write_file(out, lambda new: new.write_text(text, encoding="utf-8", errors="replace"))


def report_line(run: pathlib.Path) -> str:
    """Writes the page of a finished run and returns its line of the summary; a failure does not fail the run."""
    try:
        return str(write_report([run], run / NAME))
    except Exception as e:
        why = " ".join(f"{type(e).__name__}: {e}".split())
        return f"not written ({why[:200]}); python -m jppo.report {run} tries again"


def make_page(document: Mapping[str, Any]) -> str:
    """Returns the page. Data is embedded as base64, so no sample text is parsed as HTML.

    The samples of each step are packed separately and unpacked on demand.
    """
    runs, texts = [], []
    for i, run in enumerate(document["runs"]):
        entries = [{k: v for k, v in e.items() if k not in ("packed", "records")} for e in run["samples"]]
        runs.append({**run, "samples": entries})
        texts += [_data(f"samples-{i}-{e['kind']}-{e['step']}", e["packed"]) for e in run["samples"]]
        texts += [_data(f"tokens-{i}-{e['step']}", e["records"]) for e in run["samples"] if e["records"]]
    parts = {
        "title": html.escape(", ".join(run["name"] for run in runs)),
        "style": _file("page.css"),
        "data": "\n".join([_data("data", pack(compact({**document, "runs": runs}))), *texts]),
        "script": "\n".join(_file(name) for name in SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def _data(name: str, packed: str) -> str:
    return f'<script type="text/plain" id="{name}">{packed}</script>'


def _file(name: str) -> str:
    return (importlib.resources.files("jppo.report") / "static" / name).read_text(encoding="utf-8")
