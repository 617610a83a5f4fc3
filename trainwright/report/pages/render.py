"""Renders runs as HTML: one self-contained file, or a page that `trainwright serve` keeps up to date."""

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

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from trainwright.doctor.pages import page as page_of_code
from trainwright.errors import UsageError
from trainwright.plan.amounts import human_bytes, human_seconds
from trainwright.report.chart import Series, line_chart_svg
from trainwright.report.findings import place, value_in_words
from trainwright.report.graph import human_count
from trainwright.report.pages.compare import RunComparison
from trainwright.report.pages.curves import BUCKETS, curves_of, readings_of
from trainwright.report.pages.layers import MAPS, OUTPUT_GRAD_NORM
from trainwright.report.pages.overview import Overview
from trainwright.report.pages.rows import SpanMeans
from trainwright.report.pages.view import RunView, flat, number
from trainwright.runs.files import reason_of
from trainwright.runs.language import language, translated
from trainwright.runs.printing import readable
from trainwright.runs.secrets import masked
from trainwright.version import __version__

PARTS = ("head", "findings", "records")
"""The parts of a run's page that change while it runs; each has its own template and element."""
SCRIPTS = ("uplot", "charts", "media", "page")
STYLES = ("uplot", "page")
"""Names of the static files that are embedded in every page."""
COLUMNS = ("run", "", "state", "verdict", "changed", "step", "left", "loss", "validation")
MORE_COLUMNS = ("findings", "duration", "learning rate")
"""The columns of the list of runs. The user's columns are between the two. The column of the curve has no title."""
MAX_NAMES, MAX_RUNS_WITH_NAMES = 500, 20
"""Metrics and keys that are offered as further columns, and the newest runs whose names they are."""
MORE_WORDS = ("train", "uniform guess")
"""Texts that charts get from runs, to be translated with those of the scripts."""
MIN_BUCKETS = 60
DAY_S = 24 * 3600.0


def runs_page(views: Sequence[RunView], *, names: Sequence[str] = (), live: bool = False) -> str:
    """Return the page of one run, or of several side by side.

    A ``live`` page requests updates from its server, with the runs called by these ``names``.
    """
    buckets = max(MIN_BUCKETS, BUCKETS // max(1, len(views)))
    data = {
        "runs": [
            {
                **curves_of(view, buckets),
                "readings": readings_of(view),
                "layers": view.log.heat_maps if len(views) == 1 else [],
                "media": view.log.media.to_json(None if live else view.folder.path),
                "id": name,
            }
            for view, name in zip_longest(views, names)
        ],
        "panels": views[0].all_marks.model_dump()["panels"],
        "words": _words(language()),
    }
    page = templates().get_template("runs.html")
    comparison = RunComparison.of(views) if len(views) > 1 else None
    title = views[0].name if len(views) == 1 else f"{len(views)} runs"
    shared = page_values("live" if live else "file")
    return readable(page.render(shared, title=title, views=views, comparison=comparison, data=data, live=live))


@cache
def _words(to: str) -> dict[str, str]:
    """Return the translations of texts in the scripts. ``to`` is the language of the page; {} for English."""
    if to == "en":
        return {}
    folder = files("trainwright.report.pages").joinpath("static")
    scripts = "".join(folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS[1:])
    known = [*re.findall(r'"([A-Za-z %.]{3,60})"', scripts), *MAPS.values(), *OUTPUT_GRAD_NORM.values(), *MORE_WORDS]
    texts = {each: translated(each) for each in known}
    return {text: words for text, words in texts.items() if words != text}


def ladder_page(found: object, **values: object) -> str:
    """Return the page of a ladder (``commands.ladder.result.Ladder``); ``values`` are further template values."""
    page = templates().get_template("ladder.html")
    return readable(page.render(page_values("file"), title="Ladder", found=found, data={}, live=False, **values))


def overview_page(overview: Overview) -> str:
    """Return the page of all runs of a folder."""
    page, rows = templates().get_template("overview.html"), overview_rows(overview)
    columns = (*COLUMNS, *overview.columns, *MORE_COLUMNS)
    newest = list(overview.views.values())[:MAX_RUNS_WITH_NAMES]
    known = {key for view in newest for part in (view.recipe, view.plan) for key, _ in flat(part)}
    known |= {name for view in newest for name, _ in view.log.figures.series()}
    names = sorted(each for each in known if each and not each.startswith(("notes", "header")))[:MAX_NAMES]
    values = page_values("live") | {"columns": columns, "added": overview.columns, "names": names}
    return page.render(values, title="runs", rows=rows, data={"words": _words(language())}, live=True)


def overview_rows(overview: Overview) -> Markup:
    """Return the rows of the overview table. A run that cannot be read has a row with the reason."""
    template = templates().get_template("overview_rows.html")
    rows = Markup("")
    unreadable = dict(overview.unreadable)
    for name, view in overview.views.items():
        try:
            rows += Markup(template.render(overview=Overview({name: view}, columns=overview.columns)))
        except Exception as error:
            unreadable[name] = reason_of(error)
    columns = (*COLUMNS[3:], *overview.columns, *MORE_COLUMNS)
    unreadable_rows = templates().get_template("unreadable_rows.html")
    return rows + Markup(unreadable_rows.render(unreadable=unreadable, columns=columns))


def unreadable_part(reason: str) -> Markup:
    """Return the text that replaces a run that cannot be read."""
    return Markup('<p class="reason">This run cannot be read: {}</p>').format(reason)


def parts_of(view: RunView, index: int) -> dict[str, str]:
    """Return the parts of a run's page that change, by element id. ``index`` is the position of the run on the page."""
    environment = templates()
    return {
        f"{part}-{index}": readable(environment.get_template(f"{part}.html").render(view=view, index=index))
        for part in PARTS
    }


def content_policy(*, live: bool) -> str:
    """Return the content security policy of a page: it may run only the embedded Trainwright script."""
    connect, images = ("'self'", "'self' data:") if live else ("'none'", "data:")
    hashes = {name: f"'sha256-{_sha256(text)}'" for name, text in _assets().items()}
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; img-src {images}; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def page_values(kind: str) -> dict[str, object]:
    """Return the values that every page needs. ``kind`` is "file" or "live"."""
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    assets = {name: Markup(text) for name, text in _assets().items()}
    return {
        "policy": content_policy(live=kind == "live"),
        "made": made,
        "version": __version__,
        "language": language(),
        **assets,
    }


@cache
def _assets() -> dict[str, str]:
    """Return script and style of every page, which are embedded so that one file suffices."""
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
    """Return the environment of the templates; each is compiled at first use."""
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
        with_unit=_with_unit,
        code=_inline,
        masked=masked,
        when=_when,
        since=_since,
        value=value_in_words,
        explained=_explanation,
        count=human_count,
        image=_image,
        sparkline=sparkline,
        memory_chart=_memory_chart,
        data=_data,
        t=_translated,
    )
    return environment


