"""Full-batch solvers: :func:`minimize` a cost over a manifold, or a closure over a module's parameters."""

from manopt_torch.solvers.adaptive_regularization import AdaptiveRegularization
from manopt_torch.solvers.base import Result, Solver, State, minimize
from manopt_torch.solvers.conjugate_gradient import ConjugateGradient
from manopt_torch.solvers.gradient_descent import GradientDescent
from manopt_torch.solvers.lbfgs import LBFGS
from manopt_torch.solvers.line_search import Armijo, HagerZhang, StrongWolfe
from manopt_torch.solvers.module import minimize_module
from manopt_torch.solvers.problem import Problem
from manopt_torch.solvers.trust_region import TrustRegion

__all__ = [
    "LBFGS",
    "AdaptiveRegularization",
    "Armijo",
    "ConjugateGradient",
    "GradientDescent",
    "HagerZhang",
    "Problem",
    "Result",
    "Solver",
    "State",
    "StrongWolfe",
    "TrustRegion",
    "minimize",
    "minimize_module",
]
