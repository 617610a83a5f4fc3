"""Detects wrong values in the functions between a model and its loss, and uniform noise in a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import permutations

import torch
from torch import Tensor

from trainwright.doctor.facts.loss import LossSign
from trainwright.doctor.measure.tensors import VIEW_NODES, is_reordered, made_by, random_state
from trainwright.recorder.callers import caller, calling_frame
from trainwright.recorder.graph import graph_behind, leaves_among
from trainwright.recorder.plain_tensors import is_plain
from trainwright.recorder.plain_tensors import plain as dense
from trainwright.recorder.program import Constant, Operation, RecordedStep, Slot, constants_of
from trainwright.recorder.tensor_notes import TensorNotes
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.terms import Term, terms_of

DISTANCES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
RECONSTRUCTIONS = DISTANCES | {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
STEPS_OF_PROGRAM = 8  # The first steps, whose program is read
MIN_STEPS = 4  # Minimum number of observations. All but the first must show the mistake
MAX_WEIGHTS = 4  # Maximum number of products with weights of samples that are read in a step
MIN_SAMPLES = 8  # Minimum number of targets that are compared with variables of the loop
MIN_WITHOUT_ALIGNMENT = 0.05  # Minimum fraction of the samples of a CTC loss. A few bad transcripts are usual
MAX_EXPLAINED = 0.7  # Maximum fraction of the input's variance that mixed-in noise explains. Noisy targets explain more
MIN_UNIFORM = 128  # Elements of a target whose distribution is tested
MAX_UNIFORM = 8192
MIN_FEATURES = 32  # Minimum number of elements of a sample. With fewer, the mean is not far below the sum
LEARNED_DEVIATIONS = ("ExpBackward0", "SoftplusBackward0", "SqrtBackward0")
"""Autograd nodes that make a standard deviation."""
Key = tuple[str, str, str | None]
"""The kind of a mistake, the function, and the line."""


def _is_bootstrapped(target: Tensor) -> bool:
    """Returns True if the target has a graph, and is a constant plus a multiple of the largest or a chosen output."""
    node = target.grad_fn
    if node is None or not type(node).__name__.startswith("Add"):
        return False
    following = [each for each, _ in node.next_functions if each is not None]
    for _ in range(6):
        if len(following) != 1:
            return False
        name = type(following[0]).__name__
        if name.startswith(("MaxBackward", "AmaxBackward", "GatherBackward")):
            return True
        if not name.startswith(("Mul", *VIEW_NODES)):
            return False
        following = [each for each, _ in following[0].next_functions if each is not None]
    return False


class UniformNoise:
    """Tracks uniform random numbers, to detect those that are used instead of normal ones (see ``note``)."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._uniform: TensorNotes[None] = TensorNotes()
        self._scaled: TensorNotes[bool] = TensorNotes()  # True: with a standard deviation that the model computes
        self._is_mixed = False

    @property
    def is_drawn(self) -> bool:
        """True if there is uniform noise."""
        return bool(self._uniform or self._scaled)

    def note(self, name: str, args: Args, result: object) -> bool:
        """Returns True if uniform noise is used as a sample of a normal distribution.

        There are two cases. The noise is multiplied by a standard deviation and added to a mean, and the model computes
        both. Or the noise is mixed into the data, and a prediction is compared with it.
        """
        plain = name.strip("_")
        if not isinstance(result, Tensor):
            return False
        if plain in ("rand", "rand_like") and result.dim() > 1:
            self._uniform[result] = None
        tensors = [each for each in args[:2] if isinstance(each, Tensor)]
        if len(tensors) < 2 or not self.is_drawn:
            return False
        for noise, other in (tensors, tensors[::-1]):
            if plain in ("mul", "rmul") and noise in self._uniform:
                is_learned = other.shape == noise.shape and made_by(other, *LEARNED_DEVIATIONS) is not None
                if is_learned or not other.requires_grad:
                    self._scaled[result] = is_learned
            elif plain in ("add", "radd") and noise in self._scaled:
                if self._scaled[noise] and other.requires_grad:
                    return True
                self._is_mixed |= not self._scaled[noise] and other.shape == noise.shape
            elif plain in DISTANCES | {"sub", "rsub"} and noise in self._uniform and noise not in self._scaled:
                return self._is_mixed and other.requires_grad and other.shape == noise.shape
        return False


