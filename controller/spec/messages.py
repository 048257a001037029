"""What `docker compose config` says on failure -> sentences that say where, why and what to do.

Reads files only to find the place that Compose does not name. Words of Compose 2.26 and later are known; words that are
not known are passed on as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..model.text import shown
from .problems import at
from .yaml import load_written

_LOG_LINE = re.compile(r'time="[^"]*" level=(?P<level>\w+) msg="(?P<message>.*)"')
_SHORT_LOG_LINE = re.compile(r"(?P<level>WARN|INFO|DEBU)\[\d+\] (?P<message>.*)")


@dataclass(frozen=True)
class Setting:
    """Where Compose was run: what a message can refer to."""

    project_dir: Path
    files: Sequence[Path]

    @property
    def variables_come_from(self) -> str:
        """The sentence that every message about a variable needs."""
        return (
            f"the controller takes variables from {self.project_dir / '.env'} and from its own environment, "
            "not from the shell that ran `docker compose up`"
        )


def split_output(stderr: str) -> tuple[str, tuple[str, ...]]:
    """(the error message, the warnings) in what Compose wrote to its standard error."""
    message: list[str] = []
    warnings: list[str] = []
    for line in stderr.splitlines():
        log_line = _LOG_LINE.fullmatch(line.strip()) or _SHORT_LOG_LINE.fullmatch(line.strip())
        if log_line is None:
            message.append(line)
        elif log_line["level"].lower().startswith("warn"):
            warnings.append(log_line["message"].replace('\\"', '"'))
    return "\n".join(message).strip(), tuple(dict.fromkeys(warnings))


def explain_warning(warning: str, setting: Setting) -> str:
    """A warning in our words."""
    match = re.match(r'The "(\w+)" variable is not set\.', warning)
    if match is None:
        return warning
    return f'variable "{match[1]}" is not set and became empty: {setting.variables_come_from}'


def explain(message: str, setting: Setting) -> str:
    """One failure in our words: where it is, what is wrong, what to do."""
    text = message.removesuffix(": invalid compose project").strip()
    for pattern, sentence in _EXPLANATIONS:
        if match := pattern.search(text):
            return sentence(match, setting)
    if text.startswith("yaml: "):
        return _yaml_error(text, setting)
    files = ", ".join(str(file) for file in setting.files) or str(setting.project_dir)
    return " ".join(text.split()) if _starts_with_path(text) else f"{files}: {' '.join(text.split())}"


def _starts_with_path(text: str) -> bool:
    return re.match(r"(services|networks|volumes|secrets|configs|name)(\.\S+)?:|/\S+: ", text) is not None


def _missing_variable(match: re.Match[str], setting: Setting) -> str:
    name, hint = match["name"], match["hint"]
    where = match["where"] or ", ".join(str(file) for file in setting.files)
    said = f" ({hint.strip()})" if hint else ""
    return (
        f'{where}: variable "{name}" has no value{said}: {setting.variables_come_from}; '
        f"write {name}=... into {setting.project_dir / '.env'}"
    )


def _missing_file(match: re.Match[str], setting: Setting) -> str:
    return (
        f"{match['file']}: no such file; relative names start at {setting.project_dir} (COMPOSE_FILE) or at the file "
        f"that names it (include, extends), and the controller sees what lies in {setting.project_dir} only"
    )


def _missing_env_file(match: re.Match[str], setting: Setting) -> str:
    return (
        f"{match['file']}: no such file, and a service names it as env_file; create it or take it out of env_file (the "
        f"controller sees what lies in {setting.project_dir} only)"
    )


def _nothing_found(match: re.Match[str], setting: Setting) -> str:
    where = setting.project_dir
    return f"{where}: no compose file in this directory; create compose.yaml or name the files in COMPOSE_FILE"


def _bad_interpolation(match: re.Match[str], setting: Setting) -> str:
    written = " ".join(match["written"].split())
    return f"{match['where']}: cannot fill in the variables of {written}; a literal dollar sign is written $$"


def _wrong_cast(match: re.Match[str], setting: Setting) -> str:
    return f"{match['where']}: wrong type, found {match['found']} (Compose expects a number here, or true/false)"


def _not_finite(match: re.Match[str], setting: Setting) -> str:
    """Compose does not say where; so look for the number."""
    try:
        where = _path_of_not_finite(load_written(Path(match["file"]).read_text()), "")
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        where = ""  # the file is named in any case
    found = shown(float(match["found"]))
    return f"{where or match['file']}: expected a finite number, found {found} (in {match['file']})"


def _path_of_not_finite(value: Any, path: str) -> str:
    if isinstance(value, float):
        return "" if math.isfinite(value) else path
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return next(filter(None, (_path_of_not_finite(item, at(path, key)) for key, item in items)), "")


def _schema(match: re.Match[str], setting: Setting) -> str:
    where, what = match["where"], match["what"]
    return f"{where}: {what} (in {match['file']})"


def _undefined(match: re.Match[str], setting: Setting) -> str:
    kind, name = match["kind"], match["name"].strip('":')
    advice = "which the files do not define; correct the name or define it"
    return f'services.{match["service"]}: refers to {kind} "{name}", {advice}'


def _no_image(match: re.Match[str], setting: Setting) -> str:
    return f"services.{match['service']}: has neither image nor build; write one of them"


_EXPLANATIONS: Sequence[tuple[re.Pattern[str], Callable[[re.Match[str], Setting], str]]] = (
    (
        re.compile(
            r"(?:error while interpolating (?P<where>\S+): )?"
            r"required variable (?P<name>\w+) is missing a value(?:: (?P<hint>.+))?",
            re.DOTALL,
        ),
        _missing_variable,
    ),
    (re.compile(r"^no configuration file provided"), _nothing_found),
    (re.compile(r"^env file (?P<file>.+?) not found"), _missing_env_file),
    (re.compile(r"^(?:stat|open) (?P<file>.+?): no such file or directory"), _missing_file),
    (
        re.compile(r"^invalid interpolation format for (?P<where>\S+?)\.?\n.*\n(?P<written>.+)", re.DOTALL),
        _bad_interpolation,
    ),
    (
        re.compile(
            r"error while interpolating (?P<where>\S+): failed to cast to expected type: .*?(?P<found>\"[^\"]*\")"
        ),
        _wrong_cast,
    ),
    (re.compile(r"^validating (?P<file>.+?): json: unsupported value: (?P<found>\S+)"), _not_finite),
    (re.compile(r"^validating (?P<file>.+?): (?P<where>\S+) (?P<what>.+)", re.DOTALL), _schema),
    (
        re.compile(
            r'^service "(?P<service>[^"]+)" (?:refers to|depends on) undefined (?P<kind>(?:build )?\w+) (?P<name>\S+)'
        ),
        _undefined,
    ),
    (re.compile(r'^service "(?P<service>[^"]+)" has neither an image nor a build context'), _no_image),
)


def _yaml_error(text: str, setting: Setting) -> str:
    """Compose does not say in which file; so look which one does not parse."""
    for file in setting.files:
        try:
            load_written(file.read_text())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
            return f"{file}: not valid YAML: {place}{error.problem or error}"
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue  # not what Compose complains of: its own words follow
    files = ", ".join(str(file) for file in setting.files)
    return f"{files}: not valid YAML: {' '.join(text.removeprefix('yaml: ').split())}"
