"""Parsers of settings that are a list, a band, steps or addresses of servers in one text; presets by name."""

import ast
import dataclasses
import pathlib
import re
import urllib.parse
from collections.abc import Collection
from typing import Any

from jppo.errors import UserError
from jppo.registry import REMOTE_LOGGERS

SAVE_CONTENTS = ("model", "optimizer", "extra", "hf_model")  # extra: keys, counters, coefficients, data positions
LOCAL_LOGGERS = ("console", "jsonl", "tensorboard")
REJECTION_RULES = tuple(
    f"{over}_{k}"
    for over in ("token", "seq_sum", "seq_mean", "seq_max")
    for k in ("k1", "k2", "k3")
    if (over, k) != ("seq_max", "k1")
)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", ",": ",", "\\": "\\"}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
Named = tuple[str, int]  # a DNS name and a port


def save_contents(names: str) -> tuple[str, ...]:
    """Parses the contents of a checkpoint."""
    contents = tuple(entries(names))
    setting = f"trainer.save_contents={names!r}"
    for name in contents:
        if name not in SAVE_CONTENTS:
            raise UserError(f"{setting}: {name!r} is not known; give some of {', '.join(SAVE_CONTENTS)}")
    for name in ("model", "extra"):
        if name not in contents:
            raise UserError(f"{setting}: without {name} no run could resume from a checkpoint; add it")
    return contents


def loggers(names: str) -> tuple[str, ...]:
    """Parses the sinks of metrics."""
    known = (*LOCAL_LOGGERS, *REMOTE_LOGGERS)
    sinks = _known_names(names, known, f"trainer.logger={names!r}", "the names are")
    if "jsonl" not in sinks:
        raise UserError(
            f"trainer.logger={names!r} has no jsonl: metrics.jsonl is what a resumed run and its summary read; try"
            f" {','.join((*sinks, 'jsonl'))!r}"
        )
    return sinks


def template_arguments(text: str) -> dict[str, Any]:
    """Parses a chat template's arguments, as in 'enable_thinking=False,effort=low': Python literals, or else words."""
    arguments: dict[str, Any] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not name.isidentifier() or name in arguments:
            raise UserError(
                f"data.apply_chat_template_kwargs={text!r}: {entry!r} must be NAME=VALUE, each name once; try"
                " 'enable_thinking=False'"
            )
        try:
            arguments[name] = ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(value, value))
        except (SyntaxError, ValueError):
            arguments[name] = value
    return arguments


def stop_texts(texts: str) -> tuple[str, ...]:
    """Parses the texts that end a response; spaces count, and a backslash begins one of `ESCAPES`."""
    shown = texts.replace("\n", r"\n")
    setting = f"rollout.stop='{shown}'"  # as written: repr would double its backslashes
    endings, characters = [""], iter(texts)
    for character in characters:
        if character == ",":
            endings.append("")
        elif character != "\\":
            endings[-1] += character
        elif (after := next(characters, "")) in ESCAPES:
            endings[-1] += ESCAPES[after]
        else:
            raise UserError(
                rf"{setting}: a backslash begins one of \n, \t, \r, \, and \\, and here comes {after or 'none'}; write"
                r" \\ for a backslash"
            )
    if endings == [""]:
        return ()
    for text in endings:
        if not text:
            raise UserError(
                rf"{setting}: an empty text would end every response; leave a comma out, or write \, for a comma"
            )
        if endings.count(text) > 1:
            raise UserError(f"{setting}: {text!r} is given twice; name it once")
    return tuple(endings)


def check_factors(names: str, weights: str, setting: str) -> None:
    """Raises a UserError unless there is a weight for each name, both separated by commas, or none."""
    name_list = entries(names)
    try:
        count = len([float(weight) for weight in entries(weights)]) or len(name_list)
    except ValueError:
        count = -1
    if count != len(name_list) or len(set(name_list)) != len(name_list):
        raise UserError(f"{setting}={weights!r} must have a number for each of {names!r}, each name once, or be empty")


def importance_band(spec: str | float) -> tuple[float | None, float]:
    """Parses the bounds of importance weights: '2.0' is an upper bound, '0.5_2.0' a band."""
    return _parse_band(spec, "algorithm.rollout_is_threshold")