class LoopSigns:
    """Collects signs of mistakes. Values stay on their device until ``found``."""

    def __init__(self) -> None:
        self._shown: dict[Key, list[Tensor]] = {}
        self._values: dict[Key, float] = {}
        self._noise = UniformNoise()
        self._device = torch.device("cpu")  # of the ratios
        self._random_state: Tensor | None = None  # at the end of the last examined step
        self._weights: list[tuple[Tensor, str | None]] = []  # of the samples in this step, with lines
        self._grouped: dict[int, str | None] = {}  # line of the view that groups this number of samples
        self.forget()

    def forget(self) -> None:
        self._noise.forget()
        self._differences: TensorNotes[None] = TensorNotes()  # differences of two different tensors

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        plain = name.strip("_")
        if not args or not all(is_plain(each) for each in (*args, result) if isinstance(each, Tensor)):
            return
        with torch.no_grad():
            if self._noise.note(name, args, result):
                self._show("uniform_noise", plain, torch.ones((), dtype=torch.bool))
            if plain == "exp" and isinstance(result, Tensor) and result.requires_grad:
                self._note_ratio(args[0], result)
            elif plain in ("sub", "rsub") and len(args) > 1:
                operands = [each.data_ptr() for each in args[:2] if isinstance(each, Tensor)]
                if len(set(operands)) == 2 and isinstance(result, Tensor):
                    self._differences[result] = None
            elif plain in ("view", "reshape") and isinstance(result, Tensor):
                if not result.requires_grad and args[0].dim() == 1 and result.dim() == 2:
                    self._grouped[len(args[0])] = caller()
                elif result.requires_grad and is_reordered(args[0].shape, result.shape):
                    self._show("reordered", plain, torch.ones((), dtype=torch.bool))
            elif plain == "ctc_loss" and len(args) > 3:
                self._note_alignments(*args, **kwargs)
            elif plain in ("mul", "rmul") and len(args) > 1 and len(self._weights) < MAX_WEIGHTS:
                pair = [each for each in args[:2] if isinstance(each, Tensor) and each.dim() == 1]
                if len(pair) == 2 and pair[0].shape == pair[1].shape and sum(each.requires_grad for each in pair) == 1:
                    weights = next(each for each in pair if not each.requires_grad)
                    self._weights.append((weights.double().clone(), self._grouped.get(len(weights)) or caller()))
            if plain in DISTANCES and len(args) > 1:
                self._note_attached(plain, args[0], args[1])
            pair = [each for each in args[:2] if isinstance(each, Tensor)]
            if plain in DISTANCES | {"sub", "rsub"} and sum(each.requires_grad for each in pair) == 1 == len(pair) - 1:
                self._note_ends(plain, next(each for each in pair if not each.requires_grad))

    def _show(self, kind: str, op: str, is_shown: Tensor, line: str | None = None) -> None:
        self._shown.setdefault((kind, op, line or caller()), []).append(is_shown)

    def _note_ratio(self, exponent: object, result: Tensor) -> None:
        """Records if a ratio of probabilities, ``exp(new - old)``, is 1 everywhere.

        ``exp(new - new.detach())`` is left out: it is 1 by intention, in methods with one update for each rollout.
        The value is the number of calls that use the rollout of the previous step: no random number was drawn since.
        """
        if isinstance(exponent, Tensor) and result.numel() >= 8 and exponent in self._differences:
            key, self._device = ("ratio_is_one", "exp", caller()), result.device
            before = self._random_state
            is_same_rollout = before is not None and torch.equal(before, random_state(self._device))
            self._shown.setdefault(key, []).append(((result.detach() - 1).abs() < 1e-5).all())
            self._values[key] = self._values.get(key, 0.0) + is_same_rollout

    def _note_alignments(
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: object,
        target_lengths: object,
        blank: int = 0,
        *more: object,
        **other: object,
    ) -> None:
        """Records if the blank of a CTC loss is a label, and the fraction of samples that have no alignment.

        An alignment needs as many frames as there are labels, and a blank between two equal labels.
        """
        lengths, frames = (
            torch.as_tensor(each).to(targets.device).view(-1) for each in (target_lengths, input_lengths)
        )
        if not targets.numel() or len(lengths) != len(frames):
            return
        if targets.dim() > 1:  # a row is padded behind its length
            is_label = torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]
            repeats = ((targets[:, 1:] == targets[:, :-1]) & is_label[:, 1:]).sum(1)
            self._show("blank_is_label", "ctc_loss", ((targets == blank) & is_label).any())
        else:
            sample = torch.arange(len(lengths), device=targets.device).repeat_interleave(lengths)
            equal = (targets[1:] == targets[:-1]) & (sample[1:] == sample[:-1])
            repeats = torch.zeros_like(lengths).index_add(0, sample[1:], equal.to(lengths))
            self._show("blank_is_label", "ctc_loss", (targets == blank).any())
        self._show("no_alignment", "ctc_loss", (frames < lengths + repeats).double().mean())

    # bootstrapped targets

    def _note_attached(self, plain: str, prediction: object, target: object) -> None:
        """Records whether the loss of a chosen action's value also trains its target, reward + factor * next value."""
        if (
            not isinstance(prediction, Tensor)
            or not isinstance(target, Tensor)
            or prediction.shape != target.shape
            or not prediction.dim()
        ):
            return
        is_attached = bool(made_by(prediction, "GatherBackward", "IndexBackward")) and _is_bootstrapped(target)
        if is_attached:  # a separate target network is not trained by this loss
            one, other = (leaves_among(graph_behind([each])) for each in (prediction, target))
            is_attached = bool(one & other)
        self._show("target_attached", plain, torch.tensor(is_attached))

    def _note_ends(self, plain: str, target: Tensor) -> None:
        """Records whether a target ``reward + factor * next value`` ignores flags of ended episodes.

        Reward, next value and flags are variables of the function that computes the loss. Synchronizes with the device
        if the function has three floating-point variables with a number for each sample.
        """
        frame, size = calling_frame(), target.numel()
        values = [] if frame is None or size < MIN_SAMPLES else list(frame.f_locals.values())
        values = [v for v in values if isinstance(v, Tensor) and v.numel() == size and is_plain(v)]
        flat = [v.detach().flatten() for v in values if not v.requires_grad and v.dtype != torch.int64]
        numbers = [v.double() for v in flat if v.is_floating_point() and v.device == target.device][:8]
        if len(numbers) < 3:
            return
        flags = [v for v in flat if bool(((v == 0) | (v == 1)).all()) and 0 < int(v.sum()) < size]
        pairs = [pair for pair in permutations(numbers, 2) if flags and _is_bootstrap(target.flatten().double(), *pair)]
        if flags:
            is_shown = any(not torch.equal(v.to(reward), reward) for reward, _ in pairs for v in flags)
            self._show("ends_ignored", plain, torch.tensor(is_shown))

    # the program of a step

    def end_step(self, step: RecordedStep) -> None:
        """Reads the program of one of the first steps."""
        self._random_state = random_state(self._device)
        weights, self._weights = self._weights, []
        if step.step > STEPS_OF_PROGRAM:
            return
        for each, line in weights[:1]:
            self._note_groups(step, each, line)
        with torch.no_grad():
            self._note_noise_target(step)
        self._note_reductions(step, terms_of(step))

    def _note_groups(self, step: RecordedStep, weights: Tensor, line: str | None) -> None:
        """Records whether advantages were normalized over consecutive samples that belong to different prompts.

        Synchronizes with the device, in the first steps with such a product.
        """
        inputs = [each for each in _inputs_of(step) if each.dim() and len(each) == len(weights)]
        if not inputs or len(weights) < 4:
            return
        rows = inputs[0].flatten(1) if inputs[0].dim() > 1 else inputs[0][:, None]
        prompts = _groups(rows)
        if prompts is None and not rows.is_floating_point() and rows.shape[1] > 3:
            prompts = _groups(rows[:, : rows.shape[1] // 4])  # the answers after the prompt differ
        if prompts is not None:
            size = len(weights) // (int(prompts.max()) + 1)
            sums = torch.zeros(len(weights) // size, dtype=weights.dtype, device=weights.device)
            limit = 1e-3 * weights.abs().sum()
            in_a_row = weights.view(-1, size).sum(1).abs().sum()
            of_prompt = sums.index_add(0, prompts, weights).abs().sum()
            self._show("groups_mixed", "mul", (in_a_row < limit) & (of_prompt > 10 * limit), line)

    def _note_noise_target(self, step: RecordedStep) -> None:
        """Records whether a prediction is compared with uniform noise that is part of the model's input."""
        inputs = _inputs_of(step)
        for each in step.program:
            if not isinstance(each, Operation) or each.name.strip("_") not in DISTANCES | {"sub", "rsub"}:
                continue
            args = (*each.args, *each.kwargs.values())[:2]
            target = next((arg.tensor for arg in args if type(arg) is Constant), None)
            if target is None or not any(type(arg) is Slot for arg in args) or not _may_be_noise(target):
                continue
            mixed = [
                _is_mixed_in(entry, target)
                for entry in inputs
                if entry.is_floating_point() and entry.numel() == target.numel()
            ]
            if mixed:
                shown = torch.stack(mixed).any() & _is_uniform(target)
                self._shown.setdefault(("uniform_noise", each.name.strip("_"), None), []).append(shown)

    def _note_reductions(self, step: RecordedStep, terms: list[Term]) -> None:
        """Records a reconstruction loss averaged over all elements and added to a term that is summed over features."""
        makers = {slot: each for each in step.program if isinstance(each, Operation) for slot in each.outputs}
        inputs = {each.data_ptr() for each in _inputs_of(step)}
        sums = [weight for term in terms if (weight := _weight_of_sum(term, makers, step)) is not None]
        for term in terms:
            made = makers.get(term.slot)
            if made is None or made.name not in RECONSTRUCTIONS or made.kwargs.get("reduction", "mean") != "mean":
                continue
            targets = [c.tensor for c in constants_of((made.args[1:], made.kwargs)) if c.tensor.dim() > 1]
            if sums and dense(targets[:1]) and targets[0].data_ptr() in inputs and term.coefficient:
                features = targets[0].numel() // len(targets[0])
                ratio = max(sums) * features / abs(term.coefficient)
                if features >= MIN_FEATURES:
                    key = "features_summed_and_averaged", made.name, None
                    self._shown.setdefault(key, []).append(torch.ones((), dtype=torch.bool))
                    self._values[key] = ratio

    def found(self) -> Iterator[LossSign]:
        """Yields the mistakes that every observation after the first has shown. Synchronizes with the device.

        For alignments of a CTC loss, the mean counts. One observation of sums of advantages is enough: they are not 0
        by chance.
        """
        for key, shown in self._shown.items():
            values = torch.stack([each.cpu() for each in shown]).tolist()
            if key[0] == "no_alignment":
                if len(values) >= MIN_STEPS and (mean := sum(values) / len(values)) >= MIN_WITHOUT_ALIGNMENT:
                    yield LossSign(key[0], key[1], len(values), key[2], mean)
            elif (len(values) >= MIN_STEPS and all(values[1:])) or (key[0] == "groups_mixed" and all(values)):
                yield LossSign(key[0], key[1], len(values), key[2], self._values.get(key, 0.0))


def _is_bootstrap(target: Tensor, reward: Tensor, following: Tensor) -> bool:
    """Returns True if the target is the reward plus one multiple of the next value, for all samples."""
    rest = target - reward
    factor = (rest * following).sum() / following.square().sum().clamp(min=1e-12)
    return 0.3 < float(factor) < 0.9999 and torch.allclose(rest, factor * following, rtol=1e-4, atol=1e-5)


def _groups(rows: Tensor) -> Tensor | None:
    """Returns the group of equal rows that each row belongs to; None unless there are several of one size above 1."""
    _, groups, counts = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    is_even = len(counts) > 1 and int(counts.min()) == int(counts.max()) > 1
    return groups if is_even else None


def _inputs_of(step: RecordedStep) -> list[Tensor]:
    """Returns the dense tensors among the inputs of the models."""
    return dense([c.tensor for call in step.calls for c in constants_of((call.args, call.kwargs))])


def _may_be_noise(target: Tensor) -> bool:
    is_float = bool(dense([target])) and target.is_floating_point() and target.dim() > 1 and not target.requires_grad
    return is_float and len(target) > 3 and target.numel() >= MIN_UNIFORM


def _is_uniform(target: Tensor) -> Tensor:
    """Returns True if the elements are uniform between 0 and 1, and neighbours are not correlated."""
    flat = target.flatten()[:MAX_UNIFORM].float()
    ordered, count = flat.sort().values, len(flat)
    distance = (ordered - torch.arange(1, count + 1, device=flat.device) / count).abs().amax()
    centred = flat - flat.mean()
    correlation = (centred[1:] * centred[:-1]).mean() / centred.square().mean().clamp(min=1e-12)
    is_within = (target >= 0).all() & (target < 1).all()
    return is_within & (distance < 2 / math.sqrt(count)) & (correlation.abs() < 5 / math.sqrt(count))


def _is_mixed_in(inputs: Tensor, target: Tensor) -> Tensor:
    """Returns True if samples of the input contain the target, each with a different factor."""
    signal, noise = (each.detach().reshape(len(target), -1).float() for each in (inputs, target))
    signal = signal - signal.mean(1, keepdim=True)
    noise = noise - noise.mean(1, keepdim=True)
    products, squares = (signal * noise).sum(1), noise.square().sum(1)
    # samples with few elements have large factors by chance, so quartiles are compared
    low, median, high = (products / squares.clamp(min=1e-12)).quantile(torch.tensor([0.25, 0.5, 0.75]).to(squares))
    explained = products.sum().square() / (squares.sum() * signal.square().sum()).clamp(min=1e-12)
    return torch.stack([median > 0.05, high - low > 0.05, explained < MAX_EXPLAINED]).all()


def _weight_of_sum(term: Term, makers: Mapping[int, Operation], step: RecordedStep) -> float | None:
    """Returns the weight per sample of a term that is a sum over features; None for other terms."""
    made = makers.get(term.slot)
    rows = next((len(each) for each in _inputs_of(step) if each.dim() > 1), 0)
    if made is None or made.name not in ("sum", "mean") or not rows:
        return None
    if made.name == "sum":
        is_all = len(made.args) == 1 and not made.kwargs.get("dim")
        return abs(term.coefficient) * rows if is_all else None
    for _ in range(4):  # the mean over samples of a sum over features
        slot = next((each.number for each in made.args if type(each) is Slot), None)
        made = makers.get(slot) if slot is not None else None
        if made is None or made.name not in ("sum", "mul", "rmul", "neg", "div"):
            return None
        if made.name == "sum":
            return abs(term.coefficient)
    return None
