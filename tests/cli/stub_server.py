"""What `telescope.inference.alone` is to whoever starts it, without an engine: it answers each prompt of token ids with its
last three, in two pieces, and has a child as an engine has.

The environment variable STUB says how it behaves: `serve` (the default), `refuse` (a sentence and exit code 1), `engine` (as
an engine that does not start: words in its log, and a sentence that points to them), `die` (exit
code 3 without a word), `hang` (it never listens), `slow` (its log tells of weights, and it listens
2 s later), `crumble` (it listens, and ends at the first request).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from telescope.inference.alone import AloneServer, alone_file
from telescope.inference.vllm.outputs import start_failure
from telescope.runlog.files import read_json
from telescope.runlog.layout import RunDirectory

HOW = os.environ.get("STUB", "serve")


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if HOW == "crumble":
            os._exit(9)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        *ids, last = asked["prompt"][-3:]
        self.tell({"text": "piece\n", "token_ids": ids, "finish_reason": None})
        self.tell({"text": f"of {len(asked['prompt'])}", "token_ids": [last], "finish_reason": "length"})
        self.wfile.write(b"data: [DONE]\n\n")

    def tell(self, choice: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


def main() -> None:
    run = RunDirectory(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
    told = read_json(alone_file(run), AloneServer)
    if HOW == "refuse":
        run.failure("server-0").write_text("server-0: vLLM refuses the model: it is a stub\n")
        sys.exit(1)
    if HOW == "engine":
        sys.stderr.write("Traceback (most recent call last):\nValueError: no memory is left\nRuntimeError: it failed\nBye.\n")
        run.failure("server-0").write_text(start_failure("It failed. See root cause above. Failed core proc(s): {}"))
        sys.exit(1)
    if HOW == "die":
        sys.stderr.write("its last line\n")
        sys.exit(3)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if HOW == "hang":
        time.sleep(600)
    if HOW == "slow":
        sys.stderr.write("Loading safetensors checkpoint shards:  38% Completed | 3/8 [00:05<00:08,  1.73s/it]\n")
        time.sleep(2)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    facts = {"url": f"http://127.0.0.1:{server.server_address[1]}/v1"}
    if "STUB_PIDS" in os.environ:
        Path(os.environ["STUB_PIDS"]).write_text(f"{os.getpid()} {child.pid} {told.model} {told.adapter}\n")
    os.write(told.ready, json.dumps(facts).encode() + b"\n")
    server.serve_forever()


if __name__ == "__main__":
    main()
