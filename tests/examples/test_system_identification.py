"""System identification: the systems by formula, the step of both models, resuming, the table, capacity."""

import argparse
import importlib
import math
import re
from pathlib import Path

import pytest
import torch

from manopt_torch import Unitary

SMALL = {"starts": 2, "steps": 7, "batch": 3, "train": 12, "validation": 6, "test": 6, "seed": 0}


@pytest.fixture
def script(path):
    return importlib.import_module("system_identification")


@pytest.fixture
def identification(path):
    return importlib.import_module("harness.identification")


def settings(**changes):
    return argparse.Namespace(**{**SMALL, **changes})


def naive_states(W, b, x):
    """h_t = σ(W h_{t-1} + x_t) for one W and one sequence x (T, N), with the exact modReLU."""
    h, states = torch.zeros_like(x[0]), []
    for x_t in x:
        z = W @ h + x_t
        h = z / z.abs() * torch.relu(z.abs() + b)
        states.append(h)
    return torch.stack(states)


def loaded(folder):
    return torch.load(Path(folder) / "checkpoints" / "last.ckpt", weights_only=True)


# ------------------------------------------------------------ the systems
def test_systems_by_formula(identification):
    systems = identification.Systems(5, settings())
    assert Unitary().residual(systems.weight).max() < 1e-5
    assert ((systems.bias >= -0.11) & (systems.bias <= -0.09)).all()
    assert systems.bias.unique().numel() == 10
    input, target = systems.batch("test", 1)
    assert target.shape == (7, 2, 1, 1, 3, 5)
    for kind in range(2):
        for b in range(3):
            expected = naive_states(systems.weight[kind], systems.bias[kind], input[:, b])
            assert (target[:, kind, 0, 0, b] - expected).abs().max() < 1e-3  # the soft modReLU
            assert expected.abs().max() > 1


def test_first_kind_is_within_reach_of_the_restricted_model_and_the_second_is_not(identification, monkeypatch):
    monkeypatch.setattr(identification, "DESCENT", 120)
    systems = identification.Systems(8, settings(seed=1))
    starts = identification.RestrictedUnitary(8, batch_shape=(6,), dtype=torch.complex128)
    starts.permutation.copy_(systems.restricted.permutation[0, 0].expand_as(starts.permutation).clone())
    first, second = (identification.distances(W.to(torch.complex128), starts)[0] for W in systems.weight)
    assert first < 1e-5  # the rounding of W_u
    assert second > 0.1


def test_every_network_has_a_start_of_its_own(identification):
    systems = identification.Systems(8, settings())
    starts = systems.restricted.matrix().detach()
    assert starts.shape == (2, 2, 8, 8)
    rows = torch.view_as_real(starts).reshape(4, -1)
    assert (torch.cdist(rows, rows) + torch.eye(4)).min() > 0.5
    assert (systems.restricted.permutation == systems.restricted.permutation[0, 0]).all()


def test_noise_is_white_circular_and_its_own_for_every_batch(identification):
    systems = identification.Systems(4, settings(steps=100, batch=200))
    x = systems.batch("train", 0)[0]
    assert x.abs().square().mean().item() == pytest.approx(1, abs=0.02)
    assert x.square().mean().abs() < 0.02  # Re and Im alike, and independent
    assert (x[1:] * x[:-1].conj()).mean().abs() < 0.02
    again = systems.batch("train", 0)[0]
    assert torch.equal(x, again)
    others = [systems.batch(part, number)[0] for part, number in (("train", 1), ("validation", 0), ("test", 0))]
    assert all((x - other).abs().mean() > 0.5 for other in others)


def test_errors_of_known_networks(identification):
    """The system itself has error 0; the error is normalised by that of predicting zero."""
    systems = identification.Systems(4, settings(validation=3))
    own = systems.weight[:, None, None]
    assert systems.evaluate(own, "validation")[0].max() == 0
    other = Unitary().random(2, 3, 2, 4, 4, dtype=torch.complex64)  # (kinds, models, starts)
    mse, normalised = systems.evaluate(other, "validation")
    input, target = systems.batch("validation", 0)
    for kind, model, start in ((0, 0, 1), (1, 2, 0)):
        states = torch.stack(
            [naive_states(other[kind, model, start], systems.bias[kind], x) for x in input.unbind(1)], 1
        )
        difference = (states - target[:, kind, 0, 0]).abs().square().mean()
        power = target[:, kind].abs().square().mean()
        assert mse[kind, model, start].item() == pytest.approx(difference.item(), rel=1e-3)
        assert normalised[kind, model, start].item() == pytest.approx((difference / power).item(), rel=1e-3)


