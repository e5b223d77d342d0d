"""Client and server speak the /retrieve protocol, and a broken server is a fault, never an observation."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from surefoot.core.errors import ConfigError
from surefoot.core.types import ToolCall
from surefoot.tools.base import ToolFault, run_calls
from surefoot.tools.retrieve import RemoteRetriever, retrieval_app
from surefoot.tools.search import Bm25Index, Document, Hit, search_tool

starlette = pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")

WORLD = [
    Document("0", '"Paris"\nthe capital of France'),
    Document("1", '"Rome"\nthe capital of Italy'),
    Document("2", '"Cats"\nsleep'),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = retrieval_app(Bm25Index(WORLD), topk=1, most=2, queries=3, kibibytes=1)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(5)


def post(url: str, body: Any) -> tuple[int, Any]:
    import httpx

    data = body if isinstance(body, (bytes, str)) else json.dumps(body)
    answer = httpx.post(f"{url}/retrieve", content=data)
    return answer.status_code, answer.json()


def test_the_answer_has_the_shape_that_clients_of_the_protocol_read(url: str) -> None:
    status, body = post(url, {"queries": ["capital", "cats"], "topk": 2, "return_scores": True})
    assert status == 200
    assert [[item["document"] for item in one] for one in body["result"]] == [
        [{"id": "0", "contents": '"Paris"\nthe capital of France'},
         {"id": "1", "contents": '"Rome"\nthe capital of Italy'}],
        [{"id": "2", "contents": '"Cats"\nsleep'}],
    ]  # fmt: skip
    assert all(isinstance(item["score"], float) for one in body["result"] for item in one)
    _, bare = post(url, {"queries": ["capital"], "topk": None})
    assert bare == {"result": [[{"id": "0", "contents": '"Paris"\nthe capital of France'}]]}


def test_topk_is_capped_and_wrong_requests_are_refused(url: str) -> None:
    _, body = post(url, {"queries": ["capital cats"], "topk": 50})
    assert len(body["result"][0]) == 2
    assert post(url, {"queries": []}) == (200, {"result": []})
    for wrong in ("{", {"queries": "a"}, {"queries": ["a"], "topk": 0}, {"queries": ["a"], "top_k": 1}):
        assert post(url, wrong)[0] == 422
    assert post(url, {"queries": ["a"] * 4})[0] == 413
    assert post(url, {"queries": ["a" * 2000]})[0] == 413


def test_the_client_finds_what_the_servers_index_finds_also_from_many_threads(url: str) -> None:
    remote = RemoteRetriever(f"{url}/retrieve")
    expected = Bm25Index(WORLD).search("capital", 2)
    found: list[list[Hit]] = []
    threads = [
        threading.Thread(target=lambda: found.append(asyncio.run(remote.search("capital", 2))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[hit.document for hit in hits] for hits in found] == [[hit.document for hit in expected]] * 4
    assert asyncio.run(remote.search_many(["cats", "zebra"], 1))[1] == []
    remote.close()


class _Scripted(BaseHTTPRequestHandler):
    answers: list[tuple[int, bytes]] = []  # noqa: RUF012  the test sets it

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, data = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def scripted() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Scripted)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


GOOD = json.dumps({"result": [[{"document": {"id": 3, "contents": "x\ny"}, "score": 0.5}]]}).encode()


@pytest.mark.parametrize(
    "answer",
    [(500, b"oops"), (429, b"slow down"), (200, b"<html>"), (200, b'{"result": []}'),
     (200, b'{"result": [[{"document": {}, "score": 1}]]}'),
     (200, b'{"result": [[{"document": {"contents": "a"}, "score": NaN}]]}'),
     (200, b" " * (9 << 20))],
)  # fmt: skip
def test_whatever_a_broken_server_says_is_a_fault(scripted: str, answer: tuple[int, bytes]) -> None:
    _Scripted.answers = [answer]
    with pytest.raises(ToolFault):
        asyncio.run(RemoteRetriever(scripted).search("q", 1))


def test_a_request_that_the_server_refuses_is_a_wrong_setting(scripted: str) -> None:
    _Scripted.answers = [(404, b"no such place")]
    with pytest.raises(ConfigError, match="404: no such place"):
        asyncio.run(RemoteRetriever(scripted).search("q", 1))


def test_a_fault_is_retried_when_the_tool_allows_it(scripted: str) -> None:
    from dataclasses import replace

    _Scripted.answers = [(503, b""), (200, GOOD)]
    tool = replace(search_tool(RemoteRetriever(scripted)), retries=1)
    (result,) = asyncio.run(run_calls([tool], [ToolCall("c", "search", {"query": "q"})]))
    assert (result.ok, result.content) == (True, "[1] x (3): y")


def test_no_server_and_a_silent_one_are_faults_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ToolFault, match="Timeout"):
            asyncio.run(RemoteRetriever(f"http://127.0.0.1:{port}/retrieve", seconds=0.2).search("q", 1))
    with pytest.raises(ToolFault, match="ConnectError"):
        asyncio.run(RemoteRetriever(f"http://127.0.0.1:{port}/retrieve", seconds=1).search("q", 1))
    with pytest.raises(ConfigError, match="must begin with http"):
        RemoteRetriever("localhost:8000")
