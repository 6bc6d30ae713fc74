"""The table of verl's settings as Markdown, for docs/verl.md."""

import textwrap
from collections.abc import Iterator

from jppo.verl.derived import FOLLOWING
from jppo.verl.name import Name
from jppo.verl.names import OLDER, TABLE

WIDTH = 120


def names() -> str:
    """Formats all rows: settings, needless keys, unsupported keys, older names."""
    parts = [
        "### Settings\n",
        *(_setting(name) for name in TABLE if name.kind == "same"),
        "\n### What follows from several\n",
        *(_item(f"`{setting}`: {why}") for setting, (_, _, why) in FOLLOWING.items()),
        "\n### No meaning in jppo\n",
        *_grouped("needless"),
        "\n### Not supported\n",
        *_grouped("missing"),
        "\n### Older names\n",
        *(_item(f"`{old}` is `{new}`") for old, new in OLDER.items()),
    ]
    return "\n".join(parts) + "\n"


def _setting(name: Name) -> str:
    default = name.default
    shown = (
        "" if default is None else f", `{default[1:] if str(default).startswith('=') else default}` unless it is given"
    )
    return _item(f"`{name.key}` is `{name.setting}`{shown}{f': {name.why}' if name.why else ''}")


def _grouped(kind: str) -> Iterator[str]:
    """Yields the rows of a kind by their reason."""
    rows = [name for name in TABLE if name.kind == kind]
    for why in dict.fromkeys(name.why for name in rows):
        yield _item(f"{why}: {', '.join(f'`{name.key}`' for name in rows if name.why == why)}")


def _item(text: str) -> str:
    text = text.replace("``", "`''`")
    return textwrap.fill(
        text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
