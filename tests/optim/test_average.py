"""``ManifoldAverage``: exact means that end on the manifold; torch's own where nothing is constrained."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from manopt_torch import SPD, ManifoldParameter, Sphere, Stiefel, Unitary, View, constrain, max_residual
from manopt_torch.optim import ManifoldAverage, RiemannianAdam

PLACES = [(Stiefel(), (5, 3)), (Unitary(), (3, 3)), (Sphere(), (4,)), (SPD(), (3, 3)), (Stiefel(), (4, 3, 2))]
CHORDAL = [place for place in PLACES if not isinstance(place[0], SPD)]
both = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])


def holder(x: torch.Tensor, M) -> nn.Module:
    net = nn.Module()
    net.W = ManifoldParameter(x.clone(), M)
    return net


def near(M, shape, dtype, count=5, size=0.4):
    """Points around a random one."""
    x = M.random(*shape, dtype=dtype)
    return [M.retract(x, size * M.project(x, torch.randn_like(x))) for _ in range(count)]


def average(points, M, decay=None) -> torch.Tensor:
    net = holder(points[0], M)
    averaged = AveragedModel(net, multi_avg_fn=ManifoldAverage(net, decay))
    for x in points:
        net.W.data.copy_(x)
        averaged.update_parameters(net)
    assert max_residual(averaged.module) < 1e-12
    return averaged.module.W.detach()


def polar(z: torch.Tensor, M) -> torch.Tensor:
    """The nearest point, by SciPy."""
    if M.event_dim == 1:
        return z / torch.linalg.vector_norm(z)
    flat = z.reshape(-1, *z.shape[-2:]).numpy()
    return torch.from_numpy(np.stack([scipy.linalg.polar(a)[0] for a in flat])).reshape(z.shape)


@both
@pytest.mark.parametrize(("M", "shape"), CHORDAL)
def test_equal_weights_are_the_polar_factor_of_the_exact_mean(M, shape, dtype):
    torch.manual_seed(0)
    points = near(M, shape, dtype)
    expected = polar(torch.stack(points).mean(0), M)
    torch.testing.assert_close(average(points, M), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(average(points[::-1], M), expected, rtol=0, atol=1e-12)  # in any order


@both
@pytest.mark.parametrize(("M", "shape"), CHORDAL)
def test_moving_average_is_the_polar_factor_of_the_exact_one(M, shape, dtype):
    torch.manual_seed(0)
    points, decay = near(M, shape, dtype), 0.7
    weights = [decay**4, *(0.3 * decay ** (4 - k) for k in range(1, 5))]
    assert math.isclose(sum(weights), 1)
    expected = polar(sum(w * x for w, x in zip(weights, points, strict=True)), M)
    torch.testing.assert_close(average(points, M, decay), expected, rtol=0, atol=1e-12)


def geodesic(x: torch.Tensor, y: torch.Tensor, t: float) -> torch.Tensor:
    """x^½ (x^-½ y x^-½)^t x^½, by SciPy."""
    root = scipy.linalg.sqrtm(x.numpy())
    inverse = np.linalg.inv(root)
    middle = scipy.linalg.fractional_matrix_power(inverse @ y.numpy() @ inverse, t)
    return torch.from_numpy(root @ middle @ root).to(x.dtype)


@both
def test_positive_definite_matrices_meet_on_the_geodesic(dtype):
    torch.manual_seed(0)
    x, y, z = (SPD().random(3, 3, dtype=dtype) for _ in range(3))
    torch.testing.assert_close(average([x, y], SPD()), geodesic(x, y, 0.5), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(average([x, y], SPD(), 0.9), geodesic(x, y, 0.1), rtol=1e-9, atol=1e-9)
    expected = geodesic(geodesic(x, y, 0.5), z, 1 / 3)
    torch.testing.assert_close(average([x, y, z], SPD()), expected, rtol=1e-9, atol=1e-9)


@both
def test_mean_of_commuting_matrices_is_the_karcher_mean(dtype):
    """exp(mean of logarithms), where log is linear: the eigenvalues have their geometric mean."""
    torch.manual_seed(0)
    q = Unitary().random(3, 3, dtype=dtype)
    spectra = torch.rand(6, 3, dtype=torch.float64) * 5 + 0.1
    points = [(q * s) @ q.mH for s in spectra]
    expected = (q * spectra.log().mean(0).exp()) @ q.mH
    torch.testing.assert_close(average(points, SPD()), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_what_is_not_constrained_is_averaged_as_torch_does_to_the_bit(decay, use_buffers):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 4, dtype=torch.complex64))
    constrain(net, {"0.weight": Unitary(), "2.weight": Stiefel()})
    if decay is None:
        net[1].num_batches_tracked = None  # torch 2.13 cannot average an integer with equal weights
    torchs = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)
    plain = AveragedModel(net, multi_avg_fn=torchs, use_buffers=use_buffers)
    ours = AveragedModel(net, multi_avg_fn=ManifoldAverage(net, decay), use_buffers=use_buffers)
    for _ in range(5):
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.data.copy_(torch.randn(tensor.shape) * 10)
        net[0].weight.data.copy_(Unitary().random(3, 3))
        net[2].weight.data.copy_(Stiefel().random(4, 3, dtype=torch.complex64))
        plain.update_parameters(net)
        ours.update_parameters(net)
        assert max_residual(ours.module) < 1e-6
    found, expected = ours.module.state_dict(), plain.module.state_dict()
    assert all(torch.equal(found[k], expected[k]) == (k not in ("0.weight", "2.weight")) for k in expected)


def test_a_weight_and_its_negative_have_no_average_of_norm_zero():
    """The average of two orthonormal frames keeps full rank (CASES 26: a column of norm zero)."""
    torch.manual_seed(0)
    layer = constrain(nn.Linear(3, 6), "weight", Stiefel(), init="random")
    averaged = AveragedModel(layer, multi_avg_fn=ManifoldAverage(layer))
    for _ in range(2):
        averaged.update_parameters(layer)
        layer.weight.data.copy_(Stiefel().random(6, 3))
    averaged.update_parameters(layer)
    W = averaged.module.weight.detach()
    torch.testing.assert_close(W.mH @ W, torch.eye(3), rtol=0, atol=1e-6)


def test_a_view_is_averaged_through_it():
    torch.manual_seed(0)
    M = View(Stiefel(), "transpose")
    points = near(M, (2, 4), torch.float64)
    expected = polar(torch.stack(points).mean(0).mH, Stiefel()).mH
    torch.testing.assert_close(average(points, M), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", [None, 0.8])
def test_checkpoints_and_copies_resume_exactly(decay):
    torch.manual_seed(0)
    points = near(Stiefel(), (5, 3), torch.float64, count=6)
    expected = average(points, Stiefel(), decay)
    net = holder(points[0], Stiefel())
    averaged = AveragedModel(net, multi_avg_fn=ManifoldAverage(net, decay))
    for x in points[:3]:
        net.W.data.copy_(x)
        averaged.update_parameters(net)
    buffer = io.BytesIO()
    torch.save(averaged.state_dict(), buffer)
    buffer.seek(0)
    again = AveragedModel(net, multi_avg_fn=ManifoldAverage(net, decay))
    again.load_state_dict(torch.load(buffer, weights_only=True))
    for resumed in (again, copy.deepcopy(averaged), pickle.loads(pickle.dumps(averaged))):
        for x in points[3:]:
            net.W.data.copy_(x)
            resumed.update_parameters(net)
        assert torch.equal(resumed.module.W, expected)


def test_half_precision_keeps_its_mean_in_single():
    torch.manual_seed(0)
    points = [x.to(torch.bfloat16) for x in near(Stiefel(), (5, 3), torch.float32, count=40)]
    net = holder(points[0], Stiefel())
    averaged = AveragedModel(net, multi_avg_fn=ManifoldAverage(net))
    for x in points:
        net.W.data.copy_(x)
        averaged.update_parameters(net)
    expected = polar(torch.stack(points).double().mean(0), Stiefel())
    torch.testing.assert_close(averaged.module.W.detach().double(), expected, rtol=0, atol=2**-8)
    assert averaged.multi_avg_fn.mean_0.dtype == torch.float32


def test_batch_norm_update_and_forward():
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    constrain(layers, {"0.weight": Unitary()})
    averaged = AveragedModel(layers, multi_avg_fn=ManifoldAverage(layers))
    averaged.update_parameters(layers)
    update_bn([torch.randn(8, 3)], averaged)
    assert averaged.eval()(torch.randn(2, 3)).isfinite().all()


def test_what_would_be_wrong_is_refused():
    layer = constrain(nn.Linear(3, 5), "weight", Stiefel())
    with pytest.raises(ValueError, match="decay"):
        ManifoldAverage(layer, 1.5)
    averaged = AveragedModel(
        layer.double(), multi_avg_fn=ManifoldAverage(constrain(nn.Linear(3, 5), "weight", Stiefel()))
    )
    averaged.update_parameters(layer)
    with pytest.raises(ValueError, match="change of dtype"):
        averaged.update_parameters(layer)
    averaged = AveragedModel(layer, multi_avg_fn=ManifoldAverage(nn.Linear(4, 5, dtype=torch.float64)))
    averaged.update_parameters(layer)
    with pytest.raises(ValueError, match="not the parameters"):
        averaged.update_parameters(layer)


def test_lightning_averages_weights_and_resumes(tmp_path):
    lightning = pytest.importorskip("lightning")
    WeightAveraging = getattr(pytest.importorskip("lightning.pytorch.callbacks"), "WeightAveraging", None)
    if WeightAveraging is None:
        pytest.skip("this version of Lightning has no WeightAveraging")

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = constrain(nn.Linear(3, 5), "weight", Stiefel(), init="random")

        def training_step(self, batch, _):
            return (self.layer(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self):
            return RiemannianAdam(self, lr=0.1)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 5))

    def fit(epochs, path=None):
        model = Regression()
        averaging = WeightAveraging(multi_avg_fn=ManifoldAverage(model, 0.9))
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[averaging],
            enable_model_summary=False, default_root_dir=tmp_path, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=path, weights_only=True)
        return model, trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and on logging
        model, trainer = fit(2)
        trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
        resumed, again = fit(4, tmp_path / "last.ckpt")
    assert max_residual(model) < 1e-6
    assert max_residual(resumed) < 1e-6
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["averaging_state"].keys() == {"n_averaged", "multi_avg_fn.mean_0", "multi_avg_fn.sum_0"}
    torch.testing.assert_close(polar(saved["averaging_state"]["multi_avg_fn.mean_0"][0], Stiefel()), model.layer.weight)
    assert again.callbacks[0]._average_model.n_averaged > saved["averaging_state"]["n_averaged"]


def test_one_average_is_of_one_model():
    model = nn.Module()
    model.w = ManifoldParameter(torch.tensor([1.0, 0.0]), Sphere())
    other = copy.deepcopy(model)
    other.w.data.copy_(torch.tensor([0.0, 1.0]))
    average = ManifoldAverage(model, decay=0.9)
    first, second = (AveragedModel(m, multi_avg_fn=average) for m in (model, other))
    for averaged, own in ((first, model), (second, other), (first, model)):
        averaged.update_parameters(own)  # torch copies the first model; the second is averaged
    second.update_parameters(other)
    with pytest.raises(ValueError, match="build one for each AveragedModel"):
        first.update_parameters(model)


def test_counters_are_copied():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    averaged = AveragedModel(model, multi_avg_fn=ManifoldAverage(model), use_buffers=True)
    for _ in range(3):
        model(torch.randn(4, 2))
        averaged.update_parameters(model)
    assert averaged.module[1].num_batches_tracked == 3


def test_avg_fn_is_refused():
    model = nn.Linear(2, 2)
    averaged = AveragedModel(model, avg_fn=ManifoldAverage(model))
    averaged.update_parameters(model)
    with pytest.raises(TypeError, match="multi_avg_fn"):
        averaged.update_parameters(model)
