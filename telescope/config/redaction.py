"""Finds secrets in what a run writes and puts `<redacted>` there: the values of variables that a run refers to, in every form
in which they travel (JSON, URLs, base64), and what has the shape of a key whoever wrote it.

The standard library alone: the shim loads this file by its path. Refuses to know where the text goes. A value of fewer than
`SHORTEST_SCRUBBED` characters may be an ordinary word, and a path that exists is not a secret: both stay.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

REDACTED = "<redacted>"
SHORTEST_SCRUBBED = 8
HELD_BYTES = 65_536
"""Of a line without an end, before its beginning is let go."""
_SECRET_NAME = re.compile(
    r"(^|[_.-])(api_?key|access_?key|private_?key|key|token|passw(or)?d|passphrase|secret|credentials?)$", re.I
)
_SOUNDS_SECRET = re.compile(
    r"(^|[_.-])(pwd|pat|dsn|auth|cookies?|authorization)$|passw|pwd$|secret|credential|api_?keys?$|(auth|access|bearer)_?tokens?$",
    re.I,
)
_JOINT = re.compile(rb"[^\r\n]{%d,}" % SHORTEST_SCRUBBED)
_OWN_NAME = re.compile(r"[a-z]+(_[a-z]+)*")
_ENCODED = re.compile("%[0-9A-F]{2}")
_LINE = re.compile(rf"[^\r\n]{{{SHORTEST_SCRUBBED},}}")
_TOKENS = re.compile(
    r"""
      \b(?: [srp]k-[A-Za-z0-9_-]{16,} | [srp]k_(?:live|test)_[A-Za-z0-9]{12,} | gh[pousr]_[A-Za-z0-9]{20,}
          | github_pat_\w{20,} | glpat-[\w-]{16,} | hf_[A-Za-z0-9]{20,} | xox[abeoprs]-[A-Za-z0-9-]{10,}
          | (?:AKIA|ASIA)[A-Z0-9]{16}\b | AIza[\w-]{30,} | ya29\.[\w-]{20,} | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{20,}
          | (?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)? )
    | (?P<front> -----BEGIN\ [A-Z ]*PRIVATE\ KEY----- ) (?: [^"-]+ (?: -----END\ [A-Z ]*PRIVATE\ KEY----- )? )?
    """,
    re.X,
)
_HEADER = re.compile(
    r"""(?P<front> (?:[Aa]uthorization|AUTHORIZATION)\\?["']?\ *[:=]\ *\\?["']?(?:[A-Za-z]+\ +)? ) [^\s"'\\,;<>{}$]{8,}""", re.X
)
_SCHEME = re.compile(r"(?P<front>(?:[Bb]earer|BEARER|[Bb]asic|BASIC) +)(?=[A-Za-z._~+/=-]*\d)[\w.~+/=-]{16,}")
_PASSWORD = re.compile(r"""(?P<front>://[^\s/:@"'\\<>{}$]*:)[^\s/@"'\\<>{}$]+(?=@)""")
_SHAPES: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = (
    (("uthorization", "UTHORIZATION"), _HEADER),
    (("earer ", "EARER ", "asic ", "ASIC "), _SCHEME),
    (("://",), _PASSWORD),
    (
        (
            *(
                "sk-",
                "rk-",
                "pk-",
                "k_live_",
                "k_test_",
                "ghp_",
                "gho_",
                "ghu_",
                "ghs_",
                "ghr_",
                "github_pat_",
                "glpat-",
                "hf_",
            ),
            *("xox", "AKIA", "ASIA", "AIza", "ya29.", "npm_", "pypi-", "eyJ", "PRIVATE KEY"),
        ),
        _TOKENS,
    ),
)
"""What each shape has in it, and the shape: a text without any of the first needs no second look."""


def is_secret_name(name: str) -> bool:
    """Whether nothing but a reference may stand there: True for `judge_api_key` and `HF_TOKEN`, False for `max_tokens`,
    `monkey` and `token_count`."""
    return _SECRET_NAME.search(name) is not None


def sounds_secret(name: str) -> bool:
    """Whether a text there is most likely a secret, though it may stand there: True for `PGPASSWORD`, `MYSQL_PWD`, `auth` and
    `SENTRY_DSN`, False for `token` and `key`, which are ordinary words as well, and for a shell's own folders."""
    return name not in ("PWD", "OLDPWD") and _SOUNDS_SECRET.search(name) is not None


def is_hidden(name: str) -> bool:
    """Whether what stands under the name is not shown: one of both."""
    return is_secret_name(name) or sounds_secret(name)


def has_key_shape(text: str) -> bool:
    """Whether there is a token of a known kind in it, a URL with a password, a header with a key."""
    return any(shape.search(text) for hints, shape in _SHAPES if any(hint in text for hint in hints))


def is_public_path(value: str) -> bool:
    """An absolute path that is there, on this host."""
    return value.startswith("/") and "\0" not in value and os.path.exists(value)


def find_secret_values(environ: Mapping[str, str], names: Iterable[str] = ()) -> frozenset[str]:
    """The values of the variables `names`, and of those whose name hides them, with what is secret inside of them: the
    password of a URL, each line of a key file."""
    known = {*names, *filter(is_hidden, environ)}
    found = {part for name in known if name in environ for part in _take_apart(environ[name])}
    return frozenset(value for value in found if len(value) >= SHORTEST_SCRUBBED and not is_public_path(value))


def _take_apart(value: str) -> Iterator[str]:
    yield value
    yield value.strip()
    if "\n" in value or "\r" in value:
        yield from (line.strip() for line in _LINE.findall(value))
    if "://" in value:
        try:
            password = urlsplit(value.strip()).password or ""
        except ValueError:  # no URL after all
            return
        yield password
        yield unquote(password)


def spell(value: str) -> Iterator[str]:
    """A value in every form in which it travels: in JSON, also within a text of JSON, in URLs, in base64, and in one of these
    inside of another."""
    texts = {value, *_escape(value)}
    yield from texts
    for text in texts:
        yield from _escape(text)
        for encoded in (quote(text, safe=""), quote(text), quote_plus(text)):
            yield encoded
            yield _ENCODED.sub(lambda match: match.group().lower(), encoded)
        yield from _encode_base64(text.encode("utf-8", "surrogateescape"))


def _escape(text: str) -> Iterator[str]:
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield repr(text)[1:-1]
    yield text.encode("ascii", "backslashreplace").decode()
    yield html.escape(text)
    yield text.replace("'", "'\\''")  # as a shell shows it


def _encode_base64(data: bytes) -> Iterator[str]:
    """Whatever bytes stand in front, as the user's name in a Basic header: the characters that follow from the value alone."""
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):
            text = encode(b"\0" * before + data).decode().rstrip("=")
            yield text[(0, 2, 3)[before] : len(text) - (1 if (before + len(data)) % 3 else 0)]


def spell_all(values: Iterable[str]) -> frozenset[str]:
    return frozenset(form for value in values for form in spell(value) if len(form) >= SHORTEST_SCRUBBED)


class Redactor:
    """For one process: what it must not write, looked for fast."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        # one may be the beginning of another
        self._forms = sorted(spell_all(values), key=len, reverse=True)
        self._encoded = [form.encode("utf-8", "surrogateescape") for form in self._forms]
        self._hints = [hint.encode() for hints, _ in _SHAPES for hint in hints]
        self.longest = max(map(len, self._encoded), default=0)

    @classmethod
    def of(cls, environ: Mapping[str, str], names: Iterable[str] = ()) -> Redactor:
        return cls(find_secret_values(environ, names))

    def text(self, text: str) -> str:
        for form in self._forms:
            if form in text:
                text = text.replace(form, REDACTED)
        return redact_shapes(text)

    def data(self, data: bytes) -> bytes:
        """The same for bytes of a text."""
        return (
            self.text(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape") if self.sees(data) else data
        )

    def lines(self, data: bytes) -> bytes:
        """The same for whole lines of a stream that several threads and processes may write: where one came between, what ends
        a line may be the beginning of a secret, and what begins one its end."""
        return _JOINT.sub(lambda match: self._cut_edges(match.group()), self.data(data)) if self._encoded else self.data(data)

    def _cut_edges(self, line: bytes) -> bytes:
        mark = REDACTED.encode()
        for form in self._encoded:
            end = form.find(line[:SHORTEST_SCRUBBED])
            if end > 0 and line.startswith(form[end:]) and len(form) - end >= SHORTEST_SCRUBBED:
                line = mark + line[len(form) - end :]
            begin = form.rfind(line[-SHORTEST_SCRUBBED:])
            if begin >= 0 and line.endswith(form[: begin + SHORTEST_SCRUBBED]):
                line = line[: -begin - SHORTEST_SCRUBBED] + mark
        return line

    def sees(self, data: bytes) -> bool:
        """Whether there may be something to redact."""
        return any(form in data for form in self._encoded) or any(hint in data for hint in self._hints)

    def tree(self, value: Any) -> Any:
        """The same in each text of dicts and lists; numbers stay. A name that looks like one of our own stays too: the file
        would not be read any more."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {name if _OWN_NAME.fullmatch(name) else self.text(name): self.tree(inner) for name, inner in value.items()}
        return [self.tree(inner) for inner in value] if isinstance(value, list | tuple) else value

    def json_line(self, line: bytes) -> bytes:
        """A line of JSON, whose numbers are not to be cut."""
        if not self.sees(line) or self.data(line) == line:
            return line
        whole = json.loads(line)
        clean = self.tree(whole)
        if clean == whole:
            return line
        end = b"\n" if line.endswith(b"\n") else b""
        return json.dumps(clean, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + end


def redact_shapes(text: str) -> str:
    """What has the shape of a key, whoever wrote it."""
    for hints, shape in _SHAPES:
        if any(hint in text for hint in hints):
            text = shape.sub(_keep_front, text)
    return text


def _keep_front(match: re.Match[str]) -> str:
    """Who it was, and that there was a key, is worth reading."""
    front = match.groupdict().get("front") or ""
    return front + REDACTED


class RedactedLines:
    """For a stream in pieces: a secret may come in two writes, so that a line is let go when it is whole."""

    def __init__(self, redactor: Redactor, write: Callable[[bytes], object]) -> None:
        self.redactor, self._write = redactor, write
        self._held = b""

    def feed(self, data: bytes) -> None:
        self._held += data
        end = max(self._held.rfind(b"\n"), self._held.rfind(b"\r")) + 1
        if end:
            whole, self._held = self._held[:end], self._held[end:]
            self._write(self.redactor.lines(whole))
        if len(self._held) > HELD_BYTES:
            # what is complete is redacted; a secret that has only begun lies in the part that is kept
            clean = self.redactor.data(self._held)
            kept = max(self.redactor.longest, HELD_BYTES // 4)
            self._write(clean[:-kept])
            self._held = clean[-kept:]

    def close(self) -> None:
        """Let go what is there, whole or not."""
        whole, self._held = self._held, b""
        if whole:
            self._write(self.redactor.lines(whole))
