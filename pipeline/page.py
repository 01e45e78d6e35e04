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


def new_figure(width: float = 7, height: float = 3.4) -> tuple[Any, Any]:
    """A figure and its axes, by the object interface: no global figure state, no display needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def new_panels(count: int) -> tuple[Any, list[Any]]:
    """A figure with so many axes, at most four side by side."""
    from matplotlib.figure import Figure

    columns = min(count, 4)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(7, 3.6 * columns), 3.2 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for surplus in panels[count:]:
        surplus.set_axis_off()
    return figure, panels[:count]


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
