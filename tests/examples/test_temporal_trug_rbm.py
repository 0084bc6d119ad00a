"""The temporal TruG-RBM example: its data, its table, resuming, its pictures and MIDI files, at tiny sizes."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
mido = pytest.importorskip("mido")


@pytest.fixture
def example(path):
    return importlib.import_module("temporal_trug_rbm")


@pytest.fixture
def sequences(path):
    return importlib.import_module("harness.sequences")


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_smoke(example, capsys):
    results = example.main(["--smoke"])
    said = capsys.readouterr().out
    out = Path("runs/temporal_trug_rbm/0")
    assert said.endswith(f"table and pictures in {out}\n")
    lines = (out / "results.md").read_text().splitlines()
    assert all(line in said for line in lines)
    assert [r.name for r in results] == ["the frame before", "the training mean", *example.VARIANTS]
    for line, result in zip(lines[2:], results, strict=True):
        assert cells(line)[:2] == [result.name, f"{result.error:.3f}"]
    assert cells(lines[5])[4:6] == ["0.00 … 0.00", "1.00 … 1.00"]
    assert all(-36 * math.log(2) < r.bound < 0 for r in results[1:])
    assert (out / "generated.png").read_bytes()[:4] == b"\x89PNG"


def test_resumed_run_is_the_uninterrupted_one(example):
    """Training in two parts: the checkpoint of two epochs, and one of a third, asked for at first or later."""
    arguments = ["--smoke", "--variant", "unit", "--out"]
    whole = example.main([*arguments, "a"])
    kept = torch.load("a/unit.pt", weights_only=True)
    again = example.main([*arguments, "a", "--resume"])
    assert again[-1].error == whole[-1].error
    more = example.main([*arguments, "a", "--resume", "--epochs", "3"])
    assert torch.load("a/unit.pt", weights_only=True)["epoch"] == 3 == kept["epoch"] + 1
    assert not torch.equal(more[-1].model.W1, whole[-1].model.W1)
    for refused in (
        ["--smoke", "--out", "a"],
        [*arguments, "b", "--resume"],
        [*arguments, "a", "--resume", "--k", "2"],
    ):
        with pytest.raises(SystemExit):
            example.main(refused)


def test_interrupted_training_goes_on_as_if_nothing_had_been(example):
    arguments = example.argparse.Namespace(
        seed=0, hidden=3, lower=0.0, upper=1.0, lr=0.01, length=5, batch=2, k=1, epochs=3, bound_sequences=1,
        temperatures=2, chains=2, iterations=1, samples=1,
    )  # fmt: skip
    x = list(torch.randint(2, (4, 6, 5)).float())
    sets = example.SequenceSets(x, [], x, True)
    for name in "ab":
        Path(name).mkdir()
    whole = example.train("shared", sets, arguments, Path("a"))
    save, saved = torch.save, []

    def stop(state, file):
        save(state, file)
        saved.append(file)
        if len(saved) == 2:
            file.replace(file.with_suffix(".pt"))
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            example.train("shared", sets, arguments, Path("b"))
    resumed = example.train("shared", sets, arguments, Path("b"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert resumed.bound == whole.bound


def test_balls_keep_their_number_and_their_speed(sequences):
    films = sequences.bouncing_balls(20, 30, 40, seed=1).view(20, 30, 40, 40)
    area = math.pi * sequences.RADIUS**2 * (40 / sequences.BOX) ** 2
    assert (films.sum((-2, -1)) > 2.5 * area).all()
    assert (films.sum((-2, -1)) < 3.2 * area).all()
    assert (films[:, 1:] - films[:, :-1]).abs().sum((-2, -1)).min() > 0
    one = sequences.bouncing_balls(5, 100, 30, balls=1).view(5, 100, 30, 30)
    weight = one / one.sum((-2, -1), keepdim=True)
    centre = (
        torch.stack([(weight.sum(dim) * (torch.arange(30) + 0.5)).sum(-1) for dim in (-1, -2)], -1) * sequences.BOX / 30
    )
    way = (centre[:, 1:] - centre[:, :-1]).norm(dim=-1)
    assert abs(way.median() - sequences.SPEED) < 0.06
    assert centre.min() > sequences.RADIUS - 0.25
    assert centre.max() < sequences.BOX - sequences.RADIUS + 0.25


def test_files_of_sequences(example, sequences, capsys):
    import scipy.io

    generator = np.random.default_rng(0)
    parts = {name: np.empty((1, 3), object) for name in ("train_data", "test_data")}
    for part in parts.values():
        for i in range(3):
            part[0, i] = generator.normal(3.0, 2.0, (15 + i, 4))
    scipy.io.savemat("motion.mat", parts)
    sets = sequences.read_sequences(Path("motion.mat"))
    assert [len(x) for x in sets.test] == [15, 16, 17]
    assert not sets.binary
    assert sets.valid == []
    torch.testing.assert_close(torch.cat(sets.train).mean(0), torch.zeros(4), atol=1e-6, rtol=0)
    results = example.main(["--smoke", "--data", "motion.mat", "--out", "motion", "--variant", "shared"])
    assert [r.name for r in results[2:]] == ["original", "shared"]
    assert all(math.isfinite(r.error) for r in results)
    np.savez("other.npz", traindata=np.ones((2, 3, 4)))
    for name, said in (("other.npz", "has traindata, needs traindata, testdata"), ("none.mat", "needs a .mat or .npz")):
        with pytest.raises(SystemExit, match=said):
            sequences.read_sequences(Path(name))


def test_piano_rolls_as_midi(example, sequences):
    """A key held for two steps, another for one; the file has their times, in seconds at 120 beats per minute."""
    roll = torch.zeros(4, 88)
    roll[0:2, 39] = roll[1, 43] = roll[3, 0] = 1
    sequences.write_midi(roll, Path("roll.mid"))
    now, events = 0.0, []
    for message in mido.MidiFile("roll.mid"):
        now += message.time
        if not message.is_meta:
            events.append((round(now, 6), message.type, message.note))
    assert events == [
        (0.0, "note_on", 60), (0.25, "note_on", 64), (0.5, "note_off", 60), (0.5, "note_off", 64),
        (0.75, "note_on", 21), (1.0, "note_off", 21),
    ]  # fmt: skip
    data = np.random.default_rng(0).integers(0, 2, (4, 14, 88))
    np.savez("rolls.npz", traindata=data, validdata=data, testdata=data)
    example.main(["--smoke", "--data", "rolls.npz", "--out", "rolls", "--variant", "fixed"])
    assert {p.name for p in Path("rolls").glob("*.mid")} == {"data.mid", "original.mid", "fixed.mid"}
    assert Path("rolls/generated.png").read_bytes()[:4] == b"\x89PNG"


def test_errors_of_the_trivial_predictors(example):
    """By hand: two sequences, n = 1; the first frames do not count."""
    x = [torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([[0.0], [1.0]])]
    sets = example.SequenceSets(x, [], x, True)
    before, mean = example.trivial(sets, 1)
    assert before.error == pytest.approx(2 / 3)
    assert mean.error == pytest.approx((0.16 + 0.16 + 0.36) / 3)
    p = 2.5 / 6
    assert mean.bound == pytest.approx((math.log(p) + 2 * math.log(1 - p)) / 3)
    shifted = example.error(x, lambda packed: packed._replace(data=packed.data + 2))
    assert shifted == pytest.approx(4)
