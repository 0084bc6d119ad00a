"""Speech, predicted one spectrogram frame ahead: log-magnitude frames by a unitary RNN, and the sound they make.

``python examples/speech_frames.py --data FOLDER`` reads all wav files below FOLDER, one sub-folder for each speaker,
and trains on some speakers to predict the others': frame t + 1 of 10 log10(1e-5 + |STFT|²) from the frames up to t.
Of ``--trials`` networks the one that is best in validation is tested. Its frames, with the true phases, become sound,
of which SegSNR, STOI and PESQ are measured; beside them stand those of copied frames, which are to be beaten, and
those of the true frames, which show that the measures work. Without ``--data`` the speech is synthetic.

Wisdom et al., 2016 (section 4.3, on TIMIT). STOI and PESQ: ``pip install -e ".[speech]"``.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from harness.audio import (
    BINS,
    MEASURES,
    RATE,
    WINDOW,
    Speech,
    Utterance,
    draw_spectrograms,
    frame_batches,
    load_speech,
    log_power,
    masked_mse,
    mean_of_numbers,
    measures,
    persistence,
    sound,
    stft,
)
from harness.cli import parse, positive, training_parser
from harness.models import MODELS, STARTS, SequenceModel, count_parameters
from harness.plots import learning_curve, read_logs
from harness.training import Sequences, fit, health, outcome
from scipy.io import wavfile
from torch import Tensor

#: hidden units of about 83,000 parameters (Wisdom et al., 2016, quoted, not re-checked); of orthogonal and rnn, ours
SIZES = {"full": 128, "frozen": 128, "restricted": 158, "lstm": 84, "orthogonal": 185, "rnn": 185}
#: an utterance that is measured has at least so many seconds
SHORTEST = 1.0
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"trials": 3, "epochs": 100, "batch": 28, "optimizer": "paper", "schedule": "constant", "seconds": 60.0},
    "smoke": {"hidden": 6, "trials": 2, "epochs": 2, "measured": 2, "seconds": 0.5},
}


class FramePredictor(Sequences):
    """The next frames (B, T, 129) in dB from frames (B, T, 129), each bin standardised as in ``train``."""

    def __init__(self, args: Namespace, train: list[Utterance]) -> None:
        super().__init__(args, SequenceModel(args.model, BINS, args.hidden, BINS, start=args.init))
        frames = torch.cat([log_power(stft(utterance.samples)) for utterance in train])
        self.register_buffer("mean", frames.mean(0))
        self.register_buffer("deviation", frames.std(0).clamp(min=0.1))
        self.mean: Tensor
        self.deviation: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.mean + self.deviation * self.model((x - self.mean) / self.deviation)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return masked_mse(outputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        frames = int((~batch[1].isnan()).sum())  # so that the mean over batches is that over frames
        self.log("val_loss", self.loss(self(batch[0]), batch[1]), prog_bar=True, batch_size=frames)


def trial(args: Namespace, data: Speech) -> tuple[FramePredictor, dict[str, Any]]:
    """Train one network; it comes back with the parameters that were best in validation."""
    start = time.perf_counter()
    L.seed_everything(args.seed, workers=True, verbose=False)
    task = FramePredictor(args, data.train)
    train = frame_batches(data.train, args.batch, args.seed)
    result = outcome(fit(task, train, frame_batches(data.validation, args.batch), args), task, start)
    out = result["out"]
    learning_curve(out / "csv", out / "learning_curve.png", loss="MSE / dB²", score=None)
    task.load_state_dict(torch.load(out / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"])
    return task, {**result, "validation": min(read_logs(out / "csv")["val_loss"].values())}


@torch.no_grad()
def test(task: FramePredictor, test: list[Utterance], args: Namespace, out: Path) -> dict[str, dict[str, float]]:
    """Mean square error and measures of the sound, by who predicts: the model, the frame before, the true frame."""
    squares: dict[str, list[Tensor]] = {name: [] for name in (args.model, "persistence", "oracle")}
    found: dict[str, dict[str, list[float]]] = {name: {measure: [] for measure in MEASURES} for name in squares}
    long = [i for i, utterance in enumerate(test) if len(utterance.samples) >= SHORTEST * RATE]
    measured = set(long[:: max(1, len(long) // args.measured)][: args.measured])
    for i, utterance in enumerate(test):
        x = utterance.samples
        frames = stft(x)
        true = log_power(frames)
        guesses = {args.model: task(true[None, :-1])[0], "persistence": true[:-1], "oracle": true[1:]}
        for name, guess in guesses.items():
            squares[name].append((guess - true[1:]).square().mean(1))
            if i not in measured:
                continue
            heard = sound(torch.cat([true[:1], guess]), frames, len(x))
            for measure, value in measures(x, heard).items():
                found[name][measure].append(value)
            if args.save_audio:
                (out / "audio").mkdir(exist_ok=True)
                wavfile.write(out / "audio" / f"{i}-{name}.wav", RATE, heard.clamp(-1, 1).numpy())
    return {
        name: {
            "MSE / dB²": torch.cat(squares[name]).mean().item(),
            **{m: mean_of_numbers(v) for m, v in found[name].items()},
        }
        for name in squares
    }


def run(args: Namespace) -> dict[str, Any]:
    """All trials, and the test of the best: a table, printed and in results.md, pictures and sound in its folder."""
    torch.set_num_threads(args.threads)
    try:
        data = load_speech(args.data, args.split_seed, level=args.level, by=args.split, seconds=args.seconds)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--data {args.data}: {error}" if args.data else str(error)) from error
    counts = ", ".join(f"{len(p)} utterances of {len({u.speaker for u in p})} for {n}" for n, p in zip(
        data._fields[1:], data[1:], strict=True))  # fmt: skip
    print(f"{data.about}: {counts}\nvalidation MSE of copied frames {persistence(data.validation):.3f} dB²", flush=True)
    runs = []
    for number in range(1 if args.resume else args.trials):
        own = {} if args.resume else {"seed": args.seed + number, "out": args.out and args.out / f"trial-{number}"}
        runs.append(trial(Namespace(**{**vars(args), **own}), data))
        print(f"trial {number}: validation MSE {runs[-1][1]['validation']:.3f} dB²", flush=True)
    task, result = min(runs, key=lambda run: run[1]["validation"])
    out = result["out"]
    rows = test(task, data.test, args, out)
    lines = [f"| {args.model}, N = {args.hidden} | {' | '.join(next(iter(rows.values())))} |", "|---" * 5 + "|"]
    lines += [f"| {name} | {' | '.join(f'{v:.3f}' for v in row.values())} |" for name, row in rows.items()]
    print(*lines, sep="\n")
    (out / "results.md").write_text("\n".join(lines) + "\n")
    shown = max(data.test, key=lambda utterance: len(utterance.samples))
    frames = log_power(stft(shown.samples))
    with torch.no_grad():
        draw_spectrograms(
            frames[1:], task(frames[None, :-1])[0], f"true, utterance {shown.name}", out / "spectrograms.png"
        )
    return {**result, "rows": rows, "parameters": count_parameters(task), "trials": [r["validation"] for _, r in runs]}


def main(argv: list[str] | None = None) -> None:
    """Command line: see ``--help``."""
    parser = training_parser("speech_frames", __doc__, lr=1e-3, epochs=20, batch=28, optimizer="paper")
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="wav files, one sub-folder for each speaker")
    add("--level", type=positive, default=1, help="which sub-folder names the speaker; 3 for TIMIT (%(default)s)")
    add(
        "--split", default="speaker", choices=("speaker", "utterance"), help="what the parts do not share (%(default)s)"
    )
    add("--seconds", type=float, default=4.0, help="longer utterances are cut into such pieces (%(default)s)")
    add("--model", default="full", choices=MODELS, help="(%(default)s)")
    add("--hidden", type=positive, help="units N (about 83,000 parameters)")
    add("--init", default="haar", choices=STARTS, help="what W of the full and frozen model starts from (%(default)s)")
    add("--trials", type=positive, default=3, help="networks trained, of which one is tested (%(default)s)")
    add("--measured", type=positive, default=100, help="test utterances whose sound is measured (%(default)s)")
    add("--save-audio", action="store_true", help="keep that sound as wav files")
    args = parse(parser, argv, PRESETS)
    if args.seconds * RATE < 2 * WINDOW:
        parser.error(f"argument --seconds: must be at least {2 * WINDOW / RATE}, two windows, got {args.seconds}")
    args.hidden = args.hidden or SIZES[args.model]
    args.split_seed = args.split_seed if args.resume else args.seed  # the trials differ in their seeds alone
    result = run(args)
    missing = [m for m, value in result["rows"]["oracle"].items() if math.isnan(value)]
    if missing:
        print(f'no {", ".join(missing)}: pip install -e ".[speech]", and test speech of more than {SHORTEST} s')
    print(
        f"{result['parameters']} parameters, {health(result)}, {result['epochs']} epochs of the best trial in "
        f"{result['seconds']:.0f} s; logs, checkpoints, table and pictures in {result['out']}"
    )


if __name__ == "__main__":
    main()
