"""The common parts of every SVG of a report: its colours, its root element, and text."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

# The background is transparent, so every colour must be readable on white and on black: a contrast of at least 3
# (4.5 for text) on either. tests/report/test_chart.py computes it.
INK = "#767676"
PALETTE = ("#1f7fd0", "#cf5f1a", "#1f8f4e", "#9a5fd6", "#d0455f", "#0f8a94")
SANS = "system-ui, sans-serif"
TITLE = 'font-size="15" font-weight="600"'


def root(width: float, height: float, title: str, *, font: str = SANS, size: int = 12, fixed: bool = False) -> str:
    """Return the opening tag of a stand-alone <svg> element. ``fixed``: shown at its size, not scaled to the page."""
    pixels = f' width="{width}" height="{height}"' if fixed else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"{pixels} role="img" '
        f'font-family="{font}" font-size="{size}" aria-label={quoteattr(printable(title))}>'
    )


def text(x: float, y: float, words: str, attributes: str = "", *, color: str = INK) -> str:
    """Return a <text> element at (x, y), with further ``attributes``."""
    more = f" {attributes}" if attributes else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}"{more}>{escape(printable(words))}</text>'


def printable(words: str) -> str:
    """Replace control characters and lone surrogates, which XML does not allow even when escaped."""
    return "".join(c if c.isprintable() else " " for c in words)
