"""The acceptance head: for each drafted slot, how likely the target accepts it once it has accepted all before.

It reads what is known before a draft is drawn: the drafter's hidden state at the slot, which slot it is, and, if asked to, how
sure the drafter is (the log-probability of its likeliest token). The last is a function of q, not of the drawn draft, so
lengths chosen from it are lossless with sampled drafts too. It is there because a well-trained drafter's own certainty nearly is
the answer, and a small network could hardly recover it from the hidden state: it takes a softmax over the whole head.

Labels are those of greedy verification. At temperatures above 0 the head still ranks slots, but is not calibrated for them.

Shapes: N blocks, B block size, D drafts of a block (B-1), H hidden size, R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

MAX_LOGIT = 6.0
"""Bound of the drafter's certainty as a logit: beyond it bfloat16 rounds probabilities to 1."""

_SOFTMAX_ROWS = 16


class AcceptanceHead(nn.Module):
    """Predicts a_j = P(draft j accepted | drafts 1..j-1 accepted) for j = 1..D.

    hidden [N, B, H] → Linear(H→width) + SiLU → Linear, a bias for each slot, and with `confidence` the logit of the drafter's
    own certainty times a learned weight that begins at 1; then a = sigmoid(scale·logit + shift), whose two numbers `calibrate`
    fits on blocks that training has not seen. Inputs are detached: its loss never reaches the drafter.
    """

    calibration: torch.Tensor

    def __init__(
        self, hidden_size: int, block_size: int, width: int = 128, *, confidence: bool = True
    ) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size, width)
        self.out = nn.Linear(width, 1)
        self.slot_bias = nn.Parameter(torch.zeros(block_size - 1))
        self.confidence_weight = nn.Parameter(torch.ones(1)) if confidence else None
        self.register_buffer("calibration", torch.tensor([1.0, 0.0]))

    @property
    def reads_confidence(self) -> bool:
        return self.confidence_weight is not None

    @property
    def block_size(self) -> int:
        return self.slot_bias.numel() + 1

    def raw_logits(self, hidden_NBH: torch.Tensor, confidence_ND: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [N, D] before calibration, fp32.

        `confidence_ND` holds log-probabilities of the drafter's likeliest tokens; needed if the head reads them.
        """
        x = hidden_NBH[:, 1:].detach().to(self.proj.weight.dtype)
        logits_ND = self.out(F.silu(self.proj(x))).squeeze(-1).float() + self.slot_bias.float()
        if self.confidence_weight is not None:
            if confidence_ND is None:
                raise ValueError("this acceptance head reads the drafter's confidence, and was given none")
            logits_ND = logits_ND + self.confidence_weight.float() * certainty_logit(confidence_ND.detach())
        return logits_ND

    def logits(self, hidden_NBH: torch.Tensor, confidence_ND: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [N, D], fp32, calibrated."""
        scale, shift = self.calibration.float()
        return self.raw_logits(hidden_NBH, confidence_ND) * scale + shift

    def forward(self, hidden_NBH: torch.Tensor, confidence_ND: torch.Tensor | None = None) -> torch.Tensor:
        """Conditional acceptance a [N, D], fp32, calibrated."""
        return torch.sigmoid(self.logits(hidden_NBH, confidence_ND))

    def survival(self, hidden_NBH: torch.Tensor, confidence_ND: torch.Tensor | None = None) -> torch.Tensor:
        """S_j = Π_{i≤j} a_i, the chance that drafts 1..j are all accepted; [N, D] fp32, falling along a block."""
        return self(hidden_NBH, confidence_ND).cumprod(dim=1)


def certainty_logit(log_probability: torch.Tensor) -> torch.Tensor:
    """log(p / (1-p)) from log p, fp32, bounded by ±MAX_LOGIT."""
    logp = log_probability.float().clamp_max(0.0)
    # the bound below keeps log(1-p) finite at p = 1
    rest = torch.log(-torch.expm1(logp.clamp_max(-1e-6)))
    return (logp - rest).clamp(-MAX_LOGIT, MAX_LOGIT)


def draft_confidence(logits_RV: torch.Tensor) -> torch.Tensor:
    """Log-probability of the likeliest token of each row, [R] fp32; as precise as probabilities in the logits' data type are.

    softmax adds up in full precision and rounds its result: half the time of a float copy of bfloat16 logits, and unlike a
    rounded log-sum-exp still telling 0.99 from 0.9.
    """
    best = [part.softmax(dim=-1).amax(dim=-1) for part in logits_RV.split(_SOFTMAX_ROWS)]
    return torch.cat(best).float().log()


def confident_argmax(
    hidden_RH: torch.Tensor, head_VH: torch.Tensor, rows: int = 512
) -> tuple[torch.Tensor, torch.Tensor]:
    """Likeliest tokens [R] int64 and their log-probabilities [R] fp32, without ever holding [R, V].

    In the head's own precision, as in serving, whatever autocast says.
    """
    tokens, confidence = [hidden_RH.new_zeros(0, dtype=torch.long)], [hidden_RH.new_zeros(0).float()]
    with torch.autocast(hidden_RH.device.type, enabled=False):
        for part in hidden_RH.split(rows):
            logits = part.to(head_VH.dtype) @ head_VH.T
            tokens.append(logits.max(dim=-1).indices)
            confidence.append(draft_confidence(logits))
    return torch.cat(tokens), torch.cat(confidence)


def acceptance_labels(match_NB: torch.Tensor, valid_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted_ND, counted_ND), both bool, of full blocks against the served text.

    Slot j counts where slots 1..j-1 all match, as the label is conditional on that, and where it lies inside the text: what
    would have come after EOS or a length cap is unknown. Slots of a cut block before its end are known and count; leaving them
    out would keep, of the blocks near an end, only those that failed before it. `match_NB` must come from whole blocks, never
    from truncated verification, which would let no slot beyond verify_len be learnt.
    """
    accepted_ND, valid_ND = match_NB[:, 1:], valid_NB[:, 1:]
    before_ND = F.pad(accepted_ND[:, :-1].long(), (1, 0), value=1).cumprod(dim=1).bool()
    return accepted_ND & valid_ND, before_ND & valid_ND


def acceptance_loss(
    logits_ND: torch.Tensor, accepted_ND: torch.Tensor, counted_ND: torch.Tensor
) -> torch.Tensor:
    """Mean binary cross-entropy over counted slots, fp32; 0 (with a graph) when none counts."""
    labels_ND, kept_ND = accepted_ND.to(logits_ND.dtype), counted_ND.to(logits_ND.dtype)
    loss_ND = F.binary_cross_entropy_with_logits(logits_ND, labels_ND, reduction="none")
    return (loss_ND * kept_ND).sum() / kept_ND.sum().clamp_min(1.0)
