"""The page: one HTML file that holds the document, the code that draws it, and Plotly. It loads nothing.

What the run says can hold anything a model wrote. It lies in the page as JSON in which no `<` is left, reaches
the screen as text, and the page's policy lets no script run but its own, which it names by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.util
from importlib import resources

import msgspec

from headway.errors import UnsupportedOption
from headway.report.document import Document

_SHELL = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{css}</style>
</head>
<body{live}>
<h1 id="name">{title}</h1>
<p id="state"></p>
<p id="bottleneck"></p>
<ul id="lines"></ul>
<p><label>x axis: <select id="axis"><option value="step">updates</option>
<option value="elapsed_s">seconds</option></select></label></p>
<div id="figures"></div>
<div id="tables"></div>
<script type="application/json" id="data">{data}</script>
<script>{plotly}</script>
<script>{code}</script>
</body>
</html>
"""


def page(document: Document, live_ms: int = 0) -> str:
    """The page as text.

    Args:
        live_ms: ask for `data.json` beside the page that often; 0: the page stays as it is.

    Raises:
        UnsupportedOption: Plotly is not installed.
    """
    plotly, code = plotly_js(), _asset("page.js")
    policy = "; ".join((
        "default-src 'none'", f"script-src {_hash(plotly)} {_hash(code)}", "style-src 'unsafe-inline'",
        "img-src data: blob:", "font-src data:", "base-uri 'none'", "form-action 'none'",
        *(("connect-src 'self'",) if live_ms else ()),
    ))  # fmt: skip
    return _SHELL.format(
        policy=policy,
        title=html.escape(document["name"]),
        css=_asset("page.css"),
        live=f' data-live="{live_ms}"' if live_ms else "",
        data=as_json(document).replace("<", "\\u003c"),
        plotly=plotly,
        code=code,
    )


def as_json(document: Document) -> str:
    """The document as JSON; each number reads back as the same number."""
    return msgspec.json.encode(document).decode()


def plotly_js() -> str:
    """Plotly's script, from the package.

    Raises:
        UnsupportedOption: it is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise UnsupportedOption(
            "the report needs plotly, which is not installed: pip install 'headway[report]'"
        )
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return resources.files("headway.report").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