# ------------------------------------------------------------ training
def test_full_model_takes_the_cayley_step_of_length_lambda(script):
    """(I + λ/2 A)⁻¹ (I − λ/2 A) W with A = G Wᴴ − W Gᴴ, G from a plain loop over one network alone."""
    rate = 0.05
    training = script.Training(settings(dimensions=[4]), [[rate, 0.01]])
    (system,), (full,) = training.systems, training.full
    before = full.detach().clone()
    assert torch.equal(before, system.restricted.matrix().detach())
    training.advance(1)
    input, target = system.batch("train", 0)
    for kind in range(2):
        for start in range(2):
            W = before[kind, start].clone().requires_grad_()
            states = torch.stack([naive_states(W, system.bias[kind], x) for x in input.unbind(1)], 1)
            (states - target[:, kind, 0, 0]).abs().square().mean().backward()
            A = W.grad @ W.mH - W @ W.grad.mH
            one = torch.eye(4)
            expected = torch.linalg.solve(one + rate / 2 * A, (one - rate / 2 * A) @ W).detach()
            assert (expected - before[kind, start]).norm() > 1e-2
            assert (full[kind, start] - expected).norm() < 1e-2 * (expected - before[kind, start]).norm()


def test_restricted_model_stays_restricted_and_frozen_stays(script):
    training = script.Training(settings(dimensions=[3]), [[0.01, 0.01]])
    start = training.weights()[0]
    assert torch.equal(start[:, 0], start[:, 1])
    training.advance(3)
    weight = training.weights()[0]
    assert (weight - start).flatten(2).norm(dim=2).min() > 1e-3  # both models move
    assert (weight[:, 0] - weight[:, 1]).norm() > 1e-3  # apart from each other
    assert torch.equal(weight[:, 1], training.systems[0].restricted.matrix().detach())
    assert Unitary().residual(weight).max() < 1e-5


def test_dimensions_do_not_mix(script):
    """What is trained beside a dimension changes nothing in it."""
    both = script.Training(settings(dimensions=[2, 4]), [[0.03, 0.04], [0.01, 0.02]])
    alone = script.Training(settings(dimensions=[4]), [[0.01, 0.02]])
    for training in (both, alone):
        training.advance(3)
    assert torch.equal(both.curve[:, 1], alone.curve[:, 0])
    assert not torch.equal(both.curve[0], both.curve[1])


def test_best_weights_are_those_of_the_lowest_validation_error(script):
    training = script.Training(settings(dimensions=[3]), [[0.5, 0.3]])  # so long that errors go up and down
    kept = [training.weights()[0]]
    for _ in range(5):
        training.advance(1)
        kept.append(training.weights()[0])
    assert (training.curve.diff(dim=0) > 0).any()
    which = training.curve[:, 0].argmin(0)
    for index in torch.cartesian_prod(*map(torch.arange, which.shape)).tolist():
        assert torch.equal(training.best[0][tuple(index)], kept[which[tuple(index)]][tuple(index)])


def test_learning_lowers_the_error(script):
    training = script.Training(settings(dimensions=[3], steps=20, batch=10, train=600, validation=20), [[1e-3, 3e-3]])
    training.advance(60)
    first, last = training.curve[:, 0]
    assert (last < first).all()
    assert ((last / first).log().mean((0, 2)).exp() < 0.95).all()  # of both models


