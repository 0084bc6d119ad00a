"""The TruG-TGGM as a regressor in the manner of scikit-learn, which need not be there."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from manopt_torch.nn.trug import SIGMA2
from manopt_torch.stochastic.tggm import TruGTGGM

#: of the mean-field equations in training: the error is far below that of a mini-batch
TOLERANCE = 1e-3


class TruGTGGMRegressor:
    """Fits a :class:`TruGTGGM` by Adam on its bound, and has scikit-learn's methods.

    Columns of X and y are standardised on the way in, and predictions taken back. It goes into pipelines and into
    ``GridSearchCV``, which chooses for instance the truncation points::

        GridSearchCV(TruGTGGMRegressor(learn=None), {"upper": [1.0, 4.0, math.inf]})

    Args:
        n_hidden: units.
        lower, upper, sigma2, learn: as in :class:`TruGTGGM`.
        learning_rate: of Adam at first; it falls to zero along half a cosine.
        batch_size: rows of a step.
        n_iter: epochs.
        random_state: seed of everything, None for another one each time.

    Attributes:
        tggm_: the fitted :class:`TruGTGGM` of standardised x and y, in float32.
        n_features_in_: columns of X in :meth:`fit`.
    """

    tggm_: TruGTGGM

    def __init__(
        self,
        n_hidden: int = 50,
        *,
        lower: float = 0.0,
        upper: float = math.inf,
        sigma2: float = SIGMA2,
        learn: Literal["unit", "shared"] | None = "unit",
        learning_rate: float = 0.02,
        batch_size: int = 100,
        n_iter: int = 100,
        random_state: int | None = None,
    ) -> None:
        self.n_hidden, self.lower, self.upper, self.sigma2, self.learn = n_hidden, lower, upper, sigma2, learn
        self.learning_rate, self.batch_size, self.n_iter = learning_rate, batch_size, n_iter
        self.random_state = random_state

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor by name; none of them is an estimator, so that ``deep`` says nothing."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> TruGTGGMRegressor:
        """Change arguments of the constructor, for the next :meth:`fit`.

        Raises:
            ValueError: for a name that is not one of them.
        """
        unknown, known = params.keys() - self.get_params().keys(), ", ".join(self.get_params())
        if unknown:
            raise ValueError(f"TruGTGGMRegressor has no {', '.join(sorted(unknown))}; it has {known}")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, RegressorTags, Tags, TargetTags  # only scikit-learn calls this

        return Tags(
            estimator_type="regressor",
            target_tags=TargetTags(required=True, multi_output=True),
            regressor_tags=RegressorTags(),
            input_tags=InputTags(),
        )

    def _rows(self, name: str, values: ArrayLike, columns: int | None) -> Tensor:
        """Rows in float64, or ValueError."""
        rows = torch.as_tensor(np.asarray(values, dtype=np.float64))
        if rows.dim() != 2 or not rows.numel() or columns not in (None, rows.shape[1]):
            raise ValueError(f"{name} must be (samples, {columns or 'columns'}), got shape {tuple(rows.shape)}")
        if not rows.isfinite().all():
            raise ValueError(f"{name} has entries that are not finite")
        return rows

    def fit(self, X: ArrayLike, y: ArrayLike) -> TruGTGGMRegressor:
        """Learn y (samples,) or (samples, targets) from X (samples, features).

        Raises:
            ValueError: for X or y of another shape or not finite, and for arguments that :class:`TruGTGGM` refuses.
        """
        targets = np.asarray(y, dtype=np.float64)
        self._flat = targets.ndim == 1
        rows, outputs = self._rows("X", X, None), self._rows("y", targets[:, None] if self._flat else targets, None)
        if len(rows) != len(outputs):
            raise ValueError(f"X and y must have the same number of samples, got {len(rows)} and {len(outputs)}")
        self.n_features_in_ = rows.shape[1]
        self._means = [t.mean(0) for t in (rows, outputs)]
        spreads = [t.std(0, correction=0) for t in (rows, outputs)]
        self._scales = [torch.where(spread > 0, spread, 1.0) for spread in spreads]
        inputs, goals = (
            ((t - m) / s).float() for t, m, s in zip((rows, outputs), self._means, self._scales, strict=True)
        )
        generator = torch.Generator()
        if self.random_state is None:
            generator.seed()
        else:
            generator.manual_seed(self.random_state)
        ends: dict[str, Any] = {"lower": self.lower, "upper": self.upper, "learn": self.learn}
        self.tggm_ = model = TruGTGGM(
            inputs.shape[1], self.n_hidden, goals.shape[1], sigma2=self.sigma2, dtype=torch.float32, **ends
        )
        model.reset_parameters(generator)
        optimizer = torch.optim.Adam(model.parameters(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.n_iter)
        for _ in range(self.n_iter):
            for batch in torch.randperm(len(inputs), generator=generator).split(self.batch_size):
                optimizer.zero_grad()
                (-model.elbo(inputs[batch], goals[batch], tolerance=TOLERANCE).mean()).backward()
                optimizer.step()
            schedule.step()
        return self

    @torch.no_grad()
    def predict(self, X: ArrayLike) -> NDArray[np.float64]:
        """E[y | x] for the rows of X, in the shape of y in :meth:`fit`."""
        if not hasattr(self, "tggm_"):
            raise AttributeError("this TruGTGGMRegressor is not fitted yet: call fit(X, y) first")
        rows = (self._rows("X", X, self.n_features_in_) - self._means[0]) / self._scales[0]
        found = self.tggm_(rows.float()).double() * self._scales[1] + self._means[1]
        return np.asarray((found[:, 0] if self._flat else found).numpy())

    def score(self, X: ArrayLike, y: ArrayLike) -> float:
        """R², 1 − Σ (y − ŷ)²/Σ (y − ȳ)², a mean over targets."""
        predicted = self.predict(X)
        goals = np.asarray(y, dtype=np.float64).reshape(predicted.shape)  # a column is as good as a row
        error, spread = ((goals - other) ** 2 for other in (predicted, goals.mean(0)))
        return float(np.mean(1 - error.sum(0) / spread.sum(0)))
