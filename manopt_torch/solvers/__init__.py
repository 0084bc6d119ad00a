"""Full-batch solvers: :func:`minimize` a cost over a manifold, or a closure over a module's parameters."""

from manopt_torch.solvers.base import Result, Solver, State, minimize
from manopt_torch.solvers.module import minimize_module
from manopt_torch.solvers.problem import Problem

__all__ = ["Problem", "Result", "Solver", "State", "minimize", "minimize_module"]
