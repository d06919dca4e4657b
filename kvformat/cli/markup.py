"""HTML elements as a tree: what is put in is escaped when it is written, everywhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import TypeAlias
from xml.etree import ElementTree as ET

from kvformat.cli.text import clean

Child: TypeAlias = "ET.Element | str"
LONGEST: int = 2000


def el(tag: str, *children: Child | Iterable[Child], **attributes: object) -> ET.Element:
    """An element; a trailing ``_`` of an attribute's name falls away, others become hyphens.

    Texts come from anyone: control, bidi and other invisible characters are shown as escapes.
    """
    names = {key.rstrip("_").replace("_", "-"): item for key, item in attributes.items()}
    element = ET.Element(tag, {key: clean(item, LONGEST) for key, item in names.items()})
    for child in children:
        for one in (child,) if isinstance(child, (str, ET.Element)) else child:
            _append(element, one)
    return element


def _append(element: ET.Element, child: Child) -> None:
    if isinstance(child, ET.Element):
        element.append(child)
        return
    text = clean(child, LONGEST)
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text


def svg(width: int, height: int, label: str, *children: Child | Iterable[Child]) -> ET.Element:
    """A drawing of that many units that fills the width of the page; it scrolls where narrow."""
    drawing = el("svg", *children, viewBox=f"0 0 {width} {height}", role="img", aria_label=label)
    return el("div", drawing, class_="scroll")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> ET.Element:
    """A table; columns whose title starts with ``>`` are numbers. Wide ones scroll."""
    kinds = ["number" if title.startswith(">") else "text" for title in columns]
    head = [el("th", title.lstrip(">"), class_=kind, scope="col")
            for title, kind in zip(columns, kinds, strict=True)]  # fmt: skip
    body = [
        el("tr", [el("td", str(cell), class_=kind) for cell, kind in zip(row, kinds, strict=True)])
        for row in rows
    ]
    return el("div", el("table", el("thead", el("tr", head)), el("tbody", body)), class_="scroll")


def facts(rows: Iterable[tuple[str, object]]) -> ET.Element:
    """Labels and values."""
    items = [el("tr", el("th", label, scope="row"), el("td", str(value))) for label, value in rows]
    return el("div", el("table", el("tbody", items), class_="facts"), class_="scroll")


def image(png: bytes, caption: str) -> ET.Element:
    """A PNG picture inside the page."""
    element = el("img", alt=caption)
    element.set("src", f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}")
    return element


def to_bytes(title: str, style: str, body: Sequence[ET.Element]) -> bytes:
    """A whole page in UTF-8 that loads nothing and runs nothing."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    sheet = ET.Element("style")
    sheet.text = style
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        sheet,
    )
    root = el("html", head, el("body", el("main", body)), lang="en")
    page: bytes = ET.tostring(root, encoding="utf-8", method="html")
    return b"<!DOCTYPE html>\n" + page + b"\n"
