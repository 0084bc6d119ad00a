"""Declaring, loading, resetting, releasing, grouping and measuring constrained parameters."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

from manopt_torch import (
    SPD,
    Euclidean,
    Manifold,
    ManifoldParameter,
    Sphere,
    Stiefel,
    Unitary,
    View,
    assert_on_manifold,
    constrain,
    max_residual,
    named_manifolds,
    param_groups,
    release,
    view_for,
)
from manopt_torch.optim import RiemannianSGD

WIDE = View(Stiefel(), "transpose")
REAL = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@dataclasses.dataclass(frozen=True)
class Ring(Manifold):
    """Numbers of modulus ``radius``, each its own point: a manifold of a user, without ``nearest``."""

    radius: float = 1.0

    event_dim = 0
    event_shapes = ((),)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return v - (x.conj() * v).real * x / self.radius**2

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return (x + u) / (x + u).abs() * self.radius

    def residual(self, x: Tensor) -> Tensor:
        return (x.abs() - self.radius).abs()

    def random(self, *shape, dtype=None, device=None, generator=None) -> Tensor:
        z = torch.randn(*shape, dtype=dtype, device=device, generator=generator)
        return z / z.abs() * self.radius


@dataclasses.dataclass(frozen=True)
class Frame(Manifold):
    """Orthonormal columns as a user writes them: float32 and above, LAPACK's layout, a ``nearest`` that misses."""

    event_dim = 2
    event_shapes = ((3, 2),)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return Stiefel().project(x, v)

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return Stiefel().retract(x, u)

    def residual(self, x: Tensor) -> Tensor:
        return Stiefel().residual(x)

    def random(self, *shape, dtype=None, device=None, generator=None) -> Tensor:
        q = torch.linalg.qr(torch.randn(*shape, dtype=dtype, device=device, generator=generator)).Q
        return q.mT.contiguous().mT

    def nearest(self, z: Tensor) -> Tensor:
        return z / 2


class Net(nn.Module):
    """A user's module: declares in ``__init__``, initialises in its own ``reset_parameters``."""

    def __init__(self, manifold: Manifold | None = None, shape: tuple[int, ...] = (5, 3), dtype=None) -> None:
        super().__init__()
        self.W = ManifoldParameter(manifold or Stiefel(), shape, dtype=dtype)
        self.out = nn.Linear(3, 2)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.W)


