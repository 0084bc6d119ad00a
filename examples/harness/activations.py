"""Leaky ReLU and its family: three forms, a dead neuron, 50 layers, learned and random slopes, linear pieces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor, nn

from manopt_torch import param_groups
from manopt_torch.nn import gain, no_weight_decay

#: inputs of the neuron and of the unit with a learned slope
POINTS = torch.linspace(-3, 3, 41, dtype=torch.float64)
#: what the unit with a learned slope is fitted to, and where it starts: w and α
TRUE, START = (1.5, 0.1), (1.0, 0.25)
#: weight decay of the runs that have it
DECAY = 0.1
DECAYS = ("none", "on α", "on w and α", "on w, by no_weight_decay")
#: units, and the side of the square, of the network whose linear pieces are counted
HIDDEN, SIDE = 8, 4.0


def forms(x: Tensor, slope: float) -> dict[str, Tensor]:
    """The three ways to write leaky ReLU; the second is right only for slopes up to 1."""
    return {
        "x if x > 0, else αx": torch.where(x > 0, x, slope * x),
        "max(x, αx)": torch.maximum(x, slope * x),
        "(1 + α)/2 x + (1 − α)/2 |x|": (1 + slope) / 2 * x + (1 - slope) / 2 * x.abs(),
    }


class Neuron(nn.Module):
    """f(x) = v LReLU_α(w x + b) for several slopes at once, x (n,) to (n, slopes); w = v = 1 and b = −4 at the start.

    The kink is at x = 4 and all inputs are left of it, so that with α = 0 no parameter has a gradient.
    """

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.slopes = slopes
        self.w, self.b, self.v = (nn.Parameter(torch.full_like(slopes, start)) for start in (1.0, -4.0, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.v * F.prelu(x[:, None] * self.w + self.b, self.slopes)


class Trajectory(NamedTuple):
    """A neuron before every step and after the last: the mean squared error, w, b and v, each (steps + 1, slopes)."""

    slopes: Tensor
    mse: Tensor
    w: Tensor
    b: Tensor
    v: Tensor

    def active(self) -> Tensor:
        """How many of the inputs are right of the kink, (steps + 1, slopes)."""
        return (self.w[..., None] * POINTS + self.b[..., None] > 0).sum(-1)

    def revived(self) -> list[int | None]:
        """The first step after which an input is right of the kink; None where there was none."""
        active = self.active() > 0
        return [int(own.int().argmax()) if own.any() else None for own in active.unbind(1)]


def target(x: Tensor) -> Tensor:
    """What the neuron is fitted to: 1.5 max(0, x − 1)."""
    return 1.5 * torch.relu(x - 1)


def train_neurons(slopes: tuple[float, ...], steps: int, lr: float = 0.1) -> Trajectory:
    """Gradient descent on the mean squared error over 41 points of [−3, 3], one neuron for each slope."""
    neuron = Neuron(torch.tensor(slopes, dtype=torch.float64))
    optimizer = torch.optim.SGD(neuron.parameters(), lr)
    goal, seen = target(POINTS)[:, None], []
    for _ in range(steps + 1):
        optimizer.zero_grad()
        mse = (neuron(POINTS) - goal).square().mean(0)
        seen.append(torch.stack([mse, neuron.w, neuron.b, neuron.v]).detach())
        mse.sum().backward()
        optimizer.step()
    return Trajectory(neuron.slopes, *torch.stack(seen, 1))


class Signal(NamedTuple):
    """An activation between layers whose weights have the standard deviation ``factor``/√n."""

    name: str
    activation: nn.Module
    factor: float
    #: power of layer 50 over that of layer 1 by formula, None where there is none
    growth: float | None


def signals(slopes: tuple[float, ...], layers: int = 50) -> list[Signal]:
    """Leaky ReLU with the gain of ReLU and with its own, ReLU with the weights of Xavier, SELU with those of LeCun.

    A layer multiplies the mean power by factor² (1 + α²)/2 (He et al., 2015); SELU keeps it (Klambauer et al., 2017).
    """
    relu, maps = gain(nn.ReLU()).item(), layers - 1
    found = [Signal("ReLU, Xavier", nn.ReLU(), 1.0, 0.5**maps), Signal("ReLU, He", nn.ReLU(), relu, 1.0)]
    for slope in slopes:
        f = nn.LeakyReLU(slope)
        found.append(Signal(f"leaky {slope:g}, gain of ReLU", f, relu, (1 + slope**2) ** maps))
        found.append(Signal(f"leaky {slope:g}, its own gain", f, gain(f).item(), 1.0))
    return [*found, Signal("SELU, LeCun", nn.SELU(), 1.0, 1.0)]


@torch.no_grad()
def propagate(kinds: list[Signal], width: int, seeds: int, seed: int, layers: int = 50) -> Tensor:
    """Mean squares of z₁ … z_layers, (layers, seeds, kinds): z₁ ~ N(0, I), z_{l+1} = W f(z_l), W (width, width).

    All kinds have the same normal numbers in their W, and every seed has others. A single network says little: the
    logarithm of its power has a variance of about 300/width.
    """
    factors = torch.tensor([kind.factor for kind in kinds]) / width**0.5
    generator, powers = torch.Generator().manual_seed(seed), []
    for count in torch.full((seeds,), 1).split(max(1, 2**21 // width**2)):
        z = torch.randn(len(count), width, 1, generator=generator).expand(-1, -1, len(kinds))
        own = [z.square().mean(1)]
        for _ in range(layers - 1):
            f = torch.stack([kind.activation(z[..., k]) for k, kind in enumerate(kinds)], -1)
            z = torch.randn(len(count), width, width, generator=generator) @ f * factors
            own.append(z.square().mean(1))
        powers.append(torch.stack(own))
    return torch.cat(powers, 1).double()


def growth(powers: Tensor) -> tuple[Tensor, Tensor]:
    """Root mean square of the last layer over that of the first, over all seeds, and its standard error; (kinds,)."""
    ratios = powers[-1] / powers[0].mean(0)
    mean = ratios.mean(0)
    return mean.sqrt(), ratios.std(0) / len(ratios) ** 0.5 / (2 * mean.sqrt())


def train_prelu(decay: str, steps: int, lr: float = 0.1) -> Tensor:
    """w and α of PReLU_α(w x) before every step and after the last, (steps + 1, 2), fitted to w = 1.5, α = 0.1."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.PReLU()).double()
    w, slope = model.parameters()
    for parameter, value in zip((w, slope), START, strict=True):
        nn.init.constant_(parameter, value)
    x = POINTS[:, None]
    goal = F.prelu(TRUE[0] * x, slope.new_tensor([TRUE[1]]))
    overrides = {"0.weight": {"weight_decay": 0.0}} if decay == "on α" else {}
    if decay == "on w, by no_weight_decay":
        overrides = no_weight_decay(model)
    groups = param_groups(model, overrides)
    optimizer = torch.optim.SGD(groups, lr, weight_decay=0.0 if decay == "none" else DECAY)
    seen = [torch.cat([w.flatten(), slope]).detach()]
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), goal).backward()
        optimizer.step()
        seen.append(torch.cat([w.flatten(), slope]).detach())
    return torch.stack(seen)


