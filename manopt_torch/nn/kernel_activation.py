"""Activations that are kernel expansions, with centers and coefficients to be learned, and a network of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Kernel = Literal["abs", "relu", "green", "gauss"]

#: slopes of the piecewise linear kernels below and above their center
SLOPES = {"abs": (-1.0, 1.0), "relu": (0.0, 1.0), "green": (0.0, -1.0)}
#: Gaussian centers that are evaluated together; with more of them the rest is computed again for the gradient
CHUNK = 16

Pieces = tuple[Tensor, Tensor, Tensor]


def count_below(centers: Tensor, a: Tensor) -> Tensor:
    """How many of the sorted ``centers`` (U, d) are below each number of ``a`` (U, n).

    On a CPU by bisection in ⌈log₂(d + 1)⌉ gathers, twice as fast as ``torch.searchsorted``, whose branches are those
    of one number after another.
    """
    if not a.is_cpu:
        return torch.searchsorted(centers.contiguous(), a.contiguous())
    step = 1 << (centers.shape[-1].bit_length() - 1)
    centers = nn.functional.pad(centers, (0, 2 * step - 1 - centers.shape[-1]), value=math.inf)
    below = (centers[..., step - 1 : step] < a).long() * step
    while step > 1:
        step //= 2
        below = below.add((centers[..., step - 1 :].gather(-1, below) < a).long(), alpha=step)
    return below


class KernelActivation(nn.Module):
    """f(a) = m a + q − Σₖ χₖ g(a − cₖ), elementwise, with c and χ of its own for each unit (KBDNN, eq. 10.4).

    ::

        kernel     g(x)               f is the minimizer of the paper's functional for
        "abs"      |x|                ∫ f'², but for a linear function and a factor
        "green"    −(|x| + x)/2       ∫ f'²: −g'' = δ
        "relu"     max(0, x)          the same as "green" with χ of the other sign
        "gauss"    exp(−x²/2)/√(2π)   the smoothness of all orders that belongs to N(0, 1)

    The sum has the minus sign that follows from the variational principle. Piecewise linear kernels are evaluated by
    sorting the centers, in O(log d) for each number, and Gaussian ones a few centers at a time, so that nothing of
    shape (batch, centers, units) is kept. At a center a piecewise linear f has its slope from the left, as torch's ReLU
    has.

    Shape: ``(..., num_units)`` to the same.

    Args:
        num_units: size of the last dimension.
        num_centers: d, terms of each sum.
        kernel: g.
        linear: whether the linear part m a + q is there, and learned; it is zero at first.
        learn_centers: whether c is a parameter; otherwise it is a buffer.
        normalize: a is normalized before (``torch.nn.BatchNorm1d``), which keeps it among the centers.
        coefficients: standard deviation of χ at first, ``1/√d`` by default; 0: f = 0 at first.
        generator, dtype, device: of the initial values; c is normal, cut at ±2, and so is χ in units of its deviation.

    Raises:
        ValueError: for sizes below one, another kernel, a negative ``coefficients``; in ``forward`` for a last
            dimension other than ``num_units``.
        TypeError: in ``forward``, for an input that is not real floating point.

    Reference: G. Marra, D. Zanca, A. Betti, M. Gori, "Learning activation functions by means of kernel based neural
    networks" (KBDNN), 2018.
    """

    chi: nn.Parameter
    centers: Tensor
    m: nn.Parameter | None
    q: nn.Parameter | None

    def __init__(
        self,
        num_units: int,
        num_centers: int = 100,
        kernel: Kernel = "abs",
        *,
        linear: bool = False,
        learn_centers: bool = True,
        normalize: bool = True,
        coefficients: float | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kernel not in get_args(Kernel):
            raise ValueError(f"kernel must be one of {get_args(Kernel)}, got {kernel!r}")
        if num_units < 1 or num_centers < 1:
            raise ValueError(f"num_units and num_centers must be at least 1, got {num_units!r} and {num_centers!r}")
        deviation = 1 / math.sqrt(num_centers) if coefficients is None else coefficients
        if not deviation >= 0:
            raise ValueError(f"coefficients must be at least 0, got {coefficients!r}")
        self.num_units, self.num_centers, self.kernel = num_units, num_centers, kernel

        def normal() -> Tensor:
            empty = torch.empty(num_units, num_centers, dtype=dtype, device=device)
            return nn.init.trunc_normal_(empty, generator=generator)

        if learn_centers:
            self.centers = nn.Parameter(normal())
        else:
            self.register_buffer("centers", normal())
        self.chi = nn.Parameter(deviation * normal())
        for name in ("m", "q"):
            zero = nn.Parameter(torch.zeros(num_units, dtype=dtype, device=device)) if linear else None
            self.register_parameter(name, zero)
        self.norm = nn.BatchNorm1d(num_units, dtype=dtype, device=device) if normalize else None

    def extra_repr(self) -> str:
        return f"{self.num_units}, {self.num_centers}, kernel={self.kernel!r}"

    def forward(self, a: Tensor) -> Tensor:
        return self.function(self.normalized(a))

    def normalized(self, a: Tensor) -> Tensor:
        """What f is applied to: ``a``, or with ``normalize`` γ (a − mean)/√(var + ε) + β."""
        if not a.is_floating_point():
            raise TypeError(f"expected real floating point numbers, got {a.dtype}")
        if a.dim() < 1 or a.shape[-1] != self.num_units:
            raise ValueError(f"expected (..., {self.num_units}), got shape {tuple(a.shape)}")
        return a if self.norm is None else self.norm(a.reshape(-1, self.num_units)).reshape(a.shape)

    def function(self, a: Tensor) -> Tensor:
        """f itself, without normalization: (..., num_units) to the same."""
        return self._function(a, self._pieces())

    def prepared(self) -> Callable[[Tensor], Tensor]:
        """``forward`` for many calls with the same parameters: what does not depend on the input is computed once."""
        pieces = self._pieces()
        return lambda a: self._function(self.normalized(a), pieces)

    def _function(self, a: Tensor, pieces: Pieces | None) -> Tensor:
        flat = a.reshape(-1, self.num_units).mH  # units first
        f = -(self._gaussian(flat) if pieces is None else self._piecewise(flat, pieces))
        if self.m is not None and self.q is not None:
            f = f + self.m[:, None] * flat + self.q[:, None]
        return f.mH.reshape(a.shape)

    def _pieces(self) -> Pieces | None:
        """The centers in order (num_units, d); slope and value at zero of Σ χ g(a − c) on the d + 1 pieces between.

        None of Gaussian kernels."""
        if self.kernel == "gauss":
            return None
        below, above = SLOPES[self.kernel]
        centers, order = self.centers.sort(dim=-1)
        chi = self.chi.gather(-1, order)
        slopes, heights = (
            below * t.sum(-1, keepdim=True) + (above - below) * nn.functional.pad(t.cumsum(-1), (1, 0))
            for t in (chi, chi * centers)
        )
        return centers, slopes, -heights

    def _piecewise(self, a: Tensor, pieces: Pieces) -> Tensor:
        centers, slopes, heights = pieces
        piece = count_below(centers.detach(), a.detach())
        return slopes.gather(-1, piece) * a + heights.gather(-1, piece)

    def _gaussian(self, a: Tensor) -> Tensor:
        def part(a: Tensor, chi: Tensor, centers: Tensor) -> Tensor:
            bumps = torch.exp((a[..., None] - centers[:, None]).square() / -2)
            return (bumps @ chi[..., None])[..., 0] / math.sqrt(2 * math.pi)

        parts = list(zip(self.chi.split(CHUNK, -1), self.centers.split(CHUNK, -1), strict=True))
        if len(parts) == 1:
            return part(a, *parts[0])
        return torch.stack([checkpoint(part, a, *own, use_reentrant=False) for own in parts]).sum(0)

    def l1(self) -> Tensor:
        """Σ |χ|, the regularizer that empties a sum of the terms that it can do without."""
        return self.chi.abs().sum()

    def smoothness(self) -> Tensor:
        """Σ over units of ∫ f'(a)² da, between the outermost centers, beyond which a piecewise linear f is a line; of
        Gaussian kernels without a linear part over all numbers. With Σχ = 0 and m = 0 both are over all numbers."""
        m = torch.zeros((), dtype=self.chi.dtype, device=self.chi.device) if self.m is None else self.m[:, None]
        if (pieces := self._pieces()) is not None:
            centers, slopes, _ = pieces
            return ((m - slopes[:, 1:-1]).square() * centers.diff(dim=-1)).sum()
        if self.m is not None:
            raise ValueError("a Gaussian expansion with a linear part has infinite ∫ f'²: add m.square() instead")
        gaps = (self.centers[:, :, None] - self.centers[:, None, :]).square()
        products = (0.5 - gaps / 4) * torch.exp(gaps / -4) / math.sqrt(4 * math.pi)
        return (self.chi[:, :, None] * products * self.chi[:, None, :]).sum()

    @torch.no_grad()
    def outside(self, a: Tensor) -> Tensor:
        """The part of inputs beyond the outermost centers, where f has nothing to learn from: (num_units,).

        Normalized as ``forward`` would, with the statistics of the batch in training, which are not updated."""
        seen = self.normalized(a) if self.norm is None or not self.norm.training else self._peek(a)
        low, high = self.centers.amin(-1), self.centers.amax(-1)
        return ((seen < low) | (seen > high)).reshape(-1, self.num_units).to(a.dtype).mean(0)

    def _peek(self, a: Tensor) -> Tensor:
        assert self.norm is not None
        flat = a.reshape(-1, self.num_units)
        weights = self.norm.weight, self.norm.bias
        return nn.functional.batch_norm(flat, None, None, *weights, training=True, eps=self.norm.eps).reshape(a.shape)


class KernelRNN(nn.Module):
    """h_t = f(BN(W [x_t, h_{t−1}] + b)), h_0 = 0, with a :class:`KernelActivation` f (KBRN, eq. 10.5).

    f is zero at first: gradients reach χ through what reads h, and the rest through χ.
    Normalized by the statistics of each step's own batch in training. All steps share one pair of running ones, which
    describe the first steps badly: with long sequences leave a network in training mode, or ``normalize=False``.

    Shape: x ``(T, batch, input_size)``, or with ``batch_first`` ``(batch, T, input_size)``; the states in the same
    layout, and the last one ``(batch, hidden_size)``.

    Args:
        input_size, hidden_size: sizes of x_t and h_t.
        num_centers, kernel, normalize: of the activation.
        batch_first: layout of x.
        generator, dtype, device: of the initial values; weights are normal with deviation 1, cut at ±2, biases 0.

    Raises:
        ValueError: for an x of another shape.

    Reference: as :class:`KernelActivation`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_centers: int = 100,
        kernel: Kernel = "abs",
        *,
        normalize: bool = True,
        batch_first: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.batch_first = input_size, hidden_size, batch_first
        weight = torch.empty(hidden_size, input_size + hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(nn.init.trunc_normal_(weight, generator=generator))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))
        self.activation = KernelActivation(
            hidden_size,
            num_centers,
            kernel,
            normalize=normalize,
            coefficients=0,
            generator=generator,
            dtype=dtype,
            device=device,
        )

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if x.dim() != 3 or x.shape[-1] != self.input_size:
            layout = "(batch, T" if self.batch_first else "(T, batch"
            raise ValueError(f"expected {layout}, {self.input_size}), got shape {tuple(x.shape)}")
        steps = x.movedim(1, 0) if self.batch_first else x
        into, across = self.weight.split([self.input_size, self.hidden_size], dim=1)
        driven = nn.functional.linear(steps, into, self.bias)
        h = driven.new_zeros(driven.shape[1:]) if h is None else h
        states, activation = [], self.activation.prepared()
        for own in driven.unbind():
            h = activation(torch.addmm(own, h, across.mH))
            states.append(h)
        out = torch.stack(states) if states else driven
        return out.movedim(1, 0) if self.batch_first else out, h
