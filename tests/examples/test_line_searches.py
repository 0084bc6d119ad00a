"""The line searches of examples/line_search.py: counts, and what a step of fixed length is."""

import importlib
import itertools
import math
from pathlib import Path

import pytest
import torch


@pytest.fixture
def script(path):
    return importlib.import_module("line_search")


def test_fixed_steps_are_cayley_steps_that_cost_two_evaluations(script):
    cost, start = script.identification(3, 4, 0)
    curve = script.fixed(cost, start, 0.05, 4)
    leaf = start.clone().requires_grad_()
    error = cost(leaf)
    (G,) = torch.autograd.grad(error, leaf)
    A = G @ start.mH - start @ G.mH
    one = torch.eye(3, dtype=A.dtype)
    next_error = cost(torch.linalg.solve(one + 0.025 * A, (one - 0.025 * A) @ start)).item()
    assert [n for n, _ in curve] == [2, 4]
    assert curve[0][1] == pytest.approx(error.item())
    assert curve[1][1] == pytest.approx(next_error, rel=1e-9)
    assert next_error < error.item()


def test_searches_descend_within_their_budget_and_find_the_hidden_matrix(script):
    cost, start = script.identification(3, 4, 0)
    for name, solver in script.SOLVERS.items():
        curve = script.searched(cost, start, solver, 60)
        counts, errors = zip(*curve, strict=True)
        assert list(counts) == sorted(counts), name
        assert counts[-2] < 60, name
        assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(errors)), name
        assert errors[-1] < 1e-2 * errors[0], name
    assert script.needed([(2, 1.0), (4, 0.5), (6, 0.05)], 0.1) == 6
    assert script.needed([(2, 1.0), (4, 0.5)], 0.1) == math.inf


def test_smoke(script, capsys):
    script.main(["--smoke", "--out", "out"])
    assert "| L-BFGS |" in capsys.readouterr().out
    assert Path("out/line_search.png").stat().st_size > 1000
    assert Path("out/results.md").read_text().count("fixed λ") == 3
