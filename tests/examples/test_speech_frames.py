"""Speech frames: wav files, splits, the spectrogram and back, the measures by hand, masks, and a run of each kind."""

import importlib
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile

pytest.importorskip("lightning")
SMOKE = ["--smoke", "--measured", "1"]


@pytest.fixture
def audio(path):
    return importlib.import_module("harness.audio")


@pytest.fixture
def speech(path):
    return importlib.import_module("speech_frames")


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------ wav files and splits
@pytest.mark.parametrize("kind", ["int16", "int32", "uint8", "float32"])
def test_formats_of_wav_files(audio, kind):
    x = 0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
    top = {"int16": 2**15, "int32": 2**31, "uint8": 2**7, "float32": 1}[kind]
    Path("anna").mkdir()
    integers = np.round(x * top) + (128 if kind == "uint8" else 0)
    wavfile.write("anna/a.wav", 8000, (x if kind == "float32" else integers).astype(kind))
    (utterance,) = audio.read_wavs(Path("."))
    assert (utterance.speaker, utterance.name) == ("anna", "anna/a.wav")
    assert utterance.samples.dtype == torch.float32
    assert np.abs(utterance.samples.numpy() - x).max() < (0.005 if kind == "uint8" else 2e-5)


def test_channels_are_mixed_and_resampled(audio):
    t = np.arange(44100) / 44100
    tone, high = np.sin(2 * np.pi * 440 * t), np.sin(2 * np.pi * 9000 * t)  # what 8 kHz can hold, and what it cannot
    Path("deep/bert").mkdir(parents=True)
    wavfile.write("deep/bert/a.WAV", 44100, np.stack([tone, high], 1).astype(np.float32))
    (utterance,) = audio.read_wavs(Path("deep"))
    assert utterance.speaker == "bert"
    expected = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000) / 2
    assert np.abs(utterance.samples.numpy() - expected)[100:-100].max() < 2e-3
    assert audio.read_wavs(Path("."), level=2)[0].speaker == "bert"
    assert audio.read_wavs(Path("."))[0].speaker == "deep"
    with pytest.raises(ValueError, match=r"a\.WAV lies in 1 folders below deep, but its speaker is number 2"):
        audio.read_wavs(Path("deep"), level=2)


def test_files_that_are_no_wav_files_are_named(audio):
    Path("cid").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no wav file below cid.*asterisk-core-sounds"):
        audio.read_wavs(Path("cid"))
    Path("cid/SA1.wav").write_bytes(b"NIST_1A\n   1024\n" + bytes(2000))  # SPHERE, as TIMIT is distributed
    with pytest.raises(ValueError, match=r"SA1\.wav: .*sox"):
        audio.read_wavs(Path("."))


def test_pieces(audio):
    whole = audio.Utterance("anna", "a", torch.arange(20100.0))
    pieces = audio.cut(whole, 1.25)
    assert [len(piece.samples) for piece in pieces] == [10000, 10000]  # the rest is shorter than two windows
    assert torch.equal(torch.cat([piece.samples for piece in pieces]), whole.samples[:20000])
    assert {piece.speaker for piece in pieces} == {"anna"}


@pytest.mark.parametrize("by", ["speaker", "utterance"])
def test_splits_share_nothing(audio, by):
    utterances = [audio.Utterance(f"s{i % 11}", f"u{i}", torch.zeros(300)) for i in range(55)]
    data = audio.split(utterances, "test", 3, by)
    parts = [{getattr(u, "speaker" if by == "speaker" else "name") for u in part} for part in data[1:]]
    assert [len(part) for part in parts] == ([7, 2, 2] if by == "speaker" else [33, 11, 11])
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert sorted(u.name for part in data[1:] for u in part) == sorted(u.name for u in utterances)
    assert audio.split(utterances, "test", 3, by) == data
    assert audio.split(utterances, "test", 4, by) != data
    with pytest.raises(ValueError, match=r"at least 3 .* got 2 \(speaker: s0, s1\).*--split utterance"):
        audio.split(utterances[:2], "test", 0)


