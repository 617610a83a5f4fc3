"""Which ranks do what: the degrees of parallelism, whose product is the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.errors import Problem, RecipeError
from trainwright.recipe.parallel import Parallel


@dataclass(frozen=True)
class Degrees:
    """``replicate`` copies of the model, each on ranks of its own."""

    replicate: int = 1

    @property
    def ranks(self) -> int:
        return self.replicate


ONE_RANK = Degrees()


def solve_degrees(ask: Parallel, ranks: int) -> Degrees:
    """Fills in what is ``auto``. Raises RecipeError where the product cannot be ``ranks``."""
    replicate = ranks if ask.replicate == "auto" else ask.replicate
    if replicate != ranks:
        raise RecipeError(
            Problem(
                "parallel.replicate",
                f"the product of the degrees must be the number of ranks, {ranks}",
                got=str(replicate),
                remedy=f"write replicate: {ranks} or auto, or start {replicate} processes: "
                f"trainwright train RECIPE -- --nproc-per-node {replicate}",
            )
        )
    return Degrees(replicate)
