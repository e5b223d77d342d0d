"""The ``POST /retrieve`` protocol of Search-R1 (arXiv:2503.09516): a client for its servers, and a server.

Request ``{"queries": [text], "topk": k, "return_scores": bool}``; answer ``{"result": [[...]]}`` with, for
each query, ``{"document": {"id", "contents"}, "score"}`` or, without scores, the bare documents.
Must not know how documents are found.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surefoot.core.errors import ConfigError
from surefoot.tools.base import ToolFault
from surefoot.tools.search import Document, Hit, Retriever

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_MOST_BYTES = 8 << 20


class RemoteRetriever:
    """A retriever behind a URL; safe to share between threads. Faults of the server raise ToolFault.

    ``seconds`` is the deadline of one request. Raises ConfigError without httpx, or when the server says
    that the request itself is wrong (a status of 4xx).
    """

    def __init__(self, url: str, *, seconds: float = 10.0) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError('a remote retriever needs httpx: pip install "surefoot[search]"') from error
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"retriever url is {url!r}; it must begin with http:// or https://")
        if not seconds > 0:
            raise ConfigError(f"retriever seconds is {seconds}; a deadline must be > 0")
        self.url = url
        self._faults = (httpx.TransportError, httpx.StreamError, httpx.DecodingError)
        self._client = httpx.Client(timeout=seconds)

    async def search(self, query: str, k: int) -> list[Hit]:
        """The server's ``k`` best documents for one query."""
        return (await self.search_many([query], k))[0]

    async def search_many(self, queries: list[str], k: int) -> list[list[Hit]]:
        """The server's ``k`` best documents for each query, in one request."""
        # A thread, since environments run on loops of their own and an async client belongs to one loop.
        return await asyncio.to_thread(self._post, queries, k)

    def close(self) -> None:
        """Drop the connections."""
        self._client.close()

    def _post(self, queries: list[str], k: int) -> list[list[Hit]]:
        body = {"queries": queries, "topk": k, "return_scores": True}
        try:
            with self._client.stream("POST", self.url, json=body) as response:
                data = b""
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > _MOST_BYTES:
                        raise ToolFault(f"{self.url} answered more than {_MOST_BYTES >> 20} MiB")
                status = response.status_code
        except self._faults as error:
            raise ToolFault(f"{self.url}: {type(error).__name__}: {error}") from error
        if 400 <= status < 500 and status not in (408, 429):
            text = data[:200].decode(errors="replace")
            raise ConfigError(f"{self.url} refused the request with status {status}: {text}")
        if status != 200:
            raise ToolFault(f"{self.url} answered with status {status}")
        return self._hits(data, len(queries))

    def _hits(self, data: bytes, queries: int) -> list[list[Hit]]:
        try:
            answer = _Answer.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            raise ToolFault(f"{self.url}: the answer is not of this protocol: {first['msg']}") from error
        if len(answer.result) != queries:
            raise ToolFault(f"{self.url} answered {len(answer.result)} of {queries} queries")
        return [
            [Hit(Document(str(item.document.id), item.document.contents), item.score) for item in one]
            for one in answer.result
        ]


class _Document(BaseModel):
    id: str | int = ""
    contents: str


class _Scored(BaseModel):
    document: _Document
    score: float = Field(allow_inf_nan=False)


class _Answer(BaseModel):
    result: list[list[_Scored]]


class _Question(BaseModel):
    model_config = ConfigDict(extra="forbid")
    queries: list[str]
    topk: int | None = Field(default=None, ge=1)
    return_scores: bool = False


def retrieval_app(
    retriever: Retriever, *, topk: int = 3, most: int = 100, queries: int = 512, kibibytes: int = 1024
) -> Starlette:
    """A server for the protocol: serve it with uvicorn.

    ``topk`` is what a request without one gets, ``most`` the cap on it. Requests of more than ``queries``
    queries or ``kibibytes`` are refused with status 413, unreadable ones with 422.
    """
    try:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError('a retrieval server needs starlette: pip install "surefoot[search]"') from error

    async def retrieve(request: Request) -> Response:
        body = await _body(request, kibibytes * 1024)
        if body is None:
            return JSONResponse({"detail": f"the request is longer than {kibibytes} KiB"}, 413)
        try:
            asked = _Question.model_validate_json(body)
        except ValidationError as error:
            detail = json.loads(error.json(include_url=False, include_input=False))
            return JSONResponse({"detail": detail}, 422)
        if len(asked.queries) > queries:
            return JSONResponse({"detail": f"{len(asked.queries)} queries; at most {queries}"}, 413)
        k = min(asked.topk or topk, most)
        found = [await _search(retriever, query, k) for query in asked.queries]
        return JSONResponse({"result": [[_shown(hit, asked.return_scores) for hit in one] for one in found]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


async def _body(request: Request, most: int) -> bytes | None:
    """The body, or None as soon as it is longer than ``most`` bytes."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            return None
    return data


async def _search(retriever: Retriever, query: str, k: int) -> list[Hit]:
    found = await asyncio.to_thread(retriever.search, query, k)
    return await found if inspect.isawaitable(found) else found


def _shown(hit: Hit, scores: bool) -> dict[str, Any]:
    document = {"id": hit.document.id, "contents": hit.document.contents}
    return cast("dict[str, Any]", {"document": document, "score": hit.score} if scores else document)
