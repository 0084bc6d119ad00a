"""Principal components as minimizers of the reconstruction error on the Stiefel manifold, against the SVD.

min ‖X − X W Wᵀ‖² over W with WᵀW = I: the leading right singular vectors of X span the best k-dimensional subspace
(Eckart and Young, 1936), unique if the k-th and (k+1)-th singular values differ.
"""

from __future__ import annotations

import argparse

import torch
from harness.cli import positive
from sklearn.datasets import load_digits

from manopt_torch import ManifoldParameter, Stiefel
from manopt_torch.optim import RiemannianSGD

#: largest sine of an angle between the two subspaces that counts as the same answer, in float64
TOLERANCE = 1e-6


def main(argv: list[str] | None = None) -> float:
    """Print both answers, and return the distance of the two subspaces, the sine of their largest angle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--components", type=positive, default=5, help="k")
    parser.add_argument("--steps", type=positive, default=500)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args(argv)
    X = torch.from_numpy(load_digits().data)
    X = X - X.mean(0)
    torch.manual_seed(0)

    # ---- the ten lines: a parameter on a manifold, an optimizer, and torch's usual loop
    W = ManifoldParameter(Stiefel(), (X.shape[1], args.components), dtype=X.dtype)
    optimizer = RiemannianSGD([W], lr=args.lr, momentum=0.9)
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = (X - X @ W @ W.mT).square().sum() / len(X)
        loss.backward()
        optimizer.step()

    _, singular, V = torch.linalg.svd(X, full_matrices=False)
    exact = singular[args.components :].square().sum() / len(X)
    V, found = V[: args.components].mT, W.detach()
    distance = torch.linalg.matrix_norm(found - V @ (V.mT @ found), ord=2).item()
    print(f"reconstruction error  {loss.item():.9f} on Stiefel, {exact.item():.9f} by SVD")
    print(f"sine of the largest angle between the subspaces  {distance:.1e}")
    print(f"WᵀW = I to  {Stiefel().residual(found).item():.1e}")
    if distance > TOLERANCE:
        raise SystemExit(f"the subspaces differ by more than {TOLERANCE}: raise --steps")
    print(f"same subspace as the SVD, to {TOLERANCE}")
    return distance


if __name__ == "__main__":
    main()
