"""Length policies behind their one interface."""

from __future__ import annotations

import pytest
import torch

from drafters.errors import UserError
from drafters.length_head import LengthHead
from drafters.policies import AdaFlashPolicy, FixedPolicy, Load

BLOCK = 8
HIDDEN = torch.randn(3, BLOCK, 4, generator=torch.Generator().manual_seed(0))
EMBEDDINGS = torch.zeros(3, BLOCK, 4)


def constant_head(ratio: float, features: str = "hidden") -> LengthHead:
    """Predicts `ratio` where its features are zero."""
    head = LengthHead(4, width=2, features=features)  # type: ignore[arg-type]
    with torch.no_grad():
        head.proj.bias.zero_()
        head.out.bias.fill_(torch.logit(torch.tensor(ratio)))
    return head


def test_fixed_verifies_the_same_length_everywhere() -> None:
    for length in range(1, BLOCK + 1):
        got = FixedPolicy(length).verify_len(HIDDEN, EMBEDDINGS, Load())
        assert (got.tolist(), got.dtype) == ([length] * 3, torch.int64)
    assert FixedPolicy().verify_len(HIDDEN, EMBEDDINGS, Load(50)).tolist() == [BLOCK] * 3


@pytest.mark.parametrize("length", [0, -1, BLOCK + 1])
def test_impossible_fixed_lengths_are_refused(length: int) -> None:
    with pytest.raises(UserError, match=r"policy\.length"):
        FixedPolicy(length).verify_len(HIDDEN, EMBEDDINGS, Load())


def test_gamma_is_chosen_by_the_highest_threshold_reached() -> None:
    policy = AdaFlashPolicy(
        constant_head(0.5), gamma=1.0, gamma_by_load={32: 0.5, 4: 1.5, 16: 0.75}, off_below_load=2
    )
    gammas = [policy.gamma_at(Load(n)) for n in (1, 3, 4, 15, 16, 31, 32, 500)]
    assert gammas == [1.0, 1.0, 1.5, 1.5, 0.75, 0.75, 0.5, 0.5]
    # (0.5 + a hair)·γ·8, on features that the head maps to its bias
    lens = [policy.verify_len(EMBEDDINGS, HIDDEN, Load(n)).tolist() for n in (1, 2, 4, 16, 32)]
    assert lens == [[8] * 3, [4] * 3, [6] * 3, [3] * 3, [2] * 3]


def test_below_the_load_threshold_the_head_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    head = constant_head(0.1)
    policy = AdaFlashPolicy(head, off_below_load=8)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("the head was asked")

    monkeypatch.setattr(head, "forward", refuse)
    assert policy.verify_len(HIDDEN, EMBEDDINGS, Load(7)).tolist() == [BLOCK] * 3
    with pytest.raises(AssertionError, match="asked"):
        policy.verify_len(HIDDEN, EMBEDDINGS, Load(8))


def test_the_head_reads_the_features_it_was_made_for() -> None:
    """Zero features give the bias, others do not: so it shows which input was read."""
    for features, zero, other in (
        ("hidden", EMBEDDINGS, HIDDEN * 50),
        ("embedding", EMBEDDINGS, HIDDEN * 50),
    ):
        head = constant_head(0.5, features)
        with torch.no_grad():
            head.out.weight.fill_(9.0)
            head.proj.weight.fill_(1.0)
        policy = AdaFlashPolicy(head)
        hidden, embeddings = (zero, other) if features == "hidden" else (other, zero)
        assert policy.verify_len(hidden, embeddings, Load()).tolist() == [4] * 3
        assert policy.verify_len(embeddings, hidden, Load()).tolist() != [4] * 3


def test_a_policy_answers_without_a_graph() -> None:
    lens = AdaFlashPolicy(constant_head(0.5)).verify_len(HIDDEN, EMBEDDINGS, Load())
    assert lens.dtype == torch.int64
    assert not lens.requires_grad
