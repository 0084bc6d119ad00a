"""The temporal restricted Boltzmann machine of truncated Gaussian units."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from manopt_torch.stochastic.gibbs import Energy
from manopt_torch.stochastic.rbm import PRECISION, WEIGHT_SCALE, TruGRBM

#: sequences: (T, n), (T, B, n), or packed
Sequences = TypeVar("Sequences", Tensor, PackedSequence)


class TemporalTruGRBM(nn.Module):
    """Temporal RBM with truncated Gaussian hidden units (Su, Liao and Carin, 2017, section 3.2).

    ::

        p(X, H) = Π_t p(x_t, h_t | x_{t−1}, h_{t−1}),    x_0 = h_0 = 0
        E_t = ½ hᵀ diag(d) h − xᵀ W1 h − b_tᵀ x − c_tᵀ h,    ξ₁ ≤ h_j ≤ ξ₂
        b_t = b + W3 x_{t−1},    c_t = c + W2 x_{t−1} + W4 h_{t−1}

    so that every step is a :class:`TruGRBM`, with ½ xᵀ diag(a) x in E_t besides for Gaussian x. The hidden units are
    inferred forwards, q(H | X) = Π_t p(h_t | x_t, x_{t−1}, h_{t−1}), and learning is by a lower bound of ln p(X)::

        L = Σ_t E_q ln p(x_t | x_{t−1}, h_{t−1})

    with q held fixed: every step adds the gradient of one RBM, in which h_{t−1} is a sample and constant. This is not
    the whole derivative of L, whose q has the same parameters. ``units="binary"`` makes the original
    machine of Sutskever and Hinton (2007), with binary h and neither d nor ξ.

    >>> model = TemporalTruGRBM(88, 100, upper=1.0)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    >>> loss = model.contrastive_divergence(torch.rand(50, 16, 88).round())
    >>> loss.backward()
    >>> optimizer.step()

    Parameters: ``W2`` (m, n), ``W3`` (n, n), ``W4`` (m, m) and those of the machine of the first step, the submodule
    ``rbm``: W1 = ``rbm.W`` (n, m), ``rbm.b``, ``rbm.c``, those of ``rbm.units``, and ``rbm.log_precision`` if that is
    learned. :attr:`W1`, :attr:`b`, :attr:`c`, :attr:`d`, :attr:`xi1` and :attr:`xi2` are what they stand for.

    Args:
        num_visible, num_hidden: n and m.
        lower, upper, precision, visible, visible_precision, learn, learn_precision, units: as in :class:`TruGRBM`.
        dtype, device: of all parameters.

    Shape: sequences x are ``(T, n)``, ``(T, B, n)``, or a ``PackedSequence`` of different lengths, as in
    :class:`torch.nn.RNN`; what has one entry for each step comes in the same form.

    Raises:
        ValueError: as :class:`TruGRBM`; in use for sequences of another shape or without steps.
    """

    def __init__(
        self,
        num_visible: int,
        num_hidden: int,
        *,
        lower: Tensor | float = 0.0,
        upper: Tensor | float = math.inf,
        precision: Tensor | float = PRECISION,
        visible: Literal["binary", "gaussian"] = "binary",
        visible_precision: Tensor | float = 1.0,
        learn: Literal["unit", "shared"] | None = "unit",
        learn_precision: bool = False,
        units: Literal["trug", "binary"] = "trug",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.rbm = TruGRBM(
            num_visible,
            num_hidden,
            lower=lower,
            upper=upper,
            precision=precision,
            visible=visible,
            visible_precision=visible_precision,
            learn=learn,
            learn_precision=learn_precision,
            units=units,
            dtype=dtype,
            device=device,
        )
        self.num_visible, self.num_hidden = num_visible, num_hidden
        self.W2 = nn.Parameter(torch.empty(num_hidden, num_visible, dtype=dtype, device=device))
        self.W3 = nn.Parameter(torch.empty(num_visible, num_visible, dtype=dtype, device=device))
        self.W4 = nn.Parameter(torch.empty(num_hidden, num_hidden, dtype=dtype, device=device))
        self._reset_past()

    @torch.no_grad()
    def _reset_past(self, generator: torch.Generator | None = None) -> None:
        for weight in (self.W2, self.W3, self.W4):
            weight.normal_(0, WEIGHT_SCALE / math.sqrt(weight.shape[1]), generator=generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """W1 to W4 normal with variance 0.09 over the number of their inputs, everything else where it began."""
        self.rbm.reset_parameters(generator)
        self._reset_past(generator)

    @property
    def W1(self) -> Tensor:
        """W1, ``(num_visible, num_hidden)``."""
        return self.rbm.W

    @property
    def b(self) -> Tensor:
        """b, ``(num_visible,)``."""
        return self.rbm.b

    @property
    def c(self) -> Tensor:
        """c, ``(num_hidden,)``."""
        return self.rbm.c

    @property
    def d(self) -> Tensor:
        """The precision d of the hidden units before truncation, ``(num_hidden,)``."""
        return self.rbm.d

    @property
    def xi1(self) -> Tensor:
        """ξ₁, ``(num_hidden,)`` or ``()``."""
        return self.rbm.xi1

    @property
    def xi2(self) -> Tensor:
        """ξ₂, ``(num_hidden,)`` or ``()``."""
        return self.rbm.xi2

    def step(self, x: Tensor, h: Tensor) -> Energy:
        """E_t after x_{t−1} (..., n) and h_{t−1} (..., m): an RBM for each, with the biases b_t and c_t."""
        energy = self.rbm.energy
        b, c = energy.b + x @ self.W3.mH, energy.c + x @ self.W2.mH + h @ self.W4.mH
        return energy._replace(b=b, c=c)

    def _rows(self, x: Tensor | PackedSequence, size: int | None = None) -> tuple[Tensor, list[int]]:
        """All steps as rows (N, size), those of one time together, and how many there are at each time."""
        size = size or self.num_visible
        data, dims = (x.data, (2,)) if isinstance(x, PackedSequence) else (x, (2, 3))
        if data.dim() not in dims or data.shape[-1] != size or not data.numel():
            raise ValueError(
                f"TemporalTruGRBM needs sequences (T, {size}), (T, B, {size}) or a PackedSequence of them, "
                f"got shape {tuple(data.shape)}{' in a PackedSequence' if isinstance(x, PackedSequence) else ''}"
            )
        sizes = x.batch_sizes.tolist() if isinstance(x, PackedSequence) else [math.prod(x.shape[1:-1])] * len(x)
        return data.reshape(-1, size).to(self.W2.dtype), sizes

    @staticmethod
    def _like(x: Any, rows: Tensor) -> Any:
        """Rows in the form of ``x``."""
        if isinstance(x, PackedSequence):
            return PackedSequence(rows, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return rows.reshape(*x.shape[:-1], *rows.shape[1:])

    @staticmethod
    def _previous(rows: Tensor, sizes: list[int]) -> Tensor:
        """For every row the one of its sequence a step before; zeros at first."""
        steps = pairwise(rows.split(sizes))
        return torch.cat([torch.zeros_like(rows[: sizes[0]]), *(before[: len(now)] for before, now in steps)])

    def _filtered(self, x: Tensor, sizes: list[int], sample: bool, generator: torch.Generator | None = None) -> Tensor:
        """h (N, m) for rows x: samples of q, or the means of h_t given x_t, x_{t−1} and the mean of h_{t−1}."""
        h = x.new_zeros(sizes[0], self.num_hidden)
        found = []
        for now, before in zip(x.split(sizes), self._previous(x, sizes).split(sizes), strict=True):
            energy = self.step(before, h[: len(now)])
            h = energy.sample_hidden(now, generator) if sample else energy.hidden(now).mean
            found.append(h)
        return torch.cat(found)

    def forward(self, x: Sequences) -> Sequences:
        """Features (…, m): the mean of h_t given x_t, x_{t−1}, and for h_{t−1} its own mean; differentiable."""
        return self._like(x, self._filtered(*self._rows(x), sample=False))

    @torch.no_grad()
    def filter(self, x: Sequences, *, generator: torch.Generator | None = None) -> Sequences:
        """A sample of q(H | X), (…, m), outside of autograd."""
        return self._like(x, self._filtered(*self._rows(x), sample=True, generator=generator))

    def contrastive_divergence(
        self, x: Tensor | PackedSequence, k: int = 1, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """The loss of CD-k: its gradient is that of −L with q fixed, a mean over sequences and a sum over steps.

        Of h_{t−1} there is one sample, of the model phase one chain of k Gibbs steps from x_t for every step; all
        moments of h_t are in closed form. The value says nothing.
        """
        rows, sizes = self._rows(x)
        with torch.no_grad():
            h = self._filtered(rows, sizes, True, generator)
        energy = self.step(self._previous(rows, sizes), self._previous(h, sizes))
        samples = energy.gibbs(rows, k, generator)
        return (energy.free_energy(rows) - energy.free_energy(samples)).sum() / sizes[0]

    def terms(
        self,
        x: Sequences,
        h: Sequences,
        *,
        temperatures: int | None = None,
        chains: int = 10,
        generator: torch.Generator | None = None,
    ) -> Sequences:
        """ln p(x_t | x_{t−1}, h_{t−1}) for all steps of x and h (…, m) of the same form; (T,), (T, B) or packed.

        ln Z of every step is exact, by enumeration of x, and everything differentiable; with ``temperatures`` it is
        estimated by annealed importance sampling instead, and constant. Then the values are too large by half the
        variance of that estimate on average.

        Raises:
            ValueError: for Gaussian x or n > 20 without ``temperatures``, and for a model that may have no Z:
                Gaussian x, hidden units with an infinite end, and diag(a) − W1 diag(1/d) W1ᵀ over these not positive
                definite.
        """
        (rows, sizes), (hidden, same) = self._rows(x), self._rows(h, self.num_hidden)
        if sizes != same:
            raise ValueError(f"x and h must have the same steps, got {sizes} and {same} sequences at each of them")
        energy = self.step(self._previous(rows, sizes), self._previous(hidden, sizes))
        energy.check_normalizable()
        if temperatures is None:
            log_partition = energy.log_partition()
        else:
            found = energy.annealed_importance_sampling(temperatures, chains, energy.b.detach(), generator)
            log_partition = found.value.to(rows.dtype)
        return self._like(x, -energy.free_energy(rows) - log_partition)

    def bound(
        self,
        x: Tensor | PackedSequence,
        *,
        samples: int = 1,
        temperatures: int | None = None,
        chains: int = 10,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """L for each sequence, (B,) or (), with E_q a mean over so many ``samples`` of H, which are constants.

        ``-bound(x).mean()`` is a loss whose gradient is the one with q fixed. For ln Z see :meth:`terms`.
        """
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        rows, sizes = self._rows(x)
        many, counts = rows.repeat_interleave(samples, 0), [size * samples for size in sizes]
        packed = PackedSequence(many, torch.tensor(counts))
        settings: dict[str, Any] = {"temperatures": temperatures, "chains": chains, "generator": generator}
        terms = self.terms(packed, self.filter(packed, generator=generator), **settings).data
        number = torch.cat([torch.arange(size, device=rows.device) for size in sizes])
        found = terms.new_zeros(sizes[0]).index_add(0, number, terms.view(-1, samples).mean(1))
        if isinstance(x, PackedSequence):
            return found if x.unsorted_indices is None else found[x.unsorted_indices]
        return found if x.dim() == 3 else found[0]

    @torch.no_grad()
    def predict(
        self, x: Sequences, *, iterations: int = 10, samples: int = 0, generator: torch.Generator | None = None
    ) -> Sequences:
        """For every step t an estimate of E[x_t | x_1, …, x_{t−1}], in the form of x; the last frame has no part.

        By mean field, x ← E[x | E[h | x]] so many times from x_{t−1} with the means of :meth:`forward` for h_{t−1};
        or with ``samples`` by Gibbs sampling, the mean of E[x | h] after so many steps over samples of h_{t−1}.
        Mean field commits itself to one mode. To look beyond the end, append a frame of anything.
        """
        if iterations < 1 or samples < 0:
            raise ValueError(f"iterations must be at least 1, samples 0 or more, got {iterations} and {samples}")
        rows, sizes = self._rows(x)
        self.rbm.energy.check_normalizable()
        copies = max(samples, 1)
        many, counts = rows.repeat_interleave(copies, 0), [size * copies for size in sizes]
        h = self._filtered(many, counts, samples > 0, generator)
        previous = self._previous(many, counts)
        energy = self.step(previous, self._previous(h, counts))
        if samples:
            now = energy.gibbs(previous, iterations - 1, generator)
            found = energy.visible(energy.sample_hidden(now, generator)).mean
        else:
            found = previous
            for _ in range(iterations):
                found = energy.visible(energy.hidden(found).mean).mean
        return self._like(x, found.view(len(rows), copies, -1).mean(1))

    @torch.no_grad()
    def generate(
        self,
        steps: int,
        batch: int = 1,
        *,
        start: Tensor | None = None,
        k: int = 50,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """So many further steps of sequences, (steps, B, n), each frame by k Gibbs steps from the one before.

        Args:
            steps: how many.
            batch: B.
            start: what they go on from, (T, B, n), which sets B; None: from nothing.
            k: Gibbs steps; exact as k → ∞.
            generator: of the samples.
        """
        if min(steps, batch, k) < 1:
            raise ValueError(f"steps, batch and k must be at least 1, got {steps}, {batch} and {k}")
        self.rbm.energy.check_normalizable()
        if start is None:
            x, h = self.W2.new_zeros(batch, self.num_visible), self.W2.new_zeros(batch, self.num_hidden)
        elif start.dim() == 3:
            x, h = start[-1].to(self.W2.dtype), self.filter(start, generator=generator)[-1]
        else:
            raise ValueError(f"start must be (T, B, {self.num_visible}), got shape {tuple(start.shape)}")
        found = []
        for _ in range(steps):
            energy = self.step(x, h)
            x = energy.gibbs(x, k, generator)
            h = energy.sample_hidden(x, generator)
            found.append(x)
        return torch.stack(found)