def test_resumed_run_has_the_trajectory_of_an_uninterrupted_one(script):
    constant = ["--schedule", "constant"]  # a cosine knows its length
    script.main(["--smoke", "--iterations", "6", "--out", "whole", *constant])
    script.main(["--smoke", "--iterations", "2", "--out", "halves", *constant])
    script.main(["--resume", "--iterations", "6", "--out", "halves"])
    whole, halves = loaded("whole"), loaded("halves")
    assert whole["done"] == halves["done"] == 6
    assert torch.equal(whole["curve"], halves["curve"])
    assert len(whole["curve"]) == 4
    for a, b in zip((*whole["full"], *whole["best"]), (*halves["full"], *halves["best"]), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(SystemExit, match="halves has had its 3 epochs"):
        script.main(["--resume", "--out", "halves"])
    with pytest.raises(SystemExit, match="halves holds a run already"):
        script.main(["--smoke", "--out", "halves"])


def test_a_batch_larger_than_a_part_of_the_data_is_refused(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--smoke", "--batch", "11", "--out", "run"])
    assert "--batch 11 is more than" in capsys.readouterr().err
    assert not Path("run").exists()


def test_rates_fall_along_half_a_cosine(script):
    training = script.Training(settings(dimensions=[2], rates=[0.4]), [[0.4, 0.2]], total=4)
    seen = []
    for _ in range(5):
        training.advance(1)
        seen.append([optimizer.param_groups[0]["lr"] for optimizer in training.optimizers])
    expected = [(1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    assert [a for a, _ in seen] == pytest.approx([0.8 * share for share in expected])  # lr = 2λ
    assert [b for _, b in seen] == pytest.approx([0.2 * share for share in expected])


# ------------------------------------------------------------ what is said
def test_rates_are_those_of_the_lowest_validation_error(script):
    """For each N and model of its own: what is chosen is not beaten by what is not."""
    args = settings(dimensions=[2, 5], rates=[0.0, 0.003, 0.3], search=5)
    chosen = script.search(args)
    for d, N in enumerate(args.dimensions):
        for m in range(2):
            errors = {}
            for rate in args.rates:
                training = script.Training(settings(dimensions=[N]), [[rate, rate]])
                training.advance(5)
                errors[rate] = training.curve[-1, 0, :, m].log().mean().item()
            assert chosen[d][m] == min(errors, key=errors.get)
    assert script.search(settings(dimensions=[2, 5], rates=[0.7], search=5)) == [[0.7, 0.7]] * 2


def test_run_says_what_it_found(script, capsys):
    script.main(["--smoke", "--out", "run"])
    said = capsys.readouterr().out
    assert len(re.findall(r"rate \S+: mean error full \S+, restricted \S+", said)) == 2
    assert re.search(r"rates by N: λ = \S+, \S+ \(full\), lr = \S+, \S+ \(restricted\); 4 iterations", said)
    rows = re.findall(r"\| (W_[ug]) \| ([^|]+) \| ([^|]*) \| ([^|]*) \|", said)
    assert [row[:2] for row in rows[:5]] == [
        ("W_u", "full"), ("W_u", "full, published (quoted, not re-checked)"),
        ("W_u", "restricted"), ("W_u", "restricted, published (quoted, not re-checked)"), ("W_u", "frozen"),
    ]  # fmt: skip
    assert len(rows) == 16  # the second table has no published rows
    assert rows[3][3] == "4.81e-01"
    for row in rows[:10]:
        for cell in row[2:]:
            if cell and "published" not in row[1]:
                best = cell.split()[0]
                assert best.endswith("†") == (float(best.rstrip("†")) >= 1)
    assert said.count("\n† ") == ("† (" in said)
    assert float(re.search(r"residual of the full W: (\S+)", said).group(1)) < 1e-5
    for name in ("curves.png", "bars.png"):
        assert (Path("run") / name).read_bytes()[:4] == b"\x89PNG"
    assert (Path("run") / "results.md").read_text().splitlines()[0] in said


@pytest.mark.parametrize(("published", "daggers"), [(True, 3), (False, 0)])
def test_errors_no_better_than_zero_are_marked_and_explained_once(identification, published, daggers):
    errors = torch.tensor([0.5, 1.0, 0.9, 1.5]).reshape(1, 2, 2, 1).expand(1, 2, 2, 2)
    said = identification.table(errors, torch.zeros(1, 2, 2, dtype=torch.int64), [4], ("full", "restricted"), published)
    rows, *rest = said.split("\n\n")
    assert ("| 1.00e+00† (1.00e+00) |" in rows) == ("| 1.50e+00† (1.50e+00) |" in rows) == published
    assert said.count("†") == daggers
    assert rest == (["† no better than predicting zero, which has error 1"] if published else [])


@pytest.mark.parametrize(
    ("full", "restricted", "words"),
    [
        (0.2, 0.4, "ratio 0.500 is to be below 0.7: reached"),
        (0.3, 0.4, "ratio 0.750 is to be below 0.7: missed"),
        (0.2, 1.2, "no better than predicting zero, so no ordering is claimed"),
    ],
)
def test_verdict(identification, full, restricted, words):
    assert words in identification.verdict("W_u", 16, torch.tensor([full, restricted, 1.9]))


def test_published_protocol(script, monkeypatch):
    seen = []
    monkeypatch.setattr(script, "run", seen.append)
    script.main(["--paper"])
    args = seen[0]
    assert (args.train, args.validation, args.test, args.batch, args.steps) == (20000, 1000, 1000, 50, 150)
    assert args.iterations * args.batch == 100 * args.train
    assert (args.starts, args.rates, args.dimensions) == (6, [0.001], [4, 6, 7, 8, 16])


# ------------------------------------------------------------ capacity
def test_capacity(script, capsys):
    """Any W is reached at N = 2; at N = 8, where the restricted matrices are a null set, a Haar matrix is not."""
    script.main(["--capacity", "--dimensions", "2", "8", "--starts", "3"])
    cells = [row.split(" | ") for row in capsys.readouterr().out.splitlines()[2:]]
    found = {(kind.strip("| "), int(N)): (float(d), int(hits[0])) for kind, N, _, d, _, hits in cells}
    assert len(found) == 6
    for kind in ("W_u", "W_g", "Haar"):
        assert found[kind, 2][0] < 1e-6
        assert found[kind, 2][1] > 0
    assert found["Haar", 8][0] > 0.1
    assert found["Haar", 8][1] == 0
    assert [cell[2] for cell in cells[::3]] == ["4 of 4", "49 of 64"]


def test_distances_find_a_way_back(identification):
    """From near a restricted matrix the descent returns to it, to rounding."""
    torch.manual_seed(0)
    starts = identification.RestrictedUnitary(8, batch_shape=(3,), dtype=torch.complex128)
    starts.permutation.copy_(starts.permutation[0].expand_as(starts.permutation).clone())
    target = starts.matrix()[1].detach()
    with torch.no_grad():
        starts.theta.add_(0.01 * torch.randn_like(starts.theta))
    away = (starts.matrix()[1] - target).norm().item()
    found = identification.distances(target, starts)
    assert found[0] < 1e-9 < 1e-3 < away
    assert (found.diff() >= 0).all()
    assert found[-1] < (starts.matrix() - target).flatten(1).norm(dim=1).max()
