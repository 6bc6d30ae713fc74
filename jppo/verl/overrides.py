"""Parser of a Hydra override, KEY=VALUE."""

import re
from typing import Any

_WORDS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def read_value(text: str) -> Any:
    """Parses a value by Hydra's grammar: null, numbers, booleans, quoted or bare text, lists and dicts."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    if text.startswith("[") and text.endswith("]"):
        return [read_value(part) for part in _parts(text[1:-1])]
    if text.startswith("{") and text.endswith("}"):
        pairs = (part.partition(":") for part in _parts(text[1:-1]))
        return {str(read_value(key)): read_value(value) for key, _, value in pairs}
    return text


def flat(key: str, value: Any) -> dict[str, Any]:
    """Flattens a dict to dotted keys."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {k: v for name, inner in value.items() for k, v in flat(f"{key}.{name}", inner).items()}


def _parts(text: str) -> list[str]:
    """Splits at commas outside quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += 0 if quote else (character in "[{") - (character in "]}")
        if character == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]
