"""Parameters of targets and drafters, exactly; FLOPs follow from the matrices among them.

H hidden, I intermediate, V vocabulary, K·D width of all query heads, G·D of all key heads, n context layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.plan.architecture import Architecture, LinearAttention


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a causal LM, in elements.

    Attributes:
        embedding: V·H.
        head: V·H, 0 if tied to the embedding.
        matrices: of all decoder layers; the weights that a token is multiplied by, all experts counted.
        mlp_matrices: those of them that belong to dense MLPs, all layers.
        idle_matrices: those of the experts that a token does not pass through.
        vectors: norms, biases, and what else is added or multiplied by element.
        largest_layer: matrices and vectors of the largest decoder layer.
    """

    embedding: int
    head: int
    matrices: int
    mlp_matrices: int
    idle_matrices: int
    vectors: int
    largest_layer: int

    @property
    def total(self) -> int:
        """All parameters, each once."""
        return self.embedding + self.head + self.matrices + self.vectors

    @property
    def active(self) -> int:
        """Parameters that one token passes through, embedding and head included as model cards count them."""
        return self.total - self.idle_matrices


def model_size(arch: Architecture) -> ModelSize:
    """Parameters of a causal LM."""
    matrices = mlp_matrices = idle = vectors = largest = 0
    for full, sparse in zip(arch.full_attention, arch.sparse, strict=True):
        layer_matrices, layer_vectors = attention_size(arch) if full else _linear_attention_size(arch)
        layer_vectors += 2 * arch.hidden
        if sparse:
            assert arch.experts is not None
            expert = 3 * arch.hidden * arch.experts.intermediate
            layer_matrices += arch.experts.held * (expert + arch.hidden)  # with its row of the router
            idle += (arch.experts.held - arch.experts.active) * expert
        else:
            mlp = 3 * arch.hidden * arch.intermediate
            layer_matrices += mlp
            mlp_matrices += mlp
            layer_vectors += arch.mlp_bias * (2 * arch.intermediate + arch.hidden)
        matrices += layer_matrices
        vectors += layer_vectors
        largest = max(largest, layer_matrices + layer_vectors)
    table = arch.vocab * arch.hidden
    return ModelSize(
        embedding=table,
        head=0 if arch.tied else table,
        matrices=matrices,
        mlp_matrices=mlp_matrices,
        idle_matrices=idle,
        vectors=vectors + arch.hidden,
        largest_layer=largest,
    )


def attention_size(arch: Architecture) -> tuple[int, int]:
    """Elements of the matrices and of the vectors of one layer of softmax attention."""
    queries = arch.query_width * (2 if arch.gated_attention else 1)
    matrices = arch.hidden * (queries + 2 * arch.kv_width + arch.query_width)
    vectors = arch.attention_bias * (queries + 2 * arch.kv_width + arch.hidden)
    return matrices, vectors + arch.qk_norm * 2 * arch.head_dim


def _linear_attention_size(arch: Architecture) -> tuple[int, int]:
    """The same of a Gated DeltaNet layer; its convolution counts as vectors: it is no product of matrices."""
    linear = _linear(arch)
    matrices = arch.hidden * (linear.projection_width + linear.value_width)
    convolution = (2 * linear.key_width + linear.value_width) * linear.kernel
    return matrices, convolution + 2 * linear.value_heads + linear.value_dim


def _linear(arch: Architecture) -> LinearAttention:
    assert arch.linear is not None
    return arch.linear


@dataclass(frozen=True)
class DFlashSize:
    """Parameters of a DFlash drafter, in elements; embedding and head are the target's.

    Attributes:
        fc: n·H·H, the projection of the context features.
        context_matrices: key and value projections of all layers, through which context and slots pass.
        slot_matrices: the rest of the attention of all layers.
        mlp_matrices: of all layers.
        vectors: norms.
        layers: decoder layers.
    """

    fc: int
    context_matrices: int
    slot_matrices: int
    mlp_matrices: int
    vectors: int
    layers: int

    @property
    def matrices(self) -> int:
        """All matrices."""
        return self.fc + self.context_matrices + self.slot_matrices + self.mlp_matrices

    @property
    def total(self) -> int:
        """All parameters."""
        return self.matrices + self.vectors

    @property
    def largest_layer(self) -> int:
        """The largest part that is gathered at once when the drafter is sharded."""
        layer = (self.context_matrices + self.slot_matrices + self.mlp_matrices) // self.layers
        return max(self.fc, layer)


def dflash_size(target: Architecture, *, layers: int, context_layers: int) -> DFlashSize:
    """Parameters of a DFlash drafter: Qwen3 layers in the target's widths, whatever the target's own are."""
    norms = 2 * target.hidden + 2 * target.head_dim
    return DFlashSize(
        fc=context_layers * target.hidden**2,
        context_matrices=layers * 2 * target.hidden * target.kv_width,
        slot_matrices=layers * 2 * target.hidden * target.query_width,
        mlp_matrices=layers * 3 * target.hidden * target.intermediate,
        vectors=layers * norms + 2 * target.hidden,
        layers=layers,
    )


def length_head_size(hidden: int, width: int) -> int:
    """Parameters of the length head: two linear layers with biases."""
    return hidden * width + width + width + 1
