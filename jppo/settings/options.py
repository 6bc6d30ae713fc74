"""Options of a user-defined algorithm: `algorithm.options.NAME` are the keyword arguments of `algorithm.extension`.

The signature of its function has their names, types and defaults. Settings have them under any name; `resolved` checks
them and adds the defaults.
"""

import contextlib
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping

from absl import flags

from jppo.errors import UserError, faults_of, raise_faults
from jppo.registry import did_you_mean, explain

PREFIX = "algorithm.options."
EXTENSION = "algorithm.extension"
Scalar = bool | int | float | str | None
# By type, as the other settings of a command line are read.
_PARSERS: dict[type, flags.ArgumentParser[typing.Any]] = {
    bool: flags.BooleanParser(),
    int: flags.IntegerParser(),
    float: flags.FloatParser(),
    str: flags.ArgumentParser(),
}


class Options(dict[str, Scalar]):
    """Options by name, hashable; nothing changes them."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))


@dataclasses.dataclass(frozen=True)
class Option:
    """A parameter of an extension's function."""

    kind: type  # bool, int, float or str
    default: Scalar = None
    needed: bool = False  # it has no default

    def read(self, text: str) -> Scalar:
        """Reads a word of a command line; a text that is none of the type stays, for `checked` to refuse."""
        try:
            value: Scalar = _PARSERS[self.kind].parse(text)
        except (TypeError, ValueError):
            return text
        return value

    def checked(self, name: str, value: object) -> Scalar:
        """Returns the value by its type; raises a UserError for another type."""
        takes = (int, float) if self.kind is float else self.kind
        known = isinstance(value, takes) and isinstance(value, bool) == (self.kind is bool) and value == value
        if value is None and self.default is None and not self.needed:
            return None
        if known:
            with contextlib.suppress(OverflowError):  # of an int as a float
                checked: Scalar = self.kind(value)
                return checked
        usual = "" if self.needed else f", as the default {self.default!r} is"
        raise UserError(
            f"{PREFIX}{name}={value!r:.200} must be a{_n(self.kind)} {self.kind.__name__}{usual}; change it"
        )


def _n(kind: type) -> str:
    return "n" if kind is int else ""


def read_signature(function: Callable[..., object], said_as: str) -> dict[str, Option]:
    """Returns the options of an extension's function by name; `said_as` begins the error."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except Exception as e:  # an annotation of a user's function may raise anything
        raise UserError(f"{said_as}: its signature cannot be read ({explain(e)}); correct it") from e
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {one.name: _option(one, said_as) for one in parameters if one.kind in named}


def _option(parameter: inspect.Parameter, said_as: str) -> Option:
    hint, default = parameter.annotation, parameter.default
    needed = default is inspect.Parameter.empty
    if hint is inspect.Parameter.empty:
        hint = type(default)
    kinds = [hint]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    if len(kinds) != 1 or kinds[0] not in _PARSERS:
        raise UserError(
            f"{said_as}: its option {parameter.name!r} has no type of an option; annotate it as a float, int, bool or"
            f" str, as in {parameter.name}: float = 1.0"
        )
    option = Option(kinds[0], None if needed else default, needed)
    if not needed:
        try:
            return dataclasses.replace(option, default=option.checked(parameter.name, default))
        except UserError as e:
            raise UserError(
                f"{said_as}: the default {default!r:.200} of its option {parameter.name!r} is no"
                f" {option.kind.__name__}; correct the file"
            ) from e
    return option


def resolved(given: Mapping[str, object], known: Mapping[str, Option], said_as: str) -> Options:
    """Returns all options, with the defaults of those not given; raises a UserError for each fault."""
    values = Options({name: option.default for name, option in known.items()})

    def check(name: str) -> None:
        if name not in known:
            raise UserError(
                f"{PREFIX}{name}={given[name]!r:.200}: {said_as} has no option {name!r}; it has {_listed(known)}"
                f"{did_you_mean(name, known)}"
            )
        if name in given:
            values.update({name: known[name].checked(name, given[name])})
        elif known[name].needed:
            kind = known[name].kind
            raise UserError(
                f"{PREFIX}{name} is missing: {said_as} has no default for it; give a{_n(kind)} {kind.__name__}, as in"
                f" --config.{PREFIX}{name}=VALUE"
            )

    raise_faults(faults_of([lambda name=name: check(name) for name in dict.fromkeys([*given, *known])]))  # type: ignore[misc]
    return values


def _listed(known: Mapping[str, Option]) -> str:
    return ", ".join(f"{name} ({option.kind.__name__})" for name, option in known.items()) or "none"


def refuse_all(given: Collection[str]) -> None:
    """Raises a UserError for options without an extension."""
    if given:
        raise UserError(
            f"{PREFIX}{next(iter(given))} is read only with {EXTENSION} set, and {EXTENSION}=''; set that, or leave the"
            " option out"
        )
