"""A policy's returns in the units of the StarPilot study, beside raw ones, on its training levels and on unseen ones.

The study's returns are sums of *normalised* rewards: Baselines' VecNormalize (discount .99, clipped to 10), begun anew
for each evaluation of 32 games with an episode each. Try:

    python -m experiments.study_units runs/tables/*_procgen__*/1/*/ --csv experiments/results/starpilot_study.csv
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import evaluate
from benchmarks import records
from common import devices, envs, runs

GAMES = 32


@dataclass(frozen=True)
class Args:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """runs of Procgen scripts, or exported agents"""
    batches: int = 8
    """evaluations of 32 episodes, each with a normaliser of its own"""
    seed: int = 0
    """of the games and the policy's draws"""
    csv: str = ""
    """also write the table to this file, among the rows of other runs that it has"""


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
    return f"penalty {penalty:g}" if penalty else script.split("_")[0].upper()


def main(args: Args) -> list[dict]:
    """Evaluates each run; returns the table's rows."""
    runs.check_limits(args, {"batches": (1, 10**4), "seed": (0, runs.MAX_SEED)})
    runs.check(len(args.run_dirs) > 0, "RUN_DIRS: give at least one")
    path = Path(args.csv)
    old = records.read_rows(path) if args.csv else []
    ours = all({"run", "on", "normalized"} <= row.keys() for row in old)
    runs.check(ours, f"--csv {args.csv}: is another table, give another file")
    policies = {run_dir: evaluate.procgen_policy(run_dir) for run_dir in args.run_dirs}
    for run_dir, (_, saved, _, _) in policies.items():
        even = devices.multiple(saved, GAMES) == GAMES
        runs.check(even, f"RUN_DIR {run_dir}: plays on {saved.num_devices} devices, which must divide {GAMES} games")
    rows, shown = [], []
    for run_dir, (script, saved, step, policy) in policies.items():
        about = {"method": method_of(script.SCRIPT, saved), "game": saved.env_id, "encoder": saved.encoder}
        about |= {"hidden": saved.hidden, "training levels": saved.num_levels, "step": step}
        for levels in ("train", "test"):
            row = {"run": Path(run_dir).name, "on": levels}
            both = play(saved, policy, levels, batches=args.batches, seed=args.seed)
            for name, returns in zip(("normalized", "raw"), both, strict=True):
                row |= {name: f"{returns.mean():.2f}", f"{name} error": f"{returns.std() / len(returns) ** 0.5:.2f}"}
            shown.append(row)
            rows.append(row | about)
        if args.csv:
            records.add_rows(path, [row | records.origin() for row in rows[-2:]], ("run",))
    evaluate.show("the StarPilot study's units and raw returns", shown, {})
    return rows


if __name__ == "__main__":
    runs.cli(Args, main)