def orthonormal(n: int, p: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    z = torch.randn(n, p, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(z).Q.contiguous()


def polar(z: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(z, full_matrices=False)
    return u @ vh


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in module.state_dict().items()}


def assert_same_bits(module: nn.Module, before: dict[str, Tensor]) -> None:
    after = module.state_dict()
    assert after.keys() == before.keys()
    for k in before:
        assert torch.equal(after[k], before[k]), k


def noise_like(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    return {k: v + 1 if v.dtype == torch.int64 else torch.randn_like(v) for k, v in state.items()}


# ------------------------------------------------------------------ ManifoldParameter
class TestManifoldParameter:
    def test_of_a_tensor_shares_memory_and_declares(self) -> None:
        x = orthonormal(5, 3)
        p = ManifoldParameter(x, Stiefel())
        assert isinstance(p, nn.Parameter)
        assert p.requires_grad
        assert p.is_leaf
        assert p.manifold == Stiefel()
        assert p.data_ptr() == x.data_ptr()
        assert not ManifoldParameter(x, Stiefel(), requires_grad=False).requires_grad
        assert ManifoldParameter(p, Stiefel()).manifold == Stiefel()

    def test_of_a_conjugated_view_is_a_copy_that_can_be_stepped(self) -> None:
        """U.mH is how one writes an inverse."""
        u = Unitary().random(3, 3, dtype=torch.complex128)
        p = ManifoldParameter(u.mH, Unitary())
        assert not p.is_conj()
        assert torch.equal(p, u.mH)
        p.grad = torch.randn_like(p)
        RiemannianSGD([p], lr=0.1).step()
        assert Unitary().residual(p.detach()) < 1e-13
        assert Unitary().residual(u) < 1e-13

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
    def test_of_a_shape_is_a_random_point(self, dtype: torch.dtype) -> None:
        def draw() -> ManifoldParameter:
            return ManifoldParameter(Unitary(), (2, 4, 4), dtype=dtype, generator=torch.Generator().manual_seed(3))

        p = draw()
        assert p.shape == (2, 4, 4)
        assert p.dtype == dtype
        eye = torch.eye(4, dtype=dtype)
        assert torch.dist(p.mH @ p, eye.expand(2, 4, 4)) < 1e-5
        assert p.imag.abs().mean() > 0.1
        assert torch.equal(p, draw())
        assert not torch.equal(p, ManifoldParameter(Unitary(), (2, 4, 4), dtype=dtype))
        assert ManifoldParameter(Stiefel(), torch.Size((4, 2))).dtype == torch.get_default_dtype()

    @pytest.mark.parametrize("dtype", REAL)
    def test_every_dtype_is_judged_by_its_rounding(self, dtype: torch.dtype) -> None:
        for n, p in ((1, 1), (4, 4), (64, 64), (200, 3)):
            assert ManifoldParameter(Stiefel(), (n, p), dtype=dtype).dtype == dtype
            rounded = orthonormal(n, p).to(dtype)
            assert ManifoldParameter(rounded, Stiefel()).dtype == dtype
            x = orthonormal(n, p)
            off = x + 20 * torch.finfo(dtype).eps ** 0.5 * x
            with pytest.raises(ValueError, match=r"residual .* tolerance .*nearest"):
                ManifoldParameter(off.to(dtype), Stiefel())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_of_a_users_manifold(self, dtype: torch.dtype) -> None:
        """Whatever precision and layout its ``random`` is written for; fully_shard wants contiguous parameters."""
        p = ManifoldParameter(Frame(), (5, 3), dtype=dtype)
        assert p.is_contiguous()
        assert p.dtype == dtype
        torch.testing.assert_close(p.double().mH @ p.double(), torch.eye(3).double(), rtol=0, atol=2e-2)

    def test_refuses_by_name(self) -> None:
        x = orthonormal(4, 2)
        with pytest.raises(ValueError, match=r"residual 4\.24, tolerance"):  # ‖4I − I‖ = 3√2
            ManifoldParameter(2 * x, Stiefel())
        with pytest.raises(ValueError, match="NaN"):
            ManifoldParameter(torch.full_like(x, math.nan), Stiefel())
        with pytest.raises(ValueError, match="NaN or inf"):
            ManifoldParameter(torch.full_like(x, math.inf), Euclidean())
        with pytest.raises(ValueError, match="view_for"):
            ManifoldParameter(x.mH.contiguous(), Stiefel())
        with pytest.raises(ValueError, match="view_for"):
            ManifoldParameter(Stiefel(), (2, 4))
        with pytest.raises(TypeError, match="int64"):
            ManifoldParameter(torch.eye(3, dtype=torch.int64), Stiefel())
        with pytest.raises(TypeError, match="int32"):
            ManifoldParameter(Stiefel(), (3, 3), dtype=torch.int32)
        with pytest.raises(TypeError, match="ManifoldParameter\\(tensor, manifold\\)"):
            ManifoldParameter(x.tolist(), Stiefel())  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"got \(Tensor, the class Stiefel\)"):
            ManifoldParameter(x, Stiefel)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"got \(Sphere, int\).*ManifoldParameter\(manifold, shape\)"):
            ManifoldParameter(Sphere(), 5)  # type: ignore[call-overload]
        for manifold, shape in ((Sphere(), (0,)), (Stiefel(), (3, 0)), (WIDE, (0, 3)), (Sphere(), (2, 0))):
            with pytest.raises(ValueError, match="has no points without entries"):
                ManifoldParameter(manifold, shape)
        with pytest.raises(TypeError, match=r"data\.to"):
            ManifoldParameter(x, Stiefel(), dtype=torch.float32)  # type: ignore[call-overload]

    def test_rgrad_is_derived_from_the_accumulated_grad(self) -> None:
        """Case 67: rgrad of two backward passes is of their sum; with XᴴX = I it is G − X herm(XᴴG)."""
        x, a, b = orthonormal(5, 3), torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
        p = ManifoldParameter(x, Stiefel())
        assert p.rgrad is None
        (p * a).sum().backward()
        (p * b).sum().backward()
        g = a + b
        s = x.mH @ g
        torch.testing.assert_close(p.rgrad, g - x @ (s + s.mH) / 2)
        assert torch.equal(p.grad, g)
        assert not p.rgrad.requires_grad
        p.grad = None
        assert p.rgrad is None

    @pytest.mark.parametrize("manifold", [Stiefel(), Stiefel(retraction="qr"), View(WIDE, "flatten", ndim=3)])
    def test_save_and_load_weights_only(self, manifold: Manifold) -> None:
        """Case 55."""
        shape = (5, 3) if manifold.event_dim == 2 else (3, 2, 4)
        p = ManifoldParameter(manifold, shape, requires_grad=False)
        file = io.BytesIO()
        torch.save({"p": p, "plain": torch.ones(2)}, file)
        file.seek(0)
        q = torch.load(file, weights_only=True)["p"]
        assert type(q) is ManifoldParameter
        assert q.manifold == manifold
        assert torch.equal(p, q)
        assert not q.requires_grad

    def test_of_a_users_manifold_loads_once_it_is_declared_safe(self) -> None:
        p = ManifoldParameter(Ring(2.0), (3,), dtype=torch.complex128)
        file = io.BytesIO()
        torch.save(p, file)
        file.seek(0)
        with torch.serialization.safe_globals([Ring]):
            assert torch.load(file, weights_only=True).manifold == Ring(2.0)

    @pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda p: pickle.loads(pickle.dumps(p))])
    def test_copies(self, how) -> None:
        """Case 74; also of a value that has drifted, which a copy must not refuse."""
        p = ManifoldParameter(Stiefel(), (5, 3), requires_grad=False)
        with torch.no_grad():
            p.mul_(3)
        q = how(p)
        assert type(q) is ManifoldParameter
        assert q.manifold == p.manifold
        assert torch.equal(p, q)
        assert not q.requires_grad
        assert (q.data_ptr() == p.data_ptr()) == (how is copy.copy)

    def test_deepcopy_keeps_ties(self) -> None:
        p = ManifoldParameter(Stiefel(), (5, 3))
        a, b = copy.deepcopy([p, p])
        assert a is b

    def test_arithmetic_gives_plain_tensors(self) -> None:
        p = ManifoldParameter(Stiefel(), (5, 3))
        for t in (p + 1, p.detach(), p.data, p.clone(), p.mH):
            assert type(t) is Tensor

    def test_repr_names_the_manifold(self) -> None:
        text = repr(ManifoldParameter(Stiefel(retraction="qr"), (2, 1)))
        assert "Stiefel(retraction='qr')" in text
        assert "tensor([[" in text

    def test_on_meta_nothing_is_drawn(self) -> None:
        with torch.device("meta"):
            p = ManifoldParameter(Stiefel(), (5, 3))
        assert p.is_meta
        assert p.manifold == Stiefel()
        assert ManifoldParameter(torch.empty(5, 3, device="meta"), Stiefel()).is_meta
        assert ManifoldParameter(Stiefel(), (5, 3), device="meta").is_meta