def test_synthetic_speech_is_harmonic(audio):
    """Between multiples of the fundamental there is little: a voice, and not noise."""
    for utterance in audio.vowels(1, speakers=3, each=1):
        assert utterance.samples.abs().max().item() == pytest.approx(0.3, abs=0.01)
        x = utterance.samples[2000:4048] * torch.hann_window(2048)
        power = torch.fft.rfft(x).abs().square()
        correlation = torch.fft.irfft(power)[20:100]  # at lags of 80 to 400 Hz
        assert correlation.max() > 0.6 * power.sum() * 2 / 2048


# ------------------------------------------------------------ frames
def test_frames_are_windowed_fourier_transforms(audio):
    x = noise(1000).double()
    frames = audio.stft(x)
    assert frames.shape == (8, 129)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    for t in range(1, 7):  # those that do not touch the ends
        expected = np.fft.rfft(x[128 * t - 128 : 128 * t + 128].numpy() * window)
        assert np.abs(frames[t].numpy() - expected).max() < 1e-12


@pytest.mark.parametrize("length", [256, 1000, 4097])
def test_frames_and_back(audio, length):
    x = noise(length)
    frames = audio.stft(x)
    assert (audio.inverse_stft(frames, length) - x).abs().max() < 1e-5
    assert (audio.sound(audio.log_power(frames), frames, length) - x).abs().max() < 1e-4


def test_decibels(audio):
    z = torch.tensor([0, 1j, 10, -0.6 + 0.8j, 1e-3])
    expected = [
        -50,
        10 * math.log10(1.00001),
        10 * math.log10(100.00001),
        10 * math.log10(1.00001),
        10 * math.log10(1.1e-5),
    ]
    assert audio.log_power(z).tolist() == pytest.approx(expected, abs=1e-4)


def test_predicted_below_the_floor_is_silence(audio):
    frames = audio.stft(noise(600))
    assert audio.sound(torch.full((5, 129), -60.0), frames, 600).abs().max() < 1e-6


def test_batches_pair_frames_with_their_successors(audio):
    long, short = noise(5, 129), noise(3, 129, seed=1)
    inputs, targets = audio.prediction_batch([long, short])
    assert torch.equal(inputs[0], long[:4])
    assert torch.equal(targets[0], long[1:])
    assert torch.equal(inputs[1], torch.cat([short[:2], torch.zeros(2, 129)]))
    assert torch.equal(targets[1, :2], short[1:])
    assert targets[1, 2:].isnan().all()


def test_padding_changes_neither_loss_nor_gradient(audio, speech):
    """The loss of a padded batch is that of its sequences put one after the other, whatever stands in the padding."""
    args = speech.training_parser("speech_frames", "", lr=0, epochs=1, batch=1).parse_args([])
    args.model, args.hidden, args.init = "full", 4, "haar"
    train = audio.vowels(0, speakers=1, each=2)
    task = speech.FramePredictor(args, train)
    sequences = [audio.log_power(audio.stft(u.samples)) for u in (*train, *audio.vowels(1, speakers=1, each=1))]
    sequences[0] = sequences[0][:9]
    inputs, targets = audio.prediction_batch(sequences)

    def loss_and_gradients(batches):
        task.zero_grad()
        outputs = [(task(x), y) for x, y in batches]
        squares = torch.cat([(p - y)[~y.isnan()].square() for p, y in outputs])
        loss = task.loss(*outputs[0]) if len(outputs) == 1 else squares.mean()
        loss.backward()
        return loss.item(), [p.grad.clone() for p in task.parameters()]

    alone = loss_and_gradients([(x[None, :-1], x[None, 1:]) for x in sequences])
    padded = loss_and_gradients([(inputs, targets)])
    other = loss_and_gradients([(torch.where(targets.isnan(), 77.0, inputs), targets)])
    assert 10 < alone[0] < 1e4
    for loss, gradients in (padded, other):
        assert loss == pytest.approx(alone[0], rel=1e-5)
        for g, expected in zip(gradients, alone[1], strict=True):
            assert expected.abs().max() > 0
            assert (g - expected).abs().max() < 1e-4 * expected.abs().max()


