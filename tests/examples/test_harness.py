"""What the examples on sequences share: models, the papers' optimizer, generated batches."""

import importlib
import math

import pytest
import torch
from scipy.linalg import expm
from torch import nn

pytest.importorskip("lightning")


def harness(name):
    return importlib.import_module(f"harness.{name}")


# ------------------------------------------------------------ models
@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [  # Wisdom et al., 2016, with N units, M inputs, L outputs: full N² + 2N(M + L) + 3N + L, restricted 7N for N²
        ("full", (10, 128, 9), 21641),
        ("full", (1, 116, 10), 116**2 + 25 * 116 + 10),
        ("restricted", (10, 470, 9), 7 * 470 + 2 * 470 * 19 + 3 * 470 + 9),
        ("restricted", (1, 512, 10), 32 * 512 + 10),
        ("lstm", (10, 68, 9), 4 * 68 * (10 + 68 + 2) + 68 * 9 + 9),
        ("rnn", (10, 136, 9), 136 * (136 + 10 + 2) + 137 * 9),
    ],
)
def test_parameters_are_counted_as_the_papers_count(name, sizes, expected):
    models = harness("models")
    assert models.count_parameters(models.SequenceModel(name, *sizes)) == expected


@pytest.mark.parametrize(("experiment", "sizes"), [("copy_memory", (10, 9)), ("sequential_digits", (1, 10))])
def test_sizes_of_our_own_have_no_more_parameters_than_the_full_model(experiment, sizes):
    models = harness("models")
    M, L = sizes
    counts = {}
    for name in ("full", "rnn", "orthogonal"):
        N = models.paper_size(experiment, name)
        counts[name] = [models.count_parameters(models.SequenceModel(name, M, n, L)) for n in (N, N + 1)]
    for name in ("rnn", "orthogonal"):
        assert counts[name][0] <= counts["full"][0] < counts[name][1]


@pytest.mark.parametrize("name", ["full", "frozen", "restricted", "lstm", "rnn", "orthogonal"])
def test_models_read_every_state_or_the_last(name):
    models = harness("models")
    torch.manual_seed(0)
    model = models.SequenceModel(name, 3, 5, 2)
    x = torch.randn(4, 7, 3)
    y = model(x)
    assert (y.shape, y.dtype) == ((4, 7, 2), torch.float32)
    model.last = True
    torch.testing.assert_close(model(x), y[:, -1])
    hx = None
    for t in range(7):  # step by step
        _, hx = model.rnn(x[:, t : t + 1], hx)
    torch.testing.assert_close(model.readout((hx[0] if name == "lstm" else hx)[-1]), y[:, -1])


def test_unknown_model_is_named():
    with pytest.raises(ValueError, match=r"'gru': full, restricted, lstm"):
        harness("models").SequenceModel("gru", 1, 2, 3)


def test_forget_gate_starts_open():
    layer = harness("models").recurrent_layer("lstm", 3, 4)
    with torch.no_grad():  # a gate that sees zeros is the sigmoid of its bias
        layer.weight_ih_l0.zero_()
        layer.weight_hh_l0.zero_()
        bias = (layer.bias_ih_l0 + layer.bias_hh_l0).reshape(4, 4)
    torch.testing.assert_close(bias[1], torch.ones(4))
    cell = torch.ones(1, 1, 4)
    _, (_, after) = layer(torch.zeros(1, 1, 3), (torch.zeros(1, 1, 4), cell))
    i, _, g, _ = bias
    torch.testing.assert_close(after[0, 0], i.sigmoid() * g.tanh() + 1 / (1 + math.exp(-1)))


def test_orthogonal_recurrence_is_that_of_its_parametrization():
    torch.manual_seed(0)
    layer = harness("models").OrthogonalRNN(3, 6).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    (free,) = (p for name, p in layer.named_parameters() if name.startswith("recurrence"))
    start = layer.recurrence.weight.detach().clone()
    layer(x)[0][:, -1].sum().backward()
    assert free.grad.abs().max() > 1e-3
    optimizer.step()
    W = layer.recurrence.weight.detach()
    assert (W - start).abs().max() > 1e-3
    assert torch.linalg.matrix_norm(W.mT @ W - torch.eye(6, dtype=torch.float64)) < 1e-6  # drawn in float32
    # torch's trivialization: W = B exp(A), A the skew matrix of the lower triangle of the free one
    A = free.detach().tril(-1)
    B = layer.recurrence.parametrizations.weight[0].base
    torch.testing.assert_close(W, B @ torch.from_numpy(expm((A - A.mT).numpy())))
    h = layer.h0.expand(2, 6)
    for t in range(5):
        z = h @ W.mT + x[:, t] @ layer.weight_ih.mT
        s = (z.square() + 1e-5).sqrt()
        h = z * torch.relu(s + layer.modrelu.bias) / (s + 1e-5)
    torch.testing.assert_close(layer(x)[1][0], h)


