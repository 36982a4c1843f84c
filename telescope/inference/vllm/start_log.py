"""How far a server's start is, by what its log says: vLLM's lines in words for a person who waits.

Pure: text in, words out. Knows the lines of vLLM 0.25 to 0.32, of huggingface_hub and of our own engine; imports none of them.
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
_DOWNLOAD = re.compile(r"(?:Fetching \d+ files|Downloading\b[^:|]*|[\w.-]+\.(?:safetensors|bin|json|txt|model|jinja)): +(\d+)%")
"""What huggingface_hub writes: of all files, and of one."""
_ENGINE_LINE = re.compile(r"\[\w+\.py:\d+\]|\((?:EngineCore|Worker|APIServer)\b")
"""How vLLM's lines begin."""
BEGINNING = "starting its engine"


def describe_server_start(lines: list[str]) -> str:
    """The newest phase that the log's lines tell: `loading weights, 3 of 8 files`. Before any: `BEGINNING` where vLLM has a
    line, which a download precedes; else the newest line itself. Empty where the log has no line."""
    has_engine = False
    for line in reversed(lines):
        if words := _describe_line(line):
            return words
        has_engine = has_engine or bool(_ENGINE_LINE.search(line))
        if not has_engine and (found := _DOWNLOAD.search(line)):
            return f"downloading the model, {found[1]} %"
    return BEGINNING if has_engine else lines[-1] if lines else ""


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
