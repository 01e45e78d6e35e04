"""The chunked block loss against eager autograd in float64, and what it lets through to memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drafters.block_loss import (
    BlockTargets,
    accepted_prefix,
    block_loss,
    prefix_complete,
)
from drafters.fill import fill_blocks
from drafters.objectives import ClipMode, LossSpec, Weighting, fixed_weights
from drafters.packing import pack_documents

BLOCKS, BLOCK, HIDDEN, VOCAB, TOKENS = 6, 4, 5, 9, 24
VALID_LENGTHS = [3, 0, 2, 3, 1, 3]


@dataclasses.dataclass(frozen=True)
class Case:
    hidden_NBH: torch.Tensor
    head_VH: torch.Tensor
    teacher_hidden_TH: torch.Tensor
    targets: BlockTargets


@pytest.fixture
def case() -> Case:
    """Overlapping blocks; the served text departs from the teacher's greedy choice at one slot of three blocks."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    head, teacher_hidden = normal(VOCAB, HIDDEN), normal(TOKENS, HIDDEN)
    anchors = torch.tensor([2, 3, 5, 11, 12, 18])
    teacher_NB = anchors[:, None] + torch.arange(BLOCK) - 1
    greedy_NB = (teacher_hidden @ head.T).argmax(dim=-1)[teacher_NB]
    served_NB = greedy_NB.clone()
    for block, slot in ((0, 2), (3, 1), (5, 3)):
        served_NB[block, slot] = (greedy_NB[block, slot] + 1) % VOCAB
    valid_NB = torch.tensor([[0 < j <= length for j in range(BLOCK)] for length in VALID_LENGTHS])
    # hidden states near the teacher's, so that some slots match and some ratios fall below the clip
    hidden = teacher_hidden[teacher_NB] + 0.3 * normal(BLOCKS, BLOCK, HIDDEN)
    return Case(hidden, head, teacher_hidden, BlockTargets(served_NB, valid_NB, teacher_NB))


