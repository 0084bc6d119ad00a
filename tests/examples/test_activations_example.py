"""The leaky ReLU family: trajectories of reference, growth of signals, learned slopes, linear pieces, the page."""

import importlib
import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "leaky_relu.json").read_text())


@pytest.fixture
def example(path):
    return importlib.import_module("activations")


@pytest.fixture
def family(path):
    return importlib.import_module("harness.activations")


@pytest.mark.parametrize("case", REFERENCE["family"], ids=lambda case: f"{case['alpha']:g}")
def test_three_forms(family, case):
    x, y, maximum = (torch.tensor([v[k] for v in case["values"]], dtype=torch.float64) for k in ("x", "y", "max_form"))
    piecewise, as_maximum, with_modulus = family.forms(x, case["alpha"]).values()
    torch.testing.assert_close(piecewise, y, rtol=1e-15, atol=0)
    torch.testing.assert_close(as_maximum, maximum, rtol=1e-15, atol=0)
    torch.testing.assert_close(with_modulus, y, rtol=1e-14, atol=1e-15)
    assert torch.allclose(as_maximum, y, rtol=1e-15, atol=0) == (case["alpha"] <= 1)


def test_neuron_follows_the_reference(example, family):
    run = family.train_neurons(example.NEURON, 3000)
    cases = {case["alpha"]: case["trajectory"] for case in REFERENCE["neuron"]}
    assert run.slopes.tolist() == list(cases)
    assert run.mse.shape == (3001, len(cases))
    active = run.active()
    for i, (alpha, trajectory) in enumerate(cases.items()):
        for at in trajectory:
            mse, w, b, v = (series[at["step"], i].item() for series in run[1:])
            expected = [at[name] for name in ("mse", "w", "b", "v", "left_slope", "right_slope")]
            assert [mse, w, b, v, alpha * v * w, v * w] == pytest.approx(expected, abs=1e-10, rel=0)
            assert active[at["step"], i] == at["active"]
    never, late, *early = run.revived()
    assert never is None
    assert 100 < late <= 150
    assert all(0 < step < 50 for step in early[:2])
    for i, step in enumerate(run.revived()[1:], 1):
        assert (active[:step, i] == 0).all()
        assert active[step, i] > 0


def test_limits_of_the_neuron(example, family):
    """The table of limits, and the published left slope: larger slopes than 0.1 end in a wrong valley."""
    run = family.train_neurons(example.NEURON, 3000)
    text = example.neuron_table(run).splitlines()
    assert [[cell.strip() for cell in row.strip("|").split("|")][:7] for row in text[2:]] == [
        ["0", "1.09", "1.0000", "-4.0000", "1.0000", "0.0000", ""],
        ["0.01", "0.00082", "2.8665", "-2.8535", "0.5212", "0.0149", ""],
        ["0.05", "0.0181", "3.0090", "-2.6881", "0.4551", "0.0685", ""],
        ["0.1", "0.0549", "3.3123", "-2.2753", "0.3506", "0.1161", "0.116"],
        ["0.2", "0.407", "-1.4980", "-3.8052", "-0.8803", "0.2637", ""],
        ["0.3", "0.393", "-1.5872", "-3.6935", "-0.5905", "0.2812", ""],
    ]


def test_growth_by_formula(example, family):
    kinds = {kind.name: kind for kind in family.signals(example.LAYERS)}
    for case in REFERENCE["family"]:
        if case["alpha"] in example.LAYERS:
            uncorrected = kinds[f"leaky {case['alpha']:g}, gain of ReLU"]
            assert uncorrected.growth**0.5 == pytest.approx(case["rms_growth_49_layers_relu_init"], rel=1e-12)
            corrected = kinds[f"leaky {case['alpha']:g}, its own gain"]
            assert (corrected.growth, corrected.factor) == (1.0, pytest.approx(case["gain"], rel=1e-12))
    assert kinds["ReLU, Xavier"].growth ** 0.5 == pytest.approx(4.2e-8, rel=0.01)
    assert kinds["SELU, LeCun"].factor == 1


