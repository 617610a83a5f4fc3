"""The mechanisms by which a step stops being finite: code, cause in words, remedy, and the trial of the remedy."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.doctor.finding import RemedyTrial, Stage, in_words
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Examined


@dataclass(frozen=True)
class Mechanism:
    """How an operation stops being finite. ``template`` formats the cause from the values of the trace.

    ``guard`` is the trial of the remedy at the op itself.
    """

    code: str
    template: str
    remedy: str
    guard: str | None = None

    @property
    def brings(self) -> tuple[str, ...]:
        """Codes that follow in later steps: numbers that nearly overflowed do so elsewhere."""
        return ("num.overflow", "num.invalid") if self.code in ("num.exp_overflow", "prec.fp16_overflow") else ()

    def cause(self, first: Facts) -> str:
        """The cause in words; ``first`` is what the trace found first."""
        inputs = [*first["forward_inputs"], {"absmax": 0.0, "zeros": 0, "min": 0.0, "max": 0.0}]
        place = f" in {in_words(first['module'])}" if first["phase"] != "update" else ""
        return self.template.format(
            **{k: v for k, v in first.items() if k not in ("inputs", "module")},
            place=place,
            largest=max(held["absmax"] for held in inputs),
            highest=max(held["max"] for held in inputs),
            lowest=min(held["min"] for held in inputs),
        )

    def stage(self, first: Facts) -> Stage:
        """The stage of the step in which it happened."""
        if first["kind"] == "input":
            return "input"
        if first["kind"] == "target":
            return "label"
        if first["phase"] != "forward":
            return "backward" if first["phase"] == "backward" else "update"
        return "forward" if first["module"] is not None else "loss"

    def trial(self, exam: Examined, first: Facts) -> RemedyTrial | None:
        """The remedy at the op itself; else fp32, where the step is finite in it; else the step without the samples."""
        if self.guard is not None:
            return RemedyTrial(self.guard, {"op": first["op"]} if self.guard == "guarded" else {})
        if exam.values.get("fp32", {}).get("finite"):
            return RemedyTrial("in_fp32")
        return self.without_samples(exam, first)

    def without_samples(self, exam: Examined, first: Facts) -> RemedyTrial | None:
        if not first.get("rows"):
            return None
        several = exam.values["micro_batches"] > 1
        return RemedyTrial(
            "without_these_samples", {"rows": first["rows"], "micro": first["micro_batch"] if several else None}
        )

    @staticmethod
    def without_samples_of_buffers(first: Facts) -> RemedyTrial:
        return RemedyTrial("statistics_without_samples", {"rows": first["rows"]})


WORDS = {
    "log_of_zero": Mechanism(
        "num.log_of_zero", "{op}{place} is taken of 0", "log_softmax instead of log(softmax), or an eps", "guarded"
    ),
    "log_of_negative": Mechanism(
        "num.invalid", "{op}{place} is taken of a negative number ({lowest:.4g})", "clamp its input", "guarded"
    ),
    "div_by_zero": Mechanism(
        "num.div_by_zero",
        "{op}{place} divides by 0",
        "clamp the divisor: clamp(min=1) for a count, else an eps",
        "guarded",
    ),
    "mean_of_empty": Mechanism(
        "num.div_by_zero", "{op}{place} is taken of an empty tensor: 0 / 0", "leave empty selections out"
    ),
    "std_of_one": Mechanism(
        "num.div_by_zero", "{op}{place} is taken of a single value: 0 / 0", "unbiased=False, or drop batches of one"
    ),
    "sqrt_of_negative": Mechanism(
        "num.invalid", "{op}{place} is taken of a negative number ({lowest:.4g})", "clamp its input at 0", "guarded"
    ),
    "power_of_negative": Mechanism(
        "num.invalid", "{op}{place} has a negative base and a fractional power", "clamp the base"
    ),
    "out_of_domain": Mechanism(
        "num.invalid", "{op}{place} is not defined at {lowest:.4g}..{highest:.4g}", "clamp its input", "guarded"
    ),
    "sqrt_at_zero_backward": Mechanism(
        "num.sqrt_grad_at_zero",
        "{op}{place} is taken of 0: the value is 0, its derivative is infinite, and 0 times that is NaN",
        "an eps under the root, or torch.linalg.norm, whose gradient at 0 is 0",
        "guarded",
    ),
    "domain_edge_backward": Mechanism(
        "num.invalid",
        "{op}{place} is finite at the edge of its domain, its derivative is not",
        "clamp its input",
        "guarded",
    ),
    "where_branch_backward": Mechanism(
        "num.where_branch_grad",
        "{hidden_by} discards what {op}{place} gives there, but not its derivative: 0 times infinity in backward",
        "make the input safe before {op} (a second where, or clamp), not its output after it",
        "guarded",
    ),
    "exp_overflow": Mechanism(
        "num.exp_overflow",
        "{op}{place} of {highest:.4g} is more than {dtype} can represent",
        "clamp its input, or use softplus",
        "guarded",
    ),
    "overflow": Mechanism(
        "num.overflow",
        "{op}{place} gives more than {dtype} can represent (inputs up to {largest:.4g})",
        "look at what feeds it; clamp",
    ),
    "invalid": Mechanism("num.invalid", "{op}{place} is not defined for its inputs", "look at its inputs"),
    "softmax_all_masked": Mechanism(
        "num.softmax_all_masked",
        "every entry of a row of {op}{place} is -inf: 0 / 0",
        "keep one key, or use finfo.min instead of -inf",
        "finite_mask",
    ),
    "inf_in_softmax": Mechanism(
        "num.overflow", "an input of {op}{place} is +inf: inf / inf", "look at what overflowed before it"
    ),
    "zero_times_inf": Mechanism(
        "num.invalid",
        "{op}{place} multiplies 0 by the infinity of a mask",
        "a finite mask value",
        "finite_mask",
    ),
    "inf_minus_inf": Mechanism(
        "num.invalid", "{op}{place} subtracts infinities from each other", "a finite mask value", "finite_mask"
    ),
    "inf_logit_smoothing": Mechanism(
        "num.inf_logit_smoothing",
        "label smoothing gives a share of the target to classes whose logit is -inf",
        "a large negative finite mask (-1e4)",
        "finite_mask",
    ),
    "inf_at_target": Mechanism(
        "num.log_of_zero",
        "the target is a class whose logit is masked with -inf{place}",
        "do not mask targets",
        "finite_mask",
    ),
    "inf_in_loss": Mechanism(
        "num.log_of_zero", "{op}{place} adds up the infinity of a mask", "a finite mask value", "finite_mask"
    ),
    "fp16_overflow": Mechanism(
        "prec.fp16_overflow",
        "{op}{place} gives more than 65504, the largest number of {dtype}; in fp32 the step is finite",
        "bfloat16, or this op in fp32",
        "in_fp32",
    ),
    "mask_overflow": Mechanism(
        "prec.mask_overflow",
        "the mask's large negative constant is -inf in {dtype}{place}; a row with nothing else is NaN",
        "torch.finfo(dtype).min, or a boolean mask",
        "finite_mask",
    ),
    "no_valid_target": Mechanism(
        "loss.no_valid_target",
        "every target is ignored: {op} is a mean over nothing, 0 / 0",
        "divide the sum by max(1, number of valid targets); leave such a batch out of the mean",
        "valid_targets",
    ),
    "ctc_infeasible": Mechanism(
        "loss.ctc_infeasible",
        "a target is too long for its input: no alignment exists",
        "zero_infinity=True, or filter such samples",
        "zero_infinity",
    ),
    "nan_written": Mechanism("num.nonfinite", "{op}{place} writes NaN", "look at that line"),
    "inf_written": Mechanism("num.nonfinite", "{op}{place} writes infinities that are summed later", "a finite value"),
}

_INPUT = Mechanism(
    "data.nonfinite_input",
    "the input of the model is {what}",
    "drop or impute such samples where the data is read",
)
_TARGET = Mechanism(
    "data.nonfinite_input",
    "a tensor that enters the loss (a target or a weight) is {what}",
    "drop or mask these samples where the data is read",
)
_NARROW_EXP = Mechanism(
    "prec.fp16_overflow",
    "{op}{place} of {highest:.4g} is more than {dtype} can represent; in fp32 it is finite",
    "this op in fp32, or bfloat16",
    "in_fp32",
)
_EPS = Mechanism(
    "prec.eps_underflow",
    "gradients are finite, the update is not: eps={eps:g} is 0 in float16, so the optimizer divides by 0",
    "eps=1e-4, or fp32 master weights",
    "larger_eps",
)
_STATISTICS = Mechanism("model.bn_stats_poisoned", "the running statistics {name} are {what}", "reset them")
_OUTSIDE = Mechanism(
    "num.nonfinite", "{kind} {name} was {what} before the step", "look for the code that last wrote it"
)


def mechanism_of(first: Facts) -> Mechanism:
    """The mechanism of what the trace found first."""
    if first["kind"] != "op":
        if first["kind"] == "buffer" and ".running_" in f".{first['name']}":
            return _STATISTICS
        return {"input": _INPUT, "target": _TARGET}.get(first["kind"], _OUTSIDE)
    is_half = first["dtype"] == "float16"
    if first["phase"] == "update" and is_half and 0 < (first["eps"] or 0) < 3e-8:
        return _EPS
    if first["what"] == "exp_overflow" and is_half and first["fp32_finite"]:
        return _NARROW_EXP
    return WORDS.get(first["what"], WORDS["invalid"])
