"""Averages of weights that end on the manifold, for ``torch.optim.swa_utils.AveragedModel``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from manopt_torch.manifolds import Euclidean
from manopt_torch.parameter import param_groups
from manopt_torch.precision import widen
from manopt_torch.storage import stack, write


class ManifoldAverage(nn.Module):
    """Equal weights (SWA), or with ``decay`` an exponential moving average (EMA), of points on a manifold.

    ::

        averaged = AveragedModel(model, multi_avg_fn=ManifoldAverage(model, decay=0.999))
        averaged.update_parameters(model)        # after every step

    Unconstrained parameters, and buffers with ``use_buffers=True``, are averaged as torch's ``get_swa_multi_avg_fn()``
    and ``get_ema_multi_avg_fn(decay)`` do. With t = 1/(k + 1) for the (k+1)-th model w, or t = 1 − decay, a parameter

    * whose points all have the same norm (``Stiefel``, ``Unitary``, ``Sphere``) becomes the chordal mean: the ambient
      mean m ← m + t (w − m) is kept beside the model, and the averaged parameter is nearest(m), the polar factor or the
      unit vector. Nothing is lost by projecting often: it is the projection of the exact mean.
    * of another manifold (``SPD``) moves along the geodesic, x ← exp_x(t log_x(w)). Of two points this is the Karcher
      mean, and of points that commute; of more points it is the inductive mean, which depends on their order and
      tends to the Karcher mean of a distribution (Sturm, 2003).

    The ambient means are buffers, and a part of the state of the ``AveragedModel``: a checkpoint resumes exactly.

    Args:
        model: what is averaged, constrained and with its final dtypes; it is looked at, not kept.
        decay: None for equal weights; else in [0, 1].

    Raises:
        ValueError: for another decay, and in an update for parameters that are not those of ``model``, that are on
            several devices, or that have changed since the last update, as those of a second ``AveragedModel`` have.
        TypeError: in an update, for one parameter in place of all, which is how ``avg_fn`` is called.
        NotImplementedError: in an update, for a manifold that has no ``nearest``, or no ``exp`` and ``log``.

    Reference: K.-T. Sturm, "Probability measures on metric spaces of nonpositive curvature", 2003.
    """

    def __init__(self, model: nn.Module, decay: float | None = None) -> None:
        super().__init__()
        self.decay = decay
        self._ambient()  # torch refuses a decay outside [0, 1]
        on = {id(p): group["manifold"] for group in param_groups(model) for p in group["params"]}
        self.known = [(p.shape, p.dtype, on[id(p)]) for p in model.parameters()]
        self.dtypes = {t.dtype for t in (*model.parameters(), *model.buffers())}
        for i, p in enumerate(model.parameters()):
            if on[id(p)].constant_norm:
                self.register_buffer(f"mean_{i}", widen(stack([p.detach()])).clone())
                self.register_buffer(f"sum_{i}", _mark(p.detach()))  # by which the averaged parameter is recognised

    def _ambient(self) -> Any:
        return get_swa_multi_avg_fn() if self.decay is None else get_ema_multi_avg_fn(self.decay)

    @torch.no_grad()
    def forward(self, averaged: Sequence[Any], current: Sequence[Any], num_averaged: Tensor | int) -> None:
        """The protocol of ``multi_avg_fn``: tensors of one dtype in the order of the model, parameters first."""
        if isinstance(averaged, Tensor):
            raise TypeError(
                "a ManifoldAverage averages a model at once: AveragedModel(model, multi_avg_fn=…), not avg_fn"
            )
        dtype = averaged[0].dtype
        mine = [i for i, (_, own, _) in enumerate(self.known) if own == dtype]
        if dtype not in self.dtypes or [x.shape for x in averaged[: len(mine)]] != [self.known[i][0] for i in mine]:
            raise ValueError(
                f"got tensors of {dtype} and shapes {[tuple(x.shape) for x in averaged]}, which are not the parameters "
                "of the model that this ManifoldAverage was built for, or not on one device: build it from the model "
                "that is averaged, after its last change of dtype"
            )
        manifolds = [self.known[i][2] for i in mine] + [Euclidean()] * (len(averaged) - len(mine))
        flat = [j for j, M in enumerate(manifolds) if isinstance(M, Euclidean)]
        if self.decay is None and not (dtype.is_floating_point or dtype.is_complex):
            for j in flat:  # counters, of which torch's SWA of several tensors makes an error
                averaged[j].copy_(current[j])
        elif flat:
            self._ambient()([averaged[j] for j in flat], [current[j] for j in flat], num_averaged)
        n = torch.as_tensor(num_averaged, dtype=torch.float64, device=averaged[0].device)
        t = 1 / (n + 1) if self.decay is None else 1 - self.decay
        for i, M, x, w in zip(mine, manifolds, averaged, current, strict=False):
            if isinstance(M, Euclidean):
                continue
            point, new = widen(stack([x])), widen(stack([w]))
            if M.constant_norm:
                if not torch.equal(torch.where(n == 1, _mark(x), getattr(self, f"sum_{i}")), _mark(x)):
                    raise ValueError(
                        "the averaged model is not as this ManifoldAverage left it: build one for each AveragedModel"
                    )
                kept = getattr(self, f"mean_{i}").to(point)
                mean = torch.where(n == 1, point, kept)  # torch has copied the first model into x, and did not call
                mean = mean + t * (new - mean)
                setattr(self, f"mean_{i}", mean)
                write([x], M.nearest(mean))
                setattr(self, f"sum_{i}", _mark(x))
            else:
                write([x], M.exp(point, t * M.log(point, new)))


def _mark(x: Tensor) -> Tensor:
    """Σ k xₖ, a number that no other parameter has but by chance."""
    return (widen(x).flatten() * torch.arange(1, x.numel() + 1, device=x.device)).sum()
