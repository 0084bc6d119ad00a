"""Layers whose weights live on manifolds, and the activations and initialisations that belong to them."""

from manopt_torch.nn import init
from manopt_torch.nn.activations import ModReLU, OnModulus
from manopt_torch.nn.capacity import Capacity, capacity, parametrization
from manopt_torch.nn.kernel_activation import KernelActivation, KernelRNN
from manopt_torch.nn.layers import (
    GRU,
    LSTM,
    RNN,
    Bilinear,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Embedding,
    GRUCell,
    Linear,
    LSTMCell,
    MultiheadAttention,
    RNNCell,
)
from manopt_torch.nn.moments import dead_fraction, gain, he_normal_, moments, no_weight_decay
from manopt_torch.nn.restricted_unitary_rnn import RestrictedUnitaryRNN, RestrictedUnitaryRNNCell
from manopt_torch.nn.spd import BiMap, CovariancePool, LogEig, ReEig, SPDBatchNorm
from manopt_torch.nn.trug import TruG
from manopt_torch.nn.unitary_maps import GivensUnitary, HouseholderUnitary, RestrictedUnitary, UnitaryMap
from manopt_torch.nn.unitary_rnn import RealReadout, UnitaryRNN, UnitaryRNNCell

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "BiMap",
    "Bilinear",
    "Capacity",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CovariancePool",
    "Embedding",
    "GRUCell",
    "GivensUnitary",
    "HouseholderUnitary",
    "KernelActivation",
    "KernelRNN",
    "LSTMCell",
    "Linear",
    "LogEig",
    "ModReLU",
    "MultiheadAttention",
    "OnModulus",
    "RNNCell",
    "ReEig",
    "RealReadout",
    "RestrictedUnitary",
    "RestrictedUnitaryRNN",
    "RestrictedUnitaryRNNCell",
    "SPDBatchNorm",
    "TruG",
    "UnitaryMap",
    "UnitaryRNN",
    "UnitaryRNNCell",
    "capacity",
    "dead_fraction",
    "gain",
    "he_normal_",
    "init",
    "moments",
    "no_weight_decay",
    "parametrization",
]