# ------------------------------------------------------------------ the slot that a ManifoldParameter writes
class TestRegistration:
    def test_any_way_of_registering_writes_the_slot(self) -> None:
        p = ManifoldParameter(Stiefel(), (5, 3))
        by_name = nn.Module()
        by_name.register_parameter("W", p)
        assert list(named_manifolds(by_name)) == [("W", Stiefel())]
        assert list(named_manifolds(nn.ParameterList([p]))) == [("0", Stiefel())]
        assert list(named_manifolds(nn.ParameterDict({"a": p}))) == [("a", Stiefel())]
        assert list(named_manifolds(nn.Sequential(Net(), Net()))) == [("0.W", Stiefel()), ("1.W", Stiefel())]

    def test_a_plain_parameter_does_not(self) -> None:
        assert list(named_manifolds(nn.Linear(3, 3))) == []
        assert "_slots" not in vars(nn.Linear(3, 3))

    def test_the_declaration_outlives_the_tensor(self) -> None:
        net = Net()
        net.W = nn.Parameter(torch.ones(5, 3))
        assert list(named_manifolds(net)) == [("W", Stiefel())]
        assert max_residual(net) == pytest.approx(torch.dist(torch.full((3, 3), 5.0), torch.eye(3)).item())

    def test_the_same_declaration_changes_nothing(self) -> None:
        module = nn.Module()
        module.W = nn.Parameter(torch.randn(5, 3))
        constrain(module, "W", Stiefel(), on_load="project")
        module.W = ManifoldParameter(Stiefel(), (5, 3))
        module.load_state_dict({"W": 3 * module.W})
        assert_on_manifold(module)

    def test_another_declaration_replaces_it(self) -> None:
        net = Net()
        net.W = ManifoldParameter(Sphere(), (4,))
        assert list(named_manifolds(net)) == [("W", Sphere())]

    def test_a_shape_that_no_longer_fits_raises(self) -> None:
        net = Net()
        net.W = nn.Parameter(torch.zeros(7))
        with pytest.raises(ValueError, match=r"^W: "):
            list(named_manifolds(net))

    @pytest.mark.parametrize("how", ["del", "none", "weight_norm", "parametrize", "prune"])
    def test_a_slot_without_parameter_raises(self, how: str) -> None:
        model = nn.Sequential(constrain(nn.Linear(4, 4), "weight", Stiefel()))
        layer = model[0]
        if how == "del":
            del layer.weight
        elif how == "none":
            layer.weight = None
        elif how == "weight_norm":
            nn.utils.parametrizations.weight_norm(layer)
        elif how == "parametrize":
            nn.utils.parametrizations.orthogonal(layer)
        else:
            torch.nn.utils.prune.random_unstructured(layer, "weight", amount=1)
        for check in (max_residual, assert_on_manifold, param_groups, lambda m: list(named_manifolds(m))):
            with pytest.raises(ValueError, match=r"0\.weight was declared on Stiefel\(\) but is no longer a parameter"):
                check(model)
        assert list(named_manifolds(release(model))) == []

    def test_hooks_are_registered_once(self) -> None:
        """Also after a reload; and what one process saves another one loads."""
        file = io.BytesIO()
        torch.save(ManifoldParameter(Sphere(), (3,)), file)
        script = """
import importlib, io, sys, torch
from torch.nn.modules import module
import manopt_torch, manopt_torch.parameter
assert torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=True).manifold == manopt_torch.Sphere()
hooks = module._global_parameter_registration_hooks, module._global_module_registration_hooks
assert [len(h) for h in hooks] == [1, 1]
again = importlib.reload(manopt_torch.parameter)
assert [len(h) for h in hooks] == [1, 1]
net = torch.nn.Module()
net.W = again.ManifoldParameter(manopt_torch.Sphere(), (3,))
assert len(net._load_state_dict_pre_hooks) == 1
assert list(again.named_manifolds(net)) == [("W", manopt_torch.Sphere())]
"""
        subprocess.run([sys.executable, "-c", script], input=file.getvalue(), check=True, timeout=100)