def test_batches_hold_every_utterance_once_in_an_order_of_their_own(audio):
    utterances = audio.vowels(0, speakers=2, each=5)
    batches = audio.frame_batches(utterances, 3, shuffle_seed=1)
    frames = sum(1 + len(u.samples) // 128 for u in utterances) - len(utterances)

    def epoch(number):
        batches.sampler.set_epoch(number)
        return [targets for _, targets in batches]

    assert sum(int((~t[..., 0].isnan()).sum()) for t in epoch(0)) == frames
    sizes = [[t.shape for t in epoch(number)] for number in (0, 0, 1, 2, 3)]
    assert sizes[0] == sizes[1]
    assert any(sizes[0] != other for other in sizes[2:])


# ------------------------------------------------------------ measures
def test_segmental_snr_by_hand(audio):
    x = noise(2000)
    assert audio.segmental_snr(x, 0.9 * x) == pytest.approx(20, abs=1e-4)  # error x / 10
    assert audio.segmental_snr(x, torch.zeros(2000)) == pytest.approx(0, abs=1e-4)
    assert audio.segmental_snr(x, x) == 35
    assert audio.segmental_snr(x, -9 * x) == -10  # -20 dB is clipped
    # constants: 3 frames at amplitude 1 with error 0.1, one that is half and half, 3 at 0.5 with error 0.5
    reference = torch.cat([torch.ones(512), torch.full((512,), 0.5)])
    estimate = torch.cat([torch.full((512,), 1.1), torch.zeros(512)])
    middle = 10 * math.log10((1 + 0.25) / (0.01 + 0.25))
    assert audio.segmental_snr(reference, estimate) == pytest.approx((3 * 20 + middle) / 7, abs=1e-4)


def test_silence_does_not_count(audio):
    x = noise(1024)
    quiet = torch.cat([x, 1e-3 * noise(1024, seed=1)])  # 60 dB below
    wrong = torch.cat([0.9 * x, noise(1024, seed=2)])
    # of the frames with speech only the one that reaches into the silence is not at 20 dB
    assert audio.segmental_snr(quiet, torch.cat([0.9 * x, 0.9 * quiet[1024:]])) == pytest.approx(20, abs=1e-4)
    assert 15 < audio.segmental_snr(quiet, wrong) < 20
    assert math.isnan(audio.segmental_snr(torch.zeros(1000), torch.ones(1000)))


def test_true_magnitudes_score_as_perfect(audio):
    """The check of the measures: STOI > 0.99 and PESQ > 4.3 for the true frames, and less under noise."""
    pytest.importorskip("pystoi")
    pytest.importorskip("pesq")
    (utterance,) = audio.vowels(3, speakers=1, each=1)
    x = utterance.samples
    frames = audio.stft(x)
    oracle = audio.sound(audio.log_power(frames), frames, len(x))
    noisy = x + 0.1 * noise(len(x))
    assert audio.stoi(x, oracle) > 0.99 > 0.9 > audio.stoi(x, noisy)
    assert audio.pesq(x, oracle) > 4.3 > 3 > audio.pesq(x, noisy)
    assert math.isnan(audio.stoi(x[:2000], x[:2000]))  # too short
    assert math.isnan(audio.pesq(torch.zeros(8000), torch.zeros(8000)))  # no speech


# ------------------------------------------------------------ runs
def test_run_on_wav_files(speech, audio, monkeypatch, capsys):
    titles = []

    def drawn(true, predicted, title, picture, draw=speech.draw_spectrograms):
        titles.append(title)
        draw(true, predicted, title, picture)

    monkeypatch.setattr(speech, "draw_spectrograms", drawn)
    for utterance in audio.vowels(0, speakers=4, each=3):
        Path("wavs", utterance.speaker).mkdir(parents=True, exist_ok=True)
        samples = (utterance.samples * 2**15).short().numpy()
        wavfile.write(f"wavs/{utterance.speaker}/{utterance.name}.wav", 8000, samples)
    speech.main([*SMOKE, "--data", "wavs", "--seconds", "2", "--out", "run", "--save-audio"])
    said = capsys.readouterr().out
    assert "6 utterances of 2 for train, 3 utterances of 1 for validation, 3 utterances of 1 for test" in said
    trials = [float(v) for v in re.findall(r"trial \d: validation MSE (\S+)", said)]
    best = Path("run") / f"trial-{trials.index(min(trials))}"
    assert f"pictures in {best}" in said
    assert (best / "results.md").read_text() in said
    for name in ("spectrograms.png", "learning_curve.png"):
        assert (best / name).read_bytes()[:4] == b"\x89PNG"
    rows = {row.split("|")[1].strip(): [float(c) for c in row.split("|")[2:-1]] for row in said.splitlines()
            if re.match(r"\| (full|persistence|oracle) \|", row)}  # fmt: skip
    _, _, validation, test = audio.load_speech(Path("wavs"), 0, seconds=2)
    assert titles == [f"true, utterance {max(test, key=lambda utterance: len(utterance.samples)).name}"]
    differences = [audio.log_power(audio.stft(u.samples)).diff(dim=0).square() for u in test]
    assert rows["persistence"][0] == pytest.approx(torch.cat(differences).mean().item(), abs=2e-3)
    copied = float(re.search(r"validation MSE of copied frames (\S+) dB²", said).group(1))
    batches = audio.frame_batches(validation, 3)
    assert copied == pytest.approx(audio.masked_mse(*next(iter(batches))).item(), abs=2e-3)
    assert rows["oracle"][:2] == [0, 35]
    assert rows["full"][0] > rows["persistence"][0] > 0  # a network that has learned nothing
    files = sorted((best / "audio").iterdir())
    assert [file.name for file in files] == ["0-full.wav", "0-oracle.wav", "0-persistence.wav"]
    rate, heard = wavfile.read(files[1])
    assert rate == 8000
    assert np.abs(heard - test[0].samples.numpy()).max() < 1e-4


def test_folders_without_speech_are_named_in_one_line(speech):
    Path("empty").mkdir()
    with pytest.raises(SystemExit, match=r"^--data nope: there is no folder nope$"):
        speech.main(["--smoke", "--data", "nope"])
    with pytest.raises(SystemExit, match=r"^--data empty: no wav file below empty\. .*$"):
        speech.main(["--smoke", "--data", "empty"])
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--hidden", "0", "must be at least 1, got 0"),
        ("--init", "orthogonal", "invalid choice: 'orthogonal' .*haar.*henaff.*"),
        ("--seconds", "0", "must be at least 0.064, two windows, got 0.0"),
    ],
)
def test_settings_that_make_no_sense(speech, capsys, flag, value, said):
    with pytest.raises(SystemExit) as refused:
        speech.main([flag, value])
    assert refused.value.code == 2
    assert re.search(rf"error: argument {flag}: {said}\n$", capsys.readouterr().err)


