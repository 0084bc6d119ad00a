"""The TruG-RBM as an estimator in the manner of scikit-learn, which need not be there."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from manopt_torch.stochastic.gibbs import MOST_ENUMERATED
from manopt_torch.stochastic.rbm import PRECISION, TruGRBM


class TruGRBMEstimator:
    """Fits a :class:`TruGRBM` by (persistent) contrastive divergence with Adam, and has scikit-learn's methods.

    It goes into pipelines, as the features E[h | x], and into ``GridSearchCV``, which chooses for instance the
    truncation points by the mean of ln p(x) over what is held out::

        GridSearchCV(TruGRBMEstimator(8, learn=None), {"upper": [1.0, 4.0, math.inf]})

    Args:
        n_components: hidden units.
        lower, upper, precision, visible, visible_precision, learn, learn_precision, units: as in :class:`TruGRBM`.
        k: Gibbs steps of contrastive divergence.
        persistent: keep the chains from step to step.
        learning_rate: of Adam.
        batch_size: rows of a step, and number of chains.
        n_iter: epochs.
        temperatures, chains: of annealed importance sampling, which :meth:`score_samples` needs for Gaussian x or more
            than 20 columns.
        random_state: seed of everything, None for another one each time.

    Attributes:
        rbm_: the fitted :class:`TruGRBM`, in float32.
        n_features_in_: columns of X in :meth:`fit`.
    """

    rbm_: TruGRBM

    def __init__(
        self,
        n_components: int = 256,
        *,
        lower: float = 0.0,
        upper: float = math.inf,
        precision: float = PRECISION,
        visible: Literal["binary", "gaussian"] = "binary",
        visible_precision: float = 1.0,
        learn: Literal["unit", "shared"] | None = "unit",
        learn_precision: bool = False,
        units: Literal["trug", "binary"] = "trug",
        k: int = 1,
        persistent: bool = False,
        learning_rate: float = 0.01,
        batch_size: int = 100,
        n_iter: int = 20,
        temperatures: int = 1000,
        chains: int = 100,
        random_state: int | None = None,
    ) -> None:
        self.n_components = n_components
        self.lower, self.upper, self.precision = lower, upper, precision
        self.visible, self.visible_precision = visible, visible_precision
        self.learn, self.learn_precision, self.units = learn, learn_precision, units
        self.k, self.persistent = k, persistent
        self.learning_rate, self.batch_size, self.n_iter = learning_rate, batch_size, n_iter
        self.temperatures, self.chains = temperatures, chains
        self.random_state = random_state

    @classmethod
    def _names(cls) -> list[str]:
        return list(inspect.signature(cls).parameters)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor by name; none of them is an estimator, so that ``deep`` says nothing."""
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **params: Any) -> TruGRBMEstimator:
        """Change arguments of the constructor, for the next :meth:`fit`.

        Raises:
            ValueError: for a name that is not one of them.
        """
        unknown = params.keys() - set(self._names())
        if unknown:
            raise ValueError(f"TruGRBMEstimator has no {', '.join(sorted(unknown))}; it has {', '.join(self._names())}")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags  # only scikit-learn calls this

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(),
            input_tags=InputTags(),
        )

    def _rows(self, X: ArrayLike) -> Tensor:
        """X as float32 rows, or ValueError."""
        x = torch.as_tensor(np.asarray(X, dtype=np.float32))
        columns = getattr(self, "n_features_in_", None)
        if x.dim() != 2 or not x.numel() or columns not in (None, x.shape[1]):
            raise ValueError(f"X must be (samples, {columns or 'features'}), got shape {tuple(x.shape)}")
        if not x.isfinite().all():
            raise ValueError("X has entries that are not finite")
        if self.visible == "binary" and not ((x >= 0) & (x <= 1)).all():
            raise ValueError(
                f'visible="binary" needs X in [0, 1], got {x.min():g} to {x.max():g}: threshold it, or use "gaussian"'
            )
        return x

    def _generator(self, stream: int) -> torch.Generator:
        generator = torch.Generator()
        if self.random_state is None:
            generator.seed()
            return generator
        key = np.random.SeedSequence((self.random_state, stream)).generate_state(1, np.uint64)
        return generator.manual_seed(int(key[0] >> 1))

    def fit(self, X: ArrayLike, y: None = None) -> TruGRBMEstimator:
        """Learn from rows X (samples, features), in [0, 1] if binary.

        Raises:
            ValueError: for X of another shape or range, and for arguments that :class:`TruGRBM` refuses.
        """
        vars(self).pop("n_features_in_", None)
        x, generator = self._rows(X), self._generator(0)
        self.n_features_in_ = x.shape[1]
        self.rbm_ = rbm = TruGRBM(
            x.shape[1],
            self.n_components,
            lower=self.lower,
            upper=self.upper,
            precision=self.precision,
            visible=self.visible,
            visible_precision=self.visible_precision,
            learn=self.learn,
            learn_precision=self.learn_precision,
            units=self.units,
            dtype=torch.float32,
        )
        rbm.reset_parameters(generator)
        self._base = rbm.mean_bias(x)
        rbm.b.data.copy_(self._base)
        self._log_partition: Tensor | None = None
        optimizer = torch.optim.Adam(rbm.parameters(), lr=self.learning_rate)
        chains = None
        for _ in range(self.n_iter):
            for rows in torch.randperm(len(x), generator=generator).split(self.batch_size):
                loss, samples = rbm.contrastive_divergence(x[rows], self.k, chains=chains, generator=generator)
                chains = samples if self.persistent else None
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return self

    def _fitted(self) -> TruGRBM:
        if not hasattr(self, "rbm_"):
            raise AttributeError("this TruGRBMEstimator is not fitted yet: call fit(X) first")
        return self.rbm_

    @torch.no_grad()
    def transform(self, X: ArrayLike) -> NDArray[np.float32]:
        """E[h | x] for the rows of X: (samples, n_components)."""
        return np.asarray(self._fitted()(self._rows(X)).numpy())

    def fit_transform(self, X: ArrayLike, y: None = None) -> NDArray[np.float32]:
        """:meth:`fit`, then :meth:`transform`."""
        return self.fit(X).transform(X)

    @torch.no_grad()
    def score_samples(self, X: ArrayLike) -> NDArray[np.float32]:
        """ln p(x) for the rows of X, (samples,).

        ln Z is exact for up to 20 binary columns. Otherwise annealed importance sampling estimates it once after each
        :meth:`fit`.
        """
        rbm, x = self._fitted(), self._rows(X)
        if self._log_partition is None:
            if rbm.visible_kind == "binary" and rbm.num_visible <= MOST_ENUMERATED:
                self._log_partition = rbm.log_partition()
            else:
                energy, generator = rbm.energy, self._generator(1)
                found = energy.annealed_importance_sampling(self.temperatures, self.chains, self._base, generator)
                self._log_partition = found.value
        return np.asarray(rbm.log_likelihood(x, self._log_partition).numpy())

    def score(self, X: ArrayLike, y: None = None) -> float:
        """The mean of ln p(x) over the rows of X."""
        return float(self.score_samples(X).mean())
