"""What a process that a test forks need not load again: imported by the process that it is forked from."""

from __future__ import annotations

import torch.distributed.pipelining  # noqa: F401

import trainwright.build.tensor_parallel
import trainwright.cli
import trainwright.models.gpt
import trainwright.training.fit
import trainwright.training.run
import trainwright.watching.watch  # noqa: F401
from trainwright.pages.render import templates

for name in templates().list_templates(extensions=["html"]):  # to compile them takes twice as long as a small run
    templates().get_template(name)