@pytest.mark.parametrize("model", ["lstm", "orthogonal", "frozen"])
def test_every_model(speech, model, capsys):
    speech.main([*SMOKE, "--model", model, "--trials", "1", "--epochs", "1", "--out", model])
    assert re.search(rf"\| {model} \| \d+\.\d+ ", capsys.readouterr().out)
    state = torch.load(f"{model}/trial-0/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())


def test_a_trial_resumes_as_if_it_had_not_stopped(speech):
    two = [*SMOKE, "--trials", "2", "--schedule", "constant"]  # a cosine knows how long it will be
    speech.main([*two, "--epochs", "3", "--out", "whole"])
    speech.main([*two, "--epochs", "1", "--out", "halves"])
    speech.main(["--epochs", "3", "--resume", "--out", "halves/trial-1"])
    a, b = (
        torch.load(f"{f}/trial-1/checkpoints/last.ckpt", weights_only=True)["state_dict"] for f in ("whole", "halves")
    )
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_missing_measures_are_named(speech, monkeypatch, capsys):
    for module in ("pystoi", "pesq"):
        monkeypatch.setitem(sys.modules, module, None)
    speech.main([*SMOKE, "--seconds", "2", "--trials", "1", "--epochs", "1", "--out", "run"])
    said = capsys.readouterr().out
    assert 'no STOI, PESQ: pip install -e ".[speech]"' in said
    assert re.search(r"\| oracle \| 0\.000 \| 35\.000 \| nan \| nan \|", said)
