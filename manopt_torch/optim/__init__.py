"""Optimizers that end in a retraction instead of a plus sign, and :func:`riemannian` for all of torch's own."""

from manopt_torch.optim.adagrad import RiemannianAdagrad
from manopt_torch.optim.adam import RiemannianAdam
from manopt_torch.optim.asa import RiemannianASA
from manopt_torch.optim.average import ManifoldAverage
from manopt_torch.optim.base import RiemannianOptimizer
from manopt_torch.optim.clip import clip_grad_norm_
from manopt_torch.optim.landing import Landing
from manopt_torch.optim.matrix_adam import RiemannianMatrixAdam
from manopt_torch.optim.muon import RiemannianMuon
from manopt_torch.optim.pogo import POGO
from manopt_torch.optim.rmsprop import RiemannianRMSprop
from manopt_torch.optim.sgd import RiemannianSGD
from manopt_torch.optim.wrap import riemannian

__all__ = [
    "POGO",
    "Landing",
    "ManifoldAverage",
    "RiemannianASA",
    "RiemannianAdagrad",
    "RiemannianAdam",
    "RiemannianMatrixAdam",
    "RiemannianMuon",
    "RiemannianOptimizer",
    "RiemannianRMSprop",
    "RiemannianSGD",
    "clip_grad_norm_",
    "riemannian",
]
