"""Builds HTML and SVG text in which every string is escaped unless it was built here.

This module must not know what is shown.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

_VOID = frozenset({"meta", "br", "hr", "input", "col"})
_BREAKERS = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


class Html(str):
    """Markup that is safe to insert as it is; only :func:`h`, :func:`join` and :func:`raw` make it."""

    __slots__ = ()


Child = str | None
Attribute = str | int | float | bool | None


def clean(text: str) -> str:
    """``text`` as valid Unicode without NUL: what cannot be written becomes U+FFFD."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def h(tag: str, /, *children: Child, **attributes: Attribute) -> Html:
    """One element. Plain strings are escaped, None is left out.

    Attribute names lose a trailing ``_`` and write ``-`` for ``_`` (``class_``, ``aria_label``); True stands
    alone, False and None are left out.
    """
    head = tag + "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Html(f"<{head}>")
    return Html(f"<{head}>{join(*children)}</{tag}>")


def join(*children: Child) -> Html:
    """Children side by side, escaped where they are plain strings."""
    return Html("".join(_child(child) for child in children))


def raw(text: str) -> Html:
    """Trusted text of this package (style, script) as it is."""
    return Html(text)


def json_script(identity: str, value: Any) -> Html:
    """A data block that no text inside can end or turn into markup."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_BREAKERS)
    return Html(f'<script type="application/json" id="{identity}">{text}</script>')


def table(
    head: Iterable[Child], rows: Iterable[Iterable[Child]], *, caption: str, class_: str | None = None
) -> Html:
    """A captioned table in its own scroll box; the first cell of each row is its header.

    Cells may be ``<td>`` elements already, else they are wrapped.
    """
    top = h("tr", *(h("th", cell, scope="col") for cell in head))
    body = [h("tr", *(_cell(cell, first=i == 0) for i, cell in enumerate(row))) for row in rows]
    inner = h("table", h("thead", top), h("tbody", *body), class_=class_, aria_label=caption)
    box = h("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)
    # The caption stands outside the box, so that it wraps with the page and does not scroll away.
    return h("figure", box, h("figcaption", caption), class_="table")


def _cell(cell: Child, *, first: bool) -> Html:
    if isinstance(cell, Html) and cell.startswith(("<td", "<th")):
        return cell
    return h("th", cell, scope="row") if first else h("td", cell)


def _child(child: Child) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Html) else html.escape(clean(child), quote=False)


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    key = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {key}"
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f' {key}="{html.escape(clean(text))}"'
