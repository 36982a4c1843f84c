"""A W&B server small enough to read: it answers the real client's queries and keeps what the client streams."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RUN = {
    "id": "UnVuOjE=",
    "name": "run1",
    "displayName": "run1",
    "description": "",
    "config": "{}",
    "sweepName": None,
    "historyLineCount": 0,
    "historyTail": "[]",
    "eventsTail": "[]",
    "summaryMetrics": "{}",
    "logLineCount": 0,
    "eventsLineCount": 0,
    "wandbConfig": "{}",
    "tags": [],
    "project": {"id": "UHJvamVjdDox", "name": "telescope", "entity": {"id": "RW50aXR5OjE=", "name": "someone"}},
}


class FakeWandb(ThreadingHTTPServer):
    """`history`: rows of all file-stream posts, `of_run`: by the run's id; `queries`: the GraphQL operations; `failing` makes
    each answer a 500."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.history: list[dict[str, Any]] = []
        self.of_run: dict[str, list[dict[str, Any]]] = {}
        self.exit_codes: list[int] = []
        self.queries: list[str] = []
        self.bodies: list[str] = []
        self.authorizations: set[str] = set()
        self.failing = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeWandb
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self.server.failing:
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path == "/graphql":
            self._answer({"data": self._graphql(json.loads(body))})
        else:
            if self.path.endswith("/file_stream"):  # /files/<entity>/<project>/<run>/file_stream; else the client's telemetry
                self._stream(json.loads(body) if body else {})
            self._answer({})

    def _graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        query = request["query"]
        self.server.queries.append(query)
        name = (request.get("variables") or {}).get("name") or RUN["name"]
        if "upsertBucket" in query:
            return {"upsertBucket": {"bucket": RUN | {"name": name}, "inserted": name not in self.server.of_run}}
        if "missingOk" in query and name in self.server.of_run:  # what a client asks that wants to go on with a run
            project: dict[str, Any] = RUN["project"]
            return {"model": project | {"bucket": self._bucket(name)}}
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": RUN["id"], "uploadHeaders": [], "files": []}}
        if "serverInfo" in query or "ServerFeatures" in query:
            return {"serverInfo": {"features": [], "cliVersionInfo": {}, "latestLocalVersionInfo": None}}
        if "viewer" in query:
            return {
                "viewer": {"id": "VXNlcjox", "entity": "someone", "username": "someone", "teams": {"edges": []}, "flags": "{}"}
            }
        if "model" in query or "project" in query:
            return {"model": None, "project": None}
        return {}

    def _stream(self, post: dict[str, Any]) -> None:
        if post.get("complete"):
            self.server.exit_codes.append(post["exitcode"])
        lines = post.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        found = [json.loads(line) for line in lines]
        self.server.history += found
        self.server.of_run.setdefault(self.path.split("/")[-2], []).extend(found)

    def _bucket(self, name: str) -> dict[str, Any]:
        rows = self.server.of_run[name]
        tail = [json.dumps(row) for row in rows[-1:]]
        begun = {"wandbConfig": '{"t": 1}'}  # without it the client takes the run for one that never began
        return RUN | begun | {"name": name, "historyLineCount": len(rows), "historyTail": json.dumps(tail)}

    def _body(self) -> str:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode("utf-8", "replace")
        self.server.bodies.append(text)
        self.server.authorizations.add(self.headers.get("Authorization") or "")
        return text

    def _answer(self, value: dict[str, Any]) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