def _data(value: object) -> Markup:
    """Return JSON for a script element; nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@pass_context
def _translated(_context: Context, text: object) -> str:
    """Return a text in the output language. The context keeps jinja from translating constants when it compiles."""
    return translated(str(text))


def _with_unit(value: str, path: str) -> str:
    """Return a value of the plan in words, with the unit that its name has."""
    names = path.split(".")
    try:
        if any(name.endswith("bytes") for name in names):
            return human_bytes(int(value))
        if any(name.endswith("_s") or name == "seconds" for name in names):
            return human_seconds(float(value))
        return f"{int(value):,}"
    except ValueError:  # a word, or no value
        return value


def _image(svg: str) -> str:
    """Return a data URL of the picture. An image can neither run a script nor load anything."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _explanation(code: str) -> Markup:
    """Return the page of a finding; "" for a user's check, and for a code that this version does not have."""
    try:
        text = page_of_code(code)
    except UsageError:
        return Markup("")
    paragraphs = re.split(r"\n\s*\n", text.partition("\n")[2].strip())
    return Markup("").join(Markup("<p>") + _inline(each) + Markup("</p>") for each in paragraphs)


def _inline(text: str) -> Markup:
    """Convert `code` and **bold** of a paragraph."""
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


def _memory_chart(sizes_bytes: Sequence[int]) -> Markup:
    """Return an <svg> of the memory over the traced steps of a profile; "" for fewer than two sizes."""
    if len(sizes_bytes) < 2:
        return Markup("")
    curve = Series("allocated", range(len(sizes_bytes)), [each / 2**20 for each in sizes_bytes])
    chart = line_chart_svg([curve], title="memory in the traced steps", x_label="over time", y_label="MiB")
    return Markup(chart)  # drawn by Trainwright, which escapes its texts


WIDTH, HEIGHT = 96, 22


def sparkline(means: SpanMeans) -> Markup:
    """Return an <svg> of the mean losses, on a log axis if all are positive; "" if fewer than two are finite."""
    columns = means.columns()
    finite = np.isfinite(columns["loss"])
    steps, losses = columns["step"][finite], columns["loss"][finite]
    if len(losses) < 2:
        return Markup("")
    losses = np.log(losses) if (losses > 0).all() else losses
    across = (steps - steps[0]) / (steps[-1] - steps[0]) * (WIDTH - 4)
    down = (losses.max() - losses) / ((losses.max() - losses.min()) or 1.0) * (HEIGHT - 4)
    points = " ".join(f"{2 + x:.0f},{2 + y:.1f}" for x, y in zip(across, down))
    return Markup(
        f'<svg class="spark" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )
