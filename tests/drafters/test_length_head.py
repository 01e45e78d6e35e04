"""The length head: rounding, isolation from the drafter, masking, and no collapse under online updates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.length_head import LengthHead, length_loss, length_targets, verify_len_from


@pytest.mark.parametrize("block_size", range(2, 17))
def test_a_perfect_prediction_gives_back_the_label(block_size: int) -> None:
    accepted = torch.arange(block_size)
    ratio = length_targets(accepted, block_size)
    assert ratio.max() == 1
    assert torch.equal(verify_len_from(ratio, 1.0, block_size), accepted + 1)


@given(st.floats(0, 1, width=32), st.floats(0, 3), st.integers(2, 32))
def test_verify_len_is_the_clamped_floor(ratio: float, gamma: float, block_size: int) -> None:
    value = int(verify_len_from(torch.tensor([ratio]), gamma, block_size)[0])
    assert 1 <= value <= block_size
    exact = ratio * gamma * block_size
    if exact < 1:
        assert value == 1 or exact > 1 - 1e-5
    elif exact >= block_size:
        assert value == block_size
    else:
        assert value - 1e-5 <= exact < value + 1


def test_gamma_scales_before_the_floor() -> None:
    ratio = torch.tensor([0.5, 0.5, 0.11, 0.99])
    assert verify_len_from(ratio, 1.0, 8).tolist() == [4, 4, 1, 7]
    assert verify_len_from(ratio, 1.2, 8).tolist() == [4, 4, 1, 8]
    assert verify_len_from(ratio, 0.5, 8).tolist() == [2, 2, 1, 3]
    assert verify_len_from(ratio, 9.0, 8).tolist() == [8, 8, 7, 8]


def test_predictions_are_shares_and_pool_over_the_block() -> None:
    head = LengthHead(6, width=4)
    features = torch.randn(3, 5, 6)
    predicted = head(features)
    assert predicted.shape == (3,)
    assert predicted.dtype == torch.float32
    assert ((predicted > 0) & (predicted < 1)).all()
    torch.testing.assert_close(head(features.flip(1)), predicted)
    torch.testing.assert_close(head(features[1:2]), predicted[1:2])
    assert head(features.bfloat16()).dtype == torch.float32


def test_the_gradient_stops_at_the_features() -> None:
    head = LengthHead(6, width=4)
    features = torch.randn(3, 5, 6, requires_grad=True)
    loss = length_loss(head(features * 2), torch.tensor([1, 2, 3]), torch.ones(3, dtype=torch.bool), 5)
    loss.backward()
    assert features.grad is None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


def test_blocks_of_unknown_acceptance_do_not_count() -> None:
    predicted = torch.tensor([0.5, 0.9, 0.1], requires_grad=True)
    accepted = torch.tensor([1, 0, 3])
    complete = torch.tensor([True, False, True])
    loss = length_loss(predicted, accepted, complete, 4)
    assert loss.item() == pytest.approx(((0.5 - 0.5) ** 2 + (0.1 - 1.0) ** 2) / 2)
    loss.backward()
    assert predicted.grad is not None
    assert predicted.grad[1] == 0
    nothing = length_loss(predicted, accepted, torch.zeros(3, dtype=torch.bool), 4)
    assert nothing.item() == 0
    nothing.backward()


def online_verify_lens(censored: bool) -> tuple[float, list[float]]:
    """Label mean, and mean verify_len at each of 50 online updates on fresh traffic.

    Acceptance is geometric with a rate that the features reveal. A head that fits the labels serves;
    `censored` learns from what truncated verification saw instead of the full block.
    """
    block_size, generator = 16, torch.Generator().manual_seed(0)

    def traffic(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rate = 0.6 + 0.35 * torch.rand(count, generator=generator)
        features = torch.randn(count, block_size, 8, generator=generator) * 0.1 + rate[:, None, None] * 2
        hits = torch.rand(count, block_size - 1, generator=generator) < rate[:, None]
        return features, hits.long().cumprod(dim=1).sum(dim=1)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = LengthHead(8, width=16)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)

    def update(features: torch.Tensor, accepted: torch.Tensor, steps: int) -> None:
        complete = torch.ones(len(accepted), dtype=torch.bool)
        for _ in range(steps):
            loss = length_loss(head(features), accepted, complete, block_size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    features, accepted = traffic(2048)
    label_mean = float(accepted.float().mean()) + 1
    update(features, accepted, 200)
    optimizer.param_groups[0]["lr"] = 3e-3
    means = []
    for _ in range(50):
        features, accepted = traffic(512)
        with torch.no_grad():
            verify_len = verify_len_from(head(features), 1.0, block_size)
        means.append(float(verify_len.float().mean()))
        update(features, accepted.minimum(verify_len - 1) if censored else accepted, 8)
    return label_mean, means


def test_fifty_online_updates_keep_the_length() -> None:
    label_mean, means = online_verify_lens(censored=False)
    assert label_mean > 4
    assert max(abs(mean - label_mean) for mean in means) < 1


def test_labels_cut_by_verification_walk_down() -> None:
    label_mean, means = online_verify_lens(censored=True)
    assert abs(means[0] - label_mean) < 1
    assert means[-1] < 1.5