# ------------------------------------------------------------------ constrain
class TestConstrain:
    def test_returns_the_module_and_moves_to_the_nearest_point(self) -> None:
        layer = nn.Linear(3, 5, dtype=torch.float64)
        before, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
        weight = layer.weight
        assert constrain(layer, "weight", Stiefel()) is layer
        assert layer.weight is weight
        torch.testing.assert_close(layer.weight.detach(), polar(before), rtol=0, atol=1e-12)
        assert torch.equal(layer.bias, bias)
        assert type(layer.weight) is nn.Parameter

    @pytest.mark.parametrize("init", ["nearest", "keep"])
    @pytest.mark.parametrize("dtype", [*REAL, torch.complex64, torch.complex128])
    def test_a_value_on_the_manifold_is_kept_bit_for_bit(self, init: str, dtype: torch.dtype) -> None:
        """Case 56, and values that are there only up to the rounding of their dtype."""
        exact = orthonormal(4, 4, torch.complex128 if dtype.is_complex else torch.float64)
        for w in (torch.eye(4, dtype=dtype), exact.to(dtype)):
            layer = nn.Linear(4, 4, bias=False, dtype=dtype)
            layer.weight.data.copy_(w)
            constrain(layer, "weight", Unitary(), init=init)  # type: ignore[arg-type]
            assert torch.equal(layer.weight, w)

    def test_keep_refuses_with_the_residual_and_changes_nothing(self) -> None:
        layer = nn.Linear(2, 2)
        nn.init.eye_(layer.weight).data.mul_(2)
        before = bits(layer)
        with pytest.raises(ValueError, match=r"^weight is off Stiefel\(\): residual 4.24, .*init=\"nearest\""):
            constrain(layer, "weight", Stiefel(), init="keep")
        assert_same_bits(layer, before)
        assert b"manopt" not in pickle.dumps(layer)

    def test_random_draws_a_new_point(self) -> None:
        layer = nn.Linear(3, 3)
        nn.init.eye_(layer.weight)
        constrain(layer, "weight", Stiefel(), init="random")
        assert torch.dist(layer.weight, torch.eye(3)) > 1e-2
        assert max_residual(layer) < 1e-5

    @pytest.mark.parametrize(
        ("layer", "matrix"),
        [
            (nn.Linear(5, 3), lambda w: w),
            (nn.Conv1d(4, 3, 5), lambda w: w.flatten(1)),
            (nn.Conv2d(3, 2, 3), lambda w: w.flatten(1)),
            (nn.Conv2d(4, 8, 3, groups=2), lambda w: w.unflatten(0, (2, 4)).flatten(2)),
            (nn.ConvTranspose2d(3, 2, 3), lambda w: w.flatten(1)),
        ],
        ids=["linear", "conv1d", "conv2d", "groups", "transposed"],
    )
    def test_wide_weights_and_kernels_have_orthonormal_rows(self, layer: nn.Module, matrix) -> None:
        """Case 64."""
        layer = constrain(copy.deepcopy(layer).double(), "weight", Stiefel())
        w = matrix(layer.weight.detach())
        assert w.shape[-2] < w.shape[-1]
        eye = torch.eye(w.shape[-2], dtype=w.dtype).expand(*w.shape[:-1], w.shape[-2])  # for each group
        torch.testing.assert_close(w @ w.mH, eye, rtol=0, atol=1e-12)

    def test_elsewhere_leading_dimensions_are_a_batch(self) -> None:
        module = nn.Module()
        module.heads = nn.Parameter(torch.randn(2, 3, 5, 2))
        constrain(module, "heads", Stiefel())
        x = module.heads.detach()
        assert list(named_manifolds(module)) == [("heads", Stiefel())]
        torch.testing.assert_close(x.mH @ x, torch.eye(2).expand(2, 3, 2, 2), rtol=0, atol=1e-5)
        module.kernel = nn.Parameter(torch.randn(12, 3, 2, 2))  # unless the user says that it is a kernel
        constrain(module, "kernel", View(Stiefel(), "flatten", ndim=4))
        k = module.kernel.detach().flatten(1)
        torch.testing.assert_close(k.mH @ k, torch.eye(12), rtol=0, atol=1e-5)

    def test_vectors_and_numbers_take_any_shape(self) -> None:
        table = constrain(nn.Embedding(7, 3), "weight", Sphere())
        torch.testing.assert_close(table.weight.norm(dim=-1), torch.ones(7))
        assert list(named_manifolds(constrain(nn.Conv2d(2, 3, 3), "weight", Euclidean()))) == [("weight", Euclidean())]

    @pytest.mark.parametrize("options", [{"padding_idx": 0}, {"max_norm": 0.5}], ids=str)
    @pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
    def test_an_embedding_that_writes_to_its_rows_is_refused(self, kind, options) -> None:
        model = nn.Sequential(nn.Linear(3, 3), kind(5, 3, **options))
        before = bits(model)
        with pytest.raises(ValueError, match=r"1\.weight: .*keeps its row padding_idx at zero.*Sphere\(\)"):
            constrain(model, {"0.weight": Stiefel(), "1.weight": Sphere()})
        assert_same_bits(model, before)
        constrain(model, "1.weight", Euclidean())
        assert_same_bits(model, before)

    def test_recurrent_weights_of_torch(self) -> None:
        rnn = nn.RNN(2, 4, num_layers=2)
        found = constrain(rnn, {"weight_hh_*": Unitary()})
        assert found == [("weight_hh_l0", Unitary()), ("weight_hh_l1", Unitary())]
        rnn.reset_parameters()
        assert_on_manifold(rnn)

    def test_globs(self) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 3), nn.Embedding(4, 3)))
        found = constrain(model, {"1.1.weight": Sphere(), "*0.weight": Stiefel()})
        assert found == [("0.weight", Stiefel()), ("1.0.weight", WIDE), ("1.1.weight", Sphere())]
        assert list(named_manifolds(model)) == found
        assert_on_manifold(model)

    def test_dotted_name(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        assert constrain(model, "1.weight", Stiefel()) is model
        assert list(named_manifolds(model)) == [("1.weight", Stiefel())]

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (("weight", Stiefel()), ValueError, "Sequential has no parameter 'weight'; its parameters: none"),
            (("0.gain", Stiefel()), ValueError, "Linear has no parameter 'gain'; its parameters: weight, bias"),
            (("0.bias", Stiefel()), ValueError, "^0.bias: "),
            (("*.weight", Stiefel()), ValueError, r"no part '\*'.*constrain\(model, \{'\*\.weight': Stiefel\(\)\}\)"),
            (("2.weight", Stiefel()), ValueError, "Sequential has no part '2'"),
            (("0.weight", Stiefel), TypeError, "write constrain"),
            (("0.weight",), TypeError, "write constrain"),
            (({"0.weight": Stiefel()}, Stiefel()), TypeError, "write constrain"),
            (({"0.weight": Stiefel}), TypeError, "such as Stiefel"),
            (({"*.gain": Stiefel()}), ValueError, r"'\*\.gain' matches none of the parameters: 0.weight, 0.bias"),
            (({"0.*": Stiefel()}), ValueError, "^0.bias: "),
            (({"*.weight": Stiefel(), "0.*": Sphere()}), ValueError, "0.weight is matched by globs of"),
            (({"0.weight": Stiefel(), "1.weight": Ring(50.0)}), NotImplementedError, "nearest"),
        ],
        ids=repr,
    )
    def test_refuses_by_name_and_changes_nothing(self, arguments, error: type[Exception], message: str) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        before = bits(model)
        with pytest.raises(error, match=message):
            constrain(model, *(arguments if isinstance(arguments, tuple) else (arguments,)))
        assert_same_bits(model, before)
        assert b"manopt" not in pickle.dumps(model)

    def test_refuses_unknown_options_and_dtypes(self) -> None:
        layer = nn.Linear(3, 3)
        with pytest.raises(ValueError, match="init='haar': expected one of 'keep', 'nearest', 'random'"):
            constrain(layer, "weight", Stiefel(), init="haar")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="on_load='ignore': expected one of 'error', 'project'"):
            constrain(layer, "weight", Stiefel(), on_load="ignore")  # type: ignore[call-overload]
        layer.index = nn.Parameter(torch.eye(3, dtype=torch.int64), requires_grad=False)
        with pytest.raises(TypeError, match=r"index has dtype torch\.int64"):
            constrain(layer, "index", Stiefel())
        with pytest.raises(ValueError, match="run the model once"):
            constrain(nn.LazyLinear(3), "weight", Stiefel())
        layer.weight.data.fill_(math.nan)
        with pytest.raises(ValueError, match="NaN"):
            constrain(layer, "weight", Stiefel())
        assert max_residual(constrain(layer, "weight", Stiefel(), init="random")) < 1e-5

    def test_a_nearest_that_misses_is_not_believed(self) -> None:
        layer = nn.Linear(3, 5)
        with pytest.raises(ValueError, match=r"weight is off Frame\(\): residual"):
            constrain(layer, "weight", Frame())
        constrain(layer, "weight", Frame(), init="random", on_load="project")
        before = bits(layer)
        with pytest.raises(ValueError, match=r"weight is off Frame\(\)"):
            layer.load_state_dict(noise_like(layer))
        assert_same_bits(layer, before)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_nearest_that_rounding_takes_off_is_called_so(self, dtype: torch.dtype) -> None:
        """-1 on the diagonal is moved to 8nε of float32, the rounding of the other entries is larger."""
        torch.manual_seed(1)
        layer = nn.Linear(3, 3).to(dtype)
        nn.init.normal_(layer.weight)
        with pytest.raises(ValueError, match=rf"nearest point, rounded to {dtype}, is off too, init=\"random\""):
            constrain(layer, "weight", SPD())
        assert max_residual(constrain(layer, "weight", SPD(), init="random")) < 1e-2

    def test_declared_again(self) -> None:
        """The same manifold is no news; another one has to be released first."""
        layer = constrain(nn.Linear(3, 3), "weight", Stiefel())
        w = layer.weight.detach().clone()
        constrain(layer, "weight", Stiefel(), on_load="project")
        assert torch.equal(layer.weight, w)
        layer.load_state_dict({"weight": 3 * w, "bias": layer.bias})
        torch.testing.assert_close(layer.weight.detach(), w)
        with pytest.raises(ValueError, match=r"cannot be declared on Stiefel\(retraction='qr'\).*release"):
            constrain(layer, "weight", Stiefel(retraction="qr"))
        assert list(named_manifolds(layer)) == [("weight", Stiefel())]
        assert list(named_manifolds(constrain(release(layer), "weight", Sphere()))) == [("weight", Sphere())]

    def test_on_meta(self) -> None:
        layer = constrain(nn.Linear(3, 5, device="meta"), "weight", Stiefel(), init="keep")
        assert list(named_manifolds(layer)) == [("weight", Stiefel())]
        layer.reset_parameters()
        layer.to_empty(device="cpu").reset_parameters()
        assert_on_manifold(layer)


