"""The parts of rich that Trainwright uses. Import them from here: importing rich draws from Python's generator."""

from __future__ import annotations

import random

_state = random.getstate()
try:
    from rich.console import Console as Console
    from rich.live import Live as Live
    from rich.text import Text as Text
finally:
    random.setstate(_state)
