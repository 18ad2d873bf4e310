"""Evaluates agents in the units of the StarPilot report, sums of normalised rewards, and in raw returns.

    python -m experiments.studies.starpilot_study.units runs/tables/*_procgen__*/1/*/ --csv starpilot_study.csv

The report normalises rewards by Baselines' VecNormalize (gamma 0.99, clipped to 10), reset for each evaluation of 32
environments with one episode each. With --csv, draws all rows of the file over the number of training levels.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import evaluate
from common import envs, runs
from common.flags import PositiveInt, Seed
from experiments import plot, records

GAMES = 32
PUBLISHED = Path(__file__).with_name("published.csv")
SETTING = "method", "game", "encoder", "hidden", "training levels"


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """runs of Procgen scripts, or exported agents"""
    batches: PositiveInt = 8
    """evaluations of 32 episodes, each with a normaliser of its own"""
    seed: Seed = 0
    """seed of the games and the policy"""
    csv: str = ""
    """table to add rows to, with a picture beside it"""


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
        games = envs.make_procgen(saved, GAMES, drawn, levels)
        env = Normalized(games, GAMES)
        played = envs.play_episodes(env, policy, saved.stack_offsets, episodes=GAMES, seed=drawn)
        games.close()
        normalized.append(played.returns)
        raw.append(env.raw)
    return np.concatenate(normalized), np.concatenate(raw)


def method_of(script: str, saved) -> str:
    """An algorithm's name in published.csv."""
    penalty = getattr(saved, "penalty", 0)
    return f"penalty {penalty:g}" if penalty else script.removesuffix("_procgen").upper()


def draw(ours: list[dict], theirs: list[dict]) -> plot.plt.Figure:
    """Normalised returns over the number of training levels, on these to the left and on test levels to the right:
    published hollow and dotted, ours with standard errors and a line through the means over runs."""
    counts = sorted({int(row["training levels"]) for row in [*ours, *theirs]}, key=lambda n: n or np.inf)
    at = {n: n or 3 * max(1, *counts) for n in counts}  # all levels are drawn at the right end

    def setting_of(row):
        return f"{row['method']}, {row['encoder']} encoder, {row['hidden']} units"

    figure, axes = plot.plt.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout="constrained")
    for i, setting in enumerate(dict.fromkeys(map(setting_of, ours))):
        style = plot.style_of(i)
        published = [row for row in theirs if setting_of(row) == setting]
        for axis, on in zip(axes, ("train", "test"), strict=True):
            rows = [row for row in ours if row["on"] == on and setting_of(row) == setting]
            x = np.array([at[int(row["training levels"])] for row in rows])
            y, error = np.array([(float(row["normalized"]), float(row["normalized error"])) for row in rows]).T
            axis.errorbar(x, y, error, **style | {"ls": "none"}, capsize=3, label=f"{setting}: ours")
            axis.plot(np.unique(x), [y[x == n].mean() for n in np.unique(x)], color=style["color"], lw=style["lw"])
            if published:
                x, y = zip(*((at[int(row["training levels"])], float(row[on])) for row in published), strict=True)
                axis.plot(x, y, **style | {"ls": (0, (1, 2)), "mfc": "w", "ms": 6}, label=f"{setting}: published")
    for axis, title in zip(axes, ("training levels", "test levels"), strict=True):
        axis.set(title=title, xscale="log", xlabel="number of training levels", ylim=(0, None))
        axis.set_xticks(list(at.values()), [str(n) if n else "all" for n in counts], fontsize=7, rotation=90)
        axis.minorticks_off()
    axes[0].set_ylabel("return, of normalised rewards")
    return figure


def main(args: Args) -> None:
    path, origin, shown = Path(args.csv), records.origin(), []
    for run_dir in args.run_dirs:
        script, saved, _, step, policy = evaluate.procgen_policy(run_dir)
        values = method_of(script.SCRIPT, saved), saved.env_id, saved.encoder, saved.hidden, saved.num_levels
        setting = dict(zip(SETTING, values, strict=True)) | {"step": step}
        rows = []
        for levels in ("train", "test"):
            row = {"run": Path(run_dir).name, "on": levels}
            both = play(saved, policy, levels, batches=args.batches, seed=args.seed)
            for name, returns in zip(("normalized", "raw"), both, strict=True):
                stats = envs.summarize(returns)
                row |= {name: f"{stats['mean_return']:.2f}", f"{name} error": f"{stats['standard_error']:.2f}"}
            rows.append(row)
        shown += rows
        if args.csv:
            records.add_rows(path, [row | setting | origin for row in rows], ("run", *SETTING, "on"))
    evaluate.show("normalised and raw returns", shown)
    if args.csv:
        figure = draw(
            [row for row in records.read_rows(path) if row["game"] == "starpilot"], records.read_rows(PUBLISHED)
        )
        plot.write_picture(str(path.with_suffix("")), ".png", figure)


if __name__ == "__main__":
    runs.cli(Args, main)
