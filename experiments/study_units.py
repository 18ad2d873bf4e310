"""A policy's returns in the units of the StarPilot study, beside raw ones, on its training levels and on unseen ones.

The study's returns are sums of *normalised* rewards: Baselines' VecNormalize (discount .99, clipped to 10), begun anew
for each evaluation of 32 games with an episode each. Try:

    python -m experiments.study_units runs/tables/*_procgen__*/1/*/ --csv experiments/results/starpilot_study.csv

Beside the file goes a picture of its rows: returns over the number of training levels, published and ours.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from annotated_types import Interval

import evaluate
from benchmarks import records
from common import devices, envs, files, runs
from common.flags import Seed
from experiments import plot, reproduce

GAME, GAMES = "starpilot", 32
REFERENCE = reproduce.REFERENCE.parent / "starpilot_study.csv"
SETTING = "method", "game", "encoder", "hidden", "training levels"
# A run's rows are known by these: folders of two runs that began in the same second have the same name.
KEY = "run", *SETTING, "on"
MEASURED = "normalized", "normalized error", "raw", "raw error"


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """runs of Procgen scripts, or exported agents"""
    batches: Annotated[int, Interval(ge=1, le=10**4)] = 8
    """evaluations of 32 episodes, each with a normaliser of its own"""
    seed: Seed = 0
    """of the games and the policy's draws"""
    csv: str = ""
    """also write the table to this file, among the rows of other runs that it has; a picture goes beside it"""


class Normalized:
    """An EnvPool whose rewards are divided by the running deviation of the discounted return (Baselines' VecNormalize).

    `raw`: float64 [N], the raw return of each game's first episode.
    """

    def __init__(self, env, num_envs: int, gamma: float = 0.99, clip: float = 10.0):
        self._env, self._gamma, self._clip = env, gamma, clip
        self._mean, self._var, self._count = 0.0, 1.0, 1e-4
        self._returns = np.zeros(num_envs)
        self._junk = np.zeros(num_envs, bool)  # EnvPool's step between two episodes, which Baselines does not have
        self._first = np.ones(num_envs, bool)
        self.raw = np.zeros(num_envs)

    def reset(self):
        return self._env.reset()

    def step(self, actions):
        obs, rewards, terminated, truncated, info = self._env.step(actions)
        done = terminated | truncated
        self.raw += rewards * self._first
        self._first &= ~done
        self._returns = self._returns * self._gamma + rewards
        self._update(self._returns[~self._junk])
        self._returns[done] = 0
        self._junk = done
        scaled = np.clip(rewards / np.sqrt(self._var + 1e-8), -self._clip, self._clip)
        return obs, scaled, terminated, truncated, info

    def _update(self, x: np.ndarray) -> None:
        """Mean and variance of two samples in one (Chan et al. 1979)."""
        delta, count = x.mean() - self._mean, self._count + len(x)
        squares = self._var * self._count + x.var() * len(x) + delta**2 * self._count * len(x) / count
        self._mean += delta * len(x) / count
        self._var, self._count = squares / count, count


