"""`telescope completion bash|zsh|fish` prints what the shell needs, which then asks `telescope completion --words …`.

Knows subcommands, groups and their options, and the names of settings. Values of settings are the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

OVERRIDDEN = ("run", "check", "plan", "doctor")
"""Commands that take overrides."""
TARGETED = ("chat", "eval", "serve")
"""Those that take them behind what they are for."""
ACTIONS = {
    "runs": ("list", "resume", "stop", "tail"),
    "env": ("audit", "check"),
    "doctor": ("logprobs", "weights"),
    "completion": ("bash", "fish", "zsh"),
    "eval": ("compare",),
}
"""What stands first behind a command of several parts."""
_BASH = """_telescope() {
    local IFS=$'\\n' line=${COMP_LINE:0:$COMP_POINT}
    local word=${line##* }
    COMPREPLY=($(telescope completion --words "$line" 2>/dev/null))
    case $COMP_WORDBREAKS in *=*) case $word in *=*)
        local index
        for index in "${!COMPREPLY[@]}"; do COMPREPLY[index]=${COMPREPLY[index]#"${word%%=*}="}; done ;; esac ;; esac
    case ${COMPREPLY[0]} in *=|*.) compopt -o nospace ;; esac
}
complete -o default -F _telescope telescope
"""
_ZSH = """#compdef telescope
_telescope() {
    local -a found
    found=(${(f)"$(telescope completion --words "${BUFFER[1,CURSOR]}" 2>/dev/null)"})
    compadd -S '' -- $found
}
compdef _telescope telescope
"""
_FISH = """complete -c telescope -f -a '(telescope completion --words (commandline -cp) 2>/dev/null)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
USAGE = f'usage: telescope completion {"|".join(SCRIPTS)}      e.g. in ~/.bashrc: eval "$(telescope completion bash)"\n'


def main(arguments: Sequence[str]) -> int:
    """0, or 2 on wrong usage."""
    match list(arguments):
        case ["--words", line]:
            sys.stdout.writelines(f"{word}\n" for word in candidates(line))
            return 0
        case [shell] if shell in SCRIPTS:
            sys.stdout.write(SCRIPTS[shell])
            return 0
        case ["-h"] | ["--help"]:
            sys.stdout.write(USAGE)
            return 0
        case _:
            sys.stderr.write(USAGE)
            return 2


def candidates(line: str) -> list[str]:
    """What the last word of a command line may become, sorted; `telescope run alg` gives `algorithm=`."""
    from telescope.cli.main import COMMANDS

    words = line.split(" ")
    last, before = words[-1], [word for word in words[1:-1] if word]
    if not before:
        return [name for name in sorted(COMMANDS) if name.startswith(last)]
    if len(before) == 1 and before[0] in ACTIONS:
        return [name for name in ACTIONS[before[0]] if name.startswith(last)]
    if before == ["env", "check"]:
        return [name for name in sorted(_environments()) if name.startswith(last)]
    resumed = before[:2] == ["runs", "resume"] and len(before) > 2
    has_target = before[0] in TARGETED and len(before) > 1 and before[1] != "compare"
    if before[0] in OVERRIDDEN or resumed or has_target:
        return sorted(dict.fromkeys(_overrides(last)))
    return []  # folders and files, which the shell knows


def _environments() -> Iterator[str]:
    from telescope.compose.load import places_for

    yield from places_for(None).options("env")


def _overrides(word: str) -> Iterator[str]:
    from telescope.compose.load import places_for
    from telescope.compose.options import GROUPS
    from telescope.config.validate import setting_paths

    places = places_for(None)
    group, equals, value = word.partition("=")
    if equals:
        if group in GROUPS:
            yield from (f"{group}={option}" for option in places.options(group) if option.startswith(value))
        return
    names = [*GROUPS, *setting_paths({"algorithm": {"name": "grpo"}, "backend": {"name": "fsdp"}, "environments": {}})]
    fitting = [name for name in names if name.startswith(word)]
    depth = word.count(".")
    for name in fitting:  # a section at a time: `tr` gives `trainer.`, and not its forty settings
        parts = name.split(".")
        yield f"{name}=" if len(parts) <= depth + 1 else ".".join(parts[: depth + 1]) + "."