def test_correction_is_exact_in_every_network(example, family):
    """Leaky ReLU is homogeneous: with the same normal numbers, a gain is a factor of the signal in every layer."""
    kinds = family.signals(example.LAYERS)
    powers = family.propagate(kinds, width=12, seeds=5, seed=1)
    assert powers.shape == (50, 5, len(kinds))
    names = [kind.name for kind in kinds]
    for slope in example.LAYERS:
        two = [names.index(f"leaky {slope:g}, {whose}") for whose in ("gain of ReLU", "its own gain")]
        ratio = (powers[-1, :, two[0]] / powers[-1, :, two[1]]).sqrt()
        torch.testing.assert_close(ratio, torch.full_like(ratio, (1 + slope**2) ** 24.5), rtol=1e-3, atol=0)
    assert len(powers[-1, :, 1].unique()) == 5  # every seed has its own W


def test_mean_power_over_networks(example, family):
    """With few layers the mean is sharp; it is that of the formula for one map after the other."""
    kinds = family.signals((0.3,), layers=4)
    found, error = family.growth(family.propagate(kinds, width=64, seeds=3000, seed=0, layers=4))
    for kind, rms, own in zip(kinds[:-1], found.tolist(), error.tolist(), strict=False):
        assert own < 0.01 * rms
        assert abs(rms - kind.growth**0.5) < 4 * own
    assert found[kinds.index(next(k for k in kinds if k.name == "leaky 0.3, gain of ReLU"))] > 1.1
    selu, own = family.growth(family.propagate(kinds[-1:], width=256, seeds=4, seed=0))
    assert selu.item() == pytest.approx(1, abs=0.2)  # an attracting fixed point, in each single network


@pytest.mark.parametrize(
    ("decay", "step", "w", "slope"),
    [("none", 20, 1.499689, 0.100037), ("none", 400, 1.5, 0.1), ("on α", 400, 1.500206, 0.098596)],
)
def test_prelu_learns_its_slope(family, decay, step, w, slope):
    run = family.train_prelu(decay, 400)
    assert run.shape == (401, 2)
    assert run[0].tolist() == [1.0, 0.25]
    assert run[step].tolist() == pytest.approx([w, slope], abs=6e-7)


def test_where_weight_decay_acts(family):
    """Stationary points of the error with λ/2 (w² or α²) added where it acts."""
    x = family.POINTS
    for decay in family.DECAYS:
        w, slope = family.train_prelu(decay, 2000)[-1].requires_grad_()
        error = (torch.where(x > 0, w * x, slope * w * x) - torch.where(x > 0, 1.5 * x, 0.15 * x)).square().mean()
        own = {"none": (0, 0), "on α": (0, 1), "on w and α": (1, 1), "on w, by no_weight_decay": (1, 0)}[decay]
        total = error + 0.05 * (own[0] * w.square() + own[1] * slope.square())
        for gradient in torch.autograd.grad(total, (w, slope)):
            assert abs(gradient.item()) < 1e-12


