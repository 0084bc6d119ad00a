"""SPD layers: values by NumPy and SciPy, laws of their geometry, training, what torch's tools ask of a module."""

import copy
import io
import pickle

import numpy as np
import pytest
import scipy.linalg
import torch

import manopt_torch.optim
from manopt_torch import SPD, Stiefel, max_residual, named_manifolds, param_groups
from manopt_torch.manifolds import View
from manopt_torch.means import frechet_mean
from manopt_torch.nn import BiMap, CovariancePool, LogEig, ReEig, SPDBatchNorm

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
WIDE = [torch.float64, torch.complex128]


def herm(a):
    return (a + a.mH) / 2


def tolerance(dtype):
    return 1e-5 if dtype in (torch.float32, torch.complex64) else 1e-12


def with_repeated_eigenvalues(dtype):
    """(4, 3, 3): general, I, a double eigenvalue, and 2 I."""
    x = SPD().random(4, 3, 3, dtype=dtype)
    q = torch.linalg.qr(torch.randn(3, 3, dtype=dtype))[0]
    x[1], x[3] = torch.eye(3), 2 * torch.eye(3)
    x[2] = herm(q @ torch.diag(torch.tensor([2.0, 2.0, 0.5], dtype=dtype)) @ q.mH)
    return x


def network(dtype=torch.float32, device=None):
    where = {"dtype": dtype, "device": device}
    reals = torch.empty(0, dtype=dtype).real.dtype
    readout = torch.nn.Linear(9 if dtype.is_complex else 6, 2, dtype=reals, device=device)
    return torch.nn.Sequential(
        BiMap(4, 3, **where), SPDBatchNorm(3, **where), ReEig(0.1), LogEig(vectorize=True), readout
    )


# ------------------------------------------------------------ BiMap
@pytest.mark.parametrize("dtype", DTYPES)
def test_bimap(dtype):
    layer = BiMap(4, 3, dtype=dtype)
    w = layer.weight.detach()
    assert torch.allclose(w @ w.mH, torch.eye(3, dtype=dtype), atol=1e-5)
    x = SPD().random(2, 5, 4, 4, dtype=dtype)
    expected = np.einsum("ij,abjk,lk->abil", w.numpy(), x.numpy(), w.numpy().conj())
    assert torch.allclose(layer(x), torch.from_numpy(expected), atol=tolerance(dtype))
    eye = layer(torch.eye(4, dtype=dtype))
    assert torch.allclose(eye, torch.eye(3, dtype=dtype), atol=1e-5)
    y = layer(x)
    assert torch.equal(y, y.mH)
    assert dict(named_manifolds(layer))["weight"].residual(w) < 1e-5


def test_bimap_weight_is_uniform_and_redrawn():
    layer = BiMap(3, 1)
    draws = []
    for _ in range(200):
        layer.reset_parameters()
        draws.append(layer.weight.detach().clone())
    second = torch.stack([w.mT @ w for w in draws]).mean(0)
    assert torch.allclose(second, torch.eye(3) / 3, atol=0.1)


def test_square_bimap_keeps_eigenvalues():
    layer = BiMap(4, 4, dtype=torch.complex128)
    x = SPD().random(4, 4, dtype=torch.complex128)
    assert torch.allclose(torch.linalg.eigvalsh(layer(x)), torch.linalg.eigvalsh(x), atol=1e-12)


# ------------------------------------------------------------ ReEig, LogEig
@pytest.mark.parametrize("dtype", DTYPES)
def test_reeig_raises_eigenvalues_to_the_threshold(dtype):
    q = torch.linalg.qr(torch.randn(4, 4, dtype=dtype))[0]
    values = torch.tensor([-1.0, 0.2, 0.5, 3.0])
    x = herm(q @ torch.diag(values).to(dtype) @ q.mH)
    expected = q @ torch.diag(values.clamp(min=0.5)).to(dtype) @ q.mH
    assert torch.allclose(ReEig(0.5)(x), expected, atol=tolerance(dtype) * 10)
    assert torch.allclose(ReEig(0.01)(expected), expected, atol=tolerance(dtype) * 10)


@pytest.mark.parametrize("dtype", WIDE)
def test_logeig(dtype):
    x, y = SPD().random(2, 4, 4, dtype=dtype)
    logs = [torch.from_numpy(scipy.linalg.logm(z.numpy())) for z in (x, y)]
    assert torch.allclose(LogEig()(x), logs[0], atol=1e-12)
    v, w = LogEig(vectorize=True)(torch.stack([x, y]))
    assert v.shape == ((16,) if dtype.is_complex else (10,))
    assert v.dtype == torch.float64
    assert (v @ w).item() == pytest.approx(torch.trace(logs[0] @ logs[1]).real.item(), abs=1e-12)
    diagonal = LogEig(vectorize=True)(torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=dtype)))
    expected = torch.tensor([0.0, np.log(2), np.log(4)], dtype=torch.float64)
    assert torch.allclose(diagonal[:3], expected, atol=1e-14)
    assert torch.allclose(diagonal[3:], torch.zeros(1, dtype=torch.float64), atol=1e-14)


