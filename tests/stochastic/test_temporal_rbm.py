"""Temporal TruG-RBM: exact values, contrastive divergence, sequences of different length, prediction, generation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from manopt_torch.stochastic import TemporalTruGRBM, TruGRBM
from manopt_torch.stochastic.gibbs import configurations

INF = math.inf
CASES = json.loads((Path(__file__).parents[1] / "reference" / "temporal_exact.json").read_text())["cases"]
WEIGHTS = ("W1", "W2", "W3", "W4", "b", "c")


def doubles(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_case(case: dict) -> TemporalTruGRBM:
    """The model of a case of the reference, both ends leaves of their own."""
    ends = {"lower": doubles(case["xi1"]), "upper": doubles(case["xi2"])}
    model = TemporalTruGRBM(
        2, 2, precision=doubles(case["d"]), learn=None, learn_precision=True, dtype=torch.float64, **ends
    )
    with torch.no_grad():
        for name in WEIGHTS:
            getattr(model, name).copy_(doubles(case[name]))
    model.rbm.units.lower.requires_grad_()
    model.rbm.units.upper.requires_grad_()
    return model


def gradients(model: TemporalTruGRBM) -> dict[str, Tensor]:
    """By the names of the reference; the derivative with respect to ln d is d times that to d."""
    found = {name: getattr(model, name).grad for name in WEIGHTS}
    units = model.rbm.units
    return {
        **found,
        "d": model.rbm.log_precision.grad / model.d.detach(),
        "xi1": units.lower.grad,
        "xi2": units.upper.grad,
    }


def random_model(n: int, m: int, scale: float = 0.6, **settings: object) -> TemporalTruGRBM:
    """Dense random parameters."""
    model = TemporalTruGRBM(n, m, dtype=torch.float64, **settings)
    with torch.no_grad():
        for name in WEIGHTS:
            getattr(model, name).normal_(0, scale)
    return model


def frames(*shape: int) -> Tensor:
    return torch.randint(2, shape).double()


def close(found: Tensor, expected: object, tolerance: float = 1e-8) -> None:
    expected = expected if isinstance(expected, Tensor) else doubles(expected)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ exact values
@pytest.mark.parametrize("case", CASES)
def test_reference_by_quadrature(case: dict) -> None:
    """E_q over h_1 and h_2 by 14 Gauss-Legendre nodes for each unit, all paths as one batch of sequences.

    ln p(X) = ln E_q Π_t p(x_t | x_{t−1}, h_{t−1}); (3.4) is the derivative of the terms with h given.
    """
    model, x = of_case(case), doubles(case["X"])
    nodes, weights = map(torch.as_tensor, np.polynomial.legendre.leggauss(14))
    low, high = doubles(case["xi1"]), doubles(case["xi2"])
    grid = torch.cartesian_prod(nodes, nodes)
    one = low + (high - low) * (grid + 1) / 2
    density = torch.cartesian_prod(weights, weights).prod(1) * (high - low).prod() / 4
    count = len(one)
    h1, h2 = one.repeat_interleave(count, 0), one.repeat(count, 1)
    h = torch.stack([h1, h2, torch.full_like(h1, 0.3)])
    sequences = x[:, None].expand(3, count * count, 2)
    with torch.no_grad():
        q1 = model.step(torch.zeros(2).double(), torch.zeros(2).double()).hidden(x[0]).log_prob(one).sum(-1).exp()
        q2 = model.step(x[0].expand_as(h1), h1).hidden(x[1].expand_as(h1)).log_prob(h2).sum(-1).exp()
    q = (q1 * density).repeat_interleave(count) * q2 * density.repeat(count)
    close(q.sum(), 1.0, 1e-12)
    close(torch.stack([q @ h1, q @ h2]), case["h_means"])
    terms = model.terms(sequences, h)
    close(terms @ q, case["terms"])
    close((terms @ q).sum(), case["bound"])
    close((q @ terms.sum(0).exp()).log(), case["logp"])
    (terms @ q).sum().backward()
    for name, found in gradients(model).items():
        close(found, case["grad_q_fixed"][name])


@pytest.mark.parametrize("case", CASES)
def test_sampled_bound_and_its_gradient(case: dict) -> None:
    """20,000 samples of H, in 20 batches: L and (3.4) within 5 standard errors, and these below 0.004."""
    found = []
    for seed in range(20):
        model = of_case(case)
        generator = torch.Generator().manual_seed(seed)
        bound = model.bound(doubles(case["X"]), samples=1000, generator=generator)
        bound.backward()
        found.append([bound.detach().view(1), *(g.flatten() for g in gradients(model).values())])
    expected = [doubles([case["bound"]]), *(doubles(case["grad_q_fixed"][k]).flatten() for k in gradients(model))]
    for got, right in zip(zip(*found, strict=True), expected, strict=True):
        values = torch.stack(got)
        error = values.std(0) / math.sqrt(20)
        assert (error < 0.004).all()
        assert ((values.mean(0) - right).abs() < 5 * error + 1e-12).all()


@pytest.mark.parametrize("case", CASES)
def test_long_chains_give_the_exact_gradient(case: dict) -> None:
    """CD-30 on 20 batches of 1000 copies: within 5 standard errors of (3.4), with the sign of a loss."""
    found = []
    x = doubles(case["X"])[:, None].expand(3, 1000, 2)
    for seed in range(20):
        model = of_case(case)
        model.contrastive_divergence(x, 30, generator=torch.Generator().manual_seed(seed)).backward()
        found.append(list(gradients(model).values()))
    for got, name in zip(zip(*found, strict=True), gradients(model), strict=True):
        values = torch.stack(got)
        error = values.std(0) / math.sqrt(20)
        assert (error < 0.02).all()
        assert ((values.mean(0) + doubles(case["grad_q_fixed"][name])).abs() < 5 * error + 1e-12).all(), name


def test_contrastive_divergence_is_the_sum_over_its_machines() -> None:
    """The same samples, step by step through the RBM with shifted biases."""
    model, x = random_model(3, 2, upper=1.5), frames(4, 5, 3)
    loss = model.contrastive_divergence(x, 2, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    h = model.filter(x, generator=generator)
    zero = torch.zeros(1, 5, 3).double()
    past, before = torch.cat([zero, x[:-1]]), torch.cat([zero[..., :2], h[:-1]])
    b, c = model.b + past @ model.W3.mH, model.c + past @ model.W2.mH + before @ model.W4.mH
    energy = model.rbm.energy._replace(b=b.flatten(0, 1), c=c.flatten(0, 1))
    rows = x.flatten(0, 1)
    expected = (energy.free_energy(rows) - energy.free_energy(energy.gibbs(rows, 2, generator))).sum() / 5
    close(loss, expected, 1e-12)
    found, right = (torch.autograd.grad(value, model.rbm.W, retain_graph=True)[0] for value in (loss, expected))
    close(found, right, 1e-12)


@pytest.mark.parametrize("units", ["trug", "binary"])
def test_gaussian_frames_by_quadrature(units: str) -> None:
    """n = m = 1: p(x_2 | x_1, h_1) by integrals of exp(−E_2) as it is written, ln Z by annealing."""
    model = random_model(
        1, 1, visible="gaussian", visible_precision=1.7, lower=-0.5, upper=1.25, precision=2.5, units=units, learn=None
    )
    W1, W2, W3, W4, b, c = (getattr(model, name).item() for name in WEIGHTS)
    x, h = doubles([[-0.4], [0.9]]), doubles([[1.0], [0.5]])

    def boltzmann(now: float, unit: float) -> float:
        energy = 1.7 * now**2 / 2 - now * W1 * unit - (b - 0.4 * W3) * now - (c - 0.4 * W2 + W4) * unit
        return math.exp(-energy - (2.5 * unit**2 / 2 if units == "trug" else 0.0))

    def integrated(now: float) -> float:
        if units == "binary":
            return boltzmann(now, 0) + boltzmann(now, 1)
        return scipy.integrate.quad(lambda unit: boltzmann(now, unit), -0.5, 1.25)[0]

    exact = math.log(integrated(0.9) / scipy.integrate.quad(integrated, -12, 12)[0])
    close(-model.step(x[0], h[0]).free_energy(x[1]), math.log(integrated(0.9)), 1e-12)
    found = model.terms(x, h, temperatures=200, chains=400, generator=torch.Generator().manual_seed(0))
    assert abs(found[1].item() - exact) < 0.02
    mean = model.step(x[0], h[0]).visible(h[1]).mean
    close(mean, [(W1 * 0.5 + b - 0.4 * W3) / 1.7], 1e-12)


def test_annealing_of_every_step_against_enumeration() -> None:
    model, x = random_model(6, 4, upper=1.0), frames(5, 3, 6)
    h = model.filter(x)
    found = model.terms(x, h, temperatures=100, chains=200, generator=torch.Generator().manual_seed(0))
    assert found.shape == (5, 3)
    assert (found - model.terms(x, h)).abs().max() < 0.1


# ------------------------------------------------------------------ reductions
@pytest.mark.parametrize("units", ["trug", "binary"])
def test_one_step_is_the_machine_without_past(units: str) -> None:
    model, x = random_model(4, 3, upper=2.0, units=units), frames(1, 6, 4)
    rbm = TruGRBM(4, 3, upper=2.0, units=units, dtype=torch.float64)
    rbm.load_state_dict(model.rbm.state_dict())
    close(model.bound(x), rbm.log_likelihood(x[0]), 1e-12)
    close(model(x)[0], rbm(x[0]), 1e-12)
    for name in ("W2", "W3", "W4"):
        assert not torch.autograd.grad(model.bound(x).sum(), getattr(model, name))[0].any()


def test_without_memory_all_frames_are_independent() -> None:
    model, x = random_model(4, 3, upper=2.0), frames(5, 2, 4)
    for weight in (model.W2, model.W3, model.W4):
        weight.data.zero_()
    close(model.bound(x), model.rbm.log_likelihood(x).sum(0), 1e-12)
    found = torch.autograd.grad(model.bound(x).mean(), model.rbm.W)[0]
    close(found, torch.autograd.grad(model.rbm.log_likelihood(x).sum(0).mean(), model.rbm.W)[0], 1e-12)


def test_probabilities_of_all_sequences_sum_to_one() -> None:
    """Binary units, T = 2, n = m = 2: Σ_X E_q Π p = 1, with E_q a sum over the four h_1."""
    model = random_model(2, 2, units="binary", learn=None)
    states = configurations(torch.arange(4), 2).double()
    index = torch.cartesian_prod(*[torch.arange(4)] * 3)
    x, h = states[index[:, :2]].movedim(1, 0), states[index[:, 2]].expand(2, 64, 2)
    q = model.step(torch.zeros(2).double(), torch.zeros(2).double()).hidden(x[0]).log_prob(h[0]).sum(-1).exp()
    close((q * model.terms(x, h).sum(0).exp()).sum(), 1.0, 1e-12)


# ------------------------------------------------------------------ sequences of different length
def unequal(model: TemporalTruGRBM) -> tuple[list[Tensor], PackedSequence]:
    parts = [frames(length, model.num_visible) for length in (2, 5, 1, 3)]
    return parts, pack_sequence(parts, enforce_sorted=False)


def test_lengths_have_no_effect_on_each_other() -> None:
    """With W4 = 0 nothing is random: each sequence alone has the same bound; means and predictions in any case."""
    model = random_model(3, 2, upper=1.5)
    parts, packed = unequal(model)
    features, predicted = (f(packed) for f in (model, model.predict))
    for i, part in enumerate(parts):
        length = len(part)
        for found, alone in ((features, model(part)), (predicted, model.predict(part))):
            padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(found)
            assert lengths[i] == length
            close(padded[:length, i], alone, 1e-12)
    model.W4.data.zero_()
    close(model.bound(packed, samples=3), torch.stack([model.bound(part) for part in parts]), 1e-12)
    total = model.bound(packed).sum()
    found = torch.autograd.grad(total, model.W2)[0]
    close(found, torch.autograd.grad(sum(model.bound(part) for part in parts), model.W2)[0], 1e-12)


def test_equal_lengths_are_the_same_packed_or_not() -> None:
    model, x = random_model(3, 2, upper=1.5), frames(4, 3, 3)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 4, 4]))
    losses = [model.contrastive_divergence(v, generator=torch.Generator().manual_seed(1)).detach() for v in (x, packed)]
    assert torch.equal(*losses)
    single = [model.bound(v, generator=torch.Generator().manual_seed(1)) for v in (x[:, 0], x[:, :1])]
    assert single[0].shape == ()
    close(single[0], single[1][0], 1e-12)


# ------------------------------------------------------------------ samples, prediction, generation
def test_filter_samples_q() -> None:
    """h_1 given x_1, then h_2 given x_1, x_2 and that h_1: both uniform after their distribution functions."""
    model, x = random_model(3, 1, 0.9, lower=-1.0, upper=1.0), frames(2, 3)
    x = x[:, None].expand(2, 5000, 3)
    h = model.filter(x, generator=torch.Generator().manual_seed(0))
    assert not h.requires_grad
    zero = torch.zeros(5000, 4).double()
    first = model.step(zero[:, :3], zero[:, :1]).hidden(x[0]).cdf(h[0])
    second = model.step(x[0], h[0]).hidden(x[1]).cdf(h[1])
    for u in (first, second):
        assert scipy.stats.kstest(u.detach().flatten().numpy(), "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(first.detach().flatten(), second.detach().flatten())[0, 1]) < 0.06


def test_generated_sequences_have_the_probabilities_of_the_model() -> None:
    """Binary units, T = 2, n = m = 2: the 16 sequences by a χ² test; their order matters."""
    model = random_model(2, 2, 1.0, units="binary", learn=None)
    states = configurations(torch.arange(4), 2).double()
    index = torch.cartesian_prod(*[torch.arange(4)] * 3)
    x, h = states[index[:, :2]].movedim(1, 0), states[index[:, 2]].expand(2, 64, 2)
    zero = torch.zeros(2).double()
    q = model.step(zero, zero).hidden(x[0]).log_prob(h[0]).sum(-1).exp()
    expected = (q * model.terms(x, h).sum(0).exp()).view(16, 4).sum(1).detach()
    drawn = model.generate(2, 20000, k=20, generator=torch.Generator().manual_seed(0))
    numbers = (drawn.long() * torch.tensor([1, 2])).sum(-1)
    counts = torch.bincount(numbers[0] * 4 + numbers[1], minlength=16)
    assert scipy.stats.chisquare(counts.numpy(), 20000 * expected.numpy()).pvalue > 1e-4
    assert scipy.stats.chisquare(counts.numpy(), 20000 * expected.view(4, 4).mH.flatten().numpy()).pvalue < 1e-6


def test_generation_goes_on_from_a_start() -> None:
    """A strong W3 that shifts the frame by one unit."""
    model = TemporalTruGRBM(4, 2, dtype=torch.float64)
    with torch.no_grad():
        for name in WEIGHTS:
            getattr(model, name).zero_()
        model.W3.copy_(60 * torch.eye(4).roll(1, 0))
        model.b.fill_(-30)
    start = torch.eye(4).double()[:, None][:2]
    found = model.generate(3, start=start)
    close(found[:, 0], torch.eye(4).double()[[2, 3, 0]], 0)
    close(model.predict(torch.cat([start, found]))[1:, 0], torch.eye(4).double()[[1, 2, 3, 0]], 1e-9)


def test_prediction_by_sampling_is_the_mean_of_the_next_frame() -> None:
    """Against E[x_2 | x_1] = Σ x p(x | x_1, h_1) q(h_1), enumerated over x for 4000 samples of h_1."""
    model = random_model(3, 2, upper=2.0)
    x = frames(2, 3)
    found = model.predict(x, iterations=20, samples=4000, generator=torch.Generator().manual_seed(0))
    states = configurations(torch.arange(8), 3).double()
    energy = model.step(x[0].expand(4000, 3), model.filter(x[:, None].expand(2, 4000, 3))[0])
    weights = torch.stack([-energy.free_energy(s.expand(4000, 3)) for s in states]).softmax(0).mean(1)
    assert (found[1] - weights @ states).abs().max() < 0.025
    assert torch.equal(model.predict(torch.stack([x[0], 1 - x[1]])), model.predict(x))


def test_mean_field_without_coupling_is_exact() -> None:
    model, x = random_model(3, 2, upper=2.0), frames(4, 2, 3)
    model.rbm.W.data.zero_()
    past = torch.cat([torch.zeros(1, 2, 3).double(), x[:-1]])
    close(model.predict(x), torch.sigmoid(model.b + past @ model.W3.mH), 1e-12)


def test_learning_raises_the_bound() -> None:
    """A pattern that alternates: the bound of four frames grows to that of the first alone, about −ln 2."""
    torch.manual_seed(0)
    one = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1]] * 2).double()
    x = torch.stack([one, one.roll(1, 0)] * 10, 1)
    model = TemporalTruGRBM(4, 6, upper=1.0, dtype=torch.float64)
    before = model.bound(x).mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        model.contrastive_divergence(x, 2).backward()
        optimizer.step()
    assert before < -9
    assert -4 < model.bound(x, samples=5).mean() < -math.log(2)
    assert (model.xi1.abs().min() > 1e-3) or (model.xi2 - 1).abs().min() > 1e-3


# ------------------------------------------------------------------ refusals
def test_bad_input_is_refused() -> None:
    model = random_model(3, 2)
    for shape in ((3,), (4, 2), (2, 4, 2, 3), (0, 3), (2, 0, 3)):
        with pytest.raises(ValueError, match=r"needs sequences \(T, 3\), \(T, B, 3\) or a PackedSequence"):
            model(torch.zeros(shape))
    with pytest.raises(ValueError, match="in a PackedSequence"):
        model.bound(pack_sequence([torch.zeros(2, 4)]))
    with pytest.raises(ValueError, match="the same steps"):
        model.terms(frames(3, 2, 3), torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match=r"start must be \(T, B, 3\)"):
        model.generate(2, start=frames(4, 3))
    for call in (
        lambda: model.bound(frames(2, 3), samples=0),
        lambda: model.predict(frames(2, 3), iterations=0),
        lambda: model.predict(frames(2, 3), samples=-1),
        lambda: model.generate(0),
    ):
        with pytest.raises(ValueError, match="must be at least 1"):
            call()
    with pytest.raises(ValueError, match="precision must be positive"):
        TemporalTruGRBM(3, 2, precision=-1.0)
    with pytest.raises(ValueError, match="annealed_importance_sampling"):
        random_model(21, 2).bound(frames(2, 21))


def test_models_without_partition_function_are_refused() -> None:
    settings = {"visible": "gaussian", "precision": 1.0, "learn": None, "dtype": torch.float64}
    x = torch.zeros(2, 1, 2).double()
    for upper, coupling, refused in ((INF, 1.01, True), (INF, 0.99, False), (5.0, 1.01, False)):
        model = TemporalTruGRBM(2, 2, upper=upper, **settings)
        model.W1.data.copy_(coupling * torch.eye(2))
        for call in (lambda m=model: m.bound(x, temperatures=2), lambda m=model: m.predict(x), model.generate):
            arguments = (2,) if call == model.generate else ()
            if refused:
                with pytest.raises(ValueError, match="not positive definite"):
                    call(*arguments)
            else:
                call(*arguments)


def test_state_and_reset() -> None:
    model = random_model(3, 2, upper=1.0)
    other = TemporalTruGRBM(3, 2, upper=1.0, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    x = frames(4, 2, 3)
    assert torch.equal(model(x), other(x))
    model.reset_parameters(torch.Generator().manual_seed(0))
    other.reset_parameters(torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not model.b.any()
    assert model.W4.std() < 0.6
