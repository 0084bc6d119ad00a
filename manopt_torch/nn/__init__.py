"""Layers whose weights live on manifolds, and the activations and initialisations that belong to them."""

from manopt_torch.nn import init
from manopt_torch.nn.activations import ModReLU
from manopt_torch.nn.capacity import Capacity, capacity, parametrization
from manopt_torch.nn.unitary_maps import GivensUnitary, HouseholderUnitary, RestrictedUnitary, UnitaryMap
from manopt_torch.nn.unitary_rnn import RealReadout, UnitaryRNN

__all__ = [
    "Capacity",
    "GivensUnitary",
    "HouseholderUnitary",
    "ModReLU",
    "RealReadout",
    "RestrictedUnitary",
    "UnitaryMap",
    "UnitaryRNN",
    "capacity",
    "init",
    "parametrization",
]