def test_order_of_the_vector():
    a = torch.tensor([[1, 2 + 3j, 4 - 1j], [2 - 3j, 5, 6j], [4 + 1j, -6j, 7]], dtype=torch.complex128) / 4
    x = torch.from_numpy(scipy.linalg.expm(a.numpy()))
    expected = torch.tensor([1, 5, 7, *(2**0.5 * np.array([2, 4, 0, 3, -1, 6]))], dtype=torch.float64) / 4
    assert torch.allclose(LogEig(vectorize=True)(x), expected, atol=1e-10)


def test_log_of_commuting_matrices_adds():
    q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.complex128))[0]
    x, y = (q @ torch.diag(torch.rand(3, dtype=torch.float64) + 0.1).to(q.dtype) @ q.mH for _ in range(2))
    log = LogEig()
    assert torch.allclose(log(herm(x @ y)), log(x) + log(y), atol=1e-12)


# ------------------------------------------------------------ SPDBatchNorm
@pytest.mark.parametrize("dtype", WIDE)
def test_output_has_the_bias_as_its_mean_and_the_distances_of_the_input(dtype):
    layer = SPDBatchNorm(3, iterations=60, dtype=dtype)
    with torch.no_grad():
        layer.bias.copy_(SPD().random(3, 3, dtype=dtype))
    x = SPD().random(2, 4, 3, 3, dtype=dtype)
    y = layer(x)
    assert torch.allclose(frechet_mean(SPD(), y.detach().flatten(0, 1)), layer.bias.detach(), atol=1e-10)
    assert torch.allclose(SPD().dist(y[0], y[1]), SPD().dist(x[0], x[1]), atol=1e-10)
    assert SPD().dist(frechet_mean(SPD(), x.flatten(0, 1)), layer.bias.detach()) > 0.1


def test_normalised_matrices_do_not_depend_on_a_congruence():
    """Of M X Mᴴ they are those of X up to a rotation: the same eigenvalues."""
    x, m = SPD().random(5, 3, 3, dtype=torch.complex128), torch.randn(3, 3, dtype=torch.complex128)
    values = [torch.linalg.eigvalsh(SPDBatchNorm(3, iterations=60, dtype=x.dtype)(z)) for z in (x, herm(m @ x @ m.mH))]
    assert torch.allclose(*values, atol=1e-9)


def test_of_commuting_matrices():
    """Geometric means of the eigenvalues, and a running mean that moves by ``momentum`` in their logarithms."""
    values = torch.rand(6, 3, dtype=torch.float64) + 0.2
    layer = SPDBatchNorm(3, momentum=0.3, dtype=torch.float64)
    y = layer(torch.diag_embed(values))
    mean = values.log().mean(0)
    assert torch.allclose(y.diagonal(dim1=-2, dim2=-1), values / mean.exp(), atol=1e-12)
    assert torch.allclose(layer.running_mean.diagonal().log(), 0.3 * mean, atol=1e-12)
    layer(torch.diag_embed(values))
    assert torch.allclose(layer.running_mean.diagonal().log(), (0.3 + 0.7 * 0.3) * mean, atol=1e-12)
    kept = layer.running_mean.clone()
    z = layer.eval()(torch.diag_embed(values))
    assert torch.allclose(z.diagonal(dim1=-2, dim2=-1), values / kept.diagonal(), atol=1e-12)
    assert torch.equal(layer.running_mean, kept)
    assert layer.num_batches_tracked == 2


def test_no_momentum_is_the_mean_of_all_batches():
    layer = SPDBatchNorm(2, momentum=None, dtype=torch.float64)
    values = torch.rand(3, 4, 2, dtype=torch.float64) + 0.2
    for batch in values:
        layer(torch.diag_embed(batch))
    assert torch.allclose(layer.running_mean.diagonal().log(), values.log().mean((0, 1)), atol=1e-12)
    layer.reset_parameters()
    assert torch.equal(layer.running_mean, torch.eye(2, dtype=torch.float64))
    assert layer.num_batches_tracked == 0


def test_running_mean_has_no_graph_and_is_on_the_manifold():
    layer = SPDBatchNorm(3)
    for _ in range(3):
        layer(SPD().random(5, 3, 3).requires_grad_()).sum().backward()
    assert not layer.running_mean.requires_grad
    assert SPD().residual(layer.running_mean) < 1e-6


