"""What explains the state of a stack, in one text, without secrets. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

NO_API = "PIERHEAD_NO_API"
"""The variable that has the reason why the API cannot be asked, where that is known before it is asked."""
REMOVED = "(removed)"
MOST_OF_SECTION = 500_000
"""Characters; of a longer section the end stays."""
LEAST_NAMED, LEAST_WRITTEN = 4, 8
"""Characters of a value that is taken for a secret: by its variable's name, and only because it is in .env."""
NO_SECRETS = frozenset({"true", "false", "auto", "none", "null", "default", "enabled", "disabled", "localhost"})
"""Values that are removed nowhere."""
_OWN_VARIABLES = ("PIERHEAD_", "COMPOSE_")
"""How the names of the stack's own variables begin."""

# Every expression takes a time that is linear in the length of the text: what it repeats is not given back (`*+`), and
# it does not begin again within that, or only where that is short.
_NO_NAME = r"(?![\w.-])"
_OF_LINE = "authorization|cookie|passphrase"
"""Names whose value, if it has no quotes, is the rest of the line."""
_WORDS = (
    rf"token(?!s|i[sz])|(?:api|access|auth)[_-]?tokens|secret|passw(?:or)?d|credential|webhook|alert_slack|{_OF_LINE}"
    rf"|(?!(?-i:(?<![\w.-])PWD|(?<=OLD)PWD){_NO_NAME})pwd"
    rf"|(?:api|access|private)[_-]?key|_(?:key|pass|auth|otlp_(?:traces_)?headers){_NO_NAME}"
    rf"|(?-i:(?<!MAX_)(?<!MIN_)(?<!NUM_)(?<!NEW_)(?<!BATCHED_)TOKENS{_NO_NAME})"
)
_BEGIN = r"(?<![\w.-])(?=[\w.-])"
_NAME = rf"(?>[\w.-]*?(?=[acpstw_])(?:{_WORDS}))[\w.-]*+"
_QUOTE = r"""\\{0,8}+["']"""
_BECOMES = r"[ \t]*+(?:={1,3}+>?+|:=?+)[ \t]*+"
_VALUE = rf"(?:(?P<q>{_QUOTE})(?:(?!(?<!\\)(?P=q))[^\n])*+(?P=q)?|[\[{{][^\n]*+|[^\s,;&}}\]]++)"
_SECRET_NAME: Final = re.compile(rf"(?i){_WORDS}")
_REST_OF_LINE: Final = re.compile(
    rf"(?i)(?P<name>{_BEGIN}(?>[\w.-]*?(?:{_OF_LINE}))[\w.-]*+{_BECOMES})(?P<q>)(?=\S)[^\n]++"
)
_NAMED: Final = re.compile(rf"(?i)(?P<name>{_BEGIN}{_NAME}(?:{_QUOTE})?+{_BECOMES}){_VALUE}")
"""A value that is named as a secret, in JSON (in a text of JSON, too), YAML, a query or a log line."""
_OPTION: Final = re.compile(rf"(?i)(?P<name>-(?<![\w.-]-){_NAME}(?:{_QUOTE},?+)?+[ \t]++)(?!-){_VALUE}")
"""The word after an option that is named as a secret."""
_RANDOM = r"(?=[a-z_-]*+[A-Z0-9])"
_FORMS: Final = tuple(
    re.compile(form)
    for form in (
        r"-----BEGIN [A-Z ]{0,40}+(?<=PRIVATE KEY)-----(?:-{0,4}+[^-]){0,20000}+(?:-----END [A-Z ]{0,40}+-----)?+",
        r"[Bb](?<!\w[Bb])(?:earer|EARER) ++[\w.~+/=-]{8,}+",
        r"[Bb](?<!\w[Bb])(?:asic|ASIC) ++(?=[a-z.~+/-]*+[A-Z0-9=])[\w.~+/=-]{8,}+",
        r"eyJ(?<![\w-]eyJ)[\w-]{10,}+\.[\w-]{10,}+\.[\w-]*+",
        rf"sk[_-](?<![\w-]sk[_-]){_RANDOM}[\w-]{{20,}}+",
        rf"ph_(?<![\w-]ph_){_RANDOM}[\w-]{{16,}}+",
        rf"hf_(?<![A-Za-z0-9]hf_){_RANDOM}[A-Za-z0-9]{{16,}}+",
        r"gh[oprsu]_(?<![A-Za-z0-9]gh._)[A-Za-z0-9]{16,}+",
        r"github_pat_\w{16,}+",
        r"glpat-[\w-]{16,}+",
        r"xox[abeprs]-[\w-]{10,}+",
        r"A(?<![A-Za-z0-9]A)(?:KIA|SIA)[0-9A-Z]{16}",
        r"https://hooks\.slack\.com/services/[\w/-]++",
    )
)
"""What is a secret by its form: private keys, what headers have, JSON Web Tokens, keys of APIs."""
_USER_IN_URL: Final = re.compile(r"""://[^\s"'/@:]*+(?::(?:(?!://)[^\s"'@])*+)?+@(?:[^\s"'/@]*+@)*+""")


