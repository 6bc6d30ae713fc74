"""Reader of verl overrides in a shell script. It runs nothing: it reads words, quotes, variables and arithmetic."""

import dataclasses
import re
from collections.abc import Mapping

from jppo.settings import UserError

_CONTROL = (
    "if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "function", "select",
)  # fmt: skip
_ENDS = ("then", "fi", "do", "done", "esac")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_MAIN = re.compile(r"(^|[./])main_(ppo|dapo|\w*ppo\w*)(\.py)?$")
_OTHER = re.compile(r"(^|[./])(fsdp_sft_trainer|sft_trainer\w*|main_generation|main_eval)(\.py)?$")
UNREAD = "\x00"  # marks text that only running the script could expand


@dataclasses.dataclass
class _Shell:
    """The variables that the script has set so far."""

    values: dict[str, str]
    arrays: dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Script:
    """The arguments of verl's module, and notes on unsupported syntax."""

    words: tuple[str, ...]
    notes: tuple[str, ...]


def read_script(text: str, name: str, environment: Mapping[str, str]) -> Script:
    """Returns the overrides of the text's only verl command; without a command, all words that are overrides."""
    shell, found, loose, notes = _Shell(dict(environment), {}), [], [], []
    reader = _Reader(text.replace("\r\n", "\n"), shell, name)
    while reader.at < len(reader.text):
        line, words = reader.line(), reader.command()
        while words and words[0] in ("export", "declare", "local", "readonly", "env", "nohup"):
            words = words[1:]
        if words and words[0] in _CONTROL:
            if words[0] not in _ENDS:
                notes.append(f"{name}:{line}: {words[0]!r} is not followed: what it guards is read as if it held")
            words = words[1:] if words[0] in ("then", "do", "else") else []
        while words and (match := _ASSIGNED.fullmatch(words[0])):
            shell.values[match[1]] = (shell.values.get(match[1], "") if match[2] else "") + match[3]
            words = words[1:]
        if other := [word for word in words if _OTHER.search(word)]:
            raise UserError(f"{name}:{line}: {other[0]} is no PPO of verl's; give a script that starts main_ppo")
        main = next((i for i, word in enumerate(words) if _MAIN.search(word)), None)
        if main is not None:
            found.append((line, words[main + 1 :]))
        elif words and re.match(r"[+~]*\w[\w@/]*\.[\w.-]+=", words[0]):
            loose.extend(words)
    if len(found) > 1:
        lines = ", ".join(str(line) for line, _ in found)
        raise UserError(f"{name}: lines {lines} each start verl; leave one of them")
    words = found[0][1] if found else loose
    if not words:
        raise UserError(f"{name}: there is no command of verl's in it, as python3 -m verl.trainer.main_ppo KEY=VALUE")
    return Script(tuple(words), tuple(notes))


def _closing(text: str) -> int:
    """Returns the end of an arithmetic expansion at the start of the text; 0 if it has none."""
    depth = 0
    for mark in re.finditer(r"[()]", text):
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            return mark.end() if text[: mark.end()].endswith("))") else 0
    return 0