# ------------------------------------------------------------ CovariancePool
def test_covariance_pool():
    x = torch.randn(2, 7, 3, dtype=torch.complex128)
    found = CovariancePool(0.0, 0.0)(x)
    for sequence, covariance in zip(x, found, strict=True):
        assert np.allclose(np.cov(sequence.numpy(), rowvar=False), covariance.numpy(), atol=1e-14)
    shrunk = CovariancePool(0.25, 0.01)(x)
    level = torch.diagonal(found, dim1=-2, dim2=-1).real.mean(-1)[:, None, None]
    eye = torch.eye(3, dtype=torch.float64)
    assert torch.allclose(shrunk, 0.75 * found + (0.25 * level + 0.01) * eye, atol=1e-14)
    assert SPD().residual(CovariancePool(0.1)(torch.randn(2, 5))) == 0  # rank 1, and shifted


# ------------------------------------------------------------ derivatives
LAYERS = {
    "bimap": lambda dtype: BiMap(3, 2, dtype=dtype),
    "reeig": lambda dtype: ReEig(0.9),
    "logeig": lambda dtype: LogEig(),
    "vector": lambda dtype: LogEig(vectorize=True),
    "norm": lambda dtype: SPDBatchNorm(3, iterations=60, dtype=dtype),
}


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_where_eigenvalues_repeat(name, dtype):
    """By finite differences; of the normalisation's running mean there is none, and the mean's is exact."""
    layer = LAYERS[name](dtype)
    x = with_repeated_eigenvalues(dtype)[:3]  # of distinct, all equal, and two equal eigenvalues
    names = [name for name, _ in layer.named_parameters()]

    def f(x, *values):
        given = {n: herm(v) if n == "bias" else v for n, v in zip(names, values, strict=True)}
        return torch.func.functional_call(layer, given, herm(x))

    inputs = (x.requires_grad_(), *(p.detach().clone().requires_grad_() for p in layer.parameters()))
    assert torch.autograd.gradcheck(f, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)


