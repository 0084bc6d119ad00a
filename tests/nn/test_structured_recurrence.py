"""The recurrence with a structured W: a loop in NumPy, the plain loop, derivatives of every kind, masks."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from manopt_torch.nn import structured_recurrence as module
from manopt_torch.nn.structured_recurrence import structured_recurrence
from manopt_torch.nn.unitary_maps import GivensUnitary, HouseholderUnitary, RestrictedUnitary, UnitaryMap

T, B, M, N = 7, 3, 2, 5
MAPS = {
    "restricted": (RestrictedUnitary, torch.complex128),
    "householder": (partial(HouseholderUnitary, num_factors=2), torch.complex128),
    "givens": (partial(GivensUnitary, num_layers=3), torch.complex128),
    "orthogonal householder": (partial(HouseholderUnitary, num_factors=2), torch.float64),
    "orthogonal givens": (partial(GivensUnitary, num_layers=3), torch.float64),
}
every_map = pytest.mark.parametrize("name", MAPS)
hardness = pytest.mark.parametrize("hard", [False, True])
masking = pytest.mark.parametrize("masked", [False, True])


@pytest.fixture(params=["compiled", "eager"])
def kernels(request, monkeypatch):
    """With numba's kernels and without."""
    if request.param == "eager":
        monkeypatch.setattr(module, "_compiles", lambda t: False)
    else:
        pytest.importorskip("numba")