class TestTies:
    def tied(self) -> nn.Module:
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        model[1].weight = model[0].weight
        return model

    @pytest.mark.parametrize("name", ["0.weight", "1.weight", "*.weight"])
    def test_the_constrained_slot_wins(self, name: str) -> None:
        model = self.tied()
        constrain(model, {name: Stiefel()})
        assert len(list(named_manifolds(model))) == 1
        (group,) = param_groups(model)
        assert group["manifold"] == Stiefel()
        assert len(group["params"]) == 1
        (group,) = param_groups(model, {"1.*": {"lr": 0.5}})
        assert group["lr"] == 0.5

    @pytest.mark.parametrize("name", ["0.weight", "1.weight"])
    def test_every_module_with_the_tensor_knows(self, name: str) -> None:
        """A half of the model can be stepped, measured, reset, loaded and copied by itself."""
        model = constrain(self.tied(), name, Stiefel())
        for half in (*model, copy.deepcopy(model[0]), copy.deepcopy(model[1])):
            assert list(named_manifolds(half)) == [("weight", Stiefel())]
            assert [g["manifold"] for g in param_groups(half)] == [Stiefel()]
            before = bits(half)
            with pytest.raises(ValueError, match="weight is off"):
                half.load_state_dict({"weight": 2 * before["weight"]})
            assert_same_bits(half, before)
            half.reset_parameters()
            assert_on_manifold(half)
            assert torch.dist(half.weight, before["weight"]) > 1e-2
            half.weight.data.mul_(3)
            assert max_residual(half) > 1
        assert list(named_manifolds(release(model))) == []

    @pytest.mark.parametrize("first", [0, 1])
    def test_declared_on_one_module_the_other_knows(self, first: int) -> None:
        model = nn.Sequential(self.tied(), nn.Linear(2, 2))
        assert constrain(model[0][first], "weight", Stiefel()) is model[0][first]
        other = model[0][1 - first]
        assert list(named_manifolds(other)) == [("weight", Stiefel())]
        assert [g["manifold"] for g in param_groups(other)] == [Stiefel()]
        before = bits(other)
        with pytest.raises(ValueError, match="weight is off"):
            other.load_state_dict({"weight": 2 * before["weight"]})
        assert_same_bits(other, before)
        assert len(list(named_manifolds(model))) == 1

    @pytest.mark.parametrize("name", ["0.weight", "1.weight"])
    @pytest.mark.parametrize("bad", ["0.weight", "1.weight"])
    def test_loading_checks_every_name(self, name: str, bad: str) -> None:
        model = constrain(self.tied(), name, Stiefel())
        before = bits(model)
        with pytest.raises(ValueError, match=f"{bad} is off"):
            model.load_state_dict({**before, bad: 2 * before[bad]})
        assert_same_bits(model, before)

    def test_two_slots_on_one_tensor_raise(self) -> None:
        model = constrain(self.tied(), "0.weight", Stiefel())
        with pytest.raises(ValueError, match=r"1.weight cannot be declared .*\(0.weight\) is declared on Stiefel"):
            constrain(model, "1.weight", Sphere())
        model = self.tied()
        constrain(model[0], "weight", Stiefel())
        with pytest.raises(ValueError, match=r"this tensor \(weight\) is declared on Stiefel"):
            constrain(model[1], "weight", Sphere())
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(4, 6))
        constrain(model[0], "weight", Stiefel())
        constrain(model[1], "weight", Sphere())
        model[1].weight = model[0].weight  # tied too late for constrain() to know
        for check in (max_residual, assert_on_manifold, param_groups, lambda m: list(named_manifolds(m))):
            with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are the same tensor"):
                check(model)


# ------------------------------------------------------------------ load_state_dict
def in_a_sequential(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.LayerNorm(3), part), nn.Linear(3, 3))


