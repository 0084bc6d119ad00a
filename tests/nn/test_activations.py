"""modReLU: published values and gradients, equivariance, behaviour at zero; other activations on the modulus."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from manopt_torch import max_residual, param_groups
from manopt_torch.nn import KernelActivation, ModReLU, OnModulus, RealReadout, TruG, UnitaryRNN
from manopt_torch.optim import RiemannianAdam

# torch's own derivative formulas use torch.jit.script when forward mode first runs
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

CASES = json.loads((Path(__file__).parents[1] / "reference" / "urnn.json").read_text())["modrelu"]


def number(value: dict) -> complex:
    return complex(value["re"], value["im"])


def column(name: str) -> torch.Tensor:
    values = [number(case[name]) if isinstance(case[name], dict) else case[name] for case in CASES]
    return torch.tensor(values, dtype=torch.complex128 if isinstance(values[0], complex) else torch.float64)


def modrelu(bias: torch.Tensor, hard: bool = False) -> ModReLU:
    layer = ModReLU(len(bias), hard, dtype=bias.dtype)
    with torch.no_grad():
        layer.bias.copy_(bias)
    return layer


def test_hard_has_the_reference_values_and_gradients():
    layer = modrelu(column("b"), hard=True)
    z = column("z").requires_grad_()
    out = layer(z)
    out.backward(column("grad_out"))
    torch.testing.assert_close(out.detach(), column("out"), rtol=0, atol=1e-10)
    torch.testing.assert_close(z.grad, column("grad_z"), rtol=0, atol=1e-10)
    torch.testing.assert_close(layer.bias.grad, column("grad_b"), rtol=0, atol=1e-10)


def test_soft_has_the_reference_values():
    out = modrelu(column("b"))(column("z"))
    torch.testing.assert_close(out.detach(), column("out_eps_both"), rtol=0, atol=1e-10)


def test_soft_keeps_signs_of_both_parts_of_the_derivative_apart():
    """Radial and tangential derivative of the soft form, by hand: with f(s) = (s+b)/(s+ε), f + |z|² f'/s and f."""
    z, b, eps = complex(0.3, -0.4), 0.2, 1e-5
    s = (0.25 + eps) ** 0.5
    f, slope = (s + b) / (s + eps), (eps - b) / (s + eps) ** 2
    radial, tangential = f + 0.25 * slope / s, f
    layer = modrelu(torch.tensor([b], dtype=torch.float64))
    x = torch.tensor([z], dtype=torch.complex128)
    u = x / abs(z)
    _, along = torch.func.jvp(layer, (x,), (u,))
    _, across = torch.func.jvp(layer, (x,), (1j * u,))
    torch.testing.assert_close(along.detach(), radial * u, rtol=1e-12, atol=0)
    torch.testing.assert_close(across.detach(), tangential * 1j * u, rtol=1e-12, atol=0)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradcheck(hard, dtype):
    torch.manual_seed(0)
    z = torch.randn(3, 6, dtype=dtype, requires_grad=True)
    bias = torch.tensor([-3.0, -0.4, -0.1, 0.0, 0.2, 1.5], dtype=torch.float64, requires_grad=True)
    layer = ModReLU(6, hard, dtype=torch.float64)

    def call(z, bias):
        return torch.func.functional_call(layer, {"bias": bias}, (z,))

    assert torch.autograd.gradcheck(call, (z, bias), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (z, bias))


