"""The fused recurrence against the equations written out step by step in torch's own operations."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import manopt_torch.nn.recurrence as recurrence
from manopt_torch.nn.recurrence import unitary_recurrence

REAL = torch.float64


def written_out(x, V, W, b, h, mask=None, hard=False):
    """h_t = σ(W h_{t-1} + V x_t), column vectors, one network and one sequence at a time."""
    states = []
    for t in range(len(x)):
        z = (W @ h.unsqueeze(-1) + V @ x[t].to(V.dtype).unsqueeze(-1)).squeeze(-1)
        if hard:
            r = z.abs()
            new = torch.where(r + b > 0, (r + b) * z / r, 0)
        else:
            s = (z.abs() ** 2 + 1e-5).sqrt()
            new = z * (s + b).clamp(min=0) / (s + 1e-5)
        h = new if mask is None else torch.where(mask[t], new, h)
        states.append(h)
    return torch.stack(states)


def per_sequence(x, V, W, b, h0, mask=None, hard=False):
    batch = h0.shape[:-2]
    out = []
    for index in itertools.product(*map(range, batch)):
        rows = []
        for i in range(h0.shape[-2]):
            at = (slice(None), *index, i)
            own_mask = None if mask is None else mask[at]
            rows.append(written_out(x[at], V[index], W[index], b[index], h0[(*index, i)], own_mask, hard))
        out.append(torch.stack(rows, 1))
    return torch.stack(out, 1).unflatten(1, batch) if batch else out[0]


def tensors(batch=(), T=7, B=2, M=3, N=4, dtype=torch.complex128, input_dtype=None, seed=0):
    g = torch.Generator().manual_seed(seed)

    def dense(*shape, dtype=dtype):
        return torch.randn(*shape, dtype=dtype, generator=g).requires_grad_()

    W = torch.linalg.qr(torch.randn(*batch, N, N, dtype=dtype, generator=g))[0].requires_grad_()
    b = (torch.randn(*batch, N, dtype=REAL, generator=g) * 0.4).requires_grad_()
    x = dense(T, *batch, B, M, dtype=input_dtype or dtype)
    mask = torch.rand(T, *batch, B, generator=g) < 0.6
    return [x, dense(*batch, N, M), W, b, dense(*batch, B, N)], mask


@pytest.fixture(params=["compiled", "torch"])
def kernels(request, monkeypatch):
    """Both with numba's kernels and without."""
    if request.param == "torch":
        monkeypatch.setattr(recurrence, "kernels", lambda: None)
    else:
        pytest.importorskip("numba")
        assert recurrence.kernels() is not None
    return request.param


