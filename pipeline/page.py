"""Parts of self-contained HTML pages: style, tables, and plots inside the page. Nothing is fetched from anywhere."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .8rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}code{background:#f4f4f4}"
)


def new_figure(width: float = 7, height: float = 3.4, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure and its axes side by side, by the object interface: no global figure state, no display needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def png_bytes(figure: Any) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def inline_image(title: str, png: bytes) -> str:
    """A heading and the image in the page itself."""
    text = html.escape(title, quote=True)
    return f"<h2>{text}</h2><img alt='{text}' src='data:image/png;base64,{base64.b64encode(png).decode()}'>"


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, escaped; no header without columns."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if columns else ''}{body}</table>"