def reference(
    case: Case, spec: LossSpec, slot_loss: Callable[..., torch.Tensor], *, teacher_labels: bool = True
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Value, gradient and weight sum by autograd over one slot after another."""
    hidden = case.hidden_NBH.clone().requires_grad_()
    rows: list[tuple[float, torch.Tensor]] = []
    decay = spec.decay or BLOCK / 2
    fixed = [math.exp(-(j - 1) / decay) if spec.weighting == "exponential" else 1.0 for j in range(BLOCK)]
    total = sum(fixed[j] for length in VALID_LENGTHS for j in range(1, length + 1))
    for n, length in enumerate(VALID_LENGTHS):
        hard, losses, a = True, [], []
        for j in range(1, length + 1):
            logits = case.head_VH @ hidden[n, j]
            teacher = case.head_VH @ case.teacher_hidden_TH[case.targets.teacher_NB[n, j]]
            served = int(case.targets.served_NB[n, j])
            label = int(teacher.argmax()) if teacher_labels else served
            losses.append(slot_loss(logits, teacher, label, hard, spec, total))
            a.append(torch.softmax(logits.detach(), dim=0)[label].item())
            hard = hard and label == served
        smoothed = [(1 - spec.survival_floor) * x + spec.survival_floor for x in a]
        survive = [math.prod(smoothed[: k + 1]) for k in range(length)]
        weights = [sum(survive[j:]) for j in range(length)] if spec.weighting == "survival" else fixed[1:]
        rows += list(zip(weights, losses, strict=False))
    weight_sum = sum(w for w, _ in rows)
    value = torch.stack([w * loss for w, loss in rows]).sum() / weight_sum
    (gradient,) = torch.autograd.grad(value, hidden)
    return value.detach(), gradient, weight_sum


def run(case: Case, spec: LossSpec, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = case.hidden_NBH.clone().requires_grad_()
    value = block_loss(hidden, case.head_VH, case.targets, spec, **options).value
    (gradient,) = torch.autograd.grad(value, hidden)
    return value.detach(), gradient


SPECS = [
    LossSpec(objective=objective, clip=clip, weighting=weighting, delta=0.05)
    for weighting in get_args(Weighting)
    for objective, clip in [("ce", "none"), ("osd", "none"), *(("opd", clip) for clip in get_args(ClipMode))]
    if (weighting, clip) != ("survival", "position_normalised")
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.weighting}-{s.objective}-{s.clip}")
def test_chunks_equal_eager_autograd(
    case: Case, spec: LossSpec, reference_slot_loss: Callable[..., torch.Tensor]
) -> None:
    expected = reference(case, spec, reference_slot_loss)[:2]
    for chunk_rows in (1, 7, 1000):
        got = run(case, spec, teacher_hidden_TH=case.teacher_hidden_TH, chunk_rows=chunk_rows)
        torch.testing.assert_close(got, expected, rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.weighting}-{s.objective}-{s.clip}")
def test_a_trained_head_gets_its_gradient_too(
    case: Case, spec: LossSpec, reference_slot_loss: Callable[..., torch.Tensor]
) -> None:
    """The drafter's head is not the target's: value and both gradients against autograd, slot after slot."""
    generator = torch.Generator().manual_seed(4)
    own = case.head_VH + 0.3 * torch.randn(case.head_VH.shape, generator=generator, dtype=torch.float64)

    def leaves() -> tuple[torch.Tensor, torch.Tensor]:
        return case.hidden_NBH.clone().requires_grad_(), own.clone().requires_grad_()

    hidden, head = leaves()
    weights, losses = [], []
    fixed = fixed_weights(spec, BLOCK).double()
    total = float((fixed * case.targets.valid_NB).sum())
    for n, length in enumerate(VALID_LENGTHS):
        hard, a = True, []
        for j in range(1, length + 1):
            logits = head @ hidden[n, j]
            teacher = case.head_VH @ case.teacher_hidden_TH[case.targets.teacher_NB[n, j]]
            label, served = int(teacher.argmax()), int(case.targets.served_NB[n, j])
            losses.append(reference_slot_loss(logits, teacher, label, hard, spec, total))
            a.append(
                (1 - spec.survival_floor) * float(logits.detach().softmax(0)[label]) + spec.survival_floor
            )
            hard = hard and label == served
        survive = [math.prod(a[: k + 1]) for k in range(length)]
        weights += [
            sum(survive[j - 1 :]) if spec.weighting == "survival" else float(fixed[j])
            for j in range(1, length + 1)
        ]
    value = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert isinstance(value, torch.Tensor)
    expected = torch.autograd.grad(value, (hidden, head))
    for chunk_rows in (1, 7, 1000):
        mine = leaves()
        got = block_loss(
            mine[0],
            mine[1],
            case.targets,
            spec,
            teacher_hidden_TH=case.teacher_hidden_TH,
            teacher_head_VH=case.head_VH,
            chunk_rows=chunk_rows,
        ).value
        torch.testing.assert_close(got, value, rtol=3e-7, atol=1e-9)
        torch.testing.assert_close(torch.autograd.grad(got, mine), expected, rtol=3e-7, atol=1e-9)


def test_cross_entropy_without_teacher_takes_served_tokens(
    case: Case, reference_slot_loss: Callable[..., torch.Tensor]
) -> None:
    spec = LossSpec(decay=1.5)
    served = reference(case, spec, reference_slot_loss, teacher_labels=False)[:2]
    torch.testing.assert_close(run(case, spec), served, rtol=3e-7, atol=1e-9)
    with_teacher = run(case, spec, teacher_hidden_TH=case.teacher_hidden_TH)
    assert not torch.allclose(with_teacher[0], served[0])


def test_hard_labels_are_dropped_after_the_served_text_leaves_the_greedy_one(case: Case) -> None:
    _, gradient = run(case, LossSpec(), teacher_hidden_TH=case.teacher_hidden_TH)
    touched = gradient.abs().sum(dim=-1) > 0
    expected = case.targets.valid_NB.clone()
    expected[0, 3] = False  # block 0 departs at slot 2, which still has its own label
    expected[3, 2:] = False
    assert torch.equal(touched, expected)


def test_survival_weighted_cross_entropy_is_the_gradient_of_the_expected_acceptance(
    case: Case, reference_slot_loss: Callable[..., torch.Tensor]
) -> None:
    greedy = case.targets.served_NB.clone()
    for block, slot in ((0, 2), (3, 1), (5, 3)):
        greedy[block, slot] = (greedy[block, slot] - 1) % VOCAB
    case = dataclasses.replace(case, targets=dataclasses.replace(case.targets, served_NB=greedy))
    spec = LossSpec(weighting="survival", survival_floor=0.0)
    hidden = case.hidden_NBH.clone().requires_grad_()
    a = (hidden @ case.head_VH.T).softmax(dim=-1).gather(-1, greedy[..., None])[..., 0]
    accepted = torch.stack(
        [a[n, 1 : k + 1].prod() for n, length in enumerate(VALID_LENGTHS) for k in range(1, length + 1)]
    ).sum()
    (gradient,) = torch.autograd.grad(-accepted, hidden)
    weight_sum = reference(case, spec, reference_slot_loss)[2]
    torch.testing.assert_close(run(case, spec)[1] * weight_sum, gradient, rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("clip", ["none", "bounded"])
def test_gradient_equals_finite_differences(case: Case, clip: ClipMode) -> None:
    spec = LossSpec(objective="opd", clip=clip, delta=10.0, temperature=1.5)

    def value(hidden: torch.Tensor) -> torch.Tensor:
        return block_loss(
            hidden, case.head_VH, case.targets, spec, teacher_hidden_TH=case.teacher_hidden_TH, chunk_rows=5
        ).value

    assert torch.autograd.gradcheck(value, case.hidden_NBH.clone().requires_grad_())


def test_position_normalised_is_a_clipped_share_of_the_weight_sum(case: Case) -> None:
    delta = 0.01
    spec = LossSpec(objective="opd", alpha=0.0, clip="position_normalised", delta=delta, weighting="uniform")
    value, _ = run(case, spec, teacher_hidden_TH=case.teacher_hidden_TH)
    logq = (case.hidden_NBH @ case.head_VH.T).log_softmax(dim=-1)
    logp = (case.teacher_hidden_TH @ case.head_VH.T).log_softmax(dim=-1)[case.targets.teacher_NB]
    kl = (logq.exp() * (logq - logp)).sum(dim=-1)[case.targets.valid_NB]
    share = kl / case.targets.valid_NB.sum()
    assert (share > delta).any()
    assert (share < delta).any()
    torch.testing.assert_close(value, share.clamp_max(delta).sum())


def test_matches_and_agreement_are_about_the_served_text(case: Case) -> None:
    targets = case.targets
    result = block_loss(
        case.hidden_NBH, case.head_VH, targets, LossSpec(), teacher_hidden_TH=case.teacher_hidden_TH
    )
    expected = ((case.hidden_NBH @ case.head_VH.T).argmax(dim=-1) == targets.served_NB) & targets.valid_NB
    assert expected.any()
    assert torch.equal(result.match_NB, expected)
    assert result.labels_agree == pytest.approx(9 / 12)


def test_a_batch_without_a_valid_slot_is_harmless(case: Case) -> None:
    nothing = dataclasses.replace(case.targets, valid_NB=torch.zeros_like(case.targets.valid_NB))
    for spec in (LossSpec(), LossSpec(weighting="survival"), LossSpec(objective="opd")):
        value, gradient = run(
            dataclasses.replace(case, targets=nothing), spec, teacher_hidden_TH=case.teacher_hidden_TH
        )
        assert value == 0
        assert (gradient == 0).all()


def test_distillation_needs_the_teacher(case: Case) -> None:
    with pytest.raises(ValueError, match="hidden states"):
        block_loss(case.hidden_NBH, case.head_VH, case.targets, LossSpec(objective="opd"))


def test_invalid_slots_and_slot_zero_are_never_read(case: Case) -> None:
    poisoned = case.hidden_NBH.clone()
    poisoned[~case.targets.valid_NB] = float("nan")
    spec = LossSpec(objective="opd", weighting="survival")
    expected = run(case, spec, teacher_hidden_TH=case.teacher_hidden_TH)
    got = run(dataclasses.replace(case, hidden_NBH=poisoned), spec, teacher_hidden_TH=case.teacher_hidden_TH)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_mixed_precision_regions_leave_the_loss_alone(case: Case) -> None:
    single = dataclasses.replace(
        case,
        hidden_NBH=case.hidden_NBH.float(),
        head_VH=case.head_VH.float(),
        teacher_hidden_TH=case.teacher_hidden_TH.float(),
    )
    spec = LossSpec(objective="opd")
    expected = run(single, spec, teacher_hidden_TH=single.teacher_hidden_TH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(single, spec, teacher_hidden_TH=single.teacher_hidden_TH)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_half_precision_hidden_states_get_gradients_of_their_own_type(case: Case) -> None:
    hidden = case.hidden_NBH.to(torch.bfloat16).requires_grad_()
    value = block_loss(hidden, case.head_VH.float(), case.targets, LossSpec()).value
    value.backward()
    assert value.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    exact = run(case, LossSpec())
    torch.testing.assert_close(hidden.grad.double(), exact[1], rtol=0.1, atol=0.02)


def test_on_greedy_text_the_teachers_labels_are_the_served_tokens(trained: Any) -> None:
    """Ties the layout to the real target: one position off, and the labels would no longer agree."""
    batch = pack_documents(trained.documents[:3], anchors_per_document=0, anchor_source="all")
    output = trained.target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    filled = fill_blocks(trained.drafter, trained.target, batch, output.features_TC)
    targets = BlockTargets.from_layout(batch, filled.layout)
    head = trained.target.head_VH
    served = block_loss(filled.hidden_NBH, head, targets, LossSpec())
    taught = block_loss(filled.hidden_NBH, head, targets, LossSpec(), teacher_hidden_TH=output.hidden_TH)
    assert taught.labels_agree == 1
    torch.testing.assert_close(taught.value, served.value)
    assert 0.1 < taught.match_NB.sum() / targets.valid_NB.sum() < 0.95


class LargestOutput(TorchDispatchMode):
    """Remembers the most elements that any operation produced, and the rows multiplied with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.head_rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        if func is torch.ops.aten.mm.default and out.shape[1] == 997:
            self.head_rows += out.shape[0]
        return out


def largest_output(num_blocks: int) -> LargestOutput:
    """One loss over a document with a block at every second token, three valid slots of seven."""
    generator = torch.Generator().manual_seed(1)
    block, hidden, vocab = 8, 4, 997
    anchors = torch.arange(num_blocks) * 2 + 1
    teacher_NB = anchors[:, None] + torch.arange(block) - 1
    valid_NB = torch.zeros(num_blocks, block, dtype=torch.bool)
    valid_NB[:, 1:4] = True
    tokens = int(teacher_NB.max()) + 1
    x = torch.randn(num_blocks, block, hidden, generator=generator).requires_grad_()
    with LargestOutput() as mode:
        block_loss(
            x,
            torch.randn(vocab, hidden, generator=generator),
            BlockTargets(torch.zeros(num_blocks, block, dtype=torch.long), valid_NB, teacher_NB),
            LossSpec(objective="opd"),
            teacher_hidden_TH=torch.randn(tokens, hidden, generator=generator),
            chunk_rows=28,
        ).value.backward()
    return mode


def test_memory_does_not_grow_with_the_number_of_slots() -> None:
    few, many = largest_output(8), largest_output(80)
    assert few.largest == many.largest
    assert many.largest <= 28 * 997


def test_the_head_runs_once_per_counted_slot_and_once_per_distinct_target_position() -> None:
    mode = largest_output(8)
    # two chunks of four blocks: 12 counted slots each, which share 9 target positions
    assert mode.head_rows == 2 * (12 + 9)


def test_accepted_prefix_and_its_completeness() -> None:
    match = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).bool()
    valid = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).bool()
    assert accepted_prefix(match).tolist() == [3, 1, 0, 1, 2]
    # the last two blocks are cut by the end of the text before the first mismatch
    assert prefix_complete(match, valid).tolist() == [True, True, True, False, False]
    assert prefix_complete(match[3:] & False, valid[3:]).tolist() == [True, True]


def test_of_equal_logits_the_first_is_the_draft() -> None:
    """As `argmax` has it; half precision makes ties common."""
    hidden = torch.ones(1, 4, 1)
    head = torch.tensor([[1.0], [3.0], [3.0], [2.0]])
    valid = torch.tensor([[False, True, True, True]])
    served = torch.tensor([[0, 1, 2, 3]])
    targets = BlockTargets(served, valid, torch.zeros(1, 4, dtype=torch.long))
    assert block_loss(hidden, head, targets, LossSpec()).match_NB.tolist() == [[False, True, False, False]]
