"""The laws of ``laws.md``, with the known causes that break them. The family has no names of its own."""

from __future__ import annotations

from trainwright.doctor.law import Law
from trainwright.doctor.program import laws
from trainwright.doctor.program.constants import constants_are_usual
from trainwright.doctor.program.course import base_is_the_highest, rate_has_its_course, steps_are_made

LAWS: tuple[Law, ...] = (
    Law("program.steps_are_made", steps_are_made),
    Law(
        "program.calls_come_in_order",
        laws.calls_come_in_order,
        named_by=(
            "opt.zero_grad_before_step", "opt.stepped_twice", "opt.double_owned", "opt.missing_zero_grad",
            "grad.clip_*", "accum.*", "dist.*",
        ),
    ),
    Law(
        "program.objects_belong_together",
        laws.objects_belong_together,
        named_by=("opt.stale_params", "sched.*", "prec.scaler_*", "grad.clip_before_unscale", "ckpt.*"),
    ),
    Law("program.modes_come_back", laws.modes_come_back, named_by=("mode.*",)),
    Law("program.kept_states_are_copies", laws.kept_states_are_copies, named_by=("ckpt.*",)),
    Law("program.names_are_read", laws.names_are_read, named_by=("optim.nothing_trainable",)),
    Law("program.constants_are_usual", constants_are_usual, named_by=("model.excess_dropout",)),
    Law(
        "program.warnings_are_heeded",
        laws.warnings_are_heeded,
        named_by=("loss.broadcast_target", "grad.*", "num.*", "sched.*", "ckpt.*"),
    ),
    Law("program.schedule_is_followed", laws.schedule_is_followed, named_by=("sched.*",)),
    Law("program.rate_has_its_course", rate_has_its_course, named_by=("sched.*", "schedule.*")),
    Law("program.base_is_the_highest", base_is_the_highest, named_by=("sched.*",)),
)  # fmt: skip
