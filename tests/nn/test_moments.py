"""Moments of activations, gains, dead units, and what weight decay leaves alone."""

from __future__ import annotations

import json
import math
import pathlib

import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import nn

from manopt_torch import param_groups
from manopt_torch.nn import KernelActivation, TruG, dead_fraction, gain, he_normal_, moments, no_weight_decay

REFERENCE = json.loads((pathlib.Path(__file__).parents[1] / "reference" / "leaky_relu.json").read_text())


def prelu(slope):
    layer = nn.PReLU(dtype=torch.float64)
    nn.init.constant_(layer.weight, slope)
    return layer


class Wrapped(nn.Module):
    """An activation whose class tells nothing."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, z):
        return self.activation(z)


@pytest.mark.parametrize("case", REFERENCE["family"], ids=lambda c: f"{c['alpha']:g}")
@pytest.mark.parametrize("make", [nn.LeakyReLU, prelu, lambda a: Wrapped(nn.LeakyReLU(a))])
def test_leaky_relu(case, make):
    mean, power = moments(make(case["alpha"]))
    assert mean.item() == pytest.approx(case["mean_N01"], abs=1e-13)
    assert power.item() == pytest.approx(case["second_moment_N01"], abs=1e-13)
    assert gain(make(case["alpha"])).item() == pytest.approx(case["gain"], rel=1e-13)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.RReLU(), nn.Identity()])
def test_closed_forms_are_those_of_quadrature(activation):
    for found, expected in zip(moments(activation), moments(Wrapped(activation)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.GELU(), nn.ELU(), nn.Softplus(), nn.SELU(), nn.SiLU()])
def test_smooth_activations(activation):
    def integrand(power):
        return lambda z: activation(torch.tensor(z, dtype=torch.float64)).item() ** power * scipy.stats.norm.pdf(z)

    for power, found in zip((1, 2), moments(activation), strict=True):
        expected = sum(scipy.integrate.quad(integrand(power), *ends, epsabs=1e-13)[0] for ends in ((-12, 0), (0, 12)))
        assert found.item() == pytest.approx(expected, abs=1e-11)


def test_selu_keeps_zero_mean_and_unit_power():
    """The constants of Klambauer et al. (2017) are the fixed point."""
    mean, power = moments(nn.SELU())
    assert mean.item() == pytest.approx(0, abs=1e-7)
    assert power.item() == pytest.approx(1, abs=1e-7)


def test_learned_activations_unit_by_unit():
    trug = TruG(3, lower=torch.tensor([-1.0, 0.0, -5.0]), upper=torch.tensor([1.0, 2.0, 5.0]), learn="unit")
    mean, power = moments(trug)
    z = torch.randn(200_000, generator=torch.Generator().manual_seed(0))[:, None].expand(-1, 3)
    torch.testing.assert_close(mean.float(), trug(z).mean(0).detach(), atol=0.01, rtol=0)
    torch.testing.assert_close(power.float(), trug(z).square().mean(0).detach(), atol=0.01, rtol=0)
    kernel = KernelActivation(2, 1, "relu", normalize=False, dtype=torch.float64)  # f = max(0, z − ½), −2 max(0, z)
    with torch.no_grad():
        kernel.centers.copy_(torch.tensor([[0.5], [0.0]]))
        kernel.chi.copy_(torch.tensor([[-1.0], [2.0]]))
    expected = scipy.stats.norm.pdf(0.5) - 0.5 * scipy.stats.norm.sf(0.5), -2 / math.sqrt(2 * math.pi)
    torch.testing.assert_close(moments(kernel)[0], torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)
    many = nn.PReLU(2)
    assert moments(many)[0].shape == (2,)


def test_training_is_left_as_it_was():
    kernel = KernelActivation(2, 3)
    before = kernel.norm.running_mean.clone()
    moments(kernel)
    assert kernel.training
    assert torch.equal(kernel.norm.running_mean, before)
    with pytest.raises(ValueError, match="keeps the shape"):
        moments(nn.Linear(1, 2), units=1)


@pytest.mark.parametrize("case", REFERENCE["he_std"], ids=lambda c: f"{c['fan_in']}-{c['alpha']}")
def test_he_normal(case):
    weight = torch.empty(2000, case["fan_in"], dtype=torch.float64)
    he_normal_(weight, nn.LeakyReLU(case["alpha"]), generator=torch.Generator().manual_seed(0))
    assert weight.std().item() == pytest.approx(case["std"], rel=5 / math.sqrt(2 * weight.numel()))
    kernel = he_normal_(torch.empty(500, case["fan_in"], 2, 2), nn.LeakyReLU(case["alpha"]))
    assert kernel.std().item() == pytest.approx(case["std"] / 2, rel=5 / math.sqrt(2 * kernel.numel()))


def test_power_is_kept_through_fifty_layers():
    """With the gain of the activation itself; with that of ReLU it grows by 8.26 (squared: 68) for α = 0.3."""
    generator, activation = torch.Generator().manual_seed(0), nn.LeakyReLU(0.3)
    ratios = {}
    for name, own in (("right", activation), ("relu", nn.ReLU())):
        z = torch.randn(24, 256, 1, generator=generator)  # that many networks at once
        powers = []
        for _ in range(50):
            weight = he_normal_(torch.empty(24, 256, 256), own, generator) * 16  # fan_in is 256 here, not 256²
            z = weight @ activation(z)
            powers.append(z.square().mean())
        ratios[name] = (powers[-1] / powers[0]).item()
    assert 0.5 < ratios["right"] < 2
    assert 0.5 * 68.2 < ratios["relu"] < 2 * 68.2


def test_dead_units():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.LeakyReLU(), nn.Tanh())
    with torch.no_grad():
        model[0].bias[:2] = -100.0
        model[0].bias[2] = 1.0
    x = torch.randn(50, 4)
    assert dead_fraction(model, [(x, None), (x + 1, None)]) == {"1": pytest.approx(2 / 6), "3": 0.0, "4": 0.0}
    with torch.no_grad():
        model[0].bias[0] = 0.0
    only_late = torch.zeros(1, 4), 100 * torch.randn(50, 4)
    assert dead_fraction(model, only_late)["1"] <= 1 / 6
    assert model.training
    assert not model[1]._forward_hooks


def test_dead_channels():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    nn.init.constant_(model[0].bias, -100.0)
    with torch.no_grad():
        model[0].bias[0] = 0.0
    assert dead_fraction(model, [torch.randn(5, 1, 8, 8)]) == {"1": 0.75}


def test_nothing_to_watch():
    with pytest.raises(ValueError, match="no activation module"):
        dead_fraction(nn.Linear(2, 2), [torch.randn(3, 2)])
    with pytest.raises(ValueError, match="no batches"):
        dead_fraction(nn.ReLU(), [])


def test_weight_decay_leaves_shapes_alone():
    model = nn.Sequential(
        nn.Linear(3, 4), nn.PReLU(), TruG(4, lower=-1.0, upper=1.0, learn="unit"), KernelActivation(4, 5)
    )
    left = no_weight_decay(model)
    assert set(left) == {"1.weight", "2.lower", "2.raw_width", "3.centers"}
    optimizer = torch.optim.SGD(
        [{k: v for k, v in g.items() if k != "manifold"} for g in param_groups(model, left)], lr=0.1, weight_decay=0.5
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in left or not before[name].any())
    assert set(no_weight_decay(nn.PReLU())) == {"weight"}
    assert no_weight_decay(nn.Sequential(TruG(lower=0.0, upper=1.0, learn=None))) == {}
