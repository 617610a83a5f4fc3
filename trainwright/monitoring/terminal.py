"""The parts of rich that Trainwright uses. Importing rich draws random numbers, whose generator is restored here."""

from __future__ import annotations

import random

_state = random.getstate()
try:
    from rich.console import Console as Console
    from rich.live import Live as Live
    from rich.text import Text as Text
finally:
    random.setstate(_state)
