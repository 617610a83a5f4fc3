"""The pages of ``trainwright explain CODE``: the docstrings of the checks."""

from __future__ import annotations

from difflib import get_close_matches

from trainwright.doctor.diagnose import FAILED
from trainwright.doctor.discovery import all_checks, check_of
from trainwright.doctor.docstring import Page, parse_page
from trainwright.doctor.own_checks import OWN
from trainwright.errors import UsageError, suggest

_OF_FAILED = parse_page(
    """A check of the doctor itself raised an error. All other checks ran; the training is not affected.

    Why it matters: what this check looks for may be there and is not reported.

    Fix: report it with the run folder's `log.jsonl`. A check reads nothing but its records, so `trainwright diagnose
    RUN` shows the error again.
    """
)


def codes() -> tuple[str, ...]:
    """Every code with a page, sorted."""
    return tuple(sorted({FAILED, *(each.code for each in all_checks())}))


def page(code: str) -> str:
    """The page of a code; for a topic such as ``loss``, its codes with their titles; for "" all codes.

    Raises:
        UsageError: There is no page for ``code``; with the nearest codes that have one.
    """
    if code.startswith(OWN):
        raise UsageError(f"{code} has no page: it is a check of your own", remedy="see the docstring of its function")
    if (found := _page_of(code)) is not None:
        return found.markdown(code)
    topic = code.removesuffix("*").removesuffix(".")
    group = [each for each in codes() if not topic or each.startswith(f"{topic}.")]
    if not group:
        raise UsageError(f"there is no page for {code!r}", remedy=_nearest(code))
    width = max(map(len, group))
    return "\n".join(f"{each:{width}}  {title(each)}" for each in group)


def title(code: str) -> str:
    """What is wrong, in one sentence: the first of the page."""
    found = _page_of(code)
    if found is None:
        raise UsageError(f"there is no page for {code!r}", remedy=_nearest(code))
    return found.title


def _page_of(code: str) -> Page | None:
    check = check_of(code)
    return check.page if check is not None else _OF_FAILED if code == FAILED else None


def _nearest(code: str) -> str:
    """Codes of the same topic, else codes that are written alike, else the topics."""
    same = [each for each in codes() if each.startswith(f"{code.partition('.')[0]}.")]
    if same:
        return suggest(code, same)
    topics = sorted({f"{each.partition('.')[0]}." for each in codes()})
    return suggest(code, codes() if get_close_matches(code, codes()) else topics)
