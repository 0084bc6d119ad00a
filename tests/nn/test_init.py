"""Initial values of recurrent matrices: the set they are drawn from, and how they are distributed in it."""

import math

import numpy as np
import pytest
import torch

from manopt_torch.nn import init

ROTATIONS = [init.henaff_, init.cayley_angle_]
EVERY = [init.restricted_, *ROTATIONS]


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [(fill, dtype) for fill in EVERY for dtype in (torch.complex64, torch.complex128)]
    + [(fill, dtype) for fill in ROTATIONS for dtype in (torch.float32, torch.float64)],
)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (5, 5), (3, 4, 4), (2, 3, 7, 7)])
def test_unitary_in_place_and_independent(fill, dtype, shape):
    tensor = torch.full(shape, torch.nan, dtype=dtype, requires_grad=True)
    assert fill(tensor) is tensor
    W = tensor.detach()
    atol = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(W @ W.mH, torch.eye(shape[-1], dtype=dtype).expand(shape), rtol=0, atol=atol)
    if len(shape) > 2:
        first, second = W.flatten(0, -3)[:2]
        assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("fill", EVERY)
def test_generator_decides(fill):
    def draw(seed):
        return fill(torch.empty(6, 6, dtype=torch.complex64), generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("fill", EVERY)
def test_strides_are_kept(fill):
    tensor = torch.empty(4, 4, 2, dtype=torch.complex128)[..., 0]
    fill(tensor)
    torch.testing.assert_close(tensor @ tensor.mH, torch.eye(4, dtype=torch.complex128), rtol=0, atol=1e-13)


@pytest.mark.parametrize("N", [2, 5])
def test_restricted_is_the_product_of_its_factors(N, monkeypatch):
    drawn = []

    def record(rows, *factors, product=init.restricted):
        drawn.extend(t.numpy() for t in factors)
        return product(rows, *factors)

    monkeypatch.setattr(init, "restricted", record)
    W = init.restricted_(torch.empty(2, N, N, dtype=torch.complex128)).numpy()
    F = np.exp(-2j * np.pi * np.outer(np.arange(N), np.arange(N)) / N) / np.sqrt(N)
    for found, d, u, permutation in zip(W, *drawn, strict=True):
        D1, D2, D3 = map(np.diag, d)
        R1, R2 = (np.eye(N) - 2 * np.outer(v, v.conj()) for v in u)
        P = np.eye(N)[permutation]
        np.testing.assert_allclose(found, D3 @ R2 @ F.conj().T @ D2 @ P @ R1 @ F @ D1, rtol=0, atol=1e-13)


def test_restricted_mixes_all_units():
    """Second and fourth moment of the entries are those of complex Gaussians of variance 1/N."""
    W = init.restricted_(torch.empty(40, 64, 64, dtype=torch.complex128))
    square = W.abs().square()
    assert square.mean().item() == pytest.approx(1 / 64)
    assert square.square().mean().item() == pytest.approx(2 / 64**2, rel=0.1)
    assert W.mean().abs() < 5 / math.sqrt(W.numel() * 64)


@pytest.mark.parametrize("N", [4, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_henaff_is_block_diagonal_rotations_by_uniform_angles(N, dtype):
    W = init.henaff_(torch.empty(4000, N, N, dtype=dtype))
    angles = blocks(W.numpy(), N)
    assert angles.min() < -0.999 * math.pi
    assert angles.max() > 0.999 * math.pi
    assert abs(angles.mean()) < 0.1
    assert np.square(angles).mean() == pytest.approx(math.pi**2 / 3, rel=0.03)


def blocks(W: np.ndarray, N: int) -> np.ndarray:
    """The angles of the 2×2 rotations that a batch of matrices consists of."""
    rebuilt = np.zeros(W.shape)
    if N % 2:
        rebuilt[:, -1, -1] = 1
    angles = []
    for i in range(0, N - 1, 2):
        t = np.arctan2(W[:, i + 1, i].real, W[:, i, i].real)
        rebuilt[:, i, i] = rebuilt[:, i + 1, i + 1] = np.cos(t)
        rebuilt[:, i + 1, i] = np.sin(t)
        rebuilt[:, i, i + 1] = -np.sin(t)
        angles.append(t)
    np.testing.assert_allclose(W, rebuilt, rtol=0, atol=1e-14)
    return np.concatenate(angles)


@pytest.mark.parametrize("N", [4, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_cayley_angle_is_the_cayley_transform_it_is_named_for(N, dtype):
    W = init.cayley_angle_(torch.empty(4000, N, N, dtype=dtype))
    t = blocks(W.numpy(), N)
    assert 0 <= t.min() < 0.001
    assert 0.999 * math.pi / 2 < t.max() <= math.pi / 2
    assert t.mean() == pytest.approx(math.pi / 4, rel=0.03)
    # Helfrich, Willmott and Ye (2018): s = √((1 − cos t)/(1 + cos t)), W = (I + A)⁻¹(I − A)
    angles = t.reshape(-1, 4000)[:, 0]
    A = np.zeros((N, N))
    for k, s in enumerate(np.sqrt((1 - np.cos(angles)) / (1 + np.cos(angles)))):
        A[2 * k, 2 * k + 1], A[2 * k + 1, 2 * k] = s, -s
    eye = np.eye(N)
    np.testing.assert_allclose(W[0].numpy(), np.linalg.solve(eye + A, eye - A), rtol=0, atol=1e-12)


@pytest.mark.parametrize("fill", EVERY)
def test_errors_name_what_came(fill):
    with pytest.raises(ValueError, match=rf"{fill.__name__} fills square matrices \(\*P, N, N\), got shape \(3, 4\)"):
        fill(torch.empty(3, 4, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        fill(torch.empty(3, dtype=torch.complex64))


def test_restricted_refuses_real_tensors():
    with pytest.raises(ValueError, match=r"restricted_ fills complex tensors.*got torch\.float32: haar_"):
        init.restricted_(torch.empty(3, 3))
