"""Stochastic networks of truncated Gaussian units (Su, Liao and Carin, 2017)."""

from manopt_torch.stochastic.estimator import TruGRBMEstimator
from manopt_torch.stochastic.gibbs import Energy, LogPartition
from manopt_torch.stochastic.rbm import TruGRBM
from manopt_torch.stochastic.regressor import TruGTGGMRegressor
from manopt_torch.stochastic.temporal_rbm import TemporalTruGRBM
from manopt_torch.stochastic.tggm import TruGTGGM

__all__ = ["Energy", "LogPartition", "TemporalTruGRBM", "TruGRBM", "TruGRBMEstimator", "TruGTGGM", "TruGTGGMRegressor"]
