"""torch's layers with a weight on a manifold: ``Linear(64, 32, weight_manifold=Stiefel)``.

Each is a subclass of torch's class of the same name, whose forward it has: arguments, state-dict keys and shapes are
torch's, and ``isinstance(layer, torch.nn.Linear)`` holds. What differs is ``__init__``, which draws a random point and
declares it, as ``constrain(torch.nn.Linear(64, 32), "weight", Stiefel(), init="random")`` does.

All of them take, besides torch's arguments, by keyword only:

* ``weight_manifold``: a manifold, or its class for the one with default options. None, the default, leaves torch's
  layer. On ``Euclidean`` the weight has torch's initial value too.
* ``on_load``: what ``load_state_dict`` does with a weight off the manifold: ``"error"`` refuses it, ``"project"`` loads
  the nearest point, as one does with pretrained weights.

and raise ``TypeError`` for a ``weight_manifold`` that is none, and ``ValueError`` where no view of it fits the weight.
A wide weight has orthonormal rows on ``Stiefel``. :func:`manopt_torch.release` makes them torch's own.
"""

from __future__ import annotations

import fnmatch
import inspect
from typing import Any, ClassVar

from torch import nn

from manopt_torch.manifolds import Euclidean, Manifold
from manopt_torch.parameter import Init, OnLoad, constrain, slots

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Bilinear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "GRUCell",
    "LSTMCell",
    "Linear",
    "MultiheadAttention",
    "RNNCell",
]


