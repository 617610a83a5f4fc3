"""Runs as HTML: one file that needs nothing else, or a page that `trainwright serve` keeps up to date."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from itertools import zip_longest

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from trainwright.doctor.pages import page as page_of_code
from trainwright.errors import UsageError
from trainwright.plan.explain import human_bytes, human_seconds
from trainwright.report.findings import place
from trainwright.report.graph import human_count
from trainwright.report.pages.compare import RunComparison
from trainwright.report.pages.curves import BUCKETS, curves_of, readings_of
from trainwright.report.pages.overview import Overview
from trainwright.report.pages.sparkline import sparkline
from trainwright.report.pages.view import RunView, flat, memory_parts, number
from trainwright.runs.files import reason_of
from trainwright.runs.printing import readable
from trainwright.runs.secrets import masked
from trainwright.version import __version__

PARTS = ("head", "findings", "records")
SCRIPTS, STYLES = ("uplot", "charts", "page"), ("uplot", "page")
"""The parts of a run's page that change while it runs; each is a template of its own, in an element of its own."""
LEAST_BUCKETS = 60
DAY_S = 24 * 3600.0


def runs_page(views: Sequence[RunView], *, names: Sequence[str] = (), live: bool = False) -> str:
    """The page of one run, or of several side by side.

    ``live``: it asks the server that it came from for more, calling the runs by these ``names``.
    """
    buckets = max(LEAST_BUCKETS, BUCKETS // max(1, len(views)))
    data = {
        "runs": [
            {
                **curves_of(view, buckets),
                "readings": readings_of(view),
                "layers": view.log.heat_maps if len(views) == 1 else [],
                "id": name,
            }
            for view, name in zip_longest(views, names)
        ]
    }
    page = templates().get_template("runs.html")
    comparison = RunComparison.of(views) if len(views) > 1 else None
    title = views[0].name if len(views) == 1 else f"{len(views)} runs"
    shared = of_every_page("live" if live else "file")
    return readable(page.render(shared, title=title, views=views, comparison=comparison, data=data, live=live))


def ladder_page(found: object, **values: object) -> str:
    """The page of a ladder, ``verbs.ladder.result.Ladder``; ``values`` are what its template names besides."""
    page = templates().get_template("ladder.html")
    return readable(page.render(of_every_page("file"), title="Ladder", found=found, data={}, live=False, **values))


def overview_page(overview: Overview) -> str:
    """The page of all runs of a folder."""
    page, rows = templates().get_template("overview.html"), overview_rows(overview)
    return page.render(of_every_page("live"), title="runs", rows=rows, data={}, live=True)


def overview_rows(overview: Overview) -> Markup:
    """The rows of its table, which replace older ones. A run that cannot be read has one with the reason."""
    template, rows, unreadable = templates().get_template("overview_rows.html"), Markup(""), dict(overview.unreadable)
    for name, view in overview.views.items():
        try:
            rows += Markup(template.render(overview=Overview({name: view})))
        except Exception as error:
            unreadable[name] = reason_of(error)
    return rows + Markup(templates().get_template("unreadable_rows.html").render(unreadable=unreadable))


def unreadable_part(reason: str) -> Markup:
    """What takes the place of a run that cannot be read on a page."""
    return Markup('<p class="reason">This run cannot be read: {}</p>').format(reason)


def parts_of(view: RunView, index: int) -> dict[str, str]:
    """The parts of a run's page that change, by the ids of their elements. ``index``: which run of the page it is."""
    environment = templates()
    return {
        f"{part}-{index}": readable(environment.get_template(f"{part}.html").render(view=view, index=index))
        for part in PARTS
    }


def content_policy(*, live: bool) -> str:
    """What a page may do: run our script, which it has inside, and nothing else."""
    connect = "'self'" if live else "'none'"
    hashes = {name: f"'sha256-{_sha256(text)}'" for name, text in _assets().items()}
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def of_every_page(kind: str) -> dict[str, object]:
    """The values that every page needs. ``kind`` is "file" or "live"."""
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    assets = {name: Markup(text) for name, text in _assets().items()}
    return {"policy": content_policy(live=kind == "live"), "made": made, "version": __version__, **assets}


@cache
def _assets() -> dict[str, str]:
    """Script and style of every page: they are inside of it, so that one file is all."""
    folder = files("trainwright.report.pages").joinpath("static")
    script, style = (
        "\n".join(folder.joinpath(f"{name}.{suffix}").read_text(encoding="utf-8") for name in names)
        for suffix, names in (("js", SCRIPTS), ("css", STYLES))
    )
    assert "</script" not in script and "</style" not in style
    return {"script": script, "style": style}


@cache
def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def templates() -> Environment:
    """Where the pages come from; each is compiled when it is first asked for."""
    environment = Environment(
        loader=PackageLoader("trainwright.report.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=human_bytes,
        seconds=human_seconds,
        number=number,
        place=place,
        flat=flat,
        memory_parts=memory_parts,
        masked=masked,
        when=_when,
        since=_since,
        value=_value,
        explained=_explained,
        count=human_count,
        image=_image,
        sparkline=sparkline,
        data=_data,
    )
    return environment


def _data(value: object) -> Markup:
    """JSON inside of a script element: nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _image(svg: str) -> str:
    """An address that holds the picture. As an image it can neither run a script nor ask for anything."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _explained(code: str) -> Markup:
    """The page of a finding; "" for a check of the user's own, and a code that this version does not know."""
    try:
        text = page_of_code(code)
    except UsageError:
        return Markup("")
    paragraphs = re.split(r"\n\s*\n", text.partition("\n")[2].strip())
    return Markup("").join(Markup("<p>") + _inline(each) + Markup("</p>") for each in paragraphs)


def _inline(text: str) -> Markup:
    """`code` and **bold** of a paragraph."""
    safe = str(escape(" ".join(text.split())))
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", safe))


def _when(time_s: float) -> str:
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "-"


def _since(time_s: float) -> str:
    passed_s = max(0.0, time.time() - time_s)
    return human_seconds(passed_s) if passed_s < 2 * DAY_S else f"{passed_s / DAY_S:.0f} days"


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
