"""Adapters (LoRA, Hu et al., arXiv 2106.09685) of a layer, and what its frozen weights take in memory.

They are those that the trainer makes by default, in the precision of the model: of every matrix of a layer, but in
models with experts of those alone that mix tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from chunkplan.cost.fused import Kernels, fuses_norms
from chunkplan.cost.rates import LayerTime, Rates
from chunkplan.cost.shape import Layer, ModelShape

#: Bytes of a weight in 4 bits: NF4 in blocks of 64, each with a scale of 8 bits, of which every 256 share a float32
#: (QLoRA, Dettmers et al., arXiv 2305.14314).
FOUR_BIT_BYTES = 0.5 + (1 + 4 / 256) / 64

#: Kernels of an adapter in a forward: two products, the scaling, and the sum with what the frozen matrix makes.
ADAPTER_KERNELS = 4

#: Of an element that an adapter makes, as these kernels read and write it one by one: written by the second product,
#: read and written by the scaling; in the sum two are read and one is written. Of what goes in, the first product reads
#: each.
_MADE, _READ = 6, 1

#: Matrices of what mixes tokens: of queries, keys, values and outputs.
_MIXER_MATRICES = 4


class Adapted(NamedTuple):
    """The adapted matrices of a layer: their number, and their inputs and outputs, in elements of a token.

    An adapter of rank r is two matrices, of r times the inputs and of r times the outputs.
    """

    number: int
    inputs: int
    outputs: int

    @property
    def width(self) -> int:
        """Parameters of all adapters of rank 1."""
        return self.inputs + self.outputs

    @property
    def copied(self) -> int:
        """Elements of a token that the kernels of a forward read and write, but for the few between the matrices."""
        return _READ * self.inputs + _MADE * self.outputs


def adapted(layer: Layer, shape: ModelShape) -> Adapted:
    """The matrices of a layer of `shape` that adapters are of.

    Those that mix tokens are taken to be four, each with the hidden size on one side, as with grouped queries; with
    latents they are five, down to these and up from them. What recurrent layers have differs a little. MLPs of models
    with experts have none, see `adapts_mlps`.
    """
    hidden_size = shape.hidden_size
    count = inputs = outputs = 0
    if layer.latent_width:
        # `normed_width` has the latents of queries and of keys; of keys each head counts with its part of a position.
        count = _MIXER_MATRICES + 1
        inputs = 2 * hidden_size + layer.normed_width + layer.output_width
        outputs = layer.normed_width + layer.query_width + layer.latent_width + layer.key_value_width + hidden_size
    elif layer.mixer_parameters:
        count = _MIXER_MATRICES
        inputs = (_MIXER_MATRICES - 1) * hidden_size + layer.output_width
        outputs = layer.mixer_parameters // hidden_size - layer.output_width + hidden_size
    if layer.mlp_width and adapts_mlps(shape):
        into = 1 + layer.is_gated
        count += into + 1
        inputs += into * hidden_size + layer.mlp_width
        outputs += into * layer.mlp_width + hidden_size
    return Adapted(count, inputs, outputs)


def adapts_mlps(shape: ModelShape) -> bool:
    """True if MLPs have adapters: in models with experts no MLP, router or shared expert has any.

    Experts are one weight: their adapters would make all of them anew in every chunk, and keep them for its backward.
    """
    return not shape.has_experts


@dataclass(frozen=True)
class Adapters:
    """Adapters of `rank` in all layers of `shape`; with rank 0 there are none, and all weights are trained.

    `in_4bit`: what they adapt is kept in 4 bits. `num_bytes`: of any other weight. `kernels`: which are fused.
    """

    shape: ModelShape
    rank: int
    in_4bit: bool
    num_bytes: int
    kernels: Kernels

    @cached_property
    def number(self) -> float:
        """Adapters of a layer, on average."""
        return self._mean(lambda each: each.number)

    @cached_property
    def width(self) -> float:
        """Mean of `Adapted.width` over layers."""
        return self._mean(lambda each: each.width)

    @cached_property
    def copied(self) -> float:
        """Mean of `Adapted.copied` over layers."""
        return self._mean(lambda each: each.copied)

    def _mean(self, of: Callable[[Adapted], int]) -> float:
        return self.shape.mean(lambda layer: of(adapted(layer, self.shape))) if self.rank else 0.0

    def own_parameters(self, layer: Layer) -> int:
        """Parameters of the adapters of a layer."""
        return self.rank * adapted(layer, self.shape).width

    def trained_parameters(self, layer: Layer) -> int:
        """Parameters of a layer with gradients and optimizer states: those of all its matrices, or of its adapters."""
        return self.own_parameters(layer) if self.rank else layer.parameters(self.shape.hidden_size)

    def weight_bytes(self, layer: Layer) -> float:
        """Bytes of all weights of a layer."""
        below = layer.parameters(self.shape.hidden_size) * (FOUR_BIT_BYTES if self.in_4bit else self.num_bytes)
        return below + self.own_parameters(layer) * self.num_bytes

    @property
    def unpacked_bytes(self) -> float:
        """Bytes that are read and written to make the weights of a layer whole that are kept in 4 bits."""
        return self.shape.layer_parameters * (FOUR_BIT_BYTES + self.num_bytes) if self.in_4bit else 0.0

    def activation_bytes(self, layer: Layer) -> int:
        """Bytes that a backward reads of a token in a layer, less those where all weights are trained.

        The second matrix of each adapter reads the output of the first. Frozen norms do not read their scaled input,
        and fused norms never do. Inputs of frozen matrices are read by the first matrices of adapters alone. In MLPs
        without adapters nothing reads the norm's output, the inputs of experts, the product before the last projection,
        or the router's input.
        """
        if not self.rank:
            return 0
        more, hidden_size = self.between_bytes(layer), self.shape.hidden_size
        if self._is_left_out(layer):
            inputs = layer.experts_per_token * hidden_size + layer.mlp_width
            inputs += hidden_size * (layer.num_norms > 1 or not layer.mixer_parameters)
            more -= inputs * self.num_bytes + (4 * layer.router_width if self.num_bytes < 4 else 0)
        if fuses_norms(self.kernels, layer):
            return more
        normalised = layer.num_norms * hidden_size + layer.normed_width
        return more - normalised * (4 if layer.wide_norms else self.num_bytes)

    def between_bytes(self, layer: Layer) -> int:
        """Bytes of a token between the two matrices of all adapters of a layer."""
        return self.rank * adapted(layer, self.shape).number * self.num_bytes

    def pending_bytes(self, layer: Layer) -> int:
        """Bytes that a token holds between the halves of a backward, less those where all weights are trained.

        Each adapter holds the output of its first matrix and the gradient of it; MLPs without adapters hold nothing.
        """
        more = 2 * self.between_bytes(layer)
        if self.rank and self._is_left_out(layer):
            in_and_out = (layer.experts_per_token + (layer.num_norms > 1)) * self.shape.hidden_size
            more -= (2 * in_and_out + (2 + layer.is_gated) * layer.mlp_width) * self.num_bytes
        return more

    def _is_left_out(self, layer: Layer) -> bool:
        """True if a layer has an MLP without adapters."""
        return bool(layer.mlp_width) and not adapts_mlps(self.shape)

    def with_frozen(
        self, rates: Rates, product_ns: float, chunk_ns: float, copy_bytes: float, kernel_ns: float
    ) -> Rates:
        """`rates`, with what a backward does not do with frozen weights, and does with adapters in its weight half.

        `product_ns`: of a multiply-add; `chunk_ns`: of what a chunk takes once less in a backward, the ramp of products
        and making weights whole, as it does this once and is taken as two forwards; `copy_bytes`: a second.
        """
        if not self.rank:
            return rates
        half = product_ns * self.rank * self.width + self.width * self.num_bytes / copy_bytes * 1e9
        return rates._replace(
            frozen=LayerTime(product_ns * self.shape.active_layer_parameters, chunk_ns),
            frozen_head=product_ns * self.shape.embedding_parameters,
            weight_half=LayerTime(half, 2 * self.number * kernel_ns),
        )
