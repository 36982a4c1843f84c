"""How far a server's start is, by what its log says: vLLM's lines in words for a person who waits.

Pure: text in, words out. Knows the lines of vLLM 0.25 to 0.32 and of our own engine; imports neither.
"""

from __future__ import annotations

import re

_FILES = re.compile(r"oading .*shards.*\| (\d+)/(\d+) \[")
_PERCENT = re.compile(r"Loading weights: +(\d+)%")
_GRAPHS = re.compile(r"Capturing CUDA graphs.*\| (\d+)/(\d+) \[")
_ROOM = re.compile(r"waiting for room on the GPU: .*")
_PHASES = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Capturing CUDA graphs|Profiling CUDA graph memory|Estimated CUDA graph memory", "capturing CUDA graphs"),
        (r"Starting torch\.compile|Dynamo bytecode transform|Compiling a graph|compiled graph\(s\)", "compiling the model"),
        (r"KV cache size|Available KV cache memory|rofiling/warmup run", "measuring its memory"),
        (r"Loading weights took|Model loading took", "preparing the model, its weights are loaded"),
        (r"Starting to load model|Loading weights|Loading .*shards", "loading weights"),
        (r"init engine|Graph capturing finished|[Ww]arming up|[Ww]armup", "warming up"),
        (r"telescope\.inference\.vllm\.engine: updates are|telescope\.inference\.vllm\.logprob_path", "warming up"),
    )
)
BEGINNING = "starting its engine"


def describe_server_start(lines: list[str]) -> str:
    """The newest phase that the log's lines tell: `loading weights, 3 of 8 files`; `BEGINNING` before any; empty where the log
    has no line."""
    told = next((words for line in reversed(lines) if (words := _describe_line(line))), BEGINNING)
    return told if lines else ""


def _describe_line(line: str) -> str:
    """Empty where the line tells no phase."""
    if found := _FILES.search(line):
        return f"loading weights, {found[1]} of {found[2]} files"
    if found := _PERCENT.search(line):
        return f"loading weights, {found[1]} %"
    if found := _GRAPHS.search(line):
        return f"capturing CUDA graphs, {found[1]} of {found[2]}"
    if found := _ROOM.search(line):
        return found[0]
    return next((words for pattern, words in _PHASES if pattern.search(line)), "")
