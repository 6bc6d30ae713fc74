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
    required: bool = False  # it has no default

    def read(self, text: str) -> Scalar:
        """Parses a word of a command line; returns a word of another type unchanged, which `convert` rejects."""
        try:
            value: Scalar = _PARSERS[self.kind].parse(text)
        except (TypeError, ValueError):
            return text
        return value

    def convert(self, name: str, value: object) -> Scalar:
        """Returns the value as the option's type; raises UserError for a value of another type."""
        types = (int, float) if self.kind is float else self.kind
        is_valid = isinstance(value, types) and isinstance(value, bool) == (self.kind is bool) and value == value
        if value is None and self.default is None and not self.required:
            return None
        if is_valid:
            with contextlib.suppress(OverflowError):  # of an int as a float
                convert: Scalar = self.kind(value)
                return convert
        usual = "" if self.required else f", as the default {self.default!r} is"
        raise UserError(
            f"{PREFIX}{name}={value!r:.200} must be a{_n(self.kind)} {self.kind.__name__}{usual}; change it"
        )


def _n(kind: type) -> str:
    return "n" if kind is int else ""


def read_signature(function: Callable[..., object], setting: str) -> dict[str, Option]:
    """Returns the options of an extension's function by name; `setting` begins an error."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except Exception as e:  # an annotation of a user's function may raise anything
        raise UserError(f"{setting}: its signature cannot be read ({explain(e)}); correct it") from e
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: _read_option(parameter, setting) for parameter in parameters if parameter.kind in by_name}


def _read_option(parameter: inspect.Parameter, setting: str) -> Option:
    """Makes the option of a parameter; raises UserError for a type that no option has."""
    hint, default = parameter.annotation, parameter.default
    required = default is inspect.Parameter.empty
    if hint is inspect.Parameter.empty:
        hint = type(default)
    kinds = [hint]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    if len(kinds) != 1 or kinds[0] not in _PARSERS:
        raise UserError(
            f"{setting}: its option {parameter.name!r} has no type of an option; annotate it as a float, int, bool or"
            f" str, as in {parameter.name}: float = 1.0"
        )
    option = Option(kinds[0], None if required else default, required)
    if not required:
        try:
            return dataclasses.replace(option, default=option.convert(parameter.name, default))
        except UserError as e:
            raise UserError(
                f"{setting}: the default {default!r:.200} of its option {parameter.name!r} is no"
                f" {option.kind.__name__}; correct the file"
            ) from e
    return option


def resolve_options(words: Mapping[str, object], options: Mapping[str, Option], setting: str) -> Options:
    """Returns the values in `words`, converted, with the defaults of other options; raises UserError for each fault."""
    values = Options({name: option.default for name, option in options.items()})

    def check_option(name: str) -> None:
        if name not in options:
            raise UserError(
                f"{PREFIX}{name}={words[name]!r:.200}: {setting} has no option {name!r}; it has {_listed(options)}"
                f"{did_you_mean(name, options)}"
            )
        if name in words:
            values.update({name: options[name].convert(name, words[name])})
        elif options[name].required:
            kind = options[name].kind
            raise UserError(
                f"{PREFIX}{name} is missing: {setting} has no default for it; give a{_n(kind)} {kind.__name__}, as in"
                f" --config.{PREFIX}{name}=VALUE"
            )

    raise_faults(faults_of([lambda name=name: check_option(name) for name in dict.fromkeys([*words, *options])]))  # type: ignore[misc]
    return values


def _listed(options: Mapping[str, Option]) -> str:
    return ", ".join(f"{name} ({option.kind.__name__})" for name, option in options.items()) or "none"


def refuse_all(given: Collection[str]) -> None:
    """Raises a UserError for options without an extension."""
    if given:
        raise UserError(
            f"{PREFIX}{next(iter(given))} is read only with {EXTENSION} set, and {EXTENSION}=''; set that, or leave the"
            " option out"
        )
