"""``riemannian(opt)`` on every optimizer of torch: passes, or is refused by name."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

from manopt_torch import ManifoldParameter, constrain, max_residual, param_groups
from manopt_torch.manifolds import SPD, Euclidean, Sphere, Stiefel, Unitary
from manopt_torch.optim import RiemannianSGD, riemannian

REFUSED = {"LBFGS": "several points", "ASGD": "averages points", "Adafactor": r"\|p\|", "SparseAdam": "sparse"}
CLASSES = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
WORKING = sorted(CLASSES.keys() - REFUSED.keys())
SETTINGS = {"SGD": {"momentum": 0.9, "nesterov": True}, "RMSprop": {"momentum": 0.9}, "Muon": {"lr": 0.02}}


def build(name: str, params) -> torch.optim.Optimizer:
    return CLASSES[name](params, **{"lr": 0.05, **SETTINGS.get(name, {})})


def problem(dtype: torch.dtype = torch.float64, biased: bool = True):
    """A module with two constrained weights and, unless Muon is to take it, a vector that is not constrained."""
    torch.manual_seed(0)
    net = nn.Module()
    net.W = ManifoldParameter(Stiefel().random(6, 3, dtype=dtype), Stiefel())
    net.Q = ManifoldParameter(Unitary().random(4, 4, dtype=dtype), Unitary())
    if biased:
        net.b = nn.Parameter(torch.randn(5, dtype=dtype))
    targets = {k: torch.randn_like(p) for k, p in net.named_parameters()}

    def loss() -> torch.Tensor:
        return sum((p - targets[k]).abs().square().sum() for k, p in net.named_parameters())

    return net, loss


def test_every_class_of_torch_is_in_one_of_the_two_lists():
    assert REFUSED.keys() <= CLASSES.keys()
    assert len(WORKING) >= 11


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_by_name_with_the_reason(name):
    params = param_groups(problem()[0])
    optimizer = CLASSES[name](params if name != "LBFGS" else params[0]["params"])
    kind = type(optimizer)
    with pytest.raises(ValueError, match=f"{name} cannot be made Riemannian.*{REFUSED[name]}"):
        riemannian(optimizer)
    assert type(optimizer) is kind


@pytest.mark.parametrize("frame", ["tangent", "ambient"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", WORKING)
def test_descends_on_the_manifold(name, dtype, frame):
    if (name, frame) == ("Rprop", "ambient"):
        with pytest.raises(ValueError, match="Rprop lengthens its steps"):
            riemannian(build(name, param_groups(problem(dtype)[0])), frame=frame)
        return
    net, loss = problem(dtype, biased=name != "Muon")
    start = loss().item()
    try:
        optimizer = build(name, param_groups(net))
        plain = build(name, [nn.Parameter(p.detach().clone()) for p in net.parameters()])
        for p in plain.param_groups[0]["params"]:
            p.grad = torch.randn_like(p)
        plain.step()
    except (RuntimeError, NotImplementedError):
        assert dtype.is_complex, "torch itself refuses complex numbers only"
        pytest.skip(f"torch's own {name} takes no complex parameters")
    wrapped = riemannian(optimizer, frame=frame)
    assert wrapped is optimizer
    assert isinstance(wrapped, CLASSES[name])
    for _ in range(60):
        wrapped.zero_grad()
        value = loss()
        value.backward()
        grads = [p.grad.clone() for p in net.parameters()]
        held = [p.grad for p in net.parameters()]
        wrapped.step()
        assert all(p.grad is h for p, h in zip(net.parameters(), held, strict=True))
        assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True))
        assert max_residual(net) < 1e-12
        if frame == "tangent":
            for M, x in ((Stiefel(), net.W), (Unitary(), net.Q)):
                for key in ("momentum_buffer", "exp_avg", "prev"):
                    m = wrapped.state[x].get(key)
                    if m is not None:
                        torch.testing.assert_close(
                            M.project(x.detach(), m), m, rtol=0, atol=1e-12 * (1 + m.abs().max())
                        )
    assert loss().item() < start - 1e-3


def test_ambient_rmsprop_is_the_normalised_step_of_the_unitary_rnn_paper():
    net, loss = problem(torch.complex128)
    optimizer = riemannian(torch.optim.RMSprop(param_groups(net), lr=0.02, alpha=0.9, eps=1e-8), frame="ambient")
    Q, accumulated = net.Q.detach().clone(), torch.zeros(4, 4, 2, dtype=torch.float64)
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        g = torch.view_as_real(net.Q.grad)
        accumulated = 0.9 * accumulated + 0.1 * g**2
        G = torch.view_as_complex(g / (accumulated.sqrt() + 1e-8))
        A = G @ Q.mH - Q @ G.mH
        lam, eye = 0.01, torch.eye(4, dtype=Q.dtype)  # λ = lr/2
        Q = torch.linalg.solve(eye + lam / 2 * A, (eye - lam / 2 * A) @ Q)
        optimizer.step()
        torch.testing.assert_close(net.Q.detach(), Q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("M", [Stiefel(), Unitary(), Sphere(), SPD()])
def test_wrapped_sgd_is_riemannian_sgd(M):
    shape = {1: (3,), 2: (3, 3)}[M.event_dim]
    points = [ManifoldParameter(M.random(*shape, dtype=torch.float64), M) for _ in range(2)]
    twins = [copy.deepcopy(p) for p in points]
    ours = RiemannianSGD(points, lr=0.05, momentum=0.9)
    theirs = riemannian(torch.optim.SGD([{"params": twins, "manifold": M}], lr=0.05, momentum=0.9))
    for _ in range(10):
        for p, q in zip(points, twins, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(points, twins, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-11)


def test_groups_without_a_manifold_are_left_to_torch():
    net, loss = problem()
    twin = nn.Parameter(net.b.detach().clone())
    plain = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.3)
    optimizer = riemannian(torch.optim.AdamW(param_groups(net), lr=0.1, weight_decay=0.3))
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        twin.grad = net.b.grad.clone()
        optimizer.step()
        plain.step()
    assert torch.equal(net.b, twin)


def test_weight_decay_is_neutral_or_refused_and_never_ignored():
    x = ManifoldParameter(SPD().random(3, 3), SPD())
    with pytest.raises(ValueError, match=r"weight_decay=0.1 of AdamW would be ignored on SPD\(\)"):
        riemannian(torch.optim.AdamW([{"params": [x], "manifold": SPD()}], weight_decay=0.1))
    optimizer = riemannian(torch.optim.AdamW([{"params": [x], "manifold": SPD()}], weight_decay=0.0))
    optimizer.param_groups[0]["weight_decay"] = 0.2
    x.grad = torch.eye(3)
    before = x.detach().clone()
    with pytest.raises(ValueError, match="would be ignored"):
        optimizer.step()
    assert torch.equal(x.detach(), before)
    ends = []
    for decay in (0.0, 0.5):
        net, loss = problem()
        optimizer = riemannian(torch.optim.SGD(param_groups(net), lr=0.1, weight_decay=decay))
        loss().backward()
        optimizer.step()
        ends.append(net.W.detach())
    torch.testing.assert_close(*ends)


def test_what_would_be_wrong_is_refused():
    net, _ = problem()
    with pytest.raises(ValueError, match="was declared on"):
        riemannian(torch.optim.SGD([{"params": [net.W], "manifold": Euclidean()}], lr=0.1))
    with pytest.raises(TypeError, match="has no manifold"):
        riemannian(torch.optim.SGD([{"params": [net.b], "manifold": Stiefel}], lr=0.1))
    with pytest.raises(TypeError, match=r"param_groups\(model\)"):
        riemannian(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="group without a manifold"):
        riemannian(torch.optim.SGD([{"params": [net.W], "manifold": Stiefel()}, {"params": [net.Q]}], lr=0.1))
    with pytest.raises(ValueError, match="centered"):
        riemannian(torch.optim.RMSprop(param_groups(net), centered=True))
    riemannian(torch.optim.RMSprop(param_groups(net), centered=True), frame="ambient")
    with pytest.raises(ValueError, match="differentiable"):
        riemannian(torch.optim.SGD(param_groups(net), lr=0.1, differentiable=True))
    with pytest.raises(ValueError, match="'tangent' or 'ambient'"):
        riemannian(torch.optim.SGD(param_groups(net), lr=0.1), frame="other")
    with pytest.raises(ValueError, match="Riemannian already"):
        riemannian(riemannian(torch.optim.SGD(param_groups(net), lr=0.1)))
    late = torch.optim.SGD(param_groups(net), lr=0.1)
    torch.optim.lr_scheduler.StepLR(late, 1)
    with pytest.raises(ValueError, match="before building the scheduler"):
        riemannian(late)
    with pytest.raises(TypeError, match=r"got <class 'torch.optim.adam.Adam'>; write riemannian\(torch.optim.Adam\("):
        riemannian(torch.optim.Adam)
    with pytest.raises(TypeError, match=r"\[\{'params': \[W\], 'manifold': W.manifold\}\]"):
        riemannian(torch.optim.Adam([net.W]))
    optimizer = riemannian(torch.optim.SGD(param_groups(net), lr=0.1))
    with pytest.raises(TypeError, match="group without a manifold"):
        optimizer.add_param_group({"params": [ManifoldParameter(Sphere().random(3), Sphere())]})
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(2))]})
    assert len(optimizer.param_groups) == len(param_groups(net)) + 1


class Signed(torch.optim.Optimizer):
    """A third-party optimizer with a first moment of its own name."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("velocity", torch.zeros_like(p))
                    m.mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] * m)


