"""Starts a command once for each rank, by torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from trainwright.errors import UsageError

if TYPE_CHECKING:
    from trainwright.recipe import Loaded


SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that torchrun passes on to the ranks. SIGUSR1 is not in its default."""


def become_torchrun(options: Sequence[str], loaded: Loaded) -> NoReturn:
    """Replace this process by torchrun with these ``options``, which runs the same command line on every rank.

    Raises RecipeError if the recipe does not suit the number of ranks, as far as ``options`` define it.
    """
    from trainwright.plan.parallel import solve_layout

    ranks = ranks_of(options)
    if ranks is not None:
        degrees = solve_layout(loaded.recipe, ranks)
        if degrees.ranks > degrees.data:  # only the code of the model shows if it can be divided so
            from trainwright.training.layout import require_layout

            require_layout(loaded, None, ranks)
    command = sys.argv[1 : sys.argv.index("--")]
    meet = [] if _sets_rendezvous(options) else ["--standalone"]
    passed_on = [] if _value(options, "signals-to-handle") else [f"--signals-to-handle={SIGNALS}"]
    torchrun = "from trainwright.cli.torchrun import main; main()"  # -m would warn: the package imports it as well
    arguments = ["-c", torchrun, *meet, *passed_on, *options, "-m", "trainwright", *command]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the default of torchrun, without its four lines of warning
    if not meet:  # else the agent of a restarted node waits for an address that the others send only once
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.execv(sys.executable, [sys.executable, *arguments])


def ranks_of(options: Sequence[str]) -> int | None:
    """Return the number of processes that torchrun will start; None if the machines or torchrun decide it. Raises
    UsageError.
    """
    if not options[0].startswith("-"):
        remedy = "trainwright train RECIPE -- --nproc-per-node 4"
        raise UsageError(f"{options[0]!r} is not an option of torchrun", remedy=remedy)
    nodes, each = _value(options, "nnodes") or "1", _value(options, "nproc-per-node") or "1"
    return int(nodes) * int(each) if nodes.isdecimal() and each.isdecimal() else None


def _sets_rendezvous(options: Sequence[str]) -> bool:
    names = ("nnodes", "standalone", "rdzv-backend", "rdzv-endpoint", "master-addr", "master-port")
    flags = {option.partition("=")[0].lstrip("-").replace("_", "-") for option in options if option.startswith("-")}
    return not flags.isdisjoint(names)


def _value(options: Sequence[str], name: str) -> str | None:
    """Return the value of the last ``--name VALUE`` or ``--name=VALUE``. Underscores equal hyphens, as in torchrun."""
    found = None
    for option, following in zip(options, [*options[1:], ""], strict=True):
        key, equals, value = option.partition("=")
        if key.startswith("--") and key.lstrip("-").replace("_", "-") == name:
            found = value if equals else following
    return found