def random_slopes(count: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """x, RReLU(x) in training, and the one slope that it has in evaluation."""
    torch.manual_seed(seed)
    x = torch.empty(count, dtype=torch.float64).uniform_(-3, 3)
    layer = nn.RReLU()
    f = layer(x)
    return x, f, -layer.eval()(torch.tensor(-1.0, dtype=torch.float64)).item()


class Relief(nn.Module):
    """x (..., 2) to ∑ₖ vₖ LReLU_α(wₖ·x + bₖ): linear on each piece of the plane that the lines wₖ·x + bₖ = 0 leave."""

    def __init__(self, slope: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        angle = (torch.arange(HIDDEN) + 0.8 * torch.rand(HIDDEN, generator=generator)) * torch.pi / HIDDEN
        sign = torch.randint(2, (HIDDEN, 1), generator=generator) * 2 - 1
        self.w = (torch.stack([angle.cos(), angle.sin()], 1) * sign).double()
        self.b = torch.rand(HIDDEN, generator=generator).double() * 4 - 2
        self.v = torch.randn(HIDDEN, generator=generator).double()
        self.slope = slope

    def pre(self, x: Tensor) -> Tensor:
        """wₖ·x + bₖ, (..., HIDDEN)."""
        return F.linear(x, self.w, self.b)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.pre(x), self.slope) @ self.v

    def near_vertices(self) -> Tensor:
        """Points in all pieces of the plane, (points, 2): four around each place where two lines meet.

        No two of the lines are parallel, so that each piece has such a place as a corner.
        """
        points = []
        for i, j in itertools.combinations(range(HIDDEN), 2):
            two, ends = self.w[[i, j]], self.b[[i, j]]
            others = [k for k in range(HIDDEN) if k not in (i, j)]
            corner = torch.linalg.solve(two, -ends)
            step = 0.1 * self.pre(corner)[others].abs().min() * torch.linalg.svdvals(two)[-1]
            sides = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=2)), dtype=torch.float64)
            points += [torch.linalg.solve(two, step * side - ends) for side in sides]
        return torch.stack(points)


