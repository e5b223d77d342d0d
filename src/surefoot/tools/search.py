"""Search over a folder or a JSONL file of documents, by words (BM25) or by vectors, as a tool.

What is found is untrusted text: it is handed on as plain text on one line each, so that no passage can
pass itself off as another one. This module must not know where queries come from.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import ConfigError, DataError
from surefoot.tools.base import Tool, ToolError, make_tool

_SUFFIXES = (".txt", ".md", ".rst")
_WORD = re.compile(r"\w+")
_MOST_WORDS = 64  # of a query: more is stuffing, not asking
_PATTERN = r"(?u)\b\w+\b"

# Texts -> float[n, d], one row each.
Embed = Callable[[Sequence[str]], npt.ArrayLike]


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus. The first line of ``contents`` is its title when more lines follow."""

    id: str
    contents: str

    @property
    def title(self) -> str:
        """The first line, "" for a text of one line."""
        head, newline, _ = self.contents.partition("\n")
        return head if newline else ""

    @property
    def text(self) -> str:
        """What stands under the title."""
        _, newline, rest = self.contents.partition("\n")
        return rest if newline else self.contents


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found, with its score; higher is better."""

    document: Document
    score: float


class Retriever(Protocol):
    """Whoever finds documents: best first, at most ``k``, equal scores in the order of the corpus."""

    def search(self, query: str, k: int) -> list[Hit] | Awaitable[list[Hit]]: ...


def read_corpus(path: Path) -> list[Document]:
    """The documents of a folder (.txt, .md, .rst, by relative path) or of a JSONL file (in file order).

    A JSONL line is ``{"id", "contents"}`` or ``{"id", "title", "text"}``; without an id it gets its line
    number. Raises ConfigError for a path that holds no documents, DataError for a bad line or a double id.
    """
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        found = [Document(p.relative_to(path).as_posix(), _read(p)) for p in files]
    elif path.is_file():
        found = [_parse(path, number, line) for number, line in _lines(path)]
    else:
        raise ConfigError(f"corpus {str(path)!r} does not exist; name a folder of texts or a JSONL file")
    if not found:
        raise ConfigError(f"corpus {str(path)!r} holds no documents ({', '.join(_SUFFIXES)} or JSONL lines)")
    seen: set[str] = set()
    for document in found:
        if document.id in seen:
            raise DataError(f"corpus {str(path)!r}: the id {document.id!r} is there twice")
        seen.add(document.id)
    return found


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, line


def _parse(path: Path, number: int, line: str) -> Document:
    where = f"{path} line {number}"
    try:
        record: object = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is {type(record).__name__}; a line must be an object")
    given = cast("dict[str, object]", record)
    contents = given.get("contents")
    if contents is None and isinstance(given.get("text"), str):
        title, text = given.get("title"), given["text"]
        contents = f"{title}\n{text}" if isinstance(title, str) and title else text
    if not isinstance(contents, str):
        raise DataError(f"{where} has neither 'contents' nor 'text'; one of them must be a text")
    return Document(str(given.get("id", number)), contents)


def _best(scores: npt.NDArray[Any], k: int, floor: float) -> list[int]:
    """Rows of the ``k`` highest scores above ``floor``, best first, equal ones in row order."""
    rows = np.flatnonzero(scores > floor)
    if 0 < k < len(rows):
        # Every row that ties with the k-th stays in, so that the stable sort decides between them.
        edge = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
        rows = rows[scores[rows] >= edge]
    order = np.argsort(-scores[rows], kind="stable")[: max(k, 0)]
    return [int(row) for row in rows[order]]


class Bm25Index:
    """BM25 (Lucene's variant) over stemmed English words, single letters and digits included.

    ``cache`` is a folder in which indices are kept by the hash of the documents and settings; a damaged
    or foreign one is made anew. Raises ConfigError without bm25s and PyStemmer, or for an unknown language.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        cache: Path | None = None,
        language: str = "english",
        k1: float = 0.9,
        b: float = 0.4,
    ) -> None:
        try:
            import bm25s
            import Stemmer
        except ImportError as error:
            raise ConfigError('searching by words needs bm25s and PyStemmer: "surefoot[search]"') from error
        if language not in Stemmer.algorithms():
            raise ConfigError(f"search: there is no stemmer for {language!r}; English is 'english'")
        self.documents = tuple(documents)
        self._bm25s: Any = bm25s
        self._stemmer: Any = Stemmer.Stemmer(language)
        self._stopwords: Any = "en" if language == "english" else []
        self._settings = {"language": language, "k1": k1, "b": b, "bm25s": version("bm25s")}
        self._index: Any = self._load(cache) if cache else self._build()

    def search(self, query: str, k: int) -> list[Hit]:
        """The best ``k`` documents that share a word with ``query``."""
        known = cast("dict[str, int]", self._index.vocab_dict)
        words = [word for word in self._words([query])[0] if word in known]
        if not words:
            return []
        scores = cast("npt.NDArray[np.float32]", self._index.get_scores(words))
        return [Hit(self.documents[row], float(scores[row])) for row in _best(scores, k, 0.0)]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the documents and of everything else that the index depends on."""
        found = hashlib.sha256(json.dumps(self._settings, sort_keys=True).encode())
        for document in self.documents:
            for part in (document.id, document.contents):
                data = part.encode("utf-8", "replace")
                found.update(len(data).to_bytes(8, "big") + data)
        return found.hexdigest()[:32]

    def _words(self, texts: list[str]) -> list[list[str]]:
        found = self._bm25s.tokenize(
            texts,
            token_pattern=_PATTERN,
            stopwords=self._stopwords,
            stemmer=self._stemmer,
            return_ids=False,
            show_progress=False,
        )
        return cast("list[list[str]]", found)

    def _build(self) -> Any:
        index = self._bm25s.BM25(k1=self._settings["k1"], b=self._settings["b"], method="lucene")
        words = self._words([document.contents for document in self.documents])
        if not any(words):
            raise ConfigError("search: no document holds a word that could be looked for")
        index.index(words, show_progress=False)
        return index

    def _load(self, cache: Path) -> Any:
        place = cache / f"bm25-{self.fingerprint}"
        kept = self._kept(place)
        if kept is not None:
            return kept
        shutil.rmtree(place, ignore_errors=True)
        index = self._build()
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache, prefix=".making-"))
        try:
            index.save(made, show_progress=False)
            os.replace(made, place)
        except OSError:  # another process was faster, or the disk is full: the index in hand is as good
            shutil.rmtree(made, ignore_errors=True)
        return index

    def _kept(self, place: Path) -> Any:
        """The index that lies there, None when there is none or it is damaged."""
        if not place.is_dir():
            return None
        try:
            index = self._bm25s.BM25.load(place, show_progress=False)
        except Exception:  # whatever a damaged index raises: the documents are at hand to make it anew
            return None
        return index if index.scores["num_docs"] == len(self.documents) else None


class VectorIndex:
    """Cosine similarity of the vectors that ``embed`` makes of the documents and of the query.

    Raises DataError when ``embed`` returns another shape than [texts, d], or a number that is not finite.
    """

    def __init__(self, documents: Sequence[Document], embed: Embed, *, batch: int = 64) -> None:
        if batch < 1:
            raise ConfigError(f"search: batch is {batch}; it must be >= 1")
        self.documents, self._embed = tuple(documents), embed
        texts = [document.contents for document in self.documents]
        rows = [self._unit(texts[i : i + batch]) for i in range(0, len(texts), batch)]
        if not rows:
            raise ConfigError("search: there are no documents to embed")
        self._vectors = np.concatenate(rows)

    def search(self, query: str, k: int) -> list[Hit]:
        """The ``k`` documents nearest to ``query``."""
        scores = self._vectors @ self._unit([query])[0]
        return [Hit(self.documents[row], float(scores[row])) for row in _best(scores, k, -np.inf)]

    def _unit(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        found = np.asarray(self._embed(texts), np.float64)
        if found.ndim != 2 or len(found) != len(texts):
            raise DataError(
                f"embed returned {list(found.shape)} for {len(texts)} texts; it must be [texts, d]"
            )
        if not np.isfinite(found).all():
            raise DataError("embed returned a number that is not finite")
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


def snippet(text: str, query: str, characters: int) -> str:
    """At most ``characters`` of ``text`` on one line, from shortly before its first word of ``query`` on."""
    flat = " ".join(text.split())
    if len(flat) <= characters:
        return flat
    words = [word for word in _WORD.findall(query.casefold()) if len(word) > 2]
    folded = flat.casefold()
    places = [at for word in words if (at := folded.find(word)) >= 0]
    start = max(0, min(min(places, default=0) - characters // 4, len(flat) - characters))
    cut = flat[start : start + characters]
    return ("… " if start else "") + cut + (" …" if start + characters < len(flat) else "")


def search_tool(
    retriever: Retriever, *, most: int = 5, characters: int = 500, name: str = "search", description: str = ""
) -> Tool:
    """A tool ``search(query, k)`` over ``retriever``: a numbered line for each document that was found.

    ``k`` is capped at ``most``, each text at ``characters``. Raises ConfigError when one is below 1.
    """
    for key, value in (("most", most), ("characters", characters)):
        if value < 1:
            raise ConfigError(f"search_tool: {key} is {value}; it must be >= 1")

    async def search(query: str, k: int = 3) -> str:
        """Search a collection of documents; the best matches come first."""
        if not query.strip():
            raise ToolError("the query is empty")
        if len(query.split()) > _MOST_WORDS:
            raise ToolError(f"the query has {len(query.split())} words; at most {_MOST_WORDS} are read")
        if k < 1:
            raise ToolError(f"k is {k}; it must be at least 1")
        found = retriever.search(query, min(k, most))
        hits = await found if inspect.isawaitable(found) else found
        return format_hits(hits[:most], query, characters)

    limit = most * (characters + 300)
    made = replace(make_tool(search), limit=limit)
    return made.renamed(name, description=description) if (name, description) != ("search", "") else made


def format_hits(hits: Sequence[Hit], query: str, characters: int) -> str:
    """One line a document, ``[1] title (id): text``; no text can begin a line of its own."""
    if not hits:
        return "Nothing was found."
    lines: list[str] = []
    for number, hit in enumerate(hits, 1):
        title = " ".join(hit.document.title.split())[:120]
        head = f"{title} ({hit.document.id})" if title else f"({hit.document.id})"
        text = snippet(hit.document.text, query, characters)
        lines.append(f"[{number}] {' '.join(head.split())[:250]}: {text}")
    return "\n".join(lines)