@pytest.mark.parametrize("hard", [False, True])
def test_phase_is_kept_and_modulus_thresholded(hard):
    torch.manual_seed(1)
    layer = modrelu(torch.linspace(-2, 2, 20, dtype=torch.float64), hard)
    z = torch.randn(50, 20, dtype=torch.complex128)
    z = z + 0.2 * z.sgn()  # the soft form differs by O(ε |b| / |z|²)
    out, phase = layer(z).detach(), torch.polar(*torch.rand(2, 50, 1, dtype=torch.float64))
    phase = phase / phase.abs()
    torch.testing.assert_close(layer(phase * z).detach(), phase * out)
    torch.testing.assert_close(
        out.abs(), (z.abs() + layer.bias.detach()).clamp(min=0), rtol=0, atol=1e-14 if hard else 1e-3
    )
    torch.testing.assert_close((out * z.conj()).imag, torch.zeros(50, 20, dtype=torch.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("hard", [False, True])
def test_real_values_are_the_real_line_of_the_complex_ones(hard):
    torch.manual_seed(2)
    layer = modrelu(torch.randn(7, dtype=torch.float64), hard)
    z = torch.randn(4, 7, dtype=torch.float64)
    assert layer(z).dtype == torch.float64
    torch.testing.assert_close(layer(z).to(torch.complex128), layer(z.to(torch.complex128)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_hard_is_zero_with_zero_gradient_at_zero(dtype):
    layer = modrelu(torch.tensor([0.5, 0.0, -0.5]), hard=True)
    z = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    out = layer(z)
    out.backward(torch.ones_like(out))
    assert not out.any()
    assert not z.grad.any()
    assert not layer.bias.grad.any()


def test_soft_gradient_is_bounded_where_the_hard_one_is_not():
    tiny = torch.tensor([[1e-12 + 1e-12j]], dtype=torch.complex128, requires_grad=True)
    bias, across = torch.tensor([0.01], dtype=torch.float64), torch.tensor([[1 - 1j]], dtype=torch.complex128)
    (hard,) = torch.autograd.grad(modrelu(bias, hard=True)(tiny), tiny, across)
    (soft,) = torch.autograd.grad(modrelu(bias)(tiny), tiny, across)
    assert hard.abs().item() > 1e9
    assert soft.abs().item() <= 2**0.5 * (1 + 0.01 / 1e-5**0.5)


def test_initial_bias_is_uniform_on_a_hundredth():
    torch.manual_seed(3)
    bias = ModReLU(4000).bias
    assert bias.dtype == torch.float32
    assert -0.01 <= bias.min() < -0.0099
    assert 0.0099 < bias.max() <= 0.01


def test_errors_name_what_came():
    with pytest.raises(ValueError, match=r"last dimension of 3, got shape \(2, 1\)"):
        ModReLU(3)(torch.zeros(2, 1))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ModReLU(0)
    with pytest.raises(ValueError, match=r"real floating point, got torch\.complex64"):
        ModReLU(3, dtype=torch.complex64)


def test_repr():
    assert repr(ModReLU(3)) == "ModReLU(3)"
    assert repr(ModReLU(3, hard=True)) == "ModReLU(3, hard=True)"


def test_half_precision_is_computed_one_step_up():
    z = torch.full((2,), 300.0, dtype=torch.float16)  # its square overflows
    assert torch.equal(ModReLU(2, dtype=torch.float16)(z), torch.full_like(z, 300.0))


# ------------------------------------------------------------------ any activation on the modulus
ON_MODULUS = [
    nn.Tanh(),
    nn.PReLU(dtype=torch.float64),
    KernelActivation(3, 5, "gauss", normalize=False, dtype=torch.float64),
]


@pytest.mark.parametrize("activation", ON_MODULUS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_on_modulus(activation, dtype):
    layer = OnModulus(activation, 3, dtype=torch.float64)
    z = torch.randn(5, 3, dtype=dtype, requires_grad=True)
    torch.testing.assert_close(layer(z), activation(z.abs() + layer.bias) * z / z.abs())
    assert torch.autograd.gradcheck(layer, (z,))
    assert not layer(torch.zeros(2, 3, dtype=dtype)).any()
    with pytest.raises(ValueError, match=r"expected \(\.\.\., 3\)"):
        layer(torch.zeros(3, 4, dtype=dtype))


def test_relu_on_the_modulus_is_hard_modrelu():
    layer, other = OnModulus(nn.ReLU(), 4), ModReLU(4, hard=True)
    with torch.no_grad():
        other.bias.copy_(layer.bias.uniform_(-1, 1))
    z = torch.randn(50, 4, dtype=torch.complex64)
    torch.testing.assert_close(layer(z), other(z))


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64])
def test_any_activation_in_a_unitary_rnn(dtype):
    torch.manual_seed(0)
    rnn = UnitaryRNN(3, 5, 2, hard=True, dtype=dtype)
    own = UnitaryRNN(3, 5, 2, activation=lambda n: OnModulus(nn.ReLU(), n, dtype=torch.float64), dtype=dtype)
    state = {name.replace("modrelu", "activation"): value for name, value in rnn.state_dict().items()}
    own.load_state_dict(state)
    x, mask = torch.randn(7, 4, 3, dtype=dtype), torch.rand(7, 4) < 0.7
    for found, expected in zip(own(x, mask=mask), rnn(x, mask=mask), strict=True):
        torch.testing.assert_close(found, expected)
    h = None
    for step in x:
        h = own.cells[0](step, h)
    torch.testing.assert_close(h, own(x)[1][0])


def test_nonlinearity_and_recurrence_are_learned_together():
    torch.manual_seed(0)
    rnn = UnitaryRNN(1, 8, activation=lambda n: OnModulus(TruG(n, lower=0.0, upper=2.0, learn="unit"), n))
    read = RealReadout(8, 1)
    model = nn.ModuleList([rnn, read])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = RiemannianAdam(param_groups(model), lr=0.02)
    losses = []
    for _ in range(60):
        x = torch.randn(6, 64, 1)
        loss = (read(rnn(x)[1][0]) - x[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert max_residual(model) < 1e-5
    with pytest.raises(ValueError, match="checkpoint_every is for modReLU"):
        UnitaryRNN(1, 8, activation=lambda n: OnModulus(nn.ReLU(), n), checkpoint_every=2)(x)
    with pytest.raises(ValueError, match="hard is a form of modReLU"):
        UnitaryRNN(1, 8, activation=lambda n: OnModulus(nn.ReLU(), n), hard=True)
