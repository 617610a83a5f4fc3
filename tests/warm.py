"""Modules that forked test processes need, imported once by the process that they are forked from."""

from __future__ import annotations

import numpy.ma  # noqa: F401
import rich._emoji_codes  # noqa: F401
import torch.distributed.checkpoint  # imported by each rank of a run with sharded state
import torch.distributed.pipelining  # noqa: F401

import trainwright.cli
import trainwright.commands.replay
import trainwright.distributed.tensor_parallel
import trainwright.models.gpt
import trainwright.training.fit
import trainwright.training.run
import trainwright.watching.watch  # noqa: F401
from trainwright.doctor.discovery import all_checks
from trainwright.report.pages.render import templates
from trainwright.runs.provenance import provenance

for name in templates().list_templates(extensions=["html"]):  # compiling them takes twice as long as a small run
    templates().get_template(name)
all_checks()
provenance(data_fingerprints={}, seeds={}, command=[])  # reads the versions of all packages, which are cached