def test_derivatives_of_covariance_pool():
    pool = CovariancePool(0.2)
    for dtype in WIDE:
        x = torch.randn(4, 2, dtype=dtype, requires_grad=True)
        assert torch.autograd.gradcheck(pool, x)
        assert torch.autograd.gradgradcheck(pool, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision_gradients_at_repeated_eigenvalues(dtype):
    """Those of double precision; eigh's own are NaN there."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    torch.manual_seed(3)
    double = network(wide)
    single = network(dtype)
    single.load_state_dict({k: v.to(w.dtype) for (k, v), w in zip(
        double.state_dict().items(), single.state_dict().values(), strict=True)})  # fmt: skip
    q = torch.linalg.qr(torch.randn(4, 4, dtype=wide))[0]
    x = torch.stack([torch.eye(4, dtype=wide), herm(q @ torch.diag(torch.tensor([1, 1, 3, 3.0], dtype=wide)) @ q.mH)])
    grads = []
    for model, z in ((double, x.clone()), (single, x.to(dtype))):
        model(z.requires_grad_()).square().sum().backward()
        grads.append(z.grad)
    assert torch.allclose(grads[0].to(dtype), grads[1], rtol=1e-3, atol=1e-4 * grads[0].abs().max().item())
    assert grads[0].abs().max() > 1e-3


# ------------------------------------------------------------ training
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("optimizer", ["RiemannianSGD", "RiemannianAdam", "AdamW"])
def test_training_stays_on_the_manifolds_and_learns(optimizer, dtype):
    model = network(dtype)
    if optimizer == "AdamW":
        groups = param_groups(model, {"*": {"weight_decay": 0.0}})
        steps = manopt_torch.optim.riemannian(torch.optim.AdamW(groups, lr=0.02))
    else:
        steps = getattr(manopt_torch.optim, optimizer)(param_groups(model), lr=0.02)
    y = torch.arange(20) % 2
    scale = torch.where(y == 0, 1.0, 3.0)[:, None] * torch.tensor([1, 1, 0, 0]) + torch.tensor([0, 0, 1.0, 1.0])
    root = torch.diag_embed(scale.sqrt()).to(dtype)
    x = herm(root @ SPD().random(20, 4, 4, dtype=dtype) @ root)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(15):
        steps.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        steps.step()
        losses.append(loss.item())
        assert max_residual(model) <= 1e-5
    assert losses[-1] < losses[0]
    assert all((p - before[name]).abs().max() > 1e-4 for name, p in model.named_parameters())


# ------------------------------------------------------------ torch's tools
def warm(model):
    model(SPD().random(6, 4, 4, dtype=model[0].weight.dtype))
    return model.eval()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies(copied):
    model, x = warm(network()), SPD().random(3, 4, 4)
    other = copied(model)
    assert torch.equal(other(x), model(x))
    assert dict(named_manifolds(other)) == dict(named_manifolds(model))
    with torch.no_grad():
        other[1].running_mean.mul_(2)
    assert not torch.equal(other(x), model(x))


def test_state_dict():
    model, file, x = warm(network()), io.BytesIO(), SPD().random(3, 4, 4)
    assert set(SPDBatchNorm(3).state_dict()) == {"bias", "running_mean", "num_batches_tracked"}
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = network().eval()
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), model(x))
    wrong = {**model.state_dict(), "0.weight": 2 * model[0].weight.detach()}
    with pytest.raises(ValueError, match="weight"):
        other.load_state_dict(wrong)
    assert torch.equal(other(x), model(x))


def test_meta_device():
    model = network(device="meta")
    assert {name for name, _ in named_manifolds(model)} == {"0.weight", "1.bias"}
    model.to_empty(device="cpu")
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    assert max_residual(model) < 1e-5
    assert model(SPD().random(3, 4, 4)).isfinite().all()
    with torch.device("meta"):
        assert network()[1].running_mean.is_meta


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compile():
    model = torch.nn.Sequential(BiMap(4, 3), SPDBatchNorm(3, iterations=1), ReEig(0.1), LogEig(vectorize=True))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = SPD().random(5, 4, 4)
    expected, found = twin(x), compiled(x)
    for y in (expected, found):
        y.square().sum().backward()
    assert torch.allclose(found, expected, atol=1e-4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-3)
    assert torch.allclose(model[1].running_mean, twin[1].running_mean, atol=1e-5)


def test_autocast_and_half_precision():
    model, x = network()[:4], SPD().random(5, 4, 4)
    expected = copy.deepcopy(model)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(copy.deepcopy(model)(x), expected)
    half = copy.deepcopy(model).bfloat16()
    found = half(x.bfloat16())
    assert found.dtype == half[1].running_mean.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected, atol=0.15)
    assert torch.equal(CovariancePool()(x.bfloat16()), CovariancePool()(x.bfloat16().float()).bfloat16())


# ------------------------------------------------------------ errors
def test_errors():
    square, wide = torch.eye(3), torch.zeros(2, 3)
    for layer in (BiMap(3, 2), SPDBatchNorm(3), ReEig(), LogEig()):
        with pytest.raises(ValueError, match="square matrices"):
            layer(wide)
        with pytest.raises(TypeError, match=r"int64: write x\.float"):
            layer(square.long())
    for layer in (BiMap(3, 2), SPDBatchNorm(3)):
        with pytest.raises(ValueError, match=r"\(\*B, 3, 3\), got shape \(4, 4\)"):
            layer(torch.eye(4))
        for other in (torch.complex64, torch.float64):
            with pytest.raises(TypeError, match=rf"torch\.float32 parameters and got {other}"):
                layer(square.to(other))
        assert layer(square.bfloat16()).dtype == torch.bfloat16  # as under autocast
    for bad in ((2, 3), (2, 0)):
        with pytest.raises(ValueError, match="out_features"):
            BiMap(*bad)
    with pytest.raises(ValueError, match="threshold"):
        ReEig(0.0)
    for bad in ({"momentum": 1.5}, {"iterations": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SPDBatchNorm(3, **bad)
    with pytest.raises(ValueError, match="n and iterations"):
        SPDBatchNorm(0)
    with pytest.raises(ValueError, match="empty batch"):
        SPDBatchNorm(3)(torch.zeros(0, 3, 3))
    assert SPDBatchNorm(3).eval()(torch.zeros(0, 3, 3)).shape == (0, 3, 3)
    with pytest.raises(ValueError, match="T >= 2"):
        CovariancePool()(torch.zeros(1, 3))
    with pytest.raises(TypeError, match="int64"):
        CovariancePool()(torch.zeros(4, 3).long())
    for bad in ((1.5, 0.0), (0.0, -1.0)):
        with pytest.raises(ValueError, match="shrinkage"):
            CovariancePool(*bad)


def test_representations():
    shown = repr(network())
    for part in ("in_features=4, out_features=3", "3, momentum=0.1, iterations=12", "threshold=0.1", "vectorize=True"):
        assert part in shown
    assert dict(named_manifolds(BiMap(4, 3)))["weight"] == View(Stiefel(), "transpose")
    assert "shrinkage=0, epsilon=1e-05" in repr(CovariancePool())