def play(saved, policy, levels: str, *, batches: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Normalised and raw returns, float64 [batches x 32], on "train" or "test" levels."""
    normalized, raw = [], []
    for batch in range(batches):
        drawn = envs.derive_seed(seed, batch)
        games = envs.make_levels(saved, GAMES, drawn, levels)
        env = Normalized(games, GAMES)
        returns, *_ = envs.play_episodes(env, policy, saved.offsets, episodes=GAMES, seed=drawn)
        games.close()
        normalized.append(returns)
        raw.append(env.raw)
    return np.concatenate(normalized), np.concatenate(raw)


def method_of(script: str, saved) -> str:
    """An algorithm's name, as in experiments/reference/starpilot_study.csv."""
    penalty = getattr(saved, "penalty", 0)
    return f"penalty {penalty:g}" if penalty else script.removesuffix("_procgen").upper()


def setting_of(row: dict) -> tuple[str, ...]:
    """What a line of the picture is of."""
    return row["method"], f"{row['encoder']} encoder", f"{row['hidden']} units"


def draw(ours: list[dict], theirs: list[dict]) -> plot.plt.Figure:
    """Returns in the study's units over the number of training levels: on these to the left, unseen ones to the right.

    Published is hollow and dotted; ours a mark for each run, with its standard error, and a line through the means of
    the longest.
    """
    counts = sorted({int(row["training levels"]) for row in [*ours, *theirs]}, key=lambda n: n or np.inf)
    at = {n: n or 3 * max(1, *counts) for n in counts}  # all levels are drawn at the right end
    figure, axes = plot.plt.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout="constrained")
    groups = list(dict.fromkeys(setting_of(row) for row in ours))
    for i, group in enumerate(groups):
        style = plot.style_of(i)
        hollow = style | {"ls": (0, (1, 2)), "mfc": "w", "ms": 6}
        published = [row for row in theirs if setting_of(row) == group]
        x_published = [at[int(row["training levels"])] for row in published]
        for axis, on in zip(axes, ("train", "test"), strict=True):
            rows = [row for row in ours if row["on"] == on and setting_of(row) == group]
            x = np.array([at[int(row["training levels"])] for row in rows])
            y = np.array([float(row["normalized"]) for row in rows])
            error = [float(row["normalized error"]) for row in rows]
            axis.errorbar(x, y, error, **style | {"ls": "none"}, capsize=3, label=f"{', '.join(group)}: ours")
            steps = np.array([int(row["step"]) for row in rows])
            long = steps >= 0.98 * steps.max(initial=0)  # a mean with runs that were stopped would be of no length
            means = {n: y[long & (x == n)].mean() for n in np.unique(x[long])}
            axis.plot(list(means), list(means.values()), color=style["color"], lw=style["lw"])
            if published:
                y_published = [float(row[on]) for row in published]
                axis.plot(x_published, y_published, **hollow, label=f"{', '.join(group)}: published")
    for axis, title in zip(axes, ("training levels", "unseen levels"), strict=True):
        axis.set(title=title, xscale="log", xlabel="number of training levels", ylim=(0, None))
        axis.set_xticks(list(at.values()), [str(n) if n else "all" for n in counts], fontsize=7, rotation=90)
        axis.minorticks_off()
    axes[0].set_ylabel("return, of normalised rewards")
    return figure


def main(args: Args) -> list[dict]:
    """Evaluates each run; returns the table's rows."""
    runs.check(len(args.run_dirs) > 0, "RUN_DIRS: give at least one")
    path, origin = Path(args.csv), records.origin()
    if args.csv:
        files.make_room(path, "--csv")
        runs.check(path.suffix == ".csv", f"--csv {args.csv}: give a name that ends in .csv")
        old = records.read_rows(path)
        ours = not old or list(old[0]) == ["run", "on", *MEASURED, *SETTING, "step", *origin]
        runs.check(ours, f"--csv {args.csv}: is another table, give another file")
    policies = {run_dir: evaluate.procgen_policy(run_dir) for run_dir in args.run_dirs}
    for run_dir, (_, saved, _, _) in policies.items():
        even = devices.multiple(saved, GAMES) == GAMES
        runs.check(even, f"RUN_DIR {run_dir}: plays on {saved.num_devices} devices, which must divide {GAMES} games")
    rows, shown = [], []
    for run_dir, (script, saved, step, policy) in policies.items():
        values = method_of(script.SCRIPT, saved), saved.env_id, saved.encoder, saved.hidden, saved.num_levels
        about = dict(zip(SETTING, values, strict=True)) | {"step": step}
        for levels in ("train", "test"):
            row = {"run": Path(run_dir).name, "on": levels}
            both = play(saved, policy, levels, batches=args.batches, seed=args.seed)
            for name, returns in zip(("normalized", "raw"), both, strict=True):
                said = envs.summarize(returns)
                row |= {name: f"{said['mean_return']:.2f}", f"{name} error": f"{said['standard_error']:.2f}"}
            shown.append(row)
            rows.append(row | about)
        if args.csv:
            records.add_rows(path, [row | origin for row in rows[-2:]], KEY)
    played = [row for row in records.read_rows(path) if row["game"] == GAME] if args.csv else []
    if played:
        plot.write_picture(str(path.with_suffix("")), ".png", draw(played, records.read_rows(REFERENCE)))
    evaluate.show("the StarPilot study's units and raw returns", shown, {})
    return rows


if __name__ == "__main__":
    runs.cli(Args, main)
