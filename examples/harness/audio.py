"""Speech for the examples: wav files, spectrogram frames and back to sound, and measures of predicted speech.

Everything is at 8 kHz, with a periodic Hann window of 256 samples every 128, hence 129 bins and 62.5 frames a second
(Wisdom et al., 2016, section 4.3).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import warnings
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.io import wavfile
from scipy.signal import resample_poly
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

#: samples per second; samples per window, and from one to the next; bins of a frame
RATE, WINDOW, HOP, BINS = 8000, 256, 128, 129
#: what is added to |STFT|² before the logarithm
FLOOR = 1e-5
#: a frame is speech if its energy is within so many dB of the loudest one's
ACTIVITY = 40.0
#: the signal-to-noise ratio of one frame, in dB, counts within these bounds (customary in segmental SNR)
SNR_BOUNDS = (-10.0, 35.0)
#: first two formants in Hz of five vowels; the third is at 2,500 (Peterson and Barney, 1952, rounded)
VOWELS = ((730, 1090), (530, 1840), (270, 2290), (570, 840), (300, 870))


class Utterance(NamedTuple):
    """``samples`` (n,) at 8 kHz in [-1, 1], float32."""

    speaker: str
    name: str
    samples: Tensor


class Speech(NamedTuple):
    """``train``, ``validation``, ``test``: lists of utterances; ``about``: what they are, in a few words."""

    about: str
    train: list[Utterance]
    validation: list[Utterance]
    test: list[Utterance]


# ------------------------------------------------------------ data
def load_speech(folder: Path | None, seed: int, *, level: int = 1, by: str = "speaker", seconds: float) -> Speech:
    """The wav files below ``folder``, or synthetic vowels, cut after ``seconds``, and split by ``seed``."""
    if folder is None:
        return split(vowels(seed), "synthetic vowels (--data FOLDER for real speech)", seed, by)
    pieces = [piece for utterance in read_wavs(folder, level) for piece in cut(utterance, seconds)]
    return split(pieces, str(folder), seed, by)


def cut(utterance: Utterance, seconds: float) -> list[Utterance]:
    """Pieces of at most so many ``seconds``, all but those shorter than two windows."""
    pieces = utterance.samples.split(int(seconds * RATE))
    return [utterance._replace(samples=piece) for piece in pieces if len(piece) >= 2 * WINDOW]


def read_wavs(folder: Path, level: int = 1) -> list[Utterance]:
    """All wav files below ``folder``, mixed to one channel and resampled to 8 kHz.

    The speaker is the name of the ``level``-th folder below ``folder`` on the way to the file: 1 for ``anna/x.wav``,
    3 for TIMIT's ``TRAIN/DR1/FCJF0/SA1.wav``.

    Raises ``FileNotFoundError`` if there is no such folder or no wav file below it, and ``ValueError`` for one that is
    not PCM, or not so deep.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() == ".wav" and p.is_file()):
        folders = path.relative_to(folder).parts[:-1]
        if len(folders) < level:
            raise ValueError(f"{path} lies in {len(folders)} folders below {folder}, but its speaker is number {level}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", wavfile.WavFileWarning)  # chunks of other data after the samples
                rate, samples = wavfile.read(path)
        except ValueError as error:
            raise ValueError(f"{path}: {error}. Convert it to RIFF WAVE, for example by sox") from error
        found.append(Utterance(folders[level - 1], str(path.relative_to(folder)), _at_8_khz(samples, rate)))
    if not found:
        raise FileNotFoundError(
            f"no wav file below {folder}. --data needs a folder with one sub-folder per speaker, for example "
            "/usr/share/asterisk/sounds, from Debian's packages asterisk-core-sounds-{en,fr,it,ru}-wav"
        )
    return found


def _at_8_khz(samples: NDArray[Any], rate: int) -> Tensor:
    """One channel (n,) in [-1, 1] of samples (n,) or (n, channels), PCM or floating point."""
    x = samples.astype(np.float64)
    if samples.dtype == np.uint8:  # the one unsigned format
        x = (x - 128) / 128
    elif np.issubdtype(samples.dtype, np.integer):
        x = x / -float(np.iinfo(samples.dtype).min)
    x = x.mean(1) if x.ndim == 2 else x
    ratio = Fraction(RATE, rate)
    if ratio != 1:
        x = resample_poly(x, ratio.numerator, ratio.denominator)
    return torch.from_numpy(x).float()


def vowels(seed: int, speakers: int = 8, each: int = 12) -> list[Utterance]:
    """Synthetic speech: harmonics of a gliding pitch under the resonances of vowels that pass into each other.

    A voice has its own pitch and length of the vocal tract, which scales all formants; an utterance is 4 to 7 vowels of
    0.1 to 0.3 s between short silences, with a little noise.
    """
    rng = np.random.default_rng(seed)
    return [
        Utterance(f"voice{speaker}", f"{i}", _babble(rng, pitch, tract))
        for speaker, pitch, tract in zip(
            range(speakers), rng.uniform(90, 240, speakers), rng.uniform(0.9, 1.2, speakers), strict=True
        )
        for i in range(each)
    ]