@dataclass(frozen=True)
class BundleSection:
    """One part of the bundle. `content`: a text, or what JSON is made of."""

    title: str
    content: object
    is_missing: bool = False
    """The content is the reason why there is none."""


def secrets_of(written: Mapping[str, str], environment: Mapping[str, str]) -> frozenset[str]:
    """The secrets among the values of .env, and of this process's variables.

    What has a secret's name is one. In .env, every longer value is one, but for those of the stack's own variables.
    """
    both = [*written.items(), *environment.items()]
    named = {value for name, value in both if len(value) >= LEAST_NAMED and is_secret(name)}
    own = {value for name, value in written.items() if name.startswith(_OWN_VARIABLES)}
    others = {value for value in written.values() if len(value) >= LEAST_WRITTEN} - own
    return frozenset(value for value in named | others if value.lower() not in NO_SECRETS)


def is_secret(name: str) -> bool:
    """Whether the name of a variable, or of a member of a document, says that its value is a secret."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(text: str, known: Collection[str] = ()) -> str:
    """The text without these secrets, and without what is named or formed as one."""
    escaped = {json.dumps(secret, ensure_ascii=has)[1:-1] for secret in known for has in (True, False)}
    for secret in sorted({*known, *escaped}, key=len, reverse=True):
        text = text.replace(secret, REMOVED)
    for form in _FORMS:
        text = form.sub(REMOVED, text)
    text = _USER_IN_URL.sub(f"://{REMOVED}@", text)
    for named in (_REST_OF_LINE, _NAMED, _OPTION):
        text = named.sub(rf"\g<name>\g<q>{REMOVED}\g<q>", text)
    return text


def bundle(sections: Iterable[BundleSection], known: Collection[str] = ()) -> str:
    """One text of all sections."""
    return "\n".join(f"===== {section.title}\n{_text(section, known).rstrip()}\n" for section in sections)


def contents(sections: Sequence[BundleSection]) -> str:
    """The titles of the sections, those that are missing apart."""
    there = ", ".join(section.title for section in sections if not section.is_missing)
    missing = ", ".join(section.title for section in sections if section.is_missing)
    return f"{there}; not available: {missing}" if missing else there


def _text(section: BundleSection, known: Collection[str]) -> str:
    """It is cut last: of a secret that is cut in two, the rest would not be seen as one."""
    if isinstance(section.content, str):
        text = without_secrets(section.content, known)
    else:
        text = json.dumps(_cleaned(section.content, known), indent=2)
    return _end_of(f"not available: {text}" if section.is_missing else text)


def _cleaned(value: object, known: Collection[str]) -> object:
    """What JSON is made of, without secrets."""
    if isinstance(value, str):
        return without_secrets(value, known)
    if isinstance(value, Mapping):
        return {without_secrets(name, known): _member(name, content, known) for name, content in value.items()}
    if isinstance(value, Sequence):
        return [_cleaned(item, known) for item in value]
    return value


def _member(name: str, value: object, known: Collection[str]) -> object:
    says_nothing = value is None or isinstance(value, bool) or value == ""
    return REMOVED if is_secret(name) and not says_nothing else _cleaned(value, known)


def _end_of(text: str) -> str:
    """The end of a long text, from the beginning of a line where there is one."""
    if len(text) <= MOST_OF_SECTION:
        return text
    end = text[-MOST_OF_SECTION:]
    return f"(the beginning is left out)\n{end.partition(chr(10))[2] or end}"
