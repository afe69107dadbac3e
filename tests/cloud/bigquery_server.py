"""A BigQuery of the tests: the few REST routes by which Google's client runs a query and pages
through its result.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from tests.loopback import Loopback

PAGE = 3


class Server(Loopback):
    """Answers every query with `rows`, a mapping of columns to values each; `fault` (code, message)
    refuses it instead, for `reason`; where it is `late`,
    when it has run: to whoever asks for rows, or as `job`, in what is told of it.
    """

    def __init__(
        self,
        rows: list[dict[str, Any]],
        fault: tuple[int, str] | None = None,
        reason: str = "invalidQuery",
        late: Literal["rows", "job"] | None = None,
    ) -> None:
        super().__init__(_Handler)
        self.rows, self.fault, self.reason, self.late = rows, fault, reason, late
        self.queries: list[str] = []
        self.projects: list[str] = []
        self.pages, self.page_sizes = 0, list[int]()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.projects.append(self.path.partition("/projects/")[2].partition("/")[0])
        self.server.queries.append(asked["configuration"]["query"]["query"])
        if self.server.late is None and self._refuse():
            return
        self._answer(self._job(asked))

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if "/queries/" not in address.path:
            self._answer(self._job({"configuration": {"query": {"query": "?"}}}))
            return
        if self.server.late == "rows" and self._refuse():
            return
        asked = parse_qs(address.query)
        self.server.page_sizes += map(int, asked.get("maxResults", []))
        names = list(self.server.rows[0]) if self.server.rows else ["text"]
        fields = [{"name": name, "type": "STRING", "mode": "NULLABLE"} for name in names]
        answer: dict[str, Any] = {
            "jobComplete": True,
            "jobReference": _REFERENCE,
            "schema": {"fields": fields},
            "totalRows": str(len(self.server.rows)),
        }
        if asked.get("maxResults") != ["0"]:
            self.server.pages += 1
            begin = int(asked.get("pageToken", ["0"])[0])
            answer["rows"] = [
                {"f": [{"v": row[name]} for name in names]}
                for row in self.server.rows[begin : begin + PAGE]
            ]
            if begin + PAGE < len(self.server.rows):
                answer["pageToken"] = str(begin + PAGE)
        self._answer(answer)

    def _refuse(self) -> bool:
        if self.server.fault is None:
            return False
        code, message = self.server.fault
        self._answer(
            {
                "error": {
                    "code": code,
                    "message": message,
                    "errors": [{"reason": self.server.reason, "message": message}],
                }
            },
            code,
        )
        return True

    def _job(self, asked: dict[str, Any]) -> dict[str, Any]:
        status: dict[str, Any] = {"state": "DONE"}
        if self.server.fault is not None and self.server.late == "job":
            status["errorResult"] = {"reason": self.server.reason, "message": self.server.fault[1]}
        query = {
            **asked["configuration"]["query"],
            "destinationTable": {"projectId": "p", "datasetId": "d", "tableId": "t"},
        }
        return {
            "id": "p:US.j",
            "jobReference": asked.get("jobReference", _REFERENCE) | {"location": "US"},
            "status": status,
            "configuration": {"jobType": "QUERY", "query": query},
            "statistics": {"query": {"statementType": "SELECT"}},
        }

    def _answer(self, value: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


_REFERENCE = {"projectId": "p", "jobId": "j", "location": "US"}
