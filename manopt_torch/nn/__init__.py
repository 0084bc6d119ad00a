"""Layers whose weights live on manifolds, and the activations and initialisations that belong to them."""

from manopt_torch.nn import init
from manopt_torch.nn.activations import ModReLU
from manopt_torch.nn.unitary_rnn import RealReadout, UnitaryRNN

__all__ = ["ModReLU", "RealReadout", "UnitaryRNN", "init"]
