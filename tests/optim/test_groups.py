"""What is accepted as ``params``, and what is refused by which message."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from manopt_torch import ManifoldParameter, constrain, param_groups, release
from manopt_torch.manifolds import SPD, Euclidean, Sphere, Stiefel
from manopt_torch.optim import RiemannianAdam, RiemannianRMSprop, RiemannianSGD, riemannian


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(constrain(nn.Linear(3, 5), "weight", Stiefel()), nn.Linear(5, 2))


def manifolds(optimizer: torch.optim.Optimizer) -> list:
    return [group["manifold"] for group in optimizer.param_groups]


def test_a_module_means_its_param_groups():
    net = model()
    one, other = RiemannianSGD(net, lr=0.1), RiemannianSGD(param_groups(net), lr=0.1)
    assert manifolds(one) == manifolds(other)
    assert set(manifolds(one)) == {Stiefel(), Euclidean()}
    ids = [[id(p) for p in group["params"]] for group in one.param_groups]
    assert ids == [[id(p) for p in group["params"]] for group in other.param_groups]
    assert sum(map(len, ids)) == len(list(net.parameters()))


def test_a_list_of_manifold_parameters_is_grouped_by_manifold():
    a, c = ManifoldParameter(Stiefel().random(4, 2), Stiefel()), ManifoldParameter(Stiefel().random(3, 2), Stiefel())
    b = ManifoldParameter(Sphere().random(3), Sphere())
    optimizer = RiemannianSGD([a, b, c], lr=0.1)
    assert manifolds(optimizer) == [Stiefel(), Sphere()]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert manifolds(RiemannianSGD(p for p in (a, b))) == [Stiefel(), Sphere()]


def test_a_plain_tensor_never_steps_by_accident():
    a, plain = ManifoldParameter(Stiefel().random(4, 2), Stiefel()), nn.Parameter(torch.randn(3))
    for params in ([plain], [a, plain], model().parameters(), [{"params": [plain]}], plain):
        with pytest.raises(TypeError, match=r"param_groups\(model\)"):
            RiemannianSGD(params, lr=0.1)
    optimizer = RiemannianSGD([a], lr=0.1)
    with pytest.raises(TypeError, match=r"param_groups\(model\)"):
        optimizer.add_param_group({"params": [plain]})
    assert len(optimizer.param_groups) == 1


def test_declared_and_grouped_manifold_must_agree():
    a = ManifoldParameter(Stiefel().random(3, 3), Stiefel())
    with pytest.raises(ValueError, match="was declared on"):
        RiemannianSGD([{"params": [a], "manifold": Stiefel(metric="canonical")}])
    with pytest.raises(TypeError, match="has no manifold"):
        RiemannianSGD([{"params": [nn.Parameter(torch.eye(3))], "manifold": "Stiefel"}])
    with pytest.raises(ValueError, match="view_for"):
        RiemannianSGD([{"params": [nn.Parameter(torch.eye(3)[:2])], "manifold": Stiefel()}])


def test_add_param_group():
    a, b = (ManifoldParameter(M.random(3, 3), M) for M in (Stiefel(), SPD()))
    optimizer = RiemannianAdam([a], lr=0.1)
    optimizer.add_param_group({"params": b, "lr": 0.5})
    assert manifolds(optimizer) == [Stiefel(), SPD()]
    assert optimizer.param_groups[1]["lr"] == 0.5
    with pytest.raises(ValueError, match="one manifold"):
        RiemannianAdam([{"params": nn.Parameter(torch.ones(1)), "manifold": Euclidean()}]).add_param_group(
            {"params": [a, b]}
        )


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (RiemannianSGD, {"lr": -1.0}),
        (RiemannianSGD, {"lr": float("nan")}),
        (RiemannianSGD, {"momentum": -0.1}),
        (RiemannianSGD, {"weight_decay": -0.1}),
        (RiemannianSGD, {"nesterov": True}),
        (RiemannianSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        (RiemannianSGD, {"lr": torch.tensor([0.1, 0.2])}),
        (RiemannianAdam, {"eps": -1.0}),
        (RiemannianAdam, {"betas": (0.9, 1.0)}),
        (RiemannianAdam, {"betas": (-0.1, 0.9)}),
        (RiemannianRMSprop, {"lr": -1.0}),
        (RiemannianRMSprop, {"alpha": 1.0}),
        (RiemannianRMSprop, {"momentum": -0.5}),
        (RiemannianRMSprop, {"eps": -1.0}),
        (RiemannianRMSprop, {"weight_decay": -1.0}),
    ],
)
def test_settings_out_of_range(cls, settings):
    with pytest.raises(ValueError, match="|".join(settings) + "|Nesterov"):
        cls(model(), **settings)


def test_state_dict_holds_plain_values_only(tmp_path):
    net = model()
    optimizer = RiemannianAdam(net, lr=0.1)
    net(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert [g["manifold"] for g in loaded["param_groups"]] == [repr(M) for M in manifolds(optimizer)]
    assert manifolds(optimizer)[0] == Stiefel(), "the live groups keep their manifold"


def test_loading_for_another_manifold():
    def on(M):
        return RiemannianSGD([ManifoldParameter(M.random(3, 3), M)], lr=0.1, momentum=0.9)

    with pytest.raises(ValueError, match=r"saved for Stiefel\(\), and the optimizer's group is on SPD\(\)"):
        on(SPD()).load_state_dict(on(Stiefel()).state_dict())
    live = on(Stiefel(retraction="qr"))
    with pytest.warns(UserWarning, match=r"saved for Stiefel\(\)"):
        live.load_state_dict(on(Stiefel()).state_dict())
    assert manifolds(live) == [Stiefel(retraction="qr")]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        RiemannianSGD(model()).load_state_dict(on(Stiefel()).state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("torch_class", [torch.optim.Adam, torch.optim.AdamW])
def test_a_torch_adam_state_is_taken_over(torch_class, dtype):
    x = nn.Parameter(Stiefel().random(5, 3, dtype=dtype))
    z = nn.Parameter(torch.randn(4, dtype=dtype))
    theirs = torch_class([{"params": [x]}, {"params": [z]}], lr=0.01, amsgrad=True)
    for _ in range(3):
        x.grad, z.grad = torch.randn_like(x), torch.randn_like(z)
        theirs.step()
    with torch.no_grad():
        x.copy_(Stiefel().nearest(x))
    ours = RiemannianAdam([{"params": [x], "manifold": Stiefel()}, {"params": [z], "manifold": Euclidean()}], lr=1.0)
    saved = copy.deepcopy(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.01
    assert ours.param_groups[0]["decoupled_weight_decay"] is (torch_class is torch.optim.AdamW)
    state = ours.state[x]
    torch.testing.assert_close(state["exp_avg"], Stiefel().project(x.detach(), saved["state"][0]["exp_avg"]))
    squares = saved["state"][0]["exp_avg_sq"]
    total = squares.real.sum() + (squares.imag.sum() if dtype.is_complex else 0)
    torch.testing.assert_close(state["exp_avg_sq"], total)
    assert state["step"] == 3
    x.grad, z.grad = torch.randn_like(x), torch.randn_like(z)
    twin = copy.deepcopy(theirs)
    twin.param_groups[1]["params"][0].grad = z.grad.clone()
    ours.step()
    twin.step()
    assert Stiefel().residual(x.detach()) < 1e-13
    torch.testing.assert_close(z, twin.param_groups[1]["params"][0])
    for key, value in saved["state"][0].items():
        assert torch.equal(theirs.state[x][key], value), "the source keeps its own memory"


def test_a_torch_sgd_state_with_and_without_momentum_is_taken_over():
    for momentum in (0.0, 0.9):
        x = nn.Parameter(Stiefel().random(5, 3, dtype=torch.float64))
        theirs = torch.optim.SGD([x], lr=0.01, momentum=momentum)
        x.grad = torch.randn_like(x)
        theirs.step()
        with torch.no_grad():
            x.copy_(Stiefel().nearest(x))
        ours = RiemannianSGD([{"params": [x], "manifold": Stiefel()}])
        ours.load_state_dict(theirs.state_dict())
        ours.step()
        assert ours.param_groups[0]["momentum"] == momentum
        assert Stiefel().residual(x.detach()) < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_of_half_precision_is_float32_and_resumes_exactly(dtype):
    def start():
        torch.manual_seed(1)
        x = ManifoldParameter(Stiefel().random(6, 3, dtype=dtype), Stiefel())
        return x, RiemannianAdam([x], lr=0.05)

    def run(x, optimizer, steps):
        for k in steps:
            x.grad = torch.randn(6, 3, generator=torch.Generator().manual_seed(k)).to(dtype)
            optimizer.step()

    x, optimizer = start()
    run(x, optimizer, range(5))
    assert optimizer.state[x]["exp_avg"].dtype == torch.float32
    y, resumed = start()
    with torch.no_grad():
        y.copy_(x)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(x, optimizer, range(5, 20))
    run(y, resumed, range(5, 20))
    assert torch.equal(x, y)
    assert x.isfinite().all()
    assert Stiefel().residual(x.detach().float()) < 8 * torch.finfo(dtype).eps * 3


def test_the_state_of_a_wrapped_torch_adam_is_taken_over():
    x = ManifoldParameter(Stiefel().random(5, 3, dtype=torch.float64), Stiefel())
    wrapped = riemannian(torch.optim.Adam([{"params": [x], "manifold": Stiefel()}], lr=0.1))
    x.grad = torch.randn_like(x)
    wrapped.step()
    ours = RiemannianAdam([x], lr=0.1)
    ours.load_state_dict(wrapped.state_dict())
    torch.testing.assert_close(ours.state[x]["exp_avg_sq"], wrapped.state[x]["exp_avg_sq"].sum())
    ours.step()
    assert Stiefel().residual(x.detach()) < 1e-13


OFF = {
    "kaiming after constrain": lambda p: nn.init.kaiming_uniform_(p),
    "zeros": lambda p: nn.init.zeros_(p),
    "turned and three times too long": lambda p: p.data.mul_(-3),
    "NaN": lambda p: p.data.fill_(float("nan")),
}


@pytest.mark.parametrize("spoil", OFF.values(), ids=OFF)
@pytest.mark.parametrize("M", [Stiefel(), Sphere(), SPD()])
def test_a_start_off_the_manifold_is_refused(spoil, M):
    torch.manual_seed(0)
    good, bad = (ManifoldParameter(M, (4, 4)) for _ in range(2))
    with torch.no_grad():
        spoil(bad)
    value = bad.detach().clone()
    optimizers = [RiemannianSGD([good]), riemannian(torch.optim.Adam([{"params": [good], "manifold": M}]))]
    message = r"a ManifoldParameter of shape \(4, 4\) is off .*p\.copy_\(manifold\.nearest\(p\)\) under torch\.no_grad"
    for params in ([bad], [{"params": [good, bad], "manifold": M}]):
        with pytest.raises(ValueError, match=message):
            RiemannianAdam(params)
    with pytest.raises(ValueError, match=message):
        riemannian(torch.optim.Adam([{"params": [bad], "manifold": M}]))
    for optimizer in optimizers:
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [bad], "manifold": M})
        assert len(optimizer.param_groups) == 1
    assert bad.detach().equal(value) or bad.isnan().all(), "nothing is repaired unasked"


def test_a_module_initialised_after_constrain_is_refused_by_its_optimizer():
    net = constrain(nn.Linear(8, 8), "weight", Stiefel())
    nn.init.kaiming_uniform_(net.weight)
    with pytest.raises(ValueError, match=r"a Parameter of shape \(8, 8\) is off Stiefel\(\): residual"):
        RiemannianSGD(net)
    with torch.no_grad():
        net.weight.copy_(Stiefel().nearest(net.weight))
    RiemannianSGD(net)


def test_values_that_nobody_has_yet_are_not_looked_at():
    meta = constrain(nn.Linear(4, 4, device="meta"), "weight", Stiefel())
    assert manifolds(RiemannianSGD(meta)) == manifolds(riemannian(torch.optim.SGD(param_groups(meta))))
    RiemannianSGD([{"params": [nn.Parameter(torch.full((2,), torch.inf))], "manifold": Euclidean()}])


@pytest.mark.parametrize(
    "build",
    [
        lambda net: RiemannianAdam(net, lr=0.1),
        lambda net: riemannian(torch.optim.Adam(param_groups(net), lr=0.1)),
        lambda net: riemannian(
            torch.optim.SGD([{"params": [net[0].weight], "manifold": Stiefel()}, {"params": [net[1].weight]}], lr=0.1)
        ),
    ],
    ids=["ours", "wrapped", "wrapped, a group without a manifold"],
)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("how", ["constrain", "reassign"])
def test_a_declaration_later_than_the_optimizer_is_not_ignored(build, steps, how):
    net = nn.Sequential(constrain(nn.Linear(3, 3), "weight", Stiefel()), nn.Linear(3, 3))
    optimizer = build(net)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    for _ in range(steps):
        optimizer.step()
    if how == "constrain":
        constrain(net[1], "weight", Sphere())
    else:
        constrain(net, {"1.weight": Stiefel(retraction="qr")})
    before = net[1].weight.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a Parameter of shape \(3, 3\) is declared on .* constrain first"):
            optimizer.step()
    assert torch.equal(net[1].weight, before)
    release(net[1])
    optimizer.step()
    assert not torch.equal(net[1].weight, before)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_manifold_that_the_user_changes_is_used(wrapped):
    def build(manifold):
        groups = [{"params": [nn.Parameter(start.clone())], "manifold": manifold}]
        return riemannian(torch.optim.SGD(groups, lr=0.5)) if wrapped else RiemannianSGD(groups, lr=0.5)

    start = Stiefel().random(5, 3, dtype=torch.float64)
    optimizer, other = build(Stiefel()), build(Stiefel(retraction="qr"))
    for k in range(3):
        for o in (optimizer, other):
            o.param_groups[0]["params"][0].grad = torch.full_like(start, 1.0 + k)
            if k == 1:
                o.param_groups[0]["params"][0].data.copy_(start)
                o.param_groups[0]["manifold"] = Stiefel(retraction="qr")
            o.step()
    (p,), (q,) = optimizer.param_groups[0]["params"], other.param_groups[0]["params"]
    assert torch.equal(p, q)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_changed_manifold_must_not_contradict_the_declaration(wrapped):
    x = ManifoldParameter(Stiefel(), (5, 3))
    groups = [{"params": [x], "manifold": Stiefel()}]
    optimizer = riemannian(torch.optim.SGD(groups, lr=0.1)) if wrapped else RiemannianSGD(groups, lr=0.1)
    x.grad = torch.randn(5, 3)
    optimizer.step()
    optimizer.param_groups[0]["manifold"] = Stiefel(retraction="qr")
    optimizer.step()
    optimizer.param_groups[0]["manifold"] = Euclidean()
    with pytest.raises(ValueError, match=r"declared on Stiefel\(\), but its group in the optimizer says Euclidean"):
        optimizer.step()
    assert Stiefel().residual(x.detach()) < 1e-5


def test_a_lazily_conjugated_parameter_is_refused():
    x = nn.Parameter(Stiefel().random(3, 3, dtype=torch.complex64).mH)
    assert x.is_conj()
    for manifold in (Stiefel(), Euclidean()):
        groups = [{"params": [x], "manifold": manifold}]
        for build in (RiemannianSGD, lambda groups: riemannian(torch.optim.SGD(groups))):
            with pytest.raises(ValueError, match=r"Parameter of shape \(3, 3\) is a view, lazily conjugated"):
                build(groups)


def test_empty_groups_keep_their_place():
    x = ManifoldParameter(Sphere(), (3,))
    optimizer = RiemannianSGD([{"params": [], "manifold": Sphere(), "lr": 3.0}, {"params": [x]}], lr=0.1)
    optimizer.add_param_group({"params": [], "manifold": SPD()})
    assert [(g["manifold"], len(g["params"]), g["lr"]) for g in optimizer.param_groups] == [
        (Sphere(), 0, 3.0),
        (Sphere(), 1, 0.1),
        (SPD(), 0, 0.1),
    ]
    before = x.detach().clone()
    x.grad = torch.randn(3)
    optimizer.step()
    assert not torch.equal(x, before)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in ({"params": []}, {"params": [], "manifold": "Sphere"}):
        with pytest.raises(TypeError, match="a group without parameters must name its manifold"):
            optimizer.add_param_group(group)
        with pytest.raises(TypeError, match="a group without parameters must name its manifold"):
            RiemannianSGD([{"params": [x]}, group])
    for nothing in ([], iter(()), nn.Identity()):
        with pytest.raises(ValueError, match="empty parameter list"):
            RiemannianSGD(nothing)


@pytest.mark.parametrize("collection", [set, frozenset])
def test_sets_have_no_order(collection):
    params = [ManifoldParameter(Sphere(), (3,)) for _ in range(3)]
    for given in (collection(params), [{"params": collection(params)}]):
        with pytest.raises(TypeError, match="in a set, whose order"):
            RiemannianSGD(given)
    with pytest.raises(TypeError, match="in a set, whose order"):
        RiemannianSGD(params[:1]).add_param_group({"params": collection(params[1:])})


def stepped(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


STATES = {
    "ours": lambda *shape: RiemannianAdam([ManifoldParameter(Stiefel(), shape)], amsgrad=True),
    "wrapped": lambda *shape: riemannian(
        torch.optim.Adam([{"params": [ManifoldParameter(Stiefel(), shape)], "manifold": Stiefel()}], amsgrad=True)
    ),
    "torch": lambda *shape: torch.optim.Adam([nn.Parameter(torch.randn(shape))], amsgrad=True),
}


@pytest.mark.parametrize(
    ("saved", "live", "shape"),
    [(saved, live, (4, 2)) for saved in STATES for live in ("ours", "wrapped")] + [("ours", "wrapped", (5, 2))],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_changed(saved, live, shape):
    """One of another model; and one number per point where torch wants one per entry."""
    state = stepped(STATES[saved](*shape)).state_dict()
    optimizer = stepped(STATES[live](5, 2))
    state["param_groups"][0]["lr"] = 7.0
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"of shape .* does not fit a ManifoldParameter of shape \(5, 2\)"):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    stepped(optimizer)


@pytest.mark.parametrize("live", ["ours", "wrapped"])
@pytest.mark.parametrize("saved", ["torch", "wrapped"])
def test_a_state_that_fits_is_taken_over(saved, live):
    state = stepped(STATES[saved](5, 2)).state_dict()
    optimizer = STATES[live](5, 2)
    optimizer.load_state_dict(state)
    (p,) = optimizer.param_groups[0]["params"]
    assert optimizer.state[p]["step"] == 1
    stepped(optimizer)
    assert Stiefel().residual(p.detach()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_states_of_rmsprop_are_exchanged_with_torch(momentum, dtype):
    x, z = nn.Parameter(Stiefel().random(5, 3, dtype=dtype)), nn.Parameter(torch.randn(4, dtype=dtype))
    theirs = torch.optim.RMSprop([{"params": [x]}, {"params": [z]}], momentum=momentum)
    stepped(theirs)
    with torch.no_grad():
        x.copy_(Stiefel().nearest(x))
    ours = RiemannianRMSprop([{"params": [x], "manifold": Stiefel()}, {"params": [z], "manifold": Euclidean()}])
    ours.load_state_dict(theirs.state_dict())
    squares = theirs.state[x]["square_avg"]
    total = squares.real.sum() + (squares.imag.sum() if dtype.is_complex else 0)
    torch.testing.assert_close(ours.state[x]["square_avg"], total)
    stepped(ours)
    assert Stiefel().residual(x.detach()) < 1e-13
    flat = RiemannianRMSprop(
        [{"params": [nn.Parameter(z.detach().clone())], "manifold": Euclidean()}], momentum=momentum
    )
    stepped(flat)
    (p,) = flat.param_groups[0]["params"]
    back = torch.optim.RMSprop([nn.Parameter(p.detach().clone())])
    back.load_state_dict({**flat.state_dict(), "param_groups": back.state_dict()["param_groups"]})
    back.param_groups[0]["momentum"] = momentum
    (q,) = back.param_groups[0]["params"]
    q.grad = torch.randn_like(q)
    p.grad = q.grad.clone()
    flat.step()
    back.step()
    torch.testing.assert_close(p, q)


def test_the_state_of_a_centered_rmsprop_is_refused():
    x = ManifoldParameter(Stiefel(), (5, 3))
    theirs = torch.optim.RMSprop([nn.Parameter(torch.randn(5, 3))], centered=True)
    with pytest.raises(ValueError, match="centered=True"):
        RiemannianRMSprop([x]).load_state_dict(stepped(theirs).state_dict())


def test_a_step_of_rmsprop_by_its_formula():
    """v = (1 − α)‖r‖², b = r/(√v + ε), and the buffer goes with the point."""
    M = Sphere()
    x = nn.Parameter(M.random(2, 4, dtype=torch.float64))
    optimizer = RiemannianRMSprop([{"params": [x], "manifold": M}], lr=0.1, alpha=0.9, eps=1e-3, momentum=0.5)
    point, v, b = x.detach().clone(), torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)
    for _ in range(3):
        x.grad = torch.randn_like(x)
        r = x.grad - point * (point * x.grad).sum(-1, keepdim=True)
        v = 0.9 * v + 0.1 * r.square().sum(-1, keepdim=True)
        b = 0.5 * b + r / (v.sqrt() + 1e-3)
        u = -0.1 * b
        angle = u.norm(dim=-1, keepdim=True)
        unit = u / angle
        point, b = (
            angle.cos() * point + angle.sin() * unit,
            b - (unit * b).sum(-1, keepdim=True) * (angle.sin() * point + (1 - angle.cos()) * unit),
        )
        optimizer.step()
        torch.testing.assert_close(x.detach(), point)
        torch.testing.assert_close(optimizer.state[x]["momentum_buffer"], b)
