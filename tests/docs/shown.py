"""What the pages show: their blocks of code, the files that they say to write, and the commands, as a shell reads them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.product import ROOT

PROGRAMS = (
    *("telescope", "python", "pip", "curl", "scp", "ssh", "torchrun", "hf", "podman", "openssl", "srun", "sbatch", "lm_eval"),
    *("./scripts/run", "./scripts/test", "bundle/install.sh"),
)
"""What is recorded in place of being run; all else in a command line is the shell's own or a tool of every machine."""
_SHELL = re.compile(
    rf"(?:#.*\n)*(?:\$ |[A-Z_]+=\S+ )*(?:{'|'.join(map(re.escape, PROGRAMS))}|\.|bash|ls|cat|echo|export|mkdir)(?:\s|$)"
)
_FENCE = re.compile(r" {0,3}```(\w*)$")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
_FILE = re.compile(r"\b((?:mine|my_config)/[\w./-]+\.(?:py|yaml|jsonl))")
_PYTHON = re.compile(r"(?:from|import|class|def|async def) \w")
_AT = "SHOWN_AT"
_RECORD = """#!/bin/bash
if [ "${0##*/}" = python ] && { [ "$1" = -c ] || [ -f "$1" ]; } && [ "${1#scripts/}" = "$1" ]; then exec "$REAL_PYTHON" "$@"; fi
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/pip"; fi
[ "${0##*/}" = openssl ] && echo 0123456789abcdef
{ printf '%s\\0' "$SHOWN_AT" "$SHOWN_NAME${0##*/}" "$@"; printf '\\n\\0'; } >> "$SHOWN_LOG"
"""


@dataclass(frozen=True)
class Block:
    """One block of code, e.g. `Block(docs/flow.md, 6, "shell", "telescope plan model=tiny …", "")`."""

    page: Path
    line: int
    language: str
    """python, yaml, toml, or of a block that does not say: shell where it begins with a command, else text."""
    text: str
    file: str
    """Where the page says to write it, below the folder where commands are given; empty: nowhere."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Called:
    """One program that a shell has called, with its arguments as it got them."""

    at: str
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.at}: {' '.join(self.argv)}"


def pages() -> list[Path]:
    """Every page with commands for a reader; lab pages keep what was done once, on machines that are gone."""
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs" / "internals").glob("*.md")),
    ]


def blocks(page: Path) -> list[Block]:
    """Fenced blocks, and those that are set in by four blanks outside of lists."""
    lines = page.read_text(encoding="utf-8").split("\n")
    found, at = [], 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at])
        if fence:
            end = next(index for index in range(at + 1, len(lines)) if lines[index].strip() == "```")
            found.append(_block(page, lines, at + 1, end, fence[1], len(lines[at]) - len(lines[at].lstrip())))
            at = end + 1
        elif lines[at].startswith("    ") and not lines[at - 1].strip() and not _in_list(lines, at):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            found.append(_block(page, lines, at, end, "", 4))
            at = end
        else:
            at += 1
    return found


def _in_list(lines: list[str], at: int) -> bool:
    before = next((line for line in reversed(lines[:at]) if line.strip()), "")
    return bool(_ITEM.match(before)) or before.startswith(" ")


def _block(page: Path, lines: list[str], begin: int, end: int, said: str, indent: int) -> Block:
    text = "\n".join(line[indent:] for line in lines[begin:end]).strip("\n") + "\n"
    language = {"bash": "shell"}.get(said, said) or (
        "shell" if _SHELL.match(text) else "python" if _PYTHON.match(text) else "text"
    )
    return Block(page, begin + 1, language, text, _file_of(lines, begin, end, text) if language in ("python", "yaml") else "")


def _file_of(lines: list[str], begin: int, end: int, text: str) -> str:
    """The path in the block's own first lines, else in the paragraph before it, else in the one behind it."""
    before = [line for line in lines[:begin] if line.strip() and not line.startswith("```")][-2:]
    behind = [line for line in lines[end + 1 :] if line.strip()][:2]
    for place in ("\n".join(text.split("\n")[:2]), " ".join(before), " ".join(behind)):
        if found := _FILE.findall(place):
            return str(found[-1])
    return ""


def command_lines(block: Block) -> str:
    """What a reader types of a block: where some lines have a prompt `$`, those, else all."""
    lines = block.text.split("\n")
    if not any(line.startswith("$ ") for line in lines):
        return block.text
    typed, goes_on = [], False
    for line in lines:
        if goes_on or line.startswith("$ "):
            typed.append(line.removeprefix("$ "))
            goes_on = line.endswith("\\")
    return "\n".join(typed) + "\n"


def write_files(page: Path, folder: Path) -> None:
    """What the page says to write, and what its commands take for granted."""
    for block in blocks(page):
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text, encoding="utf-8")


def call(page: Path, folder: Path, python: str) -> tuple[list[Called], str]:
    """Every program that the page's commands call, in bash in `folder`, and what bash complained of."""
    bin_folder, log = folder / "shown-bin", folder / "shown.log"
    for name in PROGRAMS:
        stub = folder / name if "/" in name else bin_folder / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(_RECORD.replace("$SHOWN_NAME${0##*/}", name if "/" in name else "${0##*/}"), encoding="utf-8")
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").touch()
    (folder / "conf").symlink_to(ROOT / "conf")
    (folder / "runs" / "mine").mkdir(parents=True)
    (folder / "runs" / "mine" / "summary.json").write_text("{}")
    log.touch()
    script = "".join(
        f"export {_AT}={block}\ncd {folder}\n{command_lines(block)}" for block in blocks(page) if block.language == "shell"
    )
    environ = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "HOME": str(folder), "PYTHONPATH": str(ROOT), "RANK": "0"}
    ended = subprocess.run(
        [shutil.which("bash") or "bash", "-eu", "-c", script],
        cwd=folder,
        env={**environ, "SHOWN_LOG": str(log), "REAL_PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return list(_read(log)), ended.stderr if ended.returncode else ""


def _read(log: Path) -> Iterator[Called]:
    for entry in log.read_bytes().decode().split("\n\0"):
        if entry:
            at, *argv = entry.removesuffix("\0").split("\0")
            yield Called(at, tuple(argv))
