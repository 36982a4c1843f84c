"""What is found in a text, a line of JSON and a stream in pieces, and what is left alone."""

from __future__ import annotations

import base64
import json
import time
from urllib.parse import quote

import pytest

from telescope.config.redaction import RedactedLines, Redactor, find_secret_values, has_key_shape

VALUE = 'S3CR3T"value/of mine+42'


@pytest.fixture
def redactor() -> Redactor:
    return Redactor([VALUE])


@pytest.mark.parametrize("user", ["", "a", "me", "who"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_a_value_is_found_in_a_basic_header_whatever_stands_before_it(redactor, user, encode):
    sent = encode(f"{user}:{VALUE}:x".encode()).decode()
    found = redactor.text(f"<{sent}>")
    assert "<redacted>" in found
    assert b"value" not in base64.urlsafe_b64decode(found.split("<redacted>")[0][1:] + "==")


@pytest.mark.parametrize("write", [json.dumps, repr, quote, lambda value: quote(value, safe=""), str])
def test_a_value_is_found_in_every_spelling(redactor, write):
    assert "mine" not in redactor.text(f"cannot reach {write(VALUE)} today")


def test_numbers_of_a_line_of_json_stay():
    line = b'{"time_ns":1123456789,"text":"pin 12345678!"}\n'
    assert Redactor(["12345678"]).json_line(line) == b'{"time_ns":1123456789,"text":"pin <redacted>!"}\n'
    assert Redactor(["112345678"]).json_line(line) == line


def test_a_secret_in_two_writes_is_found_and_a_line_waits_for_its_end(redactor):
    written: list[bytes] = []
    lines = RedactedLines(redactor, written.append)
    for part in (b"a\nkey ", VALUE[:5].encode(), VALUE[5:].encode()):
        lines.feed(part)
    assert b"".join(written) == b"a\n"
    lines.feed(b" end\rno newline")
    lines.close()
    assert b"".join(written) == b"a\nkey <redacted> end\rno newline"


def test_a_secret_that_another_writer_has_torn_apart_is_found(redactor):
    written: list[bytes] = []
    lines = RedactedLines(redactor, written.append)
    lines.feed(f"{VALUE[:12]}\n{VALUE[12:]} end\n".encode())
    assert b"".join(written) == b"<redacted>\n<redacted> end\n"


def test_a_line_without_an_end_is_let_go_without_its_secret(redactor):
    written: list[bytes] = []
    lines = RedactedLines(redactor, written.append)
    for _ in range(40):
        lines.feed(b"." * 4_000 + VALUE[:9].encode())
        lines.feed(VALUE[9:].encode())
    assert sum(map(len, written)) > 80_000
    lines.close()
    whole = b"".join(written)
    assert whole.count(b"<redacted>") == 40
    assert whole.replace(b"<redacted>", b"") == b"." * 160_000


def test_bytes_that_are_no_text_stay(redactor):
    assert redactor.data(b"\xff\xfe " + VALUE.encode() + b" \x80") == b"\xff\xfe <redacted> \x80"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("postgres://me:pass-word@db/x", "postgres://me:<redacted>@db/x"),
        ("Authorization: Bearer abcdefgh", "Authorization: Bearer <redacted>"),
        ('{"Authorization": "Token abcdefgh"}', '{"Authorization": "Token <redacted>"}'),
        ("sent bearer abcdefgh12345678 to it", "sent bearer <redacted> to it"),
        ("key sk-proj-abcdefghijklmnop0 of", "key <redacted> of"),
        ("ghp_" + "a1" * 18, "<redacted>"),
        ("AKIAABCDEFGHIJKLMNOP", "<redacted>"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc_def", "<redacted>"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\nab/+=\n-----END PRIVATE KEY-----\n.", "-----BEGIN PRIVATE KEY-----<redacted>\n."),
    ],
)
def test_what_has_the_shape_of_a_key_is_redacted(text, clean):
    assert has_key_shape(text)
    assert Redactor().text(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "basic understanding of bearer certificates-and-more",
        "https://user@host/a:b@c and http://host:8000/x",
        "Authorization: Bearer ${oc.env:TOKEN}",
        "ask-me-anything-about-the-lightness",
        "hf_home",
        "a private key is BEGIN",
    ],
)
def test_prose_and_addresses_stay(text):
    assert not has_key_shape(text)
    assert Redactor().text(text) == text


def test_values_are_those_of_references_and_of_secret_names_but_no_words_and_no_paths(tmp_path):
    environ = {
        "DATABASE_URL": "postgres://me:p%40ss-word@db/x",
        "HF_TOKEN": "hf_abcdefgh\n",
        "SHORT_TOKEN": "seven77",
        "PLACE": str(tmp_path),
        "OTHER": "another-value",
        "PEM": "-----BEGIN-----\nabcdefghijklmnop\n--\n",
    }
    assert find_secret_values(environ, ["DATABASE_URL", "PLACE", "PEM", "NOT_SET"]) == {
        *("postgres://me:p%40ss-word@db/x", "p%40ss-word", "p@ss-word", "hf_abcdefgh\n", "hf_abcdefgh"),
        *(environ["PEM"], environ["PEM"].strip(), "-----BEGIN-----", "abcdefghijklmnop"),
    }


@pytest.mark.parametrize(
    "piece",
    [
        "eyJ-", "eyJa.", "eyJaaaaaaaa.", "sk-", "ghp_", "://a:", "://a:b@", "Bearer ", "Bearer a", "Authorization: ",
        "authorization:a", "-----BEGIN PRIVATE KEY-----", "-----BEGIN A", "hf_", "xoxb-", "AKIA", "a", " ", "-", "%", "pypi-", "https://",
    ],
)  # fmt: skip
def test_no_text_takes_long(piece: str):
    """A program's output of 100 kB once held its worker for minutes: the beginning of a token at each of its characters."""
    redactor = Redactor(["a secret value", "postgres://me:hunter2Zebra@db/x"])
    text = piece * (400_000 // len(piece))
    started = time.process_time()
    redactor.lines(text.encode())
    assert time.process_time() - started < 2.0


def test_names_of_our_own_stay_and_others_do_not():
    redactor = Redactor(["discarded", "Opensesame"])
    told = {"discarded": 7, "failed: Opensesame": 1, "why": "it was discarded"}
    assert redactor.tree(told) == {"discarded": 7, "failed: <redacted>": 1, "why": "it was <redacted>"}


@pytest.mark.parametrize(("secret", "told"), [
    ("pässwörter", r"p\xe4ssw\xf6rter"),
    ('{"password": "abc"}', "{&quot;password&quot;: &quot;abc&quot;}"),
    ("it's a secret", "+ login 'it'\\''s a secret'"),
])  # fmt: skip
def test_what_python_html_and_shells_make_of_a_value_is_known_too(secret: str, told: str):
    assert Redactor([secret]).text(f"so: {told}.") in ("so: <redacted>.", "so: + login '<redacted>'.")
