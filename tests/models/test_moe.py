"""The mixture of experts: a dense computation of the same routing, balancing, its state, plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.engine.plain import assert_same_bits, bits
from tests.report_pages.reading import Page, curves_of
from trainwright.assembly.assemble import compile_in_place
from trainwright.checkpoint.cursor import MicroBatch
from trainwright.distributed.split_plan import model_shape, split_plan
from trainwright.engine.loss import call_loss
from trainwright.engine.losses import language_model
from trainwright.errors import UsageError
from trainwright.models.gpt import gpt
from trainwright.models.moe import Experts, MoEConfig, moe_gpt
from trainwright.report.pages.report import write_report

SMALL = {"vocab_size": 11, "block_size": 6, "layers": 2, "heads": 2, "d_model": 8}


def experts(**options: Any) -> Experts:
    torch.manual_seed(0)
    module = Experts(MoEConfig(**{**SMALL, "experts": 5, **options}))
    module.init_output(0.02)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def dense(module: Experts, x_BTD: Tensor) -> Tensor:
    """Every expert computes every token; the outputs are weighed by the routing, 0 for experts that were not chosen."""
    weight_NK, expert_NK = module.route(x_BTD.flatten(0, 1))
    weight_NE = torch.zeros(len(weight_NK), len(module.up)).scatter(1, expert_NK, weight_NK)
    hidden = torch.einsum("btd,edf->ebtf", x_BTD, module.up)
    if module.gate is not None:
        hidden = hidden * F.silu(torch.einsum("btd,edf->ebtf", x_BTD, module.gate))
    else:
        hidden = F.relu(hidden).square()
    out = torch.einsum("ebtf,efd->ebtd", hidden, module.down)
    out = torch.einsum("ebtd,bte->btd", out, weight_NE.view(*x_BTD.shape[:2], -1))
    return out if module.shared is None else out + module.shared(x_BTD)


@pytest.mark.parametrize("active", [1, 2, 5])
@pytest.mark.parametrize(("activation", "shared"), [("swiglu", 1), ("relu2", 0)])
def test_experts_equal_a_dense_computation_of_the_same_routing(activation: str, shared: int, active: int) -> None:
    module = experts(activation=activation, shared=shared, active=active)
    x = torch.randn(3, 6, 8, requires_grad=True)
    grads = []
    for out in (module(x), dense(module, x)):
        out.square().sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in module.parameters())])
        x.grad = None
        module.zero_grad()
    torch.testing.assert_close(module(x), dense(module, x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)


def test_an_expert_without_tokens_is_computed_too() -> None:
    module = experts(active=1, activation="relu2")
    module.bias[3] = -10.0
    x = torch.randn(3, 6, 8)
    module(x).sum().backward()
    assert module.up.grad is not None and not module.up.grad[3].any() and module.up.grad[0].any()
    torch.testing.assert_close(module(x), dense(module, x), rtol=1e-5, atol=1e-5)
    assert module.load[3] == 0


def test_the_bias_decides_the_choice_and_not_the_weights() -> None:
    module, x_ND = experts(active=5), torch.randn(7, 8)
    before_NK, expert_NK = module.route(x_ND)
    plain_NE = torch.zeros(7, 5).scatter(1, expert_NK, before_NK)
    module.bias += torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0])
    after_NK, chosen_NK = module.route(x_ND)
    assert (chosen_NK[:, 0] == 1).all()
    torch.testing.assert_close(torch.zeros(7, 5).scatter(1, chosen_NK, after_NK), plain_NE)


def test_the_bias_moves_against_the_load() -> None:
    module = experts(bias_rate=0.25)
    module.load.copy_(torch.tensor([4.0, 0.0, 2.0, 3.0, 1.0]))
    module.balance()
    assert module.bias.tolist() == [-0.25, 0.25, 0.0, -0.25, 0.25] and not module.load.any()


def test_balancing_evens_out_the_load() -> None:
    module, x = experts(experts=4, bias_rate=0.01), torch.randn(8, 64, 8) + 2.0
    spreads = []
    for _ in range(200):
        module.balance()
        module(x)
        spreads.append(float(module.load.max() / module.load.mean()))
    assert spreads[0] > 1.3 and max(spreads[-10:]) < 1.1


def test_the_bias_moves_once_a_step_by_the_load_of_all_its_micro_batches() -> None:
    model = moe_gpt(**SMALL, bias_rate=0.5)
    block = next(module for module in model.modules() if isinstance(module, Experts))
    for parts in (1, 3):
        for ids_BT in torch.randint(0, 11, (6, 6)).split(6 // parts):
            model(ids_BT).square().mean().backward()
        assert block.load.sum() == 6 * 6 * 2
        model.zero_grad()
    assert block.bias.abs().max() == 0.5  # by the first step, in the second


def test_evaluation_changes_nothing() -> None:
    model = moe_gpt(**SMALL).eval()
    before = bits(model)
    model(torch.randint(0, 11, (6, 6)))
    assert_same_bits(bits(model), before)


def test_the_parameters_are_those_of_a_gpt_and_its_experts() -> None:
    def count(model: nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    sizes = {"vocab_size": 50, "block_size": 16, "layers": 3, "heads": 2, "d_model": 32, "bias": False}
    mixture, plain = moe_gpt(**sizes, experts=8, active=3, shared=1), gpt(**sizes)
    hidden = 4 * 32 // 4
    assert count(mixture) == count(plain) + 3 * (8 * 32 + 9 * 2 * 32 * hidden - 2 * 32 * 4 * 32)
    assert mixture.options.width_of_expert == hidden  # the experts of a token are as wide as the network of the gpt


def test_attention_is_divided_and_a_pipeline_is_refused() -> None:
    model = moe_gpt(**SMALL)
    plan = split_plan(model, {})
    assert plan["blocks.1.attention.query"] == "column" and not any(".mlp" in name for name in plan)
    assert model_shape(model, plan).blocks is None


def data() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 11, (32, 7), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def trained(steps: int, **options: Any) -> tw.Result:
    torch.manual_seed(3)
    settings = {"log.every": "1steps", "log.doctor": False, "checkpoint.every": "1steps"}
    return tw.fit(
        moe_gpt(**SMALL, bias_rate=0.1),
        data(),
        language_model,
        steps=steps,
        batch=8,
        settings={**settings, **options.pop("settings", {})},
        quiet=True,
        **options,
    )


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one_and_charts_the_load(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, first = trained(6), trained(3)
    resumed = trained(6, resume=first.run)
    assert whole.state is not None and resumed.state is not None
    assert_same_bits(bits(resumed.state.model), bits(whole.state.model))
    biases = [buffer for name, buffer in resumed.state.model.named_buffers() if name.endswith("mlp.bias")]
    assert len(biases) == 2 and all(bias.any() for bias in biases)
    (charted,) = curves_of(Page(write_report([resumed.run]).path.read_text()))
    assert {"expert_load_max", "expert_load_min", "router_bias_max"} <= {each["name"] for each in charted["figures"]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"experts": 1}, "experts must be"),
        ({"active": 9}, "more than experts"),
        ({"bias_rate": -1.0}, "bias_rate"),
        ({"expert": 4}, "did you mean"),
        ({"init": "mup"}, "muP has no rule for the experts"),
    ],
)
def test_wrong_options_are_refused_with_a_remedy(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        moe_gpt(**SMALL, **options)
    assert caught.value.remedy


@pytest.mark.parametrize("samples", [0, 1])
def test_the_sample_that_a_rank_without_samples_repeats_is_not_part_of_the_load(samples: int) -> None:
    model = moe_gpt(**SMALL, experts=4)  # type: ignore[arg-type]
    ids = torch.zeros(1, 6, dtype=torch.long)
    call_loss(language_model, model, MicroBatch((ids, ids), np.arange(samples)), "micro-batch 0")
    loads = [float(each.load.sum()) for each in model.modules() if isinstance(each, Experts)]
    assert loads == [samples * 6 * 2] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch's own making
def test_a_compiled_model_computes_the_same_in_float32() -> None:
    torch._dynamo.reset()
    model, ids_BT = moe_gpt(**SMALL).eval(), torch.randint(8, (2, 6))
    expected = model(ids_BT)
    compile_in_place(model, backend="aot_eager")
    assert torch.equal(model(ids_BT), expected)
