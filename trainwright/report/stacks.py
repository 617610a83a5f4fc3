"""The combinations of CUDA, driver and NCCL that images and job files pin and ``trainwright env`` checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RELEASE_NOTES = "https://docs.nvidia.com/cuda/cuda-toolkit-release-notes"
OLDEST_DRIVERS: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest Linux driver by major version of CUDA. It runs programs built with any minor version of that version.

Source: ``RELEASE_NOTES``, tables of minimum required and corresponding driver versions.
"""
DRIVERS: Mapping[str, str] = {
    "12.6": "560.28.03",
    "12.8": "570.26",
    "12.9": "575.51.03",
    "13.0": "580.65.06",
    "13.1": "590.44.01",
    "13.2": "595.45.04",
}
"""The Linux driver that came with the first release of each CUDA version. It also compiles its kernels at run time.

Source: ``RELEASE_NOTES``, table of corresponding driver versions.
"""


@dataclass(frozen=True)
class Stack:
    """Pinned versions of an image. ``name`` is the build argument of the image, and a folder of the torch wheel index.

    ``cuda`` is the CUDA version of the torch wheel, None for the CPU. ``nccl`` is the version that the wheel requires.
    If ``nccl`` is None (unknown), the loaded version must only be equal to the installed one.
    """

    name: str
    cuda: str | None = None
    nccl: str | None = None

    @property
    def driver(self) -> str | None:
        """The oldest Linux driver that runs this CUDA version; None if no driver is needed."""
        return None if self.cuda is None else OLDEST_DRIVERS[int(self.cuda.partition(".")[0])]


STACKS: Mapping[str, Stack] = {
    stack.name: stack
    for stack in (
        Stack("cpu"),
        Stack("cu126", cuda="12.6"),
        Stack("cu129", cuda="12.9"),
        Stack("cu130", cuda="13.0", nccl="2.29.7"),
    )
}
"""The wheels of the torch version in constraints.txt. ``nccl``: as required by the metadata of the wheel."""