def pieces(relief: Relief) -> tuple[int, int]:
    """How many sign patterns of the units there are in the plane, and how many gradients the relief has."""
    x = relief.near_vertices().requires_grad_()
    (slopes,) = torch.autograd.grad(relief(x).sum(), x)
    return len((relief.pre(x) > 0).unique(dim=0)), len(slopes.mul(1e9).round().unique(dim=0))


def draw_forms(axes: Axes, slope: float) -> None:
    """The three forms of leaky ReLU; the right ones lie upon each other."""
    x = torch.linspace(-3, 3, 121)
    looks = (("C0-", 4), ("C3--", 2), ("k:", 2))
    for (name, f), (style, width) in zip(forms(x, slope).items(), looks, strict=True):
        axes.plot(x.numpy(), f.numpy(), style, label=name, linewidth=width)
    axes.set(title=f"three forms, α = {slope:g}", xlabel="x")


def draw_neurons(curves: Axes, shapes: Axes, run: Trajectory) -> None:
    """Errors over the steps, and the functions after the last beside their target."""
    x = torch.linspace(-3, 3, 241, dtype=torch.float64)
    f = run.v[-1] * F.prelu(x[:, None] * run.w[-1] + run.b[-1], run.slopes)
    for i, slope in enumerate(run.slopes.tolist()):
        curves.loglog(range(1, len(run.mse) + 1), run.mse[:, i].numpy(), label=f"α = {slope:g}")
        shapes.plot(x.numpy(), f[:, i].numpy(), label=f"α = {slope:g}")
    shapes.plot(x.numpy(), target(x).numpy(), "k--", label="target")
    curves.set(title="neurons that start dead: mean squared error", xlabel="step + 1")
    shapes.set(title="… and what they end as", xlabel="x", ylim=(-2, 4))


def draw_relief(axes: Axes, net: Relief) -> None:
    """Heights and contours on a square, and the lines (white) on which the net bends."""
    side = torch.linspace(-SIDE, SIDE, 301, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    x, height, pre = side.numpy(), net(grid).numpy(), net.pre(grid).numpy()
    axes.pcolormesh(x, x, height, cmap="viridis", rasterized=True)
    axes.contour(x, x, height, levels=20, colors="black", linewidths=0.4)
    for k in range(HIDDEN):
        axes.contour(x, x, pre[..., k], levels=[0.0], colors="white", linewidths=1.2)
    axes.set(aspect="equal", xlabel="x₁", ylabel="x₂")


def page(trajectory: Trajectory, kept: list[int]) -> str:
    """An HTML file that needs nothing else: the neuron by slope and step, trained beforehand, drawn by the browser."""
    rows = torch.stack(trajectory[1:])[:, kept].permute(2, 1, 0)  # slopes, steps, (mse, w, b, v)
    data = {
        "slopes": trajectory.slopes.tolist(),
        "steps": kept,
        "x": [round(x, 12) for x in POINTS.tolist()],
        "runs": [[[float(f"{value:.6g}") for value in row] for row in run] for run in rows.tolist()],
    }
    template = (Path(__file__).parent / "neuron.html").read_text(encoding="utf-8")
    return template.replace("/* DATA */ null", json.dumps(data, separators=(",", ":")))
