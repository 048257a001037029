"""Turns the errors of `docker compose config` into the controller's messages.

Compose's own message is passed on, with the files that it is about. Three kinds of failure need more: a variable
without a value and a missing file (the controller sees neither the user's shell nor files outside the project), and
broken YAML, for which Compose does not name the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from .yaml import load_written

_LOG_LINE = re.compile(r'time="[^"]*" level=(?P<level>\w+) msg="(?P<message>.*)"')
_NO_VALUE = re.compile(
    r"(?:error while interpolating (?P<where>\S+): )?required variable (?P<name>\w+) is missing a value"
    r"(?:: (?P<hint>.+))?",
    re.DOTALL,
)
_NO_FILE = re.compile(r"(?:^|: )(?:stat|open) (?P<file>/.+?): no such file or directory")
_SHORT_LOG_LINE = re.compile(r"(?P<level>WARN|INFO|DEBU)\[\d+\] (?P<message>.*)")


@dataclass(frozen=True)
class MessageContext:
    """The project that Compose was run for, which messages refer to."""

    project_dir: Path
    files: Sequence[Path]

    @property
    def variables_come_from(self) -> str:
        """The part that every message about a variable has."""
        return (
            f"the controller takes variables from {self.project_dir / '.env'} and from its own environment, "
            "not from the shell that ran `docker compose up`"
        )


def split_output(stderr: str) -> tuple[str, tuple[str, ...]]:
    """Split Compose's standard error into (error message, warnings)."""
    message: list[str] = []
    warnings: list[str] = []
    for line in stderr.splitlines():
        log_line = _LOG_LINE.fullmatch(line.strip()) or _SHORT_LOG_LINE.fullmatch(line.strip())
        if log_line is None:
            message.append(line)
        elif log_line["level"].lower().startswith("warn"):
            warnings.append(log_line["message"].replace('\\"', '"'))
    return "\n".join(message).strip(), tuple(dict.fromkeys(warnings))


def explain_warning(warning: str, setting: MessageContext) -> str:
    """The controller's message for a warning of Compose."""
    match = re.match(r'The "(\w+)" variable is not set\.', warning)
    if match is None:
        return warning
    return f'variable "{match[1]}" is not set and became empty: {setting.variables_come_from}'


def explain(message: str, setting: MessageContext) -> str:
    """The controller's message for a failure of Compose: where it is, what is wrong, what to do."""
    text = message.removesuffix(": invalid compose project").strip()
    if match := _NO_VALUE.search(text):
        return _missing_variable(match, setting)
    if match := _NO_FILE.search(text):
        return _missing_file(match["file"], setting)
    if text.startswith("yaml: "):
        return _yaml_error(text, setting)
    files = ", ".join(str(file) for file in setting.files) or str(setting.project_dir)
    return " ".join(text.split()) if _starts_with_path(text) else f"{files}: {' '.join(text.split())}"


def _starts_with_path(text: str) -> bool:
    return re.match(r"(services|networks|volumes|secrets|configs|name)(\.\S+)?:|/\S+: ", text) is not None


def _missing_variable(match: re.Match[str], setting: MessageContext) -> str:
    name, hint = match["name"], match["hint"]
    where = match["where"] or ", ".join(str(file) for file in setting.files)
    reason = f" ({hint.strip()})" if hint else ""
    return (
        f'{where}: variable "{name}" has no value{reason}: {setting.variables_come_from}; '
        f"write {name}=... into {setting.project_dir / '.env'}"
    )


def _missing_file(file: str, setting: MessageContext) -> str:
    return (
        f"{file}: no such file; relative names start at {setting.project_dir} (COMPOSE_FILE) or at the file "
        f"that names it (include, extends, env_file), and the controller sees what lies in {setting.project_dir} only"
    )


def _yaml_error(text: str, setting: MessageContext) -> str:
    """Name the file that does not parse, which Compose leaves out."""
    for file in setting.files:
        try:
            load_written(file.read_text())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
            return f"{file}: not valid YAML: {place}{error.problem or error}"
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue  # another error than Compose's, whose own message follows
    files = ", ".join(str(file) for file in setting.files)
    return f"{files}: not valid YAML: {' '.join(text.removeprefix('yaml: ').split())}"
