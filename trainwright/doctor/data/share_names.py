"""Which numbers of a loop are called shares: figures of decisions that lie between 0 and 1, or 0 and 100 in percent."""

from __future__ import annotations

import re

SHARES = re.compile(r"(?<![a-z])(m?iou|dice|jaccard|f1|precision|recall|hit_?rate|v?acc|accuracy)(?![a-z])")


def is_named_share(name: str) -> bool:
    """Whether its best is 1 by its name: a loss that is made of it is none."""
    return SHARES.search(name.lower()) is not None and "loss" not in name.lower()