class _Constrained(nn.Module):
    """Torch's layer, the last base of each subclass, whose parameters named in ``weights`` are put on a manifold."""

    weights: ClassVar[tuple[str, ...]] = ("weight",)
    torch_class: ClassVar[type[nn.Module]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:  # what a user derives is his own class, also after release()
            cls.torch_class = cls.__bases__[-1]
            theirs, ours = inspect.signature(cls.torch_class.__init__), inspect.signature(_Constrained.__init__)
            added = [p for p in ours.parameters.values() if p.kind is p.KEYWORD_ONLY]
            both = sorted([*list(theirs.parameters.values())[1:], *added], key=lambda p: p.kind)
            cls.__signature__ = theirs.replace(parameters=both)  # type: ignore[attr-defined]

    def __init__(
        self,
        *args: Any,
        weight_manifold: Manifold | type[Manifold] | None = None,
        on_load: OnLoad = "error",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if weight_manifold is None:
            return
        manifold = _instance(weight_manifold)
        names = [n for n, _ in self.named_parameters() if any(fnmatch.fnmatchcase(n, w) for w in self.weights)]
        init: Init = "keep" if isinstance(manifold, Euclidean) else "random"
        constrain(self, dict.fromkeys(names, manifold), init=init, on_load=on_load)

    def extra_repr(self) -> str:
        manifolds = dict.fromkeys(repr(slot.manifold) for slot in slots(self).values())
        shown = f"weight_manifold={', '.join(manifolds)}" if manifolds else ""
        return ", ".join(filter(None, (super().extra_repr(), shown)))


def _instance(weight_manifold: Manifold | type[Manifold]) -> Manifold:
    if isinstance(weight_manifold, Manifold):
        return weight_manifold
    wrong = f"weight_manifold={weight_manifold!r}: expected a manifold such as Stiefel(), or its class"
    if not (isinstance(weight_manifold, type) and issubclass(weight_manifold, Manifold)):
        raise TypeError(wrong)
    try:
        return weight_manifold()
    except TypeError as error:
        raise TypeError(f"{wrong} where it has defaults for all its options ({error})") from error


class Linear(_Constrained, nn.Linear):
    """:class:`torch.nn.Linear` with ``weight`` (out, in) on a manifold.

    On ``Stiefel``: WᴴW = I when out ≥ in, WWᴴ = I otherwise. On ``Sphere`` each row has length 1.
    """


class Bilinear(_Constrained, nn.Bilinear):
    """:class:`torch.nn.Bilinear`, y_k = x₁ᵀ A_k x₂ + b_k, with every A_k (in1, in2) of ``weight`` on a manifold."""


class Conv1d(_Constrained, nn.Conv1d):
    """:class:`torch.nn.Conv1d`; see :class:`Conv2d`."""


class Conv2d(_Constrained, nn.Conv2d):
    """:class:`torch.nn.Conv2d` whose kernel, read as a matrix, is on a manifold.

    The matrix is (out, in·kh·kw); with groups each group has one, (out/groups, in/groups·kh·kw). On ``Stiefel``
    it has orthonormal rows if it is wide, as it is unless out > in·kh·kw, and columns otherwise.
    This bounds the gain of the convolution by √(kh·kw) without making it an orthogonal map of images.
    """


class Conv3d(_Constrained, nn.Conv3d):
    """:class:`torch.nn.Conv3d`; see :class:`Conv2d`."""


class ConvTranspose1d(_Constrained, nn.ConvTranspose1d):
    """:class:`torch.nn.ConvTranspose1d`; see :class:`ConvTranspose2d`."""


class ConvTranspose2d(_Constrained, nn.ConvTranspose2d):
    """:class:`torch.nn.ConvTranspose2d`: as :class:`Conv2d`, each group with (in/groups, out/groups·kh·kw)."""


class ConvTranspose3d(_Constrained, nn.ConvTranspose3d):
    """:class:`torch.nn.ConvTranspose3d`; see :class:`ConvTranspose2d`."""


class Embedding(_Constrained, nn.Embedding):
    """:class:`torch.nn.Embedding` with ``weight`` (num, dim) on a manifold; on ``Sphere`` every row has length 1.

    Raises ``ValueError`` with ``padding_idx`` or ``max_norm``, which leave the manifold.
    ``constrain(torch.nn.Embedding.from_pretrained(w), "weight", manifold)`` starts from given rows.
    """


class RNNCell(_Constrained, nn.RNNCell):
    """:class:`torch.nn.RNNCell` with the recurrent weight ``weight_hh`` (hidden, hidden) on a manifold."""

    weights = ("weight_hh",)


class GRUCell(_Constrained, nn.GRUCell):
    """:class:`torch.nn.GRUCell`; each of the three matrices of ``weight_hh`` is on a manifold."""

    weights = ("weight_hh",)


class LSTMCell(_Constrained, nn.LSTMCell):
    """:class:`torch.nn.LSTMCell`; each of the four matrices of ``weight_hh`` is on a manifold."""

    weights = ("weight_hh",)


class RNN(_Constrained, nn.RNN):
    """:class:`torch.nn.RNN` with the recurrent weights of every layer and direction on a manifold.

    In torch's notation h_t = tanh(x_t W_ihᵀ + b_ih + h_{t−1} W_hhᵀ + b_hh): the matrices W_hh. Input weights are free.
    """

    weights = ("weight_hh_*",)


class GRU(_Constrained, nn.GRU):
    """:class:`torch.nn.GRU`; as :class:`RNN`, each of the three matrices of a recurrent weight for itself."""

    weights = ("weight_hh_*",)


class LSTM(_Constrained, nn.LSTM):
    """:class:`torch.nn.LSTM`; as :class:`RNN`, each of the four matrices of a recurrent weight for itself.

    With ``proj_size`` these are (hidden, proj_size), and the projection ``weight_hr`` is free.
    """

    weights = ("weight_hh_*",)


class MultiheadAttention(_Constrained, nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` whose queries and keys have, for each head, a matrix on a manifold.

    The matrices are (embed_dim/num_heads, embed_dim), for keys (embed_dim/num_heads, kdim); on ``Stiefel`` a head's
    rows are orthonormal, so that it compares coordinates of inputs in two subspaces. Values and output are free.
    """

    weights = ("in_proj_weight", "q_proj_weight", "k_proj_weight")
