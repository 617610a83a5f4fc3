"""Which numbers of a loop are called shares: figures of decisions that lie between 0 and 1, or 0 and 100 in percent."""

from __future__ import annotations

import re

SHARES = re.compile(r"(?<![a-z])(m?iou|dice|jaccard|f1|precision|recall|hit_?rate|v?acc|accuracy)(?![a-z])")


OTHERS = ("loss", "dist", "err", "gap", "drop", "miss", "fail", "diff", "time", "std")
"""What a name has in it of a number that is made of such a share, and is better the smaller it is."""


def is_named_share(name: str) -> bool:
    """Whether its best is 1 by its name."""
    return SHARES.search(name.lower()) is not None and not any(each in name.lower() for each in OTHERS)
