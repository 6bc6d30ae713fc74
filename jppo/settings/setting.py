"""One setting: default, meaning, unit, choices, bounds, and the check of a single value; and sections of them.

A section is a frozen dataclass whose fields are made by `setting`:

    lr: float = setting(1e-6, "Learning rate", bounds="[0,")
"""

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from jppo.errors import UserError
from jppo.registry import Registry, did_you_mean
from jppo.settings.other_names import OTHER_VALUES

LARGEST = (2 - 2**-23) * 2.0**127  # float32's: the device computes in it
MOST = 2**31 - 1  # int32's: the device counts in it
MOST_BYTES = 2**63 - 1
Value = bool | int | float | str | tuple[float, ...] | None
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of a command. A default of None may be set to a value and follows another setting until then."""

    name: str  # dotted, as on the command line
    default: Value
    meaning: str  # a noun, the effect, special values
    unit: str = ""
    choices: Collection[str | int] = ()  # a Registry also takes PATH.py:NAME and MODULE:NAME
    bounds: str = ""  # an interval: '[0, 1)', '(0,'; of a tuple's elements; '' for any number
    off: int | None = None  # a special value outside the bounds
    kind: type | None = None  # of the value where the default is None
    only: str = ""  # the condition under which it is read: 'a.b', 'a.b=x', 'a.b!=x'; '' for always
    required: bool = False  # must not be empty
    infinite: bool = False  # may be an infinity
    form: Callable[[str], object] | None = None  # parses a text; raises UserError

    @property
    def type(self) -> type:
        """The type of a value that is not None."""
        return type(self.default) if self.kind is None else self.kind

    @property
    def optional(self) -> bool:
        """Whether None is a value."""
        return self.default is None

    def check(self, value: Value) -> None:
        """Raises a UserError of one line where the setting cannot have the value."""
        if value is None and self.optional:
            return
        several = tuple(value) if isinstance(value, tuple | list) else (value,)
        numbers = [one for one in several if isinstance(one, int | float)]
        for number in numbers:
            if not abs(number) <= LARGEST and not (self.infinite and abs(number) == math.inf):
                rule = f"a finite number, at most {LARGEST:.3g} in float32"
                raise UserError(f"{self.name}={value} must be {rule}; the default is {self.default!r}")
            most = MOST_BYTES if self.unit == "bytes" else MOST
            if self.type is int and self.interval[1] is None and abs(number) > most:
                raise UserError(f"{self.name}={value} must be at most {most}; the default is {self.default!r}")
        if isinstance(self.default, tuple):
            if len(several) != len(self.default) or len(numbers) != len(several) or any(map(self._outside, numbers)):
                kind = self.allowed().lower() or "numbers"
                raise UserError(f"{self.name}={value} must be {len(self.default)} {kind}, such as {self.default}")
        elif numbers and value != self.off and (rule := self._outside(numbers[0])):
            more = "" if self.off is None else f", or {self.off}"
            raise UserError(f"{self.name}={value} must be {rule}{more}; the default is {self.default!r}")
        if isinstance(value, str):
            self._check_text(value)
        elif self.choices and value not in self.choices:
            raise UserError(f"{self.name}={value!r} is not known; it is one of {', '.join(map(repr, self.choices))}")

    def _check_text(self, value: str) -> None:
        meant = OTHER_VALUES.get(self.name, {}).get(value)
        if meant and value not in self.choices:
            raise UserError(f"{self.name}={value!r} is not known; did you mean {meant!r}?")
        if isinstance(self.choices, Registry):
            self.choices.find(value, self.name)
        elif self.choices and value not in self.choices:
            names = [one for one in self.choices if isinstance(one, str)]
            known = ", ".join(map(repr, names))
            near = did_you_mean(value, names)
            raise UserError(f"{self.name}={value!r} is not known; it is one of {known}{near}")
        if self.required and not value:
            raise UserError(f"{self.name} is empty; give a path, as in --config.{self.name}=PATH")
        if self.form is not None:
            self.form(value)

    def _outside(self, number: float) -> str:
        """Returns the rule that the number breaks, or ''."""
        return next((rule for rule, kept in self._rules(number) if not kept), "")

    def _rules(self, number: float = 0) -> Iterator[tuple[str, bool]]:
        low, high = self.interval
        if low is not None and self.bounds[0] == "(":
            yield f"above {low}", number > low
        elif low is not None:
            yield f"at least {self.type(low) if self.type in (int, float) else low}", number >= low
        if high is not None:
            yield (f"below {high}", number < high) if self.bounds[-1] == ")" else (f"at most {high}", number <= high)

    @property
    def interval(self) -> tuple[int | None, int | None]:
        """Parses the lower and the upper bound; None for none."""
        if not self.bounds:
            return None, None
        found = re.fullmatch(r"[\[(]([^,]*),\s*([^\])]*)[\])]?", self.bounds)
        assert found is not None, self
        low, high = (int(one) if one else None for one in found.groups())
        return low, high

    def allowed(self) -> str:
        """Returns the rule of a value as a sentence without its full stop; '' if every value of the type is allowed."""
        if self.choices:
            names = [f"`{one!r}`" if one == "" else f"`{one}`" for one in self.choices]
            more = ", or `PATH.py:NAME`, or `MODULE:NAME`" if isinstance(self.choices, Registry) else ""
            return f"One of {', '.join(names)}{more}"
        if isinstance(self.default, tuple):
            return f"Numbers in {self.bounds}" if self.bounds else ""
        rules = " and ".join(rule for rule, _ in self._rules())
        return f"{rules[:1].upper()}{rules[1:]}{'' if self.off is None or not rules else f', or {self.off}'}"


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of settings; its fields are settings or sections."""


def setting(default: T, meaning: str, **about: Any) -> T:
    """Declares a field of a section; `about` are fields of Setting."""
    entry = Setting("", default, meaning, **about)  # type: ignore[arg-type]
    field: T = dataclasses.field(default=default, metadata={"setting": entry})
    return field


def settings_by_name(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """Yields the settings of a section and its sections by their dotted names."""
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if "setting" not in field.metadata:
            yield from settings_by_name(hint, f"{name}.")
            continue
        entry: Setting = field.metadata["setting"]
        kinds = [one for one in typing.get_args(hint) if one is not type(None)] if entry.optional else []
        yield name, dataclasses.replace(entry, name=name, kind=kinds[0] if kinds else None)