def test_an_optimizer_from_elsewhere_names_its_tangent_state():
    net, loss = problem()
    with pytest.raises(ValueError, match="tangent_state"):
        riemannian(Signed(param_groups(net)))
    optimizer = riemannian(Signed(param_groups(net)), tangent_state=("velocity",))
    start = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        v = optimizer.state[net.W]["velocity"]
        torch.testing.assert_close(Stiefel().project(net.W.detach(), v), v)
    assert loss().item() < start
    assert max_residual(net) < 1e-12


class Breaking(Signed):
    def step(self, closure=None):
        super().step(closure)
        raise RuntimeError("broken")


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_step_that_raises_leaves_points_and_gradients(snapshot, dtype):
    net, _ = problem(torch.float64)
    net.W.data, net.Q.data, net.b.data = (p.detach().to(dtype) for p in (net.W, net.Q, net.b))
    optimizer = riemannian(Breaking(param_groups(net)), tangent_state=("velocity",), snapshot=snapshot)
    optimizer.state[net.W]["velocity"] = torch.ones_like(net.W)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    points = {k: p.detach().clone() for k, p in net.named_parameters()}
    grads = {k: p.grad for k, p in net.named_parameters()}
    values = {k: g.clone() for k, g in grads.items()}
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step()
    for k, p in net.named_parameters():
        assert p.grad is grads[k]
        assert torch.equal(p.grad, values[k])
        assert torch.equal(p.detach(), points[k])
    assert bool((optimizer.state[net.W]["velocity"] == 1).all()) is snapshot