def _babble(rng: np.random.Generator, pitch: float, tract: float) -> Tensor:
    ends = np.cumsum(rng.uniform(0.1, 0.3, rng.integers(4, 8)))
    t = np.arange(int(ends[-1] * RATE)) / RATE
    targets = np.array(VOWELS)[rng.integers(len(VOWELS), size=len(ends))] * tract
    formants = np.stack([*(np.interp(t, ends - 0.1, f) for f in targets.T), np.full_like(t, 2500 * tract)])
    fundamental = pitch * (1 + 0.1 * np.interp(t, ends, rng.uniform(-1, 1, len(ends))))
    harmonic = np.arange(1, int(0.95 * RATE / 2 / fundamental.max()))[:, None]
    gain = sum(
        g / (1 + ((harmonic * fundamental - f) / width) ** 2)
        for f, g, width in zip(formants, (1, 0.5, 0.2), (60, 90, 120), strict=True)
    )
    x = (gain * np.sin(2 * np.pi * harmonic * np.cumsum(fundamental) / RATE)).sum(0)
    x *= np.minimum(1, np.minimum(t, t[-1] - t) / 0.03) * 0.3 / np.abs(x).max()
    x = np.pad(x, RATE // 20) + 1e-4 * rng.standard_normal(len(x) + 2 * (RATE // 20))
    return torch.from_numpy(x).float()


def split(utterances: Sequence[Utterance], about: str, seed: int, by: str = "speaker") -> Speech:
    """A fifth of the speakers (at least one) each for validation and test, drawn by ``seed``; the rest for training.

    ``by="utterance"`` draws utterances instead: the splits then share their speakers.

    Raises ``ValueError`` if a part would be empty.
    """
    owner = [u.speaker if by == "speaker" else u.name for u in utterances]
    names = sorted(set(owner))
    if len(names) < 3:
        raise ValueError(
            f"splits need at least 3 of what they are drawn by, got {len(names)} ({by}: {', '.join(names)}): one "
            "folder for each speaker, or --split utterance, which shares speakers between training and test"
        )
    order = [names[i] for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))]
    n = max(1, len(names) // 5)
    parts = (set(order[2 * n :]), set(order[n : 2 * n]), set(order[:n]))
    return Speech(about, *([u for u, name in zip(utterances, owner, strict=True) if name in part] for part in parts))


# ------------------------------------------------------------ frames
def stft(samples: Tensor) -> Tensor:
    """Complex frames (T, 129) of samples (n,), T = 1 + n // 128, the ends reflected."""
    window = torch.hann_window(WINDOW, dtype=samples.dtype)
    return torch.stft(samples, WINDOW, HOP, window=window, return_complex=True).mT.contiguous()


def inverse_stft(frames: Tensor, length: int) -> Tensor:
    """The samples (length,) whose frames are nearest to ``frames`` (T, 129) in the sense of least squares."""
    window = torch.hann_window(WINDOW, dtype=frames.real.dtype)
    return torch.istft(frames.mT, WINDOW, HOP, window=window, length=length)


def log_power(frames: Tensor) -> Tensor:
    """10 log10(1e-5 + |frames|²), in dB."""
    return 10 * torch.log10(FLOOR + frames.abs().square())


def sound(log_powers: Tensor, frames: Tensor, length: int) -> Tensor:
    """Samples (length,) with the magnitudes of ``log_powers`` (T, 129), in dB, and the phases of ``frames``."""
    magnitudes = (10 ** (log_powers / 10) - FLOOR).clamp(min=0).sqrt()
    return inverse_stft(torch.polar(magnitudes, frames.angle()), length)


Batch = tuple[Tensor, Tensor]


def prediction_batch(sequences: Sequence[Tensor]) -> Batch:
    """Frames 0 to T_i - 2 of sequences (T_i, M), and their successors, each (B, T, M) with T = max T_i - 1.

    Behind the end of a sequence stand zeros in the inputs, and NaN in the targets: the mask of what is no frame.
    """
    inputs = torch.nn.utils.rnn.pad_sequence([x[:-1] for x in sequences], batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence([x[1:] for x in sequences], batch_first=True, padding_value=math.nan)
    return inputs, targets


def masked_mse(predicted: Tensor, targets: Tensor) -> Tensor:
    """Mean of |predicted - targets|² over the entries where ``targets`` is not NaN; the others have no gradient."""
    mask = ~targets.isnan()
    error = torch.where(mask, predicted - targets.nan_to_num(), 0)
    return error.square().sum() / mask.sum()


def persistence(utterances: Sequence[Utterance]) -> float:
    """Mean square error of every frame as the prediction of the next, in dB²."""
    return torch.cat([log_power(stft(u.samples)).diff(dim=0).square().mean(1) for u in utterances]).mean().item()


def frame_batches(utterances: Sequence[Utterance], batch: int, shuffle_seed: int | None = None) -> DataLoader[Batch]:
    """Utterances of similar length together; the order of the batches is drawn anew for every epoch, if at all."""
    frames = sorted((log_power(stft(utterance.samples)) for utterance in utterances), key=len)
    batches: Any = [prediction_batch(frames[i : i + batch]) for i in range(0, len(frames), batch)]
    if shuffle_seed is None:
        return DataLoader(batches, batch_size=None)
    order: DistributedSampler[Batch] = DistributedSampler(batches, num_replicas=1, rank=0, seed=shuffle_seed)
    # batches of one batch, and not batch_size=None, which asks for the order before Lightning has set a resumed epoch
    return DataLoader(batches, batch_size=1, sampler=order, collate_fn=_only)


def _only(items: list[Batch]) -> Batch:
    (item,) = items
    return item


# ------------------------------------------------------------ measures of speech
def segmental_snr(reference: Tensor, estimate: Tensor) -> float:
    """Mean over the frames with speech of 10 log10(Σ s² / Σ (s - ŝ)²), each within [-10, 35] dB; NaN if all is silent.

    Frames are 256 samples every 128. Voice activity: an energy within 40 dB of the loudest frame's.
    """
    signal, error = (x.unfold(0, WINDOW, HOP).square().sum(-1) for x in (reference, reference - estimate))
    active = signal > signal.max() * 10 ** (-ACTIVITY / 10)
    ratio = 10 * torch.log10(signal[active] / error[active].clamp(min=torch.finfo(error.dtype).tiny))
    return ratio.clamp(*SNR_BOUNDS).mean().item()


def stoi(reference: Tensor, estimate: Tensor) -> float:
    """Short-time objective intelligibility (Taal et al., 2011), at most 1; NaN where too little is not silent.

    Raises ``ModuleNotFoundError`` without pystoi.
    """
    from pystoi import stoi as measure

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RuntimeWarning)
        value = measure(reference.double().numpy(), estimate.double().numpy(), RATE)
    return math.nan if any("Not enough STFT frames" in str(w.message) for w in said) else float(value)


def pesq(reference: Tensor, estimate: Tensor) -> float:
    """Perceptual evaluation of speech quality, narrow band (ITU-T P.862), at most 4.55; NaN where it finds no speech.

    Raises ``ModuleNotFoundError`` without pesq.
    """
    from pesq import NoUtterancesError
    from pesq import pesq as measure

    if not reference.any():
        return math.nan
    try:
        return float(measure(RATE, reference.numpy(), estimate.numpy(), "nb"))
    except NoUtterancesError:
        return math.nan


MEASURES = {"SegSNR / dB": segmental_snr, "STOI": stoi, "PESQ": pesq}


def measures(reference: Tensor, estimate: Tensor) -> dict[str, float]:
    """All ``MEASURES`` of ``estimate``, both (n,); NaN for those that are not installed."""
    found = dict.fromkeys(MEASURES, math.nan)
    for name, function in MEASURES.items():
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = function(reference, estimate)
    return found


# ------------------------------------------------------------ pictures
def draw_spectrograms(true: Tensor, predicted: Tensor, title: str, picture: Path) -> None:
    """Frames (T, 129) in dB as they are and as predicted, and the difference, over seconds and kHz."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True, sharey=True)
    extent = (0, len(true) * HOP / RATE, 0, RATE / 2000)
    low, high = true.min().item(), true.max().item()
    for axes, frames, name in zip(panels, (true, predicted), (title, "predicted from the frames before"), strict=False):
        image = axes.imshow(frames.mT.numpy(), origin="lower", aspect="auto", extent=extent, vmin=low, vmax=high)
        axes.set(title=name, ylabel="kHz")
        figure.colorbar(image, ax=axes, label="dB")
    error = panels[2].imshow(
        (predicted - true).mT.numpy(), origin="lower", aspect="auto", extent=extent, vmin=-30, vmax=30, cmap="RdBu"
    )
    figure.colorbar(error, ax=panels[2], label="dB")
    panels[2].set(title="predicted − true", ylabel="kHz", xlabel="s")
    figure.savefig(picture, dpi=120)


def mean_of_numbers(values: list[float]) -> float:
    """The mean of those that are not NaN; NaN if none is."""
    return statistics.mean([v for v in values if not math.isnan(v)] or [math.nan])
