"""One verl setting: its counterpart in jppo, or why it has none."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Name:
    """A verl key, or a pattern of keys."""

    key: str
    kind: str  # same: a jppo setting; needless: no meaning in jppo; missing: not supported
    setting: str = ""  # jppo's
    convert: str = "as_is"  # a name in `values.CONVERSIONS`
    default: Any = None  # verl's, if a script that omits the key must get it; None: jppo's own
    why: str = ""
    off: tuple = (False, None)  # missing: values that disable the feature
    only: str = ""  # missing: the key that must be on for verl to read this one


def same(key: str, setting: str, default: Any = None, convert: str = "as_is", why: str = "") -> Name:
    return Name(key, "same", setting, convert, default, why)


def needless(why: str, *keys: str) -> tuple[Name, ...]:
    return tuple(Name(key, "needless", why=why) for key in keys)


def missing(why: str, *keys: str, off: tuple = (), only: str = "") -> tuple[Name, ...]:
    return tuple(Name(key, "missing", why=why, off=(False, None, *off), only=only) for key in keys)