def rejection_rules(names: str, thresholds: str | float) -> tuple[tuple[str, float, float], ...]:
    """Parses rejection rules into (name, lower, upper)."""
    specs = entries(str(thresholds))
    settings = f"algorithm.rollout_rs={names!r} with algorithm.rollout_rs_threshold={thresholds!r}"
    rules = _known_names(names, REJECTION_RULES, settings, "the rules are")
    if len(specs) != len(rules) and not (rules and len(specs) == 1):
        raise UserError(f"{settings}: give one threshold for all rules, or one for each, separated by commas")
    parsed = []
    for name, spec in zip(rules, specs * len(rules) if len(specs) == 1 else specs, strict=True):
        lower, upper = _parse_band(spec, f"{settings}: the threshold of {name}")
        if name.endswith("k1"):
            if lower is None and upper < 1:
                raise UserError(
                    f"{settings}: {spec} alone is the band from 1/{spec} to {spec}, which is empty; give low_high"
                )
            parsed.append((name, 1.0 / upper if lower is None else lower, upper))
        elif lower is not None:
            raise UserError(f"{settings}: {name} has an upper bound only, {spec!r} is a band; give one number")
        else:
            parsed.append((name, 0.0, upper))
    return tuple(parsed)


def _parse_band(spec: str | float, name: str) -> tuple[float | None, float]:
    """Parses an upper bound alone, as in 2.0, or a lower and an upper one, as in 0.5_2.0."""
    parts = str(spec).split("_")
    try:
        bounds = [float(part) for part in parts]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or not all(0 < b < float("inf") for b in bounds) or bounds != sorted(bounds):
        raise UserError(f"{name}={spec!r} must be a number above 0, or a band low_high such as 0.5_2.0")
    return (None, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])


def parse_steps(spec: str, name: str) -> tuple[range, ...]:
    """Parses steps, as in '3,5' or '2-4': single ones and ranges with both ends, separated by commas; '' for none."""
    ranges = []
    for part in (part.strip() for part in spec.split(",")) if spec.strip() else ():
        matched = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if matched is None:
            raise UserError(f"{name}={spec!r}: {part!r} is no step; give steps as in 3, in 3,5 or in 2-4")
        first, last = int(matched[1]), int(matched[2] or matched[1])
        if not 1 <= first <= last:
            raise UserError(f"{name}={spec!r}: {part!r} names no step; the first step is 1, and a range rises, as 2-4")
        ranges.append(range(first, last + 1))
    return tuple(ranges)


def check_within(steps: tuple[range, ...], total: int, name: str) -> None:
    """Raises a UserError where a step comes after the last step of the run."""
    last = max((part[-1] for part in steps), default=0)
    if last > total:
        raise UserError(f"{name}: step {last} is none of this run, which has {total}; name steps from 1 to {total}")


def entries(text: str) -> list[str]:
    """Splits a text at its commas, without empty parts."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _known_names(text: str, known: Collection[str], setting: str, list_of: str) -> tuple[str, ...]:
    """Splits a text into names, each of them `known` and given once; an error begins with the `setting`."""
    names = entries(text)
    for name in names:
        if name not in known:
            raise UserError(f"{setting}: {name!r} is not known; {list_of} {', '.join(known)}")
        if names.count(name) > 1:
            raise UserError(f"{setting}: {name!r} is given twice; name it once")
    return tuple(names)


def addresses_by_source(urls: str) -> dict[str, str]:
    """Returns the addresses of `ref.url` by data source; a single address without one is under ''."""
    addresses, pairs = dict[str, str](), sources_and_addresses(urls)
    for source, url in pairs:
        if not is_url(url):
            raise UserError(f"ref.url: {url!r} is no address; write it like http://127.0.0.1:8000")
        if len(pairs) > 1 and not source:
            raise UserError(
                f"ref.url: {url!r} has no data source, beside other addresses; write SOURCE=ADDRESS,SOURCE=ADDRESS"
            )
        if source in addresses:
            raise UserError(f"ref.url: data source {source!r} is given twice; name it once")
        addresses[source] = url
    if urls and not addresses:
        raise UserError(f"ref.url={urls!r} has no address; write it like http://127.0.0.1:8000, or leave it empty")
    return addresses


def sources_and_addresses(urls: str) -> list[tuple[str, str]]:
    """Splits SOURCE=ADDRESS,... at its commas and at each address's scheme; the source is '' where there is none."""
    parts = [(re.fullmatch(r"(.+?)\s*=\s*(https?://.*)", entry), entry) for entry in entries(urls)]
    return [("", entry) if part is None else (part[1], part[2]) for part, entry in parts]


