"""The benchmarks measure what they say: their optima are optima, steps as long as claimed, reports complete."""

from __future__ import annotations

import importlib
import math
import struct
from pathlib import Path
from types import ModuleType

import pytest
import scipy.stats
import torch

from manopt_torch.manifolds import Stiefel, Unitary

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(FOLDER))
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(4, 4), (6, 3)])
def test_procrustes_has_the_optimum_it_claims(load, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = Stiefel().random(5, *shape, dtype=dtype)
    a, least = load("drift").procrustes(x, Stiefel(), torch.Generator().manual_seed(0))
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    torch.testing.assert_close(-s.sum(-1), least.expand(5))
    if shape == (4, 4) and dtype == torch.float64:  # in reach of x: no path joins det = 1 and det = -1
        assert torch.equal(torch.linalg.det(u @ vh).sign(), torch.linalg.det(x).sign())


def test_spectral_norm_is_a_close_lower_bound(load) -> None:
    u = torch.randn(10, 12, 5, dtype=torch.complex128)
    found = load("drift").spectral_norm(u, torch.randn(10, 5, 1, dtype=u.dtype)).flatten()
    exact = torch.linalg.matrix_norm(u, ord=2)
    assert (found <= exact * (1 + 1e-12)).all()
    assert (found >= 0.8 * exact).all()


@pytest.mark.parametrize("manifold", [Unitary(), Stiefel()])
def test_drift_reaches_the_optimum_on_the_manifold(load, manifold) -> None:
    drift = load("drift")
    shape = (8, 8) if isinstance(manifold, Unitary) else (8, 2)
    rows = drift.run(drift.Run(manifold, shape, "complex64", (1e-3, 1.0)), steps=120)
    assert [row["length"] for row in rows] == [1e-3, 1.0]
    assert all(row["passes"] for row in rows)
    assert all(row["worst"] >= max(row["after_steps"], row["end"]) > 0 for row in rows)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("shape", [(5, 5), (7, 2), (3, 4, 4)])
def test_step_case_reports_every_contestant(load, dtype: str, shape: tuple[int, ...]) -> None:
    step = load("step")
    rows = step.run_case("small", step.Case(6, shape, 40), dtype, threads=1)
    assert [row["contestant"] for row in rows] == list(step.CONTESTANTS)
    ran = {row["contestant"]: row for row in rows if not row["left_out"]}
    assert {step.OURS, step.OURS_CANONICAL, step.OURS_QR, step.WRAPPED, step.TORCH_ADAM} <= set(ran)
    for name, row in ran.items():
        assert 0 < row["step_ms"] <= row["all_ms"]
        if name.startswith("manopt_torch"):
            assert row["residual"] < 1e-5
            assert row["loss"] >= row["optimum"] - 1e-4
    assert ran[step.TORCH_ADAM]["residual"] > 0.1
    problem = step.problem(step.Case(6, shape, 1), step.DTYPES[dtype])
    away = torch.stack(problem.start) - torch.stack(problem.targets)
    at_start = 0.5 * torch.linalg.vector_norm(away, dim=(-2, -1)).square().mean().item()
    assert all(row["loss"] < at_start for name, row in ran.items() if name.startswith("manopt_torch"))
    table = step.case_table(rows, 40)
    assert all(name in table for name in step.CONTESTANTS)
    assert math.isclose(
        step.ratio(rows, "small", dtype, step.OURS, step.TORCH_ADAM),
        ran[step.OURS]["step_ms"] / ran[step.TORCH_ADAM]["step_ms"],
    )


def test_optimum_of_the_step_problem(load) -> None:
    step = load("step")
    problem = step.problem(step.Case(6, (5, 5), 1), torch.float32)
    u, _, vh = torch.linalg.svd(torch.stack(problem.targets))
    nearest, start = u @ vh, torch.stack(problem.start)
    loss = 0.5 * (nearest - torch.stack(problem.targets)).square().sum((-2, -1)).mean().item()
    assert loss == pytest.approx(problem.optimum, rel=1e-5)
    assert torch.equal(torch.linalg.det(nearest).sign(), torch.linalg.det(start).sign())


def test_numbers_in_tables_have_three_digits(load) -> None:
    table = load("common").markdown(("a", "b"), [(1.23456, "x"), (0.00001234, 0.0), (123456.0, 3)])
    assert table.splitlines()[2:] == ["| 1.23 | x |", "| 1.2e-05 | 0 |", "| 1.2e+05 | 3 |"]


def test_unitary_rnn_case_reports_every_contestant(load) -> None:
    bench = load("unitary_rnn")
    rows = {row["contestant"]: row for row in bench.run_case(30, 3, 8, repeats=1)}
    assert set(rows) >= {bench.OURS, bench.LEAN, bench.TORCH, bench.LSTM, bench.SMALL_LSTM, bench.LOOP, bench.ADDMM}
    assert all(row["ms"] > 0 for row in rows.values())
    assert rows[bench.OURS]["error"] < 1e-5 > rows[bench.TORCH]["error"]
    states = 30 * 3 * 8 * 8 / 1e6  # MB of complex64
    assert 2 * states < rows[bench.OURS]["MB kept"] < 2.5 * states  # states, and the arguments of modReLU
    assert rows[bench.LEAN]["MB kept"] < 0.6 * states
    assert rows[bench.LOOP]["MB kept"] > rows[bench.OURS]["MB kept"]
    assert 0 < bench.iteration(30, 3, 8, repeats=1)["share"] < 1


def test_equal_lstm_has_as_many_parameters_as_the_unitary_rnn_has_dimensions(load) -> None:
    n = load("unitary_rnn").equal_lstm(128)
    lstm = torch.nn.LSTM(1, n)
    assert sum(p.numel() for p in lstm.parameters()) == 4 * n * n + 12 * n
    assert 4 * n * n + 12 * n == pytest.approx(128**2 + 5 * 128, rel=0.02)


def test_first_order_problems_have_the_optima_they_claim(load) -> None:
    first_order = load("first_order")
    problem = first_order.pca()
    data = problem.loss.__closure__[0].cell_contents
    leading = torch.linalg.svd(data, full_matrices=False).Vh[:50].mT
    assert problem.loss([leading], []).item() == pytest.approx(problem.optimum, rel=1e-5)
    assert problem.loss(problem.start, []).item() > problem.optimum * 0.5
    problem = first_order.procrustes()
    targets = dict(zip(problem.loss.__code__.co_freevars, problem.loss.__closure__, strict=True))["targets"]
    u, _, vh = torch.linalg.svd(targets.cell_contents)
    assert problem.loss(list(u @ vh), []).item() == pytest.approx(problem.optimum, rel=1e-5)
    same_side = torch.linalg.det(u @ vh).sign() == torch.linalg.det(torch.stack(problem.start)).sign()
    assert same_side.all()  # no path joins the two components of O(16)


def test_first_order_reports_gaps_that_fall_and_what_was_left_out(load, monkeypatch: pytest.MonkeyPatch) -> None:
    first_order = load("first_order")
    monkeypatch.setattr(first_order, "GRID", (1.0, 1e9))

    def refuses(*_: object) -> None:
        raise RuntimeError("no complex numbers")

    chosen = {"RiemannianAdam": first_order.contestants()["RiemannianAdam"], "refuses": refuses}
    monkeypatch.setattr(first_order, "contestants", lambda: chosen)
    adam, other = first_order.run("mlp", quick=True)
    assert adam["scale"] == 1.0
    assert adam["gap"][0] == 1
    assert adam["gap"][-1] == adam["last"] < 1
    assert len(adam["gap"]) == len(adam["times"]) == 21
    assert adam["residual"] < 1e-4
    assert other["left_out"] == "RuntimeError: no complex numbers"
    text = first_order.table([adam, other])
    assert "no complex numbers" in text
    assert "| RiemannianAdam |" in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the peer compiles a function as it is imported
def test_pogo_makes_the_steps_of_its_peer(load, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pogo")
    pogo = load("pogo_steps")
    monkeypatch.setattr(pogo, "CASES", {"small": (3, (4, 2))})
    row = pogo.run("small", 5)
    assert row["ratio"] == row["ours, ms"] / row["pogo-torch, ms"]
    assert row["apart"] < 1e-5


@pytest.mark.parametrize("name", ["pca", "brockett", "rayleigh", "procrustes", "karcher", "unitary_procrustes"])
def test_solver_problems_have_the_optima_they_claim(load, name: str) -> None:
    """Another solver ends there, and not below."""
    from manopt_torch.solvers import LBFGS, minimize

    solvers = load("solvers")
    problem = solvers.PROBLEMS[name]()
    generator = torch.Generator().manual_seed(5)
    x = problem.manifold.random(*problem.shape, dtype=problem.dtype, generator=generator)
    result = minimize(problem.cost, problem.manifold, x, LBFGS(), tolerance_grad=1e-7)
    assert abs(solvers.gap(problem, result.fun)) < 1e-10
    calls, seconds, reason = solvers.ours(problem, x, LBFGS())
    assert 0 < calls <= result.nfev + result.njev + result.nhev
    assert reason == ""
    if name == "karcher":
        failed = solvers.ours(problem._replace(optimum=problem.optimum - 1), x, LBFGS())
        assert failed[:2] == (math.inf, math.inf)
    rows = [
        {"problem": name, "solver": "LBFGS", "calls": calls, "seconds": seconds},
        {"problem": name, "solver": "pymanopt X", "calls": 2 * calls, "seconds": seconds / 2},
    ]
    assert "both arrive: 0.50 of calls, 2.00 of seconds" in solvers.summary(rows)


@pytest.mark.parametrize("name", ["[0, inf)", "[-1, 1]"])
def test_trug_units_are_measured_against_the_truth(load, name: str) -> None:
    trug = load("trug")
    case = trug.CASES[name]
    sigma = math.sqrt(trug.SIGMA2)
    for z in (-2.0, 0.3, 1.7):
        h = scipy.stats.truncnorm((case.low - z) / sigma, (case.high - z) / sigma, z, sigma)
        expected = (h.mean(), h.var() / trug.SIGMA2, h.std())
        assert trug.exact(z, case.low, case.high) == pytest.approx(expected, rel=1e-9)
    z = torch.linspace(-40, 1, 30, dtype=torch.float64)  # the textbook formula is 0/0 at one end, right at the other
    units = trug.contestants(case, torch.float64)
    assert trug.errors(units[trug.OURS], z, case, 30)["failed"] == 0
    assert 0 < trug.errors(units[trug.TEXTBOOK], z, case, 30)["failed"] < 30
    assert trug.errors(torch.nn.Softplus(), z, case, 30)["failed"] == 30


def test_trug_reports_every_contestant(load) -> None:
    trug = load("trug")
    rows = trug.run_units("[-1, 1], learned", torch.float32, "N(0, 1)", rows=4, repeats=1, sample=5)
    assert [row["contestant"] for row in rows] == [trug.OURS, trug.TEXTBOOK, trug.GELU, trug.SOFTPLUS]
    assert all(row["ms"] > 0 for row in rows)
    assert rows[0]["of textbook"] == rows[0]["ms"] / rows[1]["ms"]
    assert rows[0]["failed"] == 0
    rows = trug.run_epoch(trug.images(None, 200), list(trug.MACHINES))
    assert [row["machine"] for row in rows] == list(trug.MACHINES)
    assert all(row["s"] > 0 for row in rows)


def test_trug_reads_mnist(load, tmp_path: Path) -> None:
    trug = load("trug")
    name = "train-images-idx3-ubyte"
    pixels = bytes(784) + bytes([255]) * 784 + bytes(784 * 59_998)
    (tmp_path / name).write_bytes(struct.pack(">4I", 2051, 60_000, 28, 28) + pixels)
    assert trug.images(tmp_path, 3).sum(1).tolist() == [0, 784, 0]
    (tmp_path / name).write_bytes(struct.pack(">4I", 2051, 1, 2, 2) + bytes(4))
    with pytest.raises(ValueError, match=r"\(1, 2, 2\)"):
        trug.images(tmp_path, 3)
