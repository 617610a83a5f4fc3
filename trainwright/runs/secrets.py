"""Masks secrets in what is written or shown: values of keys that name a secret, and user names and passwords in URLs.

A run folder is copied, and its report is meant to be sent. Nothing in it may let somebody else log in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeVar, cast

T = TypeVar("T")
MASK = "<masked>"

_SECRET_WORDS = {"password", "passwd", "pwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey"}
"""Words that make a key name a secret at any position."""
_SECRET_LAST_WORDS = {"token", "auth", "authorization", "bearer"}
_KEY_PREFIXES = {"api", "access", "secret", "private", "account", "auth", "service", "encryption", "signing", "ssh"}
_VOCABULARY_WORDS = {
    *("pad", "eos", "bos", "unk", "cls", "sep", "mask", "start", "end", "stop", "special", "image", "audio", "video"),
    *("first", "last", "next", "new", "prompt", "separator", "per"),
}
"""Words before ``token`` that make the key part of a vocabulary, such as ``pad_token``."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_USER_OF_URL = re.compile(r"(?<=://)[^\s/?#\"'<>]+(?=@)")
_KEY = r"[A-Za-z_][A-Za-z0-9_.-]{0,100}"
"""Bounded, because a long word without an assignment would otherwise take quadratic time."""
_MAX_DEPTH = 8
"""Maximum depth of nested assignments such as ``a=b=c``. Deeper ones are masked."""
_VALUE = r"(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s,;&\"'{}()\[\]]+)"
_NAMED_VALUE = re.compile(
    rf"(?P<before>[\"']?(?P<assigned>(?<![A-Za-z_]){_KEY})[\"']?=|[{{,]\s*[\"']?(?P<mapped>{_KEY})[\"']?\s*:\s*)(?P<value>{_VALUE})"
)
_OPTION = re.compile(rf"(?P<before>--(?P<key>{_KEY})\s+)(?!-)(?P<value>{_VALUE})")
_HEADER = re.compile(rf"(?P<before>(?P<key>{_KEY}):\s+)\S[^\n]*")
_LITERAL = re.compile(
    r"(?P<before>(?<![A-Za-z0-9])(?P<key>[A-Za-z][\w-]{0,100})[\"']?\]?\s{0,20}(?::[ \w.\[\]|,]{1,60}=|[=:,]|\) or\b)"
    r"\s{0,20}(?:default ?= ?)?[(\[]?\s{0,20}[rbuf]{0,2})(?P<value>(?P<quotes>\"\"\"|\'\'\').{0,2000}?(?P=quotes)"
    r"|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')",
    re.IGNORECASE | re.DOTALL,
)
"""A string literal in code: ``api_key: str = "..."``, ``{"token": "..."}``, ``setenv("HF_TOKEN", "...")``, and
``add_argument("--token", default="...")``."""
_SETTING = re.compile(
    rf"^(?P<before>[ \t]{{0,80}}(?:- )?(?P<key>{_KEY}):[ \t]+)"
    r"(?!(?:str|int|bytes|bool|list|dict|None|Optional|[\w.]{0,40}Tensor)\b)[^\s#][^\n]*",
    re.MULTILINE,
)
"""A line of YAML at any depth, or a header, but not an annotated argument in Python code."""
_BY_CONTEXT = re.compile(
    r"(?P<before>hooks\.slack\.com/|discord(?:app)?\.com/api/webhooks/|\.webhook\.office\.com/|api\.telegram\.org/bot"
    r"|[?&](?:X-Amz-Signature|X-Goog-Signature|Signature|sig)=|\bBearer {1,4}"
    r"|\bkey {0,2}= {0,2}[\"'](?=[0-9a-f]{40}[\"']))[^\s\"'<>&)\]]{8,}"
)
"""Secrets known by the text before them: in webhook URLs, signatures in URLs, bearer tokens, wandb keys."""
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)(?:[\s\S]{0,8000}?-----END|[\w+/=\s\\]{1,8000})")
_KNOWN_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,300}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,300}"
    r"|A[KS]IA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,300}|eyJ[\w-]{10,900}\.[\w-]{10,900}\.[\w-]{1,900}"
    r"|AIza[\w-]{30,60}|nvapi-[\w-]{16,300}|gsk_[A-Za-z0-9]{16,}|[rs]k_live_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{16,300})"
)
"""Values with the form of tokens of well-known services, whatever they are assigned to."""


