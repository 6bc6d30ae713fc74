"""A name of verl's: what it is in jppo, or why it is nothing there."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Name:
    """A key of verl's, or all keys of a pattern."""

    key: str
    kind: str  # same: it is a setting; needless: it has no meaning in jppo; missing: jppo has nothing of the kind
    setting: str = ""  # jppo's
    convert: str = "as_is"  # of `values.CONVERSIONS`
    default: Any = None  # verl's, where a script that leaves it out must get it; None: jppo's own is taken
    why: str = ""
    off: tuple = (False, None)  # missing: values that ask for nothing


def same(key: str, setting: str, default: Any = None, convert: str = "as_is", why: str = "") -> Name:
    return Name(key, "same", setting, convert, default, why)


def needless(why: str, *keys: str) -> tuple[Name, ...]:
    return tuple(Name(key, "needless", why=why) for key in keys)


def missing(why: str, *keys: str, off: tuple = ()) -> tuple[Name, ...]:
    return tuple(Name(key, "missing", why=why, off=(False, None, *off)) for key in keys)