def test_hooks_run_once_and_see_the_point():
    net, loss = problem()
    optimizer = riemannian(torch.optim.Adam(param_groups(net), lr=0.1))
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("pre", max_residual(net))))
    optimizer.register_step_post_hook(lambda *_: seen.append(("post", max_residual(net))))
    loss().backward()
    optimizer.step()
    assert [name for name, _ in seen] == ["pre", "post"]
    assert all(residual < 1e-12 for _, residual in seen)


def test_closure_scheduler_copies_and_checkpoints():
    net, loss = problem()
    optimizer = riemannian(torch.optim.Adam(param_groups(net), lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    with torch.no_grad():
        assert isinstance(optimizer.step(closure), torch.Tensor)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    pairs = [copy.deepcopy((net, optimizer)), pickle.loads(pickle.dumps((net, optimizer)))]
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    resumed = copy.deepcopy(net)
    again = riemannian(torch.optim.Adam(param_groups(resumed), lr=0.1))
    again.load_state_dict(torch.load(buffer, weights_only=True))
    pairs.append((resumed, again))
    plain = [[nn.Parameter(p.detach().clone()) for p in g["params"]] for g in param_groups(resumed)]
    wrong = riemannian(torch.optim.Adam([{"params": params, "manifold": Euclidean()} for params in plain]))
    with pytest.raises(ValueError, match="saved for"):
        wrong.load_state_dict(optimizer.state_dict())
    grads = {k: torch.randn_like(p) for k, p in net.named_parameters()}
    for model, opt in [(net, optimizer), *pairs]:
        assert isinstance(opt, torch.optim.Adam)
        assert repr(type(opt)) == repr(type(optimizer))
        for k, p in model.named_parameters():
            p.grad = grads[k].clone()
        opt.step()
        for (_, p), (_, q) in zip(net.named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("setting", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": False}])
def test_implementations_of_torch_agree(setting):
    results = []
    for settings in ({}, setting):
        net, loss = problem()
        optimizer = riemannian(torch.optim.AdamW(param_groups(net), lr=0.1, weight_decay=0, **settings))
        for _ in range(3):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        results.append(net.W.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


def test_grad_scaler_skips_and_steps():
    net = constrain(nn.Linear(3, 5), "weight", Stiefel())
    optimizer = riemannian(torch.optim.SGD(param_groups(net), lr=0.1, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = net.weight.detach().clone()
    scaler.scale(net(torch.full((2, 3), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(net.weight.detach(), before)
    optimizer.zero_grad()
    scaler.scale(net(torch.randn(2, 3)).square().sum()).backward()
    scaler.step(optimizer)
    assert not torch.equal(net.weight.detach(), before)
    assert max_residual(net) < 1e-6
