"""The networks that the examples compare: one recurrent layer each, and a linear readout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from manopt_torch import named_manifolds
from manopt_torch.nn import (
    KernelActivation,
    ModReLU,
    OnModulus,
    RealReadout,
    RestrictedUnitaryRNN,
    TruG,
    UnitaryRNN,
    init,
)
from manopt_torch.nn.recurrence import unitary_recurrence
from manopt_torch.nn.unitary_rnn import Init

MODELS = ("full", "restricted", "lstm", "rnn", "orthogonal", "frozen")
#: what W of the full and the frozen model may start from, see :class:`manopt_torch.nn.UnitaryRNN`
STARTS = ("haar", "identity", "restricted", "henaff", "cayley")


def _kernel(units: int) -> KernelActivation:
    """The identity at first, with 20 kinks to be learned."""
    layer = KernelActivation(units, 20, linear=True, normalize=False, coefficients=0)
    assert layer.m is not None
    nn.init.ones_(layer.m)
    return layer


#: activations of the full and the frozen model, on the modulus; all but the first are loops over the steps
ACTIVATIONS: dict[str, Callable[[int], nn.Module] | None] = {
    "modrelu": None,
    "trug": lambda n: OnModulus(TruG(n, sigma2=0.01, lower=0.0, upper=2.0, learn="unit"), n),
    "kernel": lambda n: OnModulus(_kernel(n), n),
    "prelu": lambda n: OnModulus(nn.PReLU(n), n),
}

#: Hidden units. Copy memory and MNIST, full, restricted, lstm: Wisdom et al., 2016; adding, restricted, lstm, rnn:
#: Arjovsky et al., 2016, from memory. All others are ours: the largest with no more parameters than the full model.
PAPER_SIZES = {
    "copy_memory": {"full": 128, "restricted": 470, "lstm": 68, "rnn": 136, "orthogonal": 136},
    "adding": {"full": 128, "restricted": 512, "lstm": 128, "rnn": 128, "orthogonal": 128},
    "sequential_digits": {"full": 116, "restricted": 512, "lstm": 128, "rnn": 121, "orthogonal": 121},
}


def paper_size(experiment: str, model: str) -> int:
    """Hidden units of ``model`` in ``PAPER_SIZES``; the frozen model has those of the full one."""
    return PAPER_SIZES[experiment]["full" if model == "frozen" else model]


class SequenceModel(nn.Module):
    """Real outputs for sequences: a recurrent layer of the family ``name``, and a linear map of its states.

    ======================  =============================================================================
    ``"full"``              :class:`manopt_torch.nn.UnitaryRNN`, W in all of U(N)
    ``"frozen"``            the same with W kept as it starts: what the rest of the network does alone
    ``"restricted"``        :class:`manopt_torch.nn.RestrictedUnitaryRNN`, W of 7N parameters
    ``"lstm"``              ``torch.nn.LSTM``, its forget gate's bias starting at 1 (the papers' released code)
    ``"rnn"``               ``torch.nn.RNN`` with tanh
    ``"orthogonal"``        :class:`OrthogonalRNN`, W in O(N) by a parametrization
    ======================  =============================================================================

    Shape: (B, T, M) to (B, T, L), or to (B, L), the output of the last step, with ``last``.

    Args:
        name: one of ``MODELS``.
        input_size, hidden_size, output_size: M, N, L.
        start: what W of the full and of the frozen model starts from, an ``init`` of ``UnitaryRNN``.
        last: read the last state only.
        activation: of the full and the frozen model, one of ``ACTIVATIONS``.
    """

    def __init__(
        self,
        name: str,
        input_size: int,
        hidden_size: int,
        output_size: int,
        *,
        start: str = "restricted",
        last: bool = False,
        activation: str = "modrelu",
    ) -> None:
        super().__init__()
        self.last = last
        self.rnn = recurrent_layer(name, input_size, hidden_size, start=start, activation=activation)
        unitary = name in ("full", "frozen", "restricted")
        self.readout = (RealReadout if unitary else nn.Linear)(hidden_size, output_size)

    def forward(self, x: Tensor) -> Tensor:
        states, end = self.rnn(x)
        if not self.last:
            return self.readout(states)
        return self.readout((end[0] if isinstance(end, tuple) else end)[-1])


def recurrent_layer(
    name: str, input_size: int, hidden_size: int, *, start: str = "restricted", activation: str = "modrelu"
) -> nn.Module:
    """The recurrent layer of :class:`SequenceModel`, batch first, called like ``torch.nn.RNN``.

    Raises ``ValueError`` for a ``name`` that is not in ``MODELS``, and for an ``activation`` that it does not have.
    """
    if name in ("full", "frozen"):
        sigma, begin = ACTIVATIONS[activation], cast(Init, start)
        layer: nn.Module = UnitaryRNN(input_size, hidden_size, batch_first=True, init=begin, activation=sigma)
        for weight, _ in named_manifolds(layer):
            layer.get_parameter(weight).requires_grad_(name == "full")
        return layer
    if activation != "modrelu":
        raise ValueError(f"--activation {activation} is for the full and the frozen model, not for {name!r}")
    if name == "restricted":
        return RestrictedUnitaryRNN(input_size, hidden_size, batch_first=True)
    if name == "lstm":
        layer = nn.LSTM(input_size, hidden_size, batch_first=True)
        forget = slice(hidden_size, 2 * hidden_size)  # torch's gates are i, f, g, o, and it adds both biases
        nn.init.ones_(layer.get_parameter("bias_ih_l0")[forget])
        nn.init.zeros_(layer.get_parameter("bias_hh_l0")[forget])
        return layer
    if name == "rnn":
        return nn.RNN(input_size, hidden_size, batch_first=True)
    if name == "orthogonal":
        return OrthogonalRNN(input_size, hidden_size)
    raise ValueError(f"no model is called {name!r}: {', '.join(MODELS)}")


class OrthogonalRNN(nn.Module):
    """h_t = σ(W h_{t-1} + V x_t), real, σ = modReLU, W ∈ O(N) by ``torch.nn.utils.parametrizations.orthogonal``.

    The other school: W is a function of an unconstrained matrix, and any Euclidean optimizer moves that one. W is
    evaluated once in a call. It starts Haar-distributed, the rest as in ``UnitaryRNN``.

    Shapes: (B, T, M) to (B, T, N) and (1, B, N).
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.recurrence = nn.Linear(hidden_size, hidden_size, bias=False)
        init.haar_(self.recurrence.weight)
        parametrizations.orthogonal(self.recurrence, "weight")
        self.weight_ih = nn.Parameter(
            init.glorot_uniform_(torch.empty(hidden_size, input_size), input_size, hidden_size)
        )
        self.modrelu = ModReLU(hidden_size)
        self.h0 = nn.Parameter(init.uniform_(torch.empty(hidden_size), math.sqrt(3 / hidden_size)))

    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.h0.expand(len(x), -1) if hx is None else hx[0]
        weights = self.weight_ih, self.recurrence.weight, self.modrelu.bias
        states = unitary_recurrence(x.movedim(1, 0), *weights, h)
        return states.movedim(0, 1), states[-1:]


def count_parameters(model: nn.Module) -> int:
    """Real parameters, as the papers count: two for a complex number, the dimension of its manifold for W."""
    manifolds = dict(named_manifolds(model))
    return sum(
        manifolds[name].dim(*p.shape, dtype=p.dtype) if name in manifolds else p.numel() * (2 if p.is_complex() else 1)
        for name, p in model.named_parameters()
    )