class _Reader:
    """A position in the text."""

    def __init__(self, text: str, shell: _Shell, name: str):
        self.text, self.shell, self.name, self.at = text, shell, name, 0

    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def command(self, end: str = "\n;&|") -> list[str]:
        """Reads words up to a separator."""
        words: list[str] = []
        while self.at < len(self.text):
            rest = self.text[self.at :]
            character = rest[0]
            if rest.startswith("\\\n"):
                self.at += 2
            elif character == "#":
                self.at += len(rest.partition("\n")[0])
            elif character in end:
                self.at += 1
                return words
            elif character in " \t\n":
                self.at += 1
            elif redirect := re.match(r"\d*(>>?|<)&?[ \t]*", rest):
                self.at += redirect.end()
                if self.at < len(self.text) and self.text[self.at] not in "\n;&|":
                    self.word(end)
            elif array := re.match(r"([A-Za-z_]\w*)(\+?)=\(", rest):
                self.at += array.end()
                kept = self.shell.arrays.get(array[1], []) if array[2] else []
                self.shell.arrays[array[1]] = kept + self.command(end=")")
            elif character in "(){}" and (len(rest) == 1 or rest[1] in " \t\n;"):
                self.at += 1
            else:
                words += self.word(end)
        if end == ")":
            raise UserError(f"{self.name}: a list that begins by ( has no end")
        return words

    def word(self, end: str) -> list[str]:
        """Reads a word and unquotes it; a list gives its entries, "$@" and other empty expansions nothing."""
        out, begun = [""], self.line()
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "'":
                out[-1] += self._until("'", begun)
            elif character == '"':
                self._double(out, begun)
            elif character == "\\":
                self.at += 2
                out[-1] += self.text[self.at - 1 : self.at].replace("\n", "")
            elif character == "$":
                self._expand(out)
            elif character == "`":
                out[-1] += f"{UNREAD}`{self._until('`', begun)}`{UNREAD}"
            elif end and (character in end or character in " \t\n;&|<>"):
                break
            else:
                out[-1] += character
                self.at += 1
        return [word for word in out if word.strip()]

    def _until(self, quote: str, begun: int) -> str:
        close = self.text.find(quote, self.at + 1)
        if close < 0:
            raise UserError(f"{self.name}:{begun}: {quote} has no end")
        inner, self.at = self.text[self.at + 1 : close], close + 1
        return inner

    def _double(self, out: list[str], begun: int) -> None:
        self.at += 1
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == '"':
                self.at += 1
                return
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                out[-1] += self.text[self.at + 1].replace("\n", "")
                self.at += 2
            elif character == "$":
                self._expand(out)
            else:
                out[-1] += character
                self.at += 1
        raise UserError(f'{self.name}:{begun}: " has no end')

    def _expand(self, out: list[str]) -> None:
        rest = self.text[self.at :]
        if match := re.match(r"\$\{(\w+)\[[@*]\]\}", rest):
            entries = self.shell.arrays.get(match[1], [])
            out[-1] += entries[0] if entries else ""
            out.extend(entries[1:])
        elif match := re.match(r"\$[@*]|\$\{[@*](:\d+)?\}", rest):
            pass
        elif rest.startswith("$((") and (end := _closing(rest)):
            out[-1] += self._sum(rest[3 : end - 2], rest[:end])
            self.at += end
            return
        elif match := re.match(r"\$\(pwd\)", rest):
            out[-1] += self._value("PWD", match[0])
        elif rest.startswith("${"):
            self._braces(out)
            return
        elif match := re.match(r"\$([A-Za-z_]\w*|\d)", rest):
            out[-1] += self._value(match[1], match[0])
        elif match := re.match(r"\$\((?:[^()]|\([^()]*\))*\)", rest):
            out[-1] += f"{UNREAD}{match[0]}{UNREAD}"
        elif rest.startswith("$("):
            raise UserError(f"{self.name}:{self.line()}: $( has no end")
        else:
            out[-1] += "$"
            self.at += 1
            return
        self.at += match.end()

    def _braces(self, out: list[str]) -> None:
        """Expands ${NAME}, ${NAME:-else} and similar forms; leaves others unread."""
        depth, end = 0, self.at
        for mark in re.finditer(r"\$\{|\}", self.text[self.at :]):
            depth, end = depth + (1 if mark[0] == "${" else -1), self.at + mark.end()
            if depth == 0:
                break
        if depth:
            raise UserError(f"{self.name}:{self.line()}: ${{ has no end")
        said, self.at = self.text[self.at : end], end
        if match := re.fullmatch(r"\$\{(\w+):?\+(.*)\}", said, re.S):
            if self.shell.values.get(match[1]):
                out[-1] += "".join(_Reader(match[2], self.shell, self.name).word(""))
            return
        if (match := re.fullmatch(r"\$\{(\w+)(,,|\^\^)\}", said)) and match[1] in self.shell.values:
            text = self.shell.values[match[1]]
            out[-1] += text.lower() if match[2] == ",," else text.upper()
            return
        match = re.fullmatch(r"\$\{(\w+)(?:(:?)[-=](.*))?\}", said, re.S)
        if match is None:
            out[-1] += f"{UNREAD}{said}{UNREAD}"
            return
        known = self.shell.values.get(match[1])
        if match[3] is not None and (known is None or (match[2] and not known)):
            known = "".join(_Reader(match[3], self.shell, self.name).word(""))
        out[-1] += f"{UNREAD}{said}{UNREAD}" if known is None else known

    def _value(self, name: str, said: str) -> str:
        return self.shell.values.get(name, f"{UNREAD}{said}{UNREAD}")

    def _sum(self, expression: str, said: str) -> str:
        known = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: self.shell.values.get(m[1], "?"), expression)
        if not re.fullmatch(r"[\d\s()+*/%-]+", known) or "**" in known:
            return f"{UNREAD}{said}{UNREAD}"
        try:
            return str(int(eval(known.replace("/", "//"), {"__builtins__": {}})))
        except (SyntaxError, ZeroDivisionError):
            return f"{UNREAD}{said}{UNREAD}"