def lookup_place(urls: str) -> pathlib.Path | Named | None:
    """Returns where addresses are looked up: the file of `file:PATH` or the name of `dns://NAME:PORT`; None for a list.

    UserError if malformed.
    """
    try:
        at = urllib.parse.urlsplit(urls.strip())
        if at.scheme == "file" and at.path and not at.netloc and not at.query:
            return pathlib.Path(at.path)
        if at.scheme == "dns" and at.hostname and at.port and at.netloc == urls.strip()[len("dns://") :]:
            return at.hostname, at.port
    except ValueError:  # of a port
        at = urllib.parse.urlsplit("")
    if urls.strip().startswith(("file:", "dns:")):
        raise UserError(f"rollout.urls={urls!r} must be file:PATH, with an address on each line, or dns://NAME:PORT")
    return None


def remote_urls(urls: str) -> list[str]:
    """Returns the addresses that are not this machine's; also `file:PATH`, whose addresses are not read."""
    return [url for url in entries(urls) if _parse_host(url) not in LOOPBACK]


def _parse_host(url: str) -> str | None:
    try:
        return urllib.parse.urlsplit(url).hostname
    except ValueError:  # malformed; another rule rejects it
        return None


def is_url(url: str) -> bool:
    """Whether `url` is a server's address."""
    try:
        address = urllib.parse.urlsplit(url)  # which leaves out tabs and line breaks
        printable = url.isprintable() and " " not in url
        return printable and address.scheme in ("http", "https") and address.hostname is not None and address.port != 0
    except ValueError:
        return False


_GEO, _K3 = ("seq_mean_k1", "0.999_1.001"), ("seq_mean_k3", "0.01")
THRESHOLDS = ("rollout_is_threshold", "rollout_rs_threshold")


@dataclasses.dataclass(frozen=True)
class Preset:
    """Values of the settings of `algorithm` by the same names, and of `actor.loss_mode`."""

    old_logprob: str
    rollout_is: str
    rollout_is_threshold: str
    rollout_rs: str
    rollout_rs_threshold: str
    loss_mode: str  # '': any


def _decoupled(rollout_is: str = "none", rs: tuple[str, str] = ("", ""), *, band: str = "2.0") -> Preset:
    return Preset("correction", rollout_is, band, *rs, loss_mode="")


def _bypass(loss_mode: str, rollout_is: str = "none", rs: tuple[str, str] = ("", ""), *, band: str = "2.0") -> Preset:
    return Preset("bypass", rollout_is, band, *rs, loss_mode=loss_mode)


PRESETS = {
    "disabled": Preset("decoupled", "none", "2.0", "", "", loss_mode=""),
    "decoupled_token_is": _decoupled("token"),
    "decoupled_seq_is": _decoupled("sequence"),
    "decoupled_token_icepop": _decoupled("token", band="0.5_5.0"),
    "decoupled_seq_is_rs": _decoupled("sequence", ("seq_sum_k1", "0.5_2.0")),
    "decoupled_geo_rs": _decoupled(rs=_GEO),
    "decoupled_geo_rs_seq_tis": _decoupled("sequence", _GEO),
    "decoupled_geo_rs_token_tis": _decoupled("token", _GEO),
    "decoupled_k3_rs": _decoupled(rs=_K3),
    "decoupled_k3_rs_seq_tis": _decoupled("sequence", _K3),
    "decoupled_k3_rs_token_tis": _decoupled("token", _K3),
    "bypass_ppo_clip": _bypass("vanilla"),
    "bypass_ppo_clip_geo_rs": _bypass("vanilla", rs=_GEO),
    "bypass_ppo_clip_k3_rs": _bypass("vanilla", rs=_K3),
    "bypass_pg_is": _bypass("gpg", "sequence"),
    "bypass_pg_token_icepop": _bypass("gpg", "token", band="0.5_5.0"),
    "bypass_pg_geo_rs": _bypass("gpg", rs=_GEO),
    "bypass_pg_geo_rs_seq_tis": _bypass("gpg", "sequence", _GEO),
    "bypass_pg_geo_rs_token_tis": _bypass("gpg", "token", _GEO),
}