class Owner(nn.Module):
    """Its first parameters are loaded before those of the constrained part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.randn(()))
        self.first = nn.Linear(3, 3)
        self.parts = nn.ModuleDict({"a": part})


class Late(Owner):
    def __init__(self, part: nn.Module) -> None:
        super().__init__(nn.Identity())
        self.last = nn.ModuleList([nn.Linear(3, 3), part])


def by_dots(part: nn.Module) -> nn.Module:
    return constrain(Owner(release(part)), "parts.a.weight", Stiefel())


def by_globs(part: nn.Module) -> nn.Module:
    model = Owner(release(part))
    constrain(model, {"*.a.weight": Stiefel()})
    return model


def by_part(part: nn.Module) -> nn.Module:
    model = nn.Sequential(Owner(release(part)))
    constrain(model[0].parts["a"], "weight", Stiefel())
    return model


def by_assignment(part: nn.Module) -> nn.Module:
    model = Late(release(part))
    model.last[1].weight = ManifoldParameter(Stiefel(), (3, 3))
    return model


def by_appending(part: nn.Module) -> nn.Module:
    model = Owner(nn.ParameterList())
    model.parts["a"].append(ManifoldParameter(Stiefel(), (3, 3)))
    return nn.Sequential(nn.Linear(3, 3), model)


def by_filling(part: nn.Module) -> nn.Module:
    model = Owner(nn.ModuleList())
    model.parts["a"].append(part)
    return model


def by_param_groups(part: nn.Module) -> nn.Module:
    model = copy.deepcopy(Owner(release(part)))
    constrain(model.parts["a"], "weight", Stiefel())
    param_groups(model)
    return model


def averaged(part: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(Owner(part))


def copied(part: nn.Module) -> nn.Module:
    return copy.deepcopy(in_a_sequential(part))


def pickled(part: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(Late(part)))


BUILDS = [in_a_sequential, Owner, Late, by_dots, by_globs, by_part, by_assignment, by_appending, by_filling]


@pytest.mark.parametrize("build", [*BUILDS, by_param_groups, averaged, copied, pickled])
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=str)
def test_nothing_at_all_is_overwritten_by_a_bad_load(build, options) -> None:
    """Case 37, wherever the constrained part sits in the model that is loaded."""
    model = build(constrain(nn.Linear(3, 3), "weight", Stiefel()))
    ((name, _),) = named_manifolds(model)
    before = bits(model)
    with pytest.raises(ValueError, match=rf"{name} is off Stiefel\(\): residual .*tolerance .*on_load=\"project\""):
        model.load_state_dict(noise_like(model), **options)
    assert_same_bits(model, before)
    nan = {**noise_like(model), name: torch.full((3, 3), math.nan)}
    with pytest.raises(ValueError, match="NaN"):
        model.load_state_dict(nan, **options)
    assert_same_bits(model, before)
    good = {**noise_like(model), name: orthonormal(3, 3, torch.float32)}
    model.load_state_dict(good, **options)
    assert_same_bits(model, good)


class TestLoading:
    def test_a_users_module(self) -> None:
        net = Net(Unitary(), (3, 3), torch.complex64)
        before = bits(net)
        with pytest.raises(ValueError, match=r"refused to load into Net: W is off Unitary\(\)"):
            net.load_state_dict(noise_like(net))
        assert_same_bits(net, before)

    def test_a_part_of_a_copied_model_is_safe_by_itself(self) -> None:
        """The copy as a whole is not, before param_groups(model): nobody saw it being put together."""
        model = copy.deepcopy(Owner(nn.Linear(3, 3)))
        constrain(model.parts["a"], "weight", Stiefel())
        w = model.parts["a"].weight.detach().clone()
        with pytest.raises(ValueError, match=r"parts\.a\.weight is off"):
            model.load_state_dict(noise_like(model))
        assert torch.equal(model.parts["a"].weight, w)

    def test_only_owners_are_asked(self) -> None:
        """A module that has held a part once, or holds another one, keeps no trace of its constraint."""
        part = nn.Linear(3, 3)
        former, other = nn.Sequential(part), nn.Sequential(nn.Linear(3, 3))
        former[0] = nn.Linear(3, 3)
        owner = nn.Sequential(nn.Sequential(part))
        constrain(part, "weight", Stiefel())
        assert b"manopt" in pickle.dumps(owner)
        assert b"manopt" not in pickle.dumps(former)
        assert b"manopt" not in pickle.dumps(other)
        assert [len(m._load_state_dict_pre_hooks) for m in (owner, owner[0], part, former, other)] == [1, 1, 1, 0, 0]

    def test_every_fault_is_named(self) -> None:
        model = nn.Sequential(Net(), Net())
        with pytest.raises(ValueError, match=r"0\.W is off .*; 1\.W is off"):
            model.load_state_dict(noise_like(model))

    def test_the_tolerance_is_the_one_of_the_source(self) -> None:
        exact = orthonormal(3, 3)
        wide = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        constrain(wide, "weight", Stiefel())
        for dtype in REAL:
            wide.load_state_dict({"weight": exact.to(dtype)})
            assert torch.equal(wide.weight, exact.to(dtype).double())
        wide.load_state_dict({"weight": exact.float().double()})
        narrow = constrain(nn.Linear(3, 3, bias=False), "weight", Stiefel())
        before = bits(narrow)
        with pytest.raises(ValueError, match=r"tolerance 1\.73e-10 for torch\.float64"):
            narrow.load_state_dict({"weight": exact * (1 + 1e-7)})
        assert_same_bits(narrow, before)

    def test_project(self) -> None:
        """The nearest point is loaded, other values as they are, those on the manifold bit for bit."""
        model = nn.Sequential(nn.Linear(3, 3), constrain(nn.Linear(3, 5), "weight", Stiefel(), on_load="project"))
        model.double()
        noise = noise_like(model)
        given = {k: v.clone() for k, v in noise.items()}
        for assign in (False, True):
            model.load_state_dict(noise, assign=assign)
            torch.testing.assert_close(model[1].weight.detach(), polar(given["1.weight"]), rtol=0, atol=1e-12)
            assert torch.equal(model[0].weight, given["0.weight"])
            for k, v in given.items():
                assert torch.equal(noise[k], v)  # the caller's dictionary is his own
        good = {**given, "1.weight": orthonormal(5, 3)}
        model.load_state_dict(good)
        assert_same_bits(model, good)
        before = bits(model)
        with pytest.raises(ValueError, match="NaN"):
            model.load_state_dict({**given, "1.weight": torch.full((5, 3), math.nan, dtype=torch.float64)})
        assert_same_bits(model, before)

    def test_what_torch_reports_it_reports(self) -> None:
        layer = constrain(nn.Linear(3, 3), "weight", Stiefel())
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            layer.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(3)})
        with pytest.raises(RuntimeError, match="Missing key"):
            layer.load_state_dict({"bias": torch.zeros(3)})
        with pytest.raises(RuntimeError, match="Unexpected key"):
            layer.load_state_dict({**layer.state_dict(), "extra": torch.zeros(3)})
        assert layer.load_state_dict({"bias": torch.ones(3)}, strict=False).missing_keys == ["weight"]
        assert torch.equal(layer.bias, torch.ones(3))

    def test_values_on_meta_are_not_looked_at(self) -> None:
        net = Net()
        net.load_state_dict(copy.deepcopy(net).to("meta").state_dict(), assign=True)
        assert net.W.is_meta
        with pytest.raises(ValueError, match="W is off"):
            net.load_state_dict({k: torch.ones(v.shape) for k, v in net.state_dict().items()}, assign=True)

    def test_a_loaded_tensor_does_not_bring_its_own_declaration(self) -> None:
        other = Net(Stiefel(retraction="qr"))
        net = Net()
        net.load_state_dict(other.state_dict(keep_vars=True), assign=True)
        assert torch.equal(net.W, other.W)
        assert list(named_manifolds(net)) == [("W", Stiefel())]
        assert list(named_manifolds(other)) == [("W", Stiefel(retraction="qr"))]


# ------------------------------------------------------------------ reset_parameters
class TestReset:
    @pytest.mark.parametrize(
        "layer", [nn.Linear(4, 4), nn.Linear(6, 3), nn.Conv2d(2, 3, 3), nn.Embedding(5, 4)], ids=repr
    )
    @pytest.mark.parametrize("how", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_ends_on_a_fresh_random_point(self, layer: nn.Module, how) -> None:
        """Case 38; a copy resets itself and not the layer it comes from."""
        original = constrain(copy.deepcopy(layer), "weight", Sphere() if isinstance(layer, nn.Embedding) else Stiefel())
        before = bits(original)
        reset = how(original)
        torch.manual_seed(0)
        reset.reset_parameters()
        assert_on_manifold(reset)
        assert torch.dist(reset.weight, before["weight"]) > 1e-2
        if reset is not original:
            assert_same_bits(original, before)
        if "bias" in before:  # what the class does is still done
            assert not torch.equal(reset.bias, before["bias"])

    def test_two_resets_are_independent_and_seeded(self) -> None:
        layer = constrain(nn.Linear(4, 4), "weight", Stiefel())
        drawn = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            layer.reset_parameters()
            drawn.append(layer.weight.detach().clone())
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])

    def test_of_a_users_module(self) -> None:
        net = Net()
        net.reset_parameters()  # noise, by itself
        assert_on_manifold(net)

    def test_an_initialisation_that_stays_on_the_manifold_is_kept(self) -> None:
        class Identity(Net):
            def reset_parameters(self, sign: float = 1.0) -> None:
                self.W.data.copy_(sign * torch.eye(5, 3))

        net = Identity()
        net.reset_parameters()
        assert torch.equal(net.W, torch.eye(5, 3))
        net.reset_parameters(sign=-1.0)
        assert torch.equal(net.W, -torch.eye(5, 3))

    def test_a_module_without_one_gets_none(self) -> None:
        module = nn.Module()
        module.W = ManifoldParameter(Stiefel(), (3, 3))
        assert not hasattr(module, "reset_parameters")

    def test_the_model_is_freed_at_once(self) -> None:
        """No reference cycle keeps the memory until the garbage collector comes."""
        import gc
        import weakref

        gc.disable()
        try:
            model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
            constrain(model, {"*.weight": Stiefel()})
            alive = [weakref.ref(m) for m in model.modules()]
            del model
            assert [ref() for ref in alive] == [None] * 4
        finally:
            gc.enable()


# ------------------------------------------------------------------ release
class TestRelease:
    @pytest.mark.parametrize("how", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_leaves_an_ordinary_model(self, how) -> None:
        model = nn.Sequential(Net(), constrain(nn.Linear(3, 5), "weight", Stiefel()))
        param_groups(model)
        model[0].W.grad = torch.ones(5, 3)
        model = how(model)
        before, parameters = bits(model), list(model.parameters())
        assert b"manopt_torch" in pickle.dumps(model)
        assert release(model) is model
        assert_same_bits(model, before)
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert all(p.requires_grad and p.is_leaf for p in model.parameters())
        assert list(named_manifolds(model)) == []
        assert b"manopt_torch" not in pickle.dumps(model)
        model[1].reset_parameters()
        assert max_residual(constrain(copy.deepcopy(model[1]), "weight", Stiefel(), init="random")) < 1e-5
        model.load_state_dict(noise_like(model))

    def test_keeps_gradients(self) -> None:
        net = Net()
        net.W.grad = torch.ones(5, 3)
        assert torch.equal(release(net).W.grad, torch.ones(5, 3))

    def test_of_a_part(self) -> None:
        model = nn.Sequential(Net(), Net())
        release(model[0])
        assert list(named_manifolds(model)) == [("1.W", Stiefel())]
        good = {**noise_like(model), "1.W": orthonormal(5, 3, torch.float32)}
        model.load_state_dict(good)
        with pytest.raises(ValueError, match=r"1\.W"):
            model.load_state_dict(noise_like(model))

    def test_of_what_was_never_constrained(self) -> None:
        layer = nn.Linear(2, 2)
        before = pickle.dumps(layer)
        assert pickle.dumps(release(layer)) == before


# ------------------------------------------------------------------ param_groups
class TestParamGroups:
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(4, 4))
        constrain(model, {"[013].weight": Stiefel()})
        return model

    def test_one_group_for_each_manifold_in_order(self) -> None:
        model = self.model()
        model[2].weight.requires_grad_(False)
        groups = param_groups(model)
        assert [set(g) for g in groups] == [{"params", "manifold"}] * 2
        assert [g["manifold"] for g in groups] == [Stiefel(), Euclidean()]
        assert [id(p) for p in groups[0]["params"]] == [id(model[i].weight) for i in (0, 1, 3)]
        rest = [model[0].bias, model[1].bias, model[2].weight, model[2].bias, model[3].bias]
        assert [id(p) for p in groups[1]["params"]] == [id(p) for p in rest]

    def test_overrides(self) -> None:
        model = self.model()
        groups = param_groups(
            model, {"*.bias": {"lr": 0.5}, "2.*": {"lr": 0.5}, "0.*": {"weight_decay": 0.0}, "0.bias": {"lr": 0.25}}
        )
        found = {
            name: {k: v for k, v in g.items() if k not in ("params", "manifold")}
            for name, p in model.named_parameters()
            for g in groups
            if any(p is q for q in g["params"])
        }
        assert found == {
            "0.weight": {"weight_decay": 0.0},
            "0.bias": {"lr": 0.25, "weight_decay": 0.0},
            "1.weight": {},
            "1.bias": {"lr": 0.5},
            "2.weight": {"lr": 0.5},
            "2.bias": {"lr": 0.5},
            "3.weight": {},
            "3.bias": {"lr": 0.5},
        }
        assert len(groups) == 4  # equal options are one group, whichever glob gave them

    def test_tensor_options_and_independence(self) -> None:
        model = self.model()
        lr = torch.tensor([0.1, 0.2])
        groups = param_groups(model, {"*": {"lr": lr}})
        assert [g["lr"] is lr for g in groups] == [True, True]
        given = {"*.bias": {"lr": 1.0}}
        groups = param_groups(model, given)
        groups[1]["lr"] = 2.0
        assert given == {"*.bias": {"lr": 1.0}}

    def test_refuses_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"'\*\.gain' matches none"):
            param_groups(self.model(), {"*.gain": {"lr": 1.0}})
        with pytest.raises(ValueError, match="'manifold' is what constrain"):
            param_groups(self.model(), {"*": {"manifold": Sphere()}})

    def test_torch_optimizers_take_them(self) -> None:
        optimizer = torch.optim.SGD(param_groups(self.model(), {"*.bias": {"lr": 0.5}}), lr=0.1)
        assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.5, 0.1]

    def test_an_empty_model(self) -> None:
        assert param_groups(nn.Identity()) == []


# ------------------------------------------------------------------ max_residual, assert_on_manifold
class TestMeasuring:
    def test_max_residual_is_the_largest(self) -> None:
        model = nn.Sequential(Net(), Net())
        assert 0 <= max_residual(model) < 1e-5
        model[0].W.data.copy_(2 * torch.eye(5, 3))
        model[1].W.data.copy_(3 * torch.eye(5, 3))
        assert max_residual(model) == pytest.approx(8 * math.sqrt(3))
        assert max_residual(nn.Linear(2, 2)) == 0.0

    @pytest.mark.parametrize("where", [0, 1])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_nan_is_off(self, where: int, value: float) -> None:
        model = nn.Sequential(Net(), Net())
        model[where].W.data[2, 1] = value
        assert math.isnan(max_residual(model))
        with pytest.raises(AssertionError, match=rf"^{where}\.W is off Stiefel\(\): it holds NaN or inf"):
            assert_on_manifold(model)
        with pytest.raises(AssertionError, match=f"{where}.W"):
            assert_on_manifold(model, tol=1e30)

    @pytest.mark.parametrize("lr", [1e-2, 1e-5])
    def test_a_plain_optimizer_is_found_out(self, lr: float) -> None:
        model = nn.Sequential(nn.Linear(8, 8), constrain(nn.Linear(8, 8), "weight", Stiefel()))
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        model(torch.randn(4, 8)).square().sum().backward()
        assert_on_manifold(model)
        optimizer.step()
        with pytest.raises(AssertionError, match=r"1\.weight is off Stiefel\(\): residual .*RiemannianAdam\(model\)"):
            assert_on_manifold(model)
        assert_on_manifold(model, tol=1.0)

    def test_a_tolerance_bounds_the_residual(self) -> None:
        layer = constrain(nn.Linear(2, 2, dtype=torch.float64), "weight", Sphere())
        layer.weight.data.copy_(torch.tensor([[0.6, 0.8], [0.3 * 1.001, 0.4 * 1.001]]) * torch.tensor([[1.0], [2.0]]))
        assert max_residual(layer) == pytest.approx(1e-3, rel=1e-3)
        assert_on_manifold(layer, tol=1.1e-3)
        with pytest.raises(AssertionError, match=r"residual 0\.001, tolerance 0\.0009"):
            assert_on_manifold(layer, tol=0.9e-3)

    def test_a_float32_value_in_double_is_judged_as_such(self) -> None:
        model = Net(shape=(64, 64)).double()
        assert 1e-9 < max_residual(model) < 1e-5
        assert_on_manifold(model)
        with torch.no_grad():  # but a value of its own in double has that precision
            model.W.mul_(1 + 1e-8)
        with pytest.raises(AssertionError, match="W is off"):
            assert_on_manifold(model)
        with torch.no_grad():
            model.W.copy_(Stiefel().nearest(model.W))
        assert_on_manifold(model)
        assert max_residual(model) < 1e-12

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("wide", [torch.float32, torch.float64])
    def test_a_half_precision_value_is_judged_as_such_in_any_dtype(self, dtype: torch.dtype, wide: torch.dtype) -> None:
        model = Net(shape=(64, 64)).to(dtype).to(wide)
        assert max_residual(model) > 1e-4
        assert_on_manifold(model)
        with torch.no_grad():
            model.W.mul_(1 + 1e-4)
        with pytest.raises(AssertionError, match="W is off"):
            assert_on_manifold(model)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("shape", [(3, 3), (200, 200), (1000, 4)])
    def test_half_precision_modules(self, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        net = Net(shape=shape).to(dtype)
        assert net.W.dtype == dtype
        assert_on_manifold(net)
        net.W.data.mul_(1.25)
        with pytest.raises(AssertionError, match="W is off"):
            assert_on_manifold(net)

    def test_no_points_at_all(self) -> None:
        module = nn.Module()
        module.W = ManifoldParameter(torch.zeros(0, 5, 3), Stiefel())
        assert max_residual(module) == 0.0
        assert_on_manifold(module)


@pytest.mark.parametrize(
    "function",
    [
        max_residual,
        assert_on_manifold,
        param_groups,
        release,
        lambda given: list(named_manifolds(given)),
        lambda given: constrain(given, "weight", Sphere()),
        lambda given: constrain(given, {"*": Sphere()}),
    ],
)
@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: [p]])
def test_what_is_no_module_is_told_what_to_write(function, wrap) -> None:
    with pytest.raises(TypeError, match=r"got (list|ManifoldParameter), expected a module.*'manifold': W\.manifold"):
        function(wrap(ManifoldParameter(Sphere(), (3,))))


def test_views_of_the_manifold_are_what_view_for_says() -> None:
    conv = constrain(nn.Conv2d(2, 3, 3), "weight", Stiefel())
    assert list(named_manifolds(conv)) == [("weight", view_for(Stiefel(), (3, 2, 3, 3)))]


def test_a_complex_value_is_not_loaded_into_a_real_parameter() -> None:
    """torch would drop the imaginary part, and leave the manifold."""
    layer = constrain(nn.Linear(3, 3, bias=False), "weight", Unitary())
    value = {"weight": Unitary().random(3, 3, dtype=torch.complex64)}
    with pytest.raises(ValueError, match=r"torch\.complex64.* imaginary part"):
        layer.load_state_dict(value)
    assert max_residual(layer) < 1e-5