def test_random_slopes(family):
    x, f, slope = family.random_slopes(20_000, 0)
    left = x < 0
    own = (f / x)[left]
    assert torch.equal(f[~left], x[~left])
    assert own.min() > 1 / 8
    assert own.max() < 1 / 3
    assert len(own.unique()) > 9000  # one for every input
    spread = (1 / 3 - 1 / 8) / math.sqrt(12)
    assert own.mean().item() == pytest.approx(11 / 48, abs=4 * spread / math.sqrt(len(own)))
    assert slope == pytest.approx(REFERENCE["constants"]["rrelu_eval_slope"], rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_pieces_do_not_depend_on_the_slope(example, family, seed):
    n = family.HIDDEN
    expected = 1 + n + math.comb(n, 2)  # of n lines in general position
    for slope in example.PIECES:
        found = family.pieces(family.Relief(slope, seed))
        assert found == (expected, 1 if slope == 1 else expected)
    relief = family.Relief(0.3, seed)
    everywhere = torch.randn(20_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5
    seen, listed = ({tuple(row) for row in (relief.pre(x) > 0).tolist()} for x in (everywhere, relief.near_vertices()))
    assert seen <= listed
    for i, j in itertools.combinations(range(n), 2):
        assert torch.linalg.det(relief.w[[i, j]]).abs() > 0.01  # no two lines are parallel


def test_smoke(example, family, capsys):
    found = example.main(["--smoke"])
    said = capsys.readouterr().out
    out = Path("runs/activations/0")
    assert said == (out / "tables.md").read_text(encoding="utf-8") + f"tables, picture and page in {out}\n"
    assert (out / "activations.png").read_bytes()[:4] == b"\x89PNG"
    neuron, other = (text.splitlines() for text in said.split("\n\n"))
    for text, columns in ((neuron, example.NEURON_COLUMNS), (other[:-1], example.COLUMNS)):
        assert [cell.strip() for cell in text[0].strip("|").split("|")] == list(columns)
        assert {row.count("|") for row in text} == {len(columns) + 1}
    rows = {tuple(cell.strip() for cell in row.strip("|").split("|")) for row in other[:-1]}
    assert ("max(x, αx)", "α = 2, x = −3", "-3", "-6", "") in rows
    assert ("PReLU after 20 steps", "decay none", "w 1.499689, α 0.100037, αw 0.15002", "", "") in rows
    assert any(row[1] == "leaky 0.3, gain of ReLU" and row[3:] == ("8.259", "8.3") for row in rows)
    assert len(neuron) == 2 + len(example.NEURON)
    assert found.powers.shape == (50, 4, len(found.kinds))


def embedded(text):
    return json.loads(re.search(r"const data = (\{.*\});", text).group(1))


def test_page_needs_nothing_else_and_has_the_neuron(family):
    kept = [0, 1, 10, 100, 500]
    text = family.page(family.train_neurons((0.0, 0.1, 0.3), 500), kept)
    assert not re.search(r"https?:|\bsrc\s*=|<link|@import|\bfetch\(|\bimport\b|url\(", text)
    data = embedded(text)
    assert data["slopes"] == [0.0, 0.1, 0.3]
    assert data["steps"] == kept
    assert len(data["x"]) == 41
    cases = {case["alpha"]: {at["step"]: at for at in case["trajectory"]} for case in REFERENCE["neuron"]}
    for slope, run in zip(data["slopes"], data["runs"], strict=True):
        for step, row in zip(kept, run, strict=True):
            expected = [cases[slope][step][name] for name in ("mse", "w", "b", "v")]
            assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_page_draws(family):
    """The script of the page with a document that only remembers, both sliders moved."""
    text = family.page(family.train_neurons((0.0, 0.1), 100), [0, 10, 100])
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL).group(1)
    before = """
        const kept = {};
        const document = { getElementById: (id) => (kept[id] ??= {
            value: "", addEventListener(_, act) { this.act = act; } }) };
    """
    after = """
        const first = kept.numbers.textContent;
        kept.alpha.value = "0"; kept.step.value = "1"; kept.step.act();
        const pictures = ["shape", "loss", "path"].map((id) => kept[id].innerHTML).join("");
        console.log(JSON.stringify([first, kept.numbers.textContent, kept["step-text"].textContent, pictures]));
    """
    done = subprocess.run(["node", "-"], input=before + script + after, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second, step, pictures = json.loads(done.stdout)
    (at,) = [t for c in REFERENCE["neuron"] if c["alpha"] == 0.1 for t in c["trajectory"] if t["step"] == 100]
    assert f"w {at['w']:.4f}   b {at['b']:.4f}   v {at['v']:.4f}   left slope αvw {at['left_slope']:.4f}" in first
    assert first.endswith(f"{at['active']} of 41")
    assert second.startswith("error 1.088   w 1.0000   b -4.0000   v 1.0000")
    assert step == 10
    assert pictures.count("<polyline") == 4
    assert "NaN" not in pictures