def is_secret(key: str) -> bool:
    """Return True if a key names a secret.

    Examples: ``hf_token``, ``apiKey`` and ``db-password`` do; ``tokenizer`` and ``pad_token`` do not.
    """
    words = [each.lower() for each in _WORD.findall(key)]
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in _SECRET_LAST_WORDS:
        return before not in _VOCABULARY_WORDS
    return bool(_SECRET_WORDS & {*words}) or (words[-1] == "key" and before in _KEY_PREFIXES)


def masked(value: T) -> T:
    """Return a copy of a text, or of nested mappings and lists, with MASK in place of every secret."""
    if isinstance(value, str):
        return cast(T, _mask_text(value))
    if isinstance(value, Mapping):
        return cast(T, {key: mask_all(each) if is_secret(str(key)) else masked(each) for key, each in value.items()})
    if isinstance(value, list | tuple):
        before = ("", *value[:-1])  # in a command line: --token VALUE
        return cast(T, type(value)(_after(option, each) for option, each in zip(before, value)))
    return value


def masked_code(text: str) -> str:
    """Return source code, or other text that is sent to somebody else, without secrets.

    In addition to ``masked``, it masks string literals and lines of YAML that assign a value to the name of a secret,
    addresses of webhooks, private keys, and values with the form of tokens of well-known services.
    """
    text = "\n".join(map(_mask_text, text.split("\n")))
    text = _LITERAL.sub(_mask_literal, text)
    text = _SETTING.sub(lambda found: f"{found['before']}{MASK}" if is_secret(found["key"]) else found[0], text)
    text = _PRIVATE_KEY.sub(rf"\1 {MASK}", text)
    return _KNOWN_TOKENS.sub(MASK, _BY_CONTEXT.sub(rf"\g<before>{MASK}", text))


def masked_paths(value: object, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of nested mappings and lists at which something is masked."""
    if isinstance(value, str) and MASK in value:
        yield path
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in items:
        yield from masked_paths(each, f"{path}.{key}" if path else str(key))


def _after(option: object, value: object) -> object:
    is_value_of_secret = isinstance(option, str) and option.startswith("-") and "=" not in option and is_secret(option)
    return mask_all(value) if is_value_of_secret else masked(value)


def mask_all(value: object) -> object:
    """Mask every text and number in the value of a key that names a secret."""
    if isinstance(value, Mapping):
        return {key: mask_all(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [mask_all(each) for each in value]
    return MASK if (isinstance(value, str) and value) or type(value) in (int, float) else value


def _mask_text(text: str) -> str:
    if "@" in text:
        text = _USER_OF_URL.sub(MASK, text)
    if "=" in text or ":" in text:
        text = _NAMED_VALUE.sub(_mask_value, text)
        header = _HEADER.fullmatch(text)
        if header and is_secret(header["key"]):
            return f"{header['before']}{MASK}"
    if "--" in text:
        text = _OPTION.sub(lambda found: f"{found['before']}{MASK}" if is_secret(found["key"]) else found[0], text)
    return text


def _mask_literal(found: re.Match[str]) -> str:
    value = found["value"]
    quotes = found["quotes"] or value[0]
    is_masked = is_secret(found["key"]) and len(value) > 2 * len(quotes)
    return f"{found['before']}{quotes}{MASK}{quotes}" if is_masked else found[0]


def _mask_value(found: re.Match[str], depth: int = 0) -> str:
    before, value = found["before"], found["value"]
    if value == "...":  # a placeholder in a remedy
        return found[0]
    if depth < _MAX_DEPTH and not is_secret(found["assigned"] or found["mapped"]):
        # --set=data.args.token=VALUE
        return before + _NAMED_VALUE.sub(lambda inner: _mask_value(inner, depth + 1), value)
    quote = value[0] if value[0] in "\"'" else ""
    return f"{before}{quote}{MASK}{quote}"