@pytest.mark.parametrize("checkpoint_every", [None, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
@pytest.mark.parametrize(
    ("dtype", "input_dtype"), [(torch.complex128, torch.complex128), (torch.complex128, REAL), (REAL, REAL)]
)
def test_states_and_gradients(kernels, dtype, input_dtype, batch, hard, masked, checkpoint_every, monkeypatch):
    monkeypatch.setattr(recurrence, "CHUNK", 4)  # 7 steps: a whole chunk and a part of one
    own, mask = tensors(batch, dtype=dtype, input_dtype=input_dtype)
    mask = mask if masked else None
    states = unitary_recurrence(*own, mask, hard=hard, checkpoint_every=checkpoint_every)
    expected = per_sequence(*own, mask, hard)
    torch.testing.assert_close(states, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(states)
    gradients = torch.autograd.grad(states, own, direction)
    for found, wanted in zip(gradients, torch.autograd.grad(expected, own, direction), strict=True):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("checkpoint_every", [None, 2])
@pytest.mark.parametrize("hard", [False, True])
def test_gradcheck(kernels, hard, checkpoint_every):
    own, mask = tensors(T=5, B=2, M=2, N=3, seed=1)
    for given in (mask, None):
        assert torch.autograd.gradcheck(
            lambda *t, m=given: unitary_recurrence(*t, m, hard=hard, checkpoint_every=checkpoint_every), own
        )


def test_second_derivatives():
    own, mask = tensors(T=3, B=2, M=1, N=2, seed=2)
    assert torch.autograd.gradgradcheck(lambda *t: unitary_recurrence(*t, mask), own)


def test_batched_gradients():
    own, _ = tensors(T=3, N=2)
    states = unitary_recurrence(*own)
    directions = torch.randn(5, *states.shape, dtype=states.dtype)
    batched = torch.autograd.grad(states, own, directions, is_grads_batched=True, retain_graph=True)
    for k, direction in enumerate(directions):
        for found, wanted in zip(batched, torch.autograd.grad(states, own, direction, retain_graph=True), strict=True):
            torch.testing.assert_close(found[k], wanted)


def test_second_derivative_counts_each_path_once():
    """V depends on W here: what the inner gradient says of V must not contain the way through W."""
    (x, _, W, b, h0), _ = tensors(M=4)

    def gradient(function):
        V = W * 2
        (inner,) = torch.autograd.grad(function(x, V, W, b, h0).abs().square().sum(), W, create_graph=True)
        return torch.autograd.grad(inner.abs().square().sum(), W)[0]

    torch.testing.assert_close(gradient(unitary_recurrence), gradient(per_sequence), rtol=1e-9, atol=1e-9)


def test_forward_mode_and_vmap():
    own, _ = tensors(batch=(3,))
    own = [t.detach() for t in own]
    expected = per_sequence(*own)
    mapped = torch.vmap(unitary_recurrence, in_dims=(1, 0, 0, 0, 0), out_dims=1)(*own)
    torch.testing.assert_close(mapped, expected, rtol=1e-12, atol=1e-12)
    tangents = tuple(torch.randn_like(t) for t in own)
    _, found = torch.func.jvp(unitary_recurrence, tuple(own), tangents)
    _, wanted = torch.func.jvp(per_sequence, tuple(own), tangents)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("skipped", range(5))
def test_only_what_is_asked_for(kernels, skipped):
    own, _ = tensors()
    direction = torch.randn(7, 2, 4, dtype=torch.complex128)
    wanted = torch.autograd.grad(per_sequence(*own), own, direction)
    own[skipped].requires_grad_(False)
    unitary_recurrence(*own).backward(direction)
    for i, t in enumerate(own):
        if i == skipped:
            assert t.grad is None
        else:
            torch.testing.assert_close(t.grad, wanted[i], rtol=1e-9, atol=1e-10)


def test_no_graph_keeps_nothing():
    own, _ = tensors()
    with torch.no_grad():
        assert unitary_recurrence(*own).grad_fn is None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_as_exact_in_single_precision_as_the_loop(kernels, dtype):
    """The recurrence amplifies rounding errors: both are compared with double precision."""
    own, _ = tensors(T=100, B=5, N=16, dtype=dtype)
    own[3] = (own[3].detach() / 40).float().requires_grad_()
    wide = [t.detach().to(torch.promote_types(t.dtype, torch.float64)).requires_grad_() for t in own]

    def results(function, given):
        states = function(*given)
        return [states, *torch.autograd.grad(states.abs().square().mean(), given)]

    rows = zip(results(unitary_recurrence, own), results(per_sequence, own), results(per_sequence, wide), strict=True)
    for found, plain, true in rows:
        allowed = 4 * (plain - true).abs().max() + 1e-5 * true.abs().max()
        assert (found - true).abs().max() < allowed


def test_exact_modrelu_at_zero(kernels):
    """σ(0) = 0 with zero gradient, also for b > 0, where it jumps."""
    zero = torch.zeros(1, 1, 2, dtype=torch.complex128, requires_grad=True)
    V, W = torch.eye(2, dtype=torch.complex128), torch.eye(2, dtype=torch.complex128)
    b = torch.tensor([0.5, -0.5], dtype=REAL, requires_grad=True)
    h0 = torch.zeros(1, 2, dtype=torch.complex128, requires_grad=True)
    states = unitary_recurrence(zero, V, W, b, h0, hard=True)
    assert states.abs().max() == 0
    for gradient in torch.autograd.grad(states.real.sum() + states.imag.sum(), (zero, b, h0)):
        assert gradient.abs().max() == 0


@pytest.mark.parametrize("where", range(5))
def test_nan_comes_through(kernels, where):
    own, _ = tensors()
    with torch.no_grad():
        own[where][..., 0] = float("nan")
    assert unitary_recurrence(*own)[-1].isnan().any()


def test_nothing_depends_on_masked_input(kernels):
    own, mask = tensors()
    clean = unitary_recurrence(*own, mask)
    with torch.no_grad():
        own[0][~mask] = float("nan")
    states = unitary_recurrence(*own, mask)
    torch.testing.assert_close(states, clean, rtol=0, atol=0)
    gradients = torch.autograd.grad(states.abs().sum(), own)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_autocast_changes_nothing(dtype, kernels):
    own, _ = tensors(dtype=dtype)
    own[3] = own[3].detach().float().requires_grad_()
    own[4] = own[4].detach().requires_grad_()

    def results():
        states = unitary_recurrence(*own)
        mapped = torch.vmap(lambda h: unitary_recurrence(*own[:4], h))(own[4].unsqueeze(0))
        first = torch.autograd.grad(states.abs().sum(), own, create_graph=True)
        return [states, mapped, *first, *torch.autograd.grad(unitary_recurrence(*own).abs().sum(), own)]

    wanted = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * other.abs().max().item())


def test_no_sequences(kernels):
    own, _ = tensors(B=0)
    states = unitary_recurrence(*own)
    assert states.shape == (7, 0, 4)
    assert all(
        g.abs().sum() == 0 for g in torch.autograd.grad(states.abs().sum(), own, allow_unused=True) if g is not None
    )


def test_second_derivatives_of_the_exact_modrelu_at_zero():
    own, _ = tensors()
    with torch.no_grad():
        own[0][0], own[4][:] = 0, 0
    states = unitary_recurrence(*own, hard=True)
    first = torch.autograd.grad(states.abs().square().sum(), own, create_graph=True)
    second = torch.autograd.grad(sum(g.abs().square().sum() for g in first), own)
    assert all(g.isfinite().all() for g in second)


def test_kernels_are_left_where_they_cannot_be_imported(monkeypatch):
    def refuse(name):
        raise ImportError("Numba needs NumPy 2.2 or less")

    monkeypatch.setattr(recurrence.importlib, "import_module", refuse)
    monkeypatch.setattr(recurrence.importlib.util, "find_spec", lambda name: object())
    with pytest.warns(UserWarning, match=r"without compiled kernels: Numba needs NumPy 2\.2"):
        assert recurrence.kernels.__wrapped__() is None


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, lambda t: t[:, 0], r"input must have shape \(7, 2, 3\)"),
        (0, lambda t: t[..., :2], r"input must have shape \(7, 2, 3\).* got \(7, 2, 2\)"),
        (2, lambda t: t[:3], r"weight_hh must have shape \(4, 4\).* got \(3, 4\)"),
        (3, lambda t: t[:2], r"bias must have shape \(4,\).* got \(2,\)"),
        (3, lambda t: t.repeat(2), r"bias must have shape \(4,\).* got \(8,\)"),
        (4, lambda t: t.mT, r"input must have shape \(7, 4, 3\)|h0 must have shape"),
        (4, lambda t: t[0], r"h0 must have shape \(2, 4\).* got \(4,\)"),
        (5, lambda t: t.mT, r"mask must have shape \(7, 2\).* got \(2, 7\)"),
        (3, lambda t: t.float(), r"bias must be torch\.float64, got torch\.float32"),
        (4, lambda t: t.real, r"h0 must be torch\.complex128, got torch\.float64"),
        (5, lambda t: t.double(), r"mask must be torch\.bool, got torch\.float64"),
        (2, lambda t: t.real, r"weight_hh must be torch\.complex128, got torch\.float64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(position, change, message):
    own, mask = tensors()
    arguments = [*own, mask]
    arguments[position] = change(arguments[position])
    with pytest.raises((ValueError, TypeError), match=message):
        unitary_recurrence(*arguments)


@pytest.mark.parametrize("checkpoint_every", [None, 10])
def test_bytes_kept(checkpoint_every):
    own, _ = tensors(T=100, B=5, M=1, N=8)
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        states = unitary_recurrence(*own, checkpoint_every=checkpoint_every)
    size = sum({t.data_ptr(): t.numel() * t.element_size() for t in kept}.values())
    whole = states.numel() * states.element_size()
    assert size < (2.3 * whole if checkpoint_every is None else 0.35 * whole)


def test_output_changed_in_place_is_refused():
    own, _ = tensors()
    states = unitary_recurrence(*own)
    states.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        states.abs().sum().backward()


def test_checkpoint_every_needs_a_step():
    own, _ = tensors()
    with pytest.raises(ValueError, match="at least 1, got 0"):
        unitary_recurrence(*own, checkpoint_every=0)
    with pytest.raises(TypeError, match=r"whole number of steps or None, got 2\.5"):
        unitary_recurrence(*own, checkpoint_every=2.5)