def network(name: str, P: tuple[int, ...] = (), steps: int = T, real: bool = True) -> tuple[UnitaryMap, list[Tensor]]:
    """A map, and (input, V, b, h0) that all ask for gradients."""
    make, dtype = MAPS[name]
    shapes = ((steps, *P, B, M), (*P, N, M), (*P, N), (*P, B, N))
    dtypes = (dtype.to_real() if real else dtype, dtype, dtype.to_real(), dtype)
    tensors = [torch.randn(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
    tensors[2] *= 0.3
    tensors[2][..., 0] -= 1.5  # some units are below their threshold
    return make(N, batch_shape=P, dtype=dtype), [t.requires_grad_() for t in tensors]


def mask_of(masked: bool, P: tuple[int, ...] = (), steps: int = T) -> Tensor | None:
    return torch.rand(steps, *P, B) > 0.4 if masked else None


def call(unitary: UnitaryMap, tensors: list[Tensor], mask: Tensor | None, hard: bool) -> Tensor:
    x, V, b, h0 = tensors
    return structured_recurrence(x, V, unitary, b, h0, mask, hard=hard)


def plain(unitary: UnitaryMap, tensors: list[Tensor], mask: Tensor | None, hard: bool) -> Tensor:
    x, V, b, h0 = tensors
    return module._loop(x.to(V.dtype), V, b, h0, mask, hard, type(unitary), *unitary.factors())


@every_map
@hardness
@masking
@pytest.mark.usefixtures("kernels")
def test_equals_a_loop_in_numpy(name, hard, masked):
    unitary, tensors = network(name, real=False)
    mask = mask_of(masked)
    x, V, b, h = (t.detach().numpy() for t in tensors)
    W = unitary.matrix().detach().numpy()
    expected = []
    for t in range(T):
        z = h @ W.T + x[t] @ V.T
        s = np.abs(z) if hard else np.sqrt(np.abs(z) ** 2 + 1e-5)
        new = z / (s if hard else s + 1e-5) * np.maximum(s + b, 0)
        h = new if mask is None else np.where(mask[t].numpy()[:, None], new, h)
        expected.append(h)
    states = call(unitary, tensors, mask, hard)
    np.testing.assert_allclose(states.detach().numpy(), np.stack(expected), rtol=0, atol=1e-12)
    assert (states == 0).any()


@every_map
@hardness
@masking
@pytest.mark.parametrize("P", [(), (2, 2)])
@pytest.mark.parametrize("chunk", [1, 3 * B * N, 2**16])
@pytest.mark.usefixtures("kernels")
def test_gradients_are_those_of_the_plain_loop(name, hard, masked, P, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    unitary, tensors = network(name, P)
    mask = mask_of(masked, P)
    inputs = [*tensors, *unitary.parameters()]
    states, expected = call(unitary, tensors, mask, hard), plain(unitary, tensors, mask, hard)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-12)
    g = torch.randn_like(states)
    found = torch.autograd.grad(states, inputs, g)
    for a, b in zip(found, torch.autograd.grad(expected, inputs, g), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@every_map
@hardness
@masking
def test_gradcheck(name, hard, masked):
    unitary, tensors = network(name, steps=2)
    mask = mask_of(masked, steps=2)
    names = [key for key, _ in unitary.named_parameters()]
    weights = [p.detach().requires_grad_() for p in unitary.parameters()]

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unitary = unitary

        def forward(self, *tensors: Tensor) -> Tensor:
            return call(self.unitary, tensors, mask, hard)

    holder = Holder()

    def of(*values: Tensor) -> Tensor:
        own = {f"unitary.{key}": value for key, value in zip(names, values[4:], strict=True)}
        return torch.func.functional_call(holder, own, values[:4])

    assert torch.autograd.gradcheck(of, (*tensors, *weights), check_forward_ad=not masked, fast_mode=masked or hard)
    assert torch.autograd.gradgradcheck(of, (*tensors, *weights), fast_mode=True)


@every_map
def test_only_what_is_asked_for_gets_a_gradient(name):
    unitary, tensors = network(name)
    inputs = [*tensors, *unitary.parameters()]
    g = torch.randn(T, B, N, dtype=tensors[1].dtype)
    everything = torch.autograd.grad(call(unitary, tensors, None, False), inputs, g)
    for i, wanted in enumerate(inputs):
        for t in inputs:
            t.requires_grad_(t is wanted)
        (alone,) = torch.autograd.grad(call(unitary, tensors, None, False), wanted, g)
        torch.testing.assert_close(alone, everything[i])
    for t in inputs:
        t.requires_grad_(False)
    assert not call(unitary, tensors, None, False).requires_grad


def test_function_transforms_take_the_plain_loop():
    unitary, tensors = network("restricted")
    x, V, b, h0 = (t.detach() for t in tensors)

    def loss(x: Tensor) -> Tensor:
        return structured_recurrence(x, V, unitary, b, h0).abs().square().sum()

    many = torch.stack([x, 2 * x])
    expected = []
    for one in many:
        one.requires_grad_()
        expected.append(torch.autograd.grad(loss(one), one)[0])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(many.detach()), torch.stack(expected))
    _, tangent = torch.func.jvp(loss, (x,), (x,))
    torch.testing.assert_close(tangent, (expected[0] * x).sum())


def test_batched_gradients():
    """One backward pass for several incoming gradients, as vectorized Jacobians take it."""
    unitary, tensors = network("restricted")
    inputs = [*tensors, *unitary.parameters()]
    states = call(unitary, tensors, None, False)
    many = torch.randn(3, *states.shape, dtype=states.dtype)
    found = torch.autograd.grad(states, inputs, many, is_grads_batched=True, retain_graph=True)
    for i, g in enumerate(many):
        for a, b in zip(found, torch.autograd.grad(states, inputs, g, retain_graph=True), strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.usefixtures("kernels")
def test_masked_steps_are_skipped():
    """What a masked step reads has no influence, and its state and gradient are those of the step before."""
    unitary, tensors = network("restricted", steps=4)
    x, V, b, h0 = tensors
    mask = torch.tensor([[False, True, True], [True, False, True], [False, False, True], [True, False, True]])
    states = structured_recurrence(x, V, unitary, b, h0, mask)
    states.abs().square().sum().backward()
    assert torch.equal(states[0, 0], h0[0])
    assert torch.equal(states[1, 1], states[0, 1])
    assert torch.equal(states[3, 1], states[0, 1])
    assert torch.equal((x.grad != 0).any(-1), mask)
    alone = structured_recurrence(x[[1, 3], :1], V, unitary, b, h0[:1])
    torch.testing.assert_close(states[[1, 3], 0], alone[:, 0])


@pytest.mark.usefixtures("kernels")
def test_hard_threshold_is_zero_with_zero_gradient_at_zero():
    unitary, (x, V, b, h0) = network("restricted")
    with torch.no_grad():
        b.fill_(0.5)
        x.zero_()
        h0.zero_()
    states = structured_recurrence(x, V, unitary, b, h0, hard=True)
    states.real.sum().backward()
    assert not states.any()
    for t in (V, b, h0, x, *unitary.parameters()):
        assert not t.grad.any()


@pytest.mark.usefixtures("kernels")
def test_strides_are_free():
    unitary, (x, V, b, h0) = network("restricted")
    g = torch.randn(N, B, T, dtype=torch.complex128)

    def gradients(*tensors: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        own = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(call(unitary, own, None, False), own, g)

    expected = gradients(x, V, b, h0, g=g.permute(2, 1, 0).contiguous())
    strange = [
        x.detach().transpose(0, 1).contiguous().transpose(0, 1),
        V.detach().mH.contiguous().mH,
        b.detach().repeat_interleave(2)[::2],
        h0.detach().conj().resolve_conj().conj(),
    ]
    for found, right in zip(gradients(*strange, g=g.permute(2, 1, 0)), expected, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.usefixtures("kernels")
def test_single_precision_over_many_steps():
    unitary = RestrictedUnitary(32)
    x = torch.randn(200, 4, 1)
    V, b, h0 = torch.randn(32, 1, dtype=torch.complex64), torch.full((32,), -0.01), torch.zeros(4, 32) + 0j
    states = structured_recurrence(x, V, unitary, b, h0)
    exact = structured_recurrence(
        x.double(), V.to(torch.complex128), unitary.double(), b.double(), h0.to(torch.complex128)
    )
    assert states.dtype == torch.complex64
    torch.testing.assert_close(states.to(torch.complex128), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("kernels")
def test_a_bias_in_any_layout_has_its_gradient():
    P = (2, 3)
    unitary = RestrictedUnitary(4, batch_shape=P, dtype=torch.complex128)
    x, V = torch.randn(5, *P, 2, 2, dtype=torch.float64), torch.randn(*P, 4, 2, dtype=torch.complex128)
    h0 = torch.randn(*P, 2, 4, dtype=torch.complex128)
    bias = torch.randn(*P, 4, dtype=torch.float64) * 0.1
    gradients = []
    for b in (bias, bias.transpose(0, 1).contiguous().transpose(0, 1)):
        b = b.detach().requires_grad_()
        gradients.append(torch.autograd.grad(structured_recurrence(x, V, unitary, b, h0).abs().sum(), b)[0])
    assert gradients[0].abs().min() > 0
    torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("kernels")
def test_masked_input_may_be_anything_and_no_sequence_is_none():
    unitary = RestrictedUnitary(4)
    V = torch.randn(4, 2, dtype=torch.complex64, requires_grad=True)
    b, h0 = torch.zeros(4, requires_grad=True), torch.randn(3, 4, dtype=torch.complex64)
    x, mask = torch.randn(5, 3, 2), torch.ones(5, 3, dtype=torch.bool)
    mask[3:, 1] = False
    x[3:, 1] = float("nan")
    structured_recurrence(x, V, unitary, b, h0, mask).abs().sum().backward()
    for p in (V, b, *unitary.parameters()):
        assert p.grad.isfinite().all()
    assert structured_recurrence(x[:, :0], V, unitary, b, h0[:0]).shape == (5, 0, 4)


def test_gradient_of_w_beside_large_inputs():
    """W h has its digits although V x is a million times as large."""
    gradients = []
    for dtype in (torch.complex64, torch.complex128):
        torch.manual_seed(0)
        unitary = RestrictedUnitary(4, dtype=torch.complex128)
        unitary = unitary.float() if dtype == torch.complex64 else unitary
        V, h0 = torch.randn(4, 1, dtype=torch.complex128).to(dtype), torch.randn(1, 4, dtype=torch.complex128).to(dtype)
        x = torch.tensor([1.0, -0.5, 1e6], dtype=torch.float64).reshape(3, 1, 1).to(dtype.to_real())
        states = structured_recurrence(x, V, unitary, torch.zeros(4, dtype=x.dtype), h0)
        gradients.append(torch.autograd.grad(states[-1].real.sum(), unitary.theta)[0].double())
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3 * gradients[1].abs().max().item())


def test_tensors_that_do_not_fit_are_refused():
    unitary = RestrictedUnitary(4)
    V, b, h0 = torch.randn(4, 2, dtype=torch.complex64), torch.zeros(4), torch.zeros(3, 4, dtype=torch.complex64)
    x = torch.randn(5, 3, 2)
    for arguments, message in (
        ((x, V[:3], unitary, b, h0), r"weight_ih must have shape \(4, 2\)"),
        ((x, V, unitary, b.repeat(1000), h0), r"bias must have shape \(4,\)"),
        ((x, V, unitary, b, h0[:1]), r"input must have shape \(5, 1, 2\)"),
        ((x, V.to(torch.complex128), unitary, b, h0), r"weight_ih must be torch\.complex64"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            structured_recurrence(*arguments)