# ------------------------------------------------------------ the papers' optimizer
class Twins(nn.Module):
    """A unitary matrix and an ordinary complex one."""

    def __init__(self, W, V):
        super().__init__()
        from manopt_torch import ManifoldParameter, Unitary

        self.W, self.V = ManifoldParameter(W.clone(), Unitary()), nn.Parameter(V.clone())


def test_paper_recipe_is_a_cayley_step_for_w_and_rmsprop_for_the_rest():
    """Against eq. (5.5) and the recursion of RMSprop, both written out in numpy, and against RiemannianSGD."""
    from manopt_torch.optim import RiemannianSGD

    torch.manual_seed(0)
    n, lam, lr = 5, 0.05, 0.01
    W = torch.linalg.qr(torch.randn(n, n, dtype=torch.complex128)).Q
    V = torch.randn(n, 3, dtype=torch.complex128)
    model, other = Twins(W, V), Twins(W, V)
    optimizer = harness("training").make_optimizer(model, "paper", lr, 2 * lam)
    sgd = RiemannianSGD([other.W], lr=2 * lam)
    w, v = W.numpy(), V.numpy()
    square = 1e-3 * (1 + 1j) * torch.ones_like(V).numpy()
    one = torch.eye(n, dtype=torch.complex128).numpy()
    for _ in range(5):
        G, g = torch.randn_like(W), torch.randn_like(V)
        model.W.grad, model.V.grad, other.W.grad = G.clone(), g.clone(), G.clone()
        optimizer.step()
        sgd.step()
        G, g = G.numpy(), g.numpy()
        A = G @ w.conj().T - w @ G.conj().T
        w = torch.linalg.solve(torch.from_numpy(one + lam / 2 * A), torch.from_numpy((one - lam / 2 * A) @ w)).numpy()
        square = 0.9 * square + 0.1 * (g.real**2 + 1j * g.imag**2)
        v = v - lr * (g.real / (square.real**0.5 + 1e-8) + 1j * g.imag / (square.imag**0.5 + 1e-8))
    torch.testing.assert_close(model.W.detach(), torch.from_numpy(w), rtol=0, atol=1e-7)  # 1e-8 beside the root
    torch.testing.assert_close(model.W.detach(), other.W.detach(), rtol=0, atol=1e-7)
    torch.testing.assert_close(model.V.detach(), torch.from_numpy(v), rtol=0, atol=1e-12)
    assert (model.W - W).abs().max() > 0.1


def test_lambda_of_the_paper_recipe_is_lr():
    """The metric of Unitary() is that of the entries: a step by λ is lr_manifold = 2λ."""
    model = Twins(torch.eye(4, dtype=torch.complex64), torch.randn(4, 2, dtype=torch.complex64))
    groups = harness("training").make_optimizer(model, "paper", 1e-3).param_groups
    assert {repr(group["manifold"]): group["lr"] for group in groups} == {"Unitary()": 2e-3, "Euclidean()": 1e-3}


@pytest.mark.parametrize("name", ["paper", "Adam", "RiemannianAdam"])
def test_biases_of_modrelu_may_have_their_own_rate(name):
    model = harness("models").SequenceModel("full", 2, 4, 3)
    groups = harness("training").make_optimizer(model, name, 1e-3, lr_bias=1e-5).param_groups
    bias = model.rnn.cells[0].modrelu.bias
    assert {id(p) for group in groups if group["lr"] == 1e-5 for p in group["params"]} == {id(bias)}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


# ------------------------------------------------------------ generated batches
def numbers(batch, generator):
    x = torch.rand(batch, 3, 1, generator=generator)
    return x, x.sum(1)


def test_generated_batches_depend_on_seed_stream_and_number_only():
    data = harness("data")

    def batches(seed, epoch, every=4):
        loader = data.generated(numbers, 5, seed, every=every, epochs=3)
        loader.sampler.set_epoch(epoch)
        torch.rand(1)  # the global generator has no part in it
        return torch.stack([x for x, _ in loader])

    assert batches(0, 0).shape == (4, 5, 3, 1)
    assert torch.equal(batches(0, 1), batches(0, 1))
    seen = torch.cat([*(batches(0, epoch) for epoch in range(3)), batches(1, 0)])
    for stream in (data.VALIDATION, data.CONFIRMATION, data.TEST):
        fresh = torch.stack([x for x, _ in data.fresh(numbers, 10, 5, 0, stream)])
        assert fresh.shape == (2, 5, 3, 1)
        seen = torch.cat([seen, fresh])
    assert len(seen.flatten().unique()) == seen.numel()  # no number twice
    assert len(data.fresh(numbers, 3, 5, 0, data.TEST)) == 1


def test_epochs_of_generated_batches_go_on_where_the_last_one_stopped():
    data = harness("data")
    whole = data.generated(numbers, 2, 0, every=6, epochs=1)
    halves = data.generated(numbers, 2, 0, every=3, epochs=2)
    found = []
    for epoch in range(2):
        halves.sampler.set_epoch(epoch)
        found += [x for x, _ in halves]
    assert torch.equal(torch.stack(found), torch.stack([x for x, _ in whole]))
