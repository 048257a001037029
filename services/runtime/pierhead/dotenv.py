"""A Compose project's `.env`: read as Compose reads it, changed line by line, so that comments and line ends stay."""

from __future__ import annotations

import re
from pathlib import Path

from pierhead.files import replace_file

_NAME = re.compile(r"^[^\S\r\n]*(?:export[^\S\r\n]+)?([A-Za-z_][A-Za-z0-9_]*)[^\S\r\n]*[=:]", re.MULTILINE)
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,=~-]*")


class DotEnv:
    """The lines of one file, which need not exist."""

    def __init__(self, path: Path) -> None:
        """Raises OSError and UnicodeDecodeError."""
        self._path = path
        try:
            self._text = path.read_bytes().decode()
        except FileNotFoundError:
            self._text = ""
        self._newline = "\r\n" if "\r\n" in self._text else "\n"
        self._before = self._text

    def get(self, name: str) -> str | None:
        """The last value of a variable; None where there is none."""
        found = list(_line(name).finditer(self._text))
        return _value(found[-1]["value"]) if found else None

    def values(self) -> dict[str, str]:
        """Every variable with its last value."""
        return {name: self.get(name) or "" for name in _NAME.findall(self._text)}

    def set(self, name: str, value: str) -> None:
        """Write a variable: in the place of its last line, else at the end."""
        line = f"{name}={_written(value)}"
        found = list(_line(name).finditer(self._text))
        if found:
            start, end = found[-1].span()
            self._text = f"{self._text[:start]}{line}{self._text[end:]}"
        else:
            self.append(line)

    def append(self, line: str) -> None:
        """Add a line at the end."""
        if self._text and not self._text.endswith("\n"):
            self._text += self._newline
        self._text += line + self._newline

    def save(self, mode: int | None = None) -> bool:
        """Write the file if it changed; whether it did. `mode`: the file's; None: what it has, else 0644."""
        if self._text == self._before:
            return False
        path = self._path.resolve()  # a link stays one
        replace_file(path, self._text.encode(), mode or (None if path.exists() else 0o644))
        self._before = self._text
        return True


def _line(name: str) -> re.Pattern[str]:
    return re.compile(
        rf"^[^\S\r\n]*(?:export[^\S\r\n]+)?{re.escape(name)}[^\S\r\n]*[=:](?P<value>[^\r\n]*)", re.MULTILINE
    )


def _value(written: str) -> str:
    text = written.strip()
    if text[:1] in ("'", '"'):
        quote = text[0]
        inside = re.match(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", text)
        if inside:
            return re.sub(rf"\\([{quote}\\])" if quote == '"' else r"\\(')", r"\1", inside[1])
    comment = re.search(r" #", text)
    return (text[: comment.start()] if comment else text).strip()


def _written(value: str) -> str:
    """Without quotes where Compose needs none."""
    if _PLAIN.fullmatch(value):
        return value
    return "'" + value.replace("'", "\\'") + "'"
