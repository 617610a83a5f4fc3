"""Compares the operators and kernels that ran with the requested precision, attention, update and compilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.plan.call_trace import Work
from trainwright.profiling.verdict import ProfileFacts

MIN_FRACTION = 0.95
"""Minimum fraction of the FLOPs in the requested dtype. A head or a loss in float32 may take the rest."""
LOW_PRECISION = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "mxfp8": "bfloat16"}
"""Dtype of matrix products that are not in 8 bits, by precision."""
FUSED_ATTENTION = ("flash_attention", "cudnn_attention", "fused_attention_overrideable")
COMPILED_PREFIXES = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph", "triton_")


@dataclass(frozen=True)
class AuditRow:
    """Requested and observed implementation of a class of operators. ``agrees`` is False for a silent fallback."""

    what: str
    requested: str
    ran: str
    agrees: bool
    remedy: str = ""

    def __str__(self) -> str:
        mark = "ok" if self.agrees else "NOT AS REQUESTED"
        remedy = "" if self.agrees or not self.remedy else f"; {self.remedy}"
        return f"{self.what:<16} requested {self.requested:<14} ran {self.ran}  {mark}{remedy}"


def audit(facts: ProfileFacts, *, on_gpu: bool) -> tuple[AuditRow, ...]:
    """Return one row for each class of operators that ran and that the recipe sets."""
    return tuple(_rows(facts, on_gpu=on_gpu))


def _rows(facts: ProfileFacts, *, on_gpu: bool) -> Iterator[AuditRow]:
    products = [each for each in facts.work if each.flops and not _is_attention(each) and not _is_convolution(each)]
    yield from _dtype_rows("matrix products", products, facts, on_gpu=on_gpu)
    convolutions = [each for each in facts.work if each.flops and _is_convolution(each)]
    yield from _dtype_rows("convolutions", convolutions, facts, on_gpu=on_gpu)
    if facts.precision in ("fp8", "mxfp8"):
        scaled = sum(each.calls for each in products if "scaled_mm" in each.op)
        ran = f"{scaled:,} scaled products" if scaled else "none in 8 bits (emulated, or no layer was converted)"
        remedy = "the device must support fp8, and layer sizes must be multiples of 16"
        yield AuditRow("8-bit layers", facts.precision, ran, scaled > 0, remedy)
    yield from _attention_rows(facts, on_gpu=on_gpu)
    yield from _update_rows(facts)
    if facts.compiled:
        found = [name for name in facts.kernels if name.startswith(COMPILED_PREFIXES)]
        ran = f"{len(found)} compiled regions or kernels" if found else "eager operators only"
        remedy = "torch.compile fell back to eager: TORCH_LOGS=graph_breaks,recompiles shows the lines"
        yield AuditRow("compiled model", "torch.compile", ran, bool(found), remedy)


def _dtype_rows(what: str, works: list[Work], facts: ProfileFacts, *, on_gpu: bool) -> Iterator[AuditRow]:
    if not works:
        return
    flops = Counter[str]()
    for each in works:
        flops[each.dtype] += each.flops
    total = sum(flops.values())
    shown = ", ".join(f"{dtype} {flop / total:.0%}" for dtype, flop in flops.most_common(3))
    requested = facts.precision
    if requested in LOW_PRECISION:
        wanted = LOW_PRECISION[requested]
        others = Counter[str]()
        for each in works:
            if each.dtype != wanted and "scaled_mm" not in each.op:
                others[each.module or "the loss"] += each.flops
        agrees = sum(others.values()) <= (1 - MIN_FRACTION) * total
        where = ", ".join(name for name, _ in others.most_common(3))
        yield AuditRow(what, wanted, shown, agrees, f"other dtypes in {where}: look for .float() or autocast(False)")
    elif requested == "tf32" and on_gpu:
        kernels = {name: calls for name, calls in facts.kernels.items() if _is_product_kernel(name)}
        tensor_cores = sum(calls for name, calls in kernels.items() if "tf32" in name.lower())
        count = sum(kernels.values())
        remedy = "other code has reset torch.backends.cuda.matmul.allow_tf32 or the matmul precision"
        yield AuditRow(what, "tf32", f"{tensor_cores:.0f} of {count:.0f} kernels in tf32", tensor_cores > 0, remedy)
    elif requested == "fp32":
        float32 = flops.get("float32", 0) >= MIN_FRACTION * total
        yield AuditRow(what, "float32", shown, float32, "the model is not in float32, or autocast is on")


def _attention_rows(facts: ProfileFacts, *, on_gpu: bool) -> Iterator[AuditRow]:
    calls = Counter[str]()
    for each in facts.work:
        if _is_attention(each) and each.phase == "forward":
            calls[each.op] += each.calls
    if not calls:
        return
    fused = sum(count for op, count in calls.items() if any(mark in op for mark in FUSED_ATTENTION))
    ran = ", ".join(f"{op.removeprefix('_scaled_dot_product_')} {count}x" for op, count in calls.most_common(3))
    remedy = "flash attention needs bf16 or fp16, no explicit mask, and a head dimension of at most 256"
    yield AuditRow("attention", "flash", ran, fused == sum(calls.values()) or not on_gpu, remedy)


def _update_rows(facts: ProfileFacts) -> Iterator[AuditRow]:
    if facts.fused is None:
        return
    ops = Counter[str]()
    for each in facts.work:
        if each.phase == "update":
            ops[each.op] += each.calls
    fused = sum(count for op, count in ops.items() if op.startswith("_fused_"))
    foreach = sum(count for op, count in ops.items() if op.startswith("_foreach_"))
    ran = "fused" if fused else "foreach" if foreach else f"one tensor at a time ({sum(ops.values())} operators)"
    requested = "fused" if facts.fused else "foreach"
    remedy = "optimizer.args.fused needs floating-point parameters on one device"
    yield AuditRow("update", requested, ran, bool(fused) if facts.fused else bool(fused or foreach), remedy)


def _is_attention(work: Work) -> bool:
    return "scaled_dot_product" in work.op or "flex_attention" in work.op


def _is_convolution(work: Work) -> bool:
    return "conv" in work.op


def _is_product_kernel(name: str) -> bool:
    return any(mark in name.lower() for mark in ("gemm", "cutlass", "xmma", "nvjet"))
