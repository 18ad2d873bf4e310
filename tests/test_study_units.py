"""The StarPilot study's units: rewards over the running deviation of discounted returns, as Baselines computes it."""

import types

import numpy as np
import pytest
from conftest import ROOT, assert_refused

import ppo_procgen
from common import envs, runs
from experiments import constant_actions, records, study_units

pytestmark = pytest.mark.optimised  # episodes are played to their end


class Played:
    """An env that replays rewards float64 [T, N] and ends of episodes bool [T, N]."""

    def __init__(self, rewards, done):
        self._steps = zip(rewards, done, strict=True)

    def step(self, _):
        rewards, done = next(self._steps)
        return None, rewards, done, np.zeros_like(done), {}


def test_rewards_are_divided_as_baselines_does():
    """A reference that keeps all discounted returns, after a prior of weight 1e-4 with mean 0 and variance 1."""
    rng = np.random.default_rng(0)
    rewards, done = rng.exponential(size=(60, 5)) * (rng.random((60, 5)) < 0.3), rng.random((60, 5)) < 0.1
    rewards[1:][done[:-1]] = 0  # EnvPool's junk step
    rewards[40, 0], rewards[50, 1], done[39:50, :2] = 900, -9000, False  # beyond what is clipped
    env = study_units.Normalized(Played(rewards, done), 5)
    returns, seen, first, raw, extremes = np.zeros(5), [], np.ones(5, bool), np.zeros(5), []
    for t in range(60):
        _, scaled, *_ = env.step(None)
        returns = 0.99 * returns + rewards[t]
        junk = done[t - 1] if t else np.zeros(5, bool)
        seen += list(returns[~junk])
        weights = np.array([1e-4] + [1] * len(seen))
        mean = weights @ [0, *seen] / weights.sum()
        variance = (1e-4 * (1 + mean**2) + ((np.array(seen) - mean) ** 2).sum()) / weights.sum()
        np.testing.assert_allclose(scaled, np.clip(rewards[t] / np.sqrt(variance + 1e-8), -10, 10), rtol=1e-9)
        extremes += [scaled.min(), scaled.max()]
        returns[done[t]] = 0
        raw += np.where(first, rewards[t], 0)
        first &= ~done[t]
    np.testing.assert_allclose(env.raw, raw)
    assert (min(extremes), max(extremes)) == (-10, 10)


def test_raw_returns_are_those_of_an_evaluation():
    args = ppo_procgen.Args(env_id="starpilot")
    normalized, raw = study_units.play(args, envs.random_policy, "test", batches=1, seed=3)
    seed = envs.derive_seed(3, 0)
    plain, *_ = envs.play_episodes(
        envs.make_levels(args, 32, seed, "test"), envs.random_policy, args.offsets, episodes=32, seed=seed
    )
    np.testing.assert_array_equal(raw, plain)
    assert ((normalized > 0) == (raw > 0)).all()


def test_an_agent_gets_a_row(tmp_path, monkeypatch, capfd):
    path, play, played = tmp_path / "units.csv", study_units.play, {}

    def play_once(args, policy, levels, **how):
        if levels not in played:
            played[levels] = play(args, policy, levels, **how)
        return played[levels]

    monkeypatch.setattr(study_units, "play", play_once)
    args = study_units.Args((str(ROOT / "agents" / "ppo_coinrun"),), batches=1, csv=str(path))
    study_units.main(args)
    first = records.read_rows(path)
    others = [row | {"game": "maze"} for row in first]  # another run, whose folder has the same name
    records.write_rows(path, [row | {"raw": "0"} for row in first] + others)
    study_units.main(args)  # its rows are replaced, the other's are kept
    rows = records.read_rows(path)
    assert rows == others + first
    assert [row["on"] for row in first] == ["train", "test"]
    assert {(row["method"], row["training levels"]) for row in rows} == {("PPO", "0")}
    assert min(float(row["raw"]) for row in rows) > 3
    capfd.readouterr()
    assert_refused(study_units, [args.run_dirs[0], "--csv", tmp_path], capfd, f"--csv {tmp_path}", "name of a file")
    other = str(ROOT / "experiments" / "reference" / "tables.csv")
    assert_refused(study_units, [args.run_dirs[0], "--csv", other], capfd, f"--csv {other}", "another table")
    assert_refused(study_units, [args.run_dirs[0], "--csv", tmp_path / "a.png"], capfd, "--csv", "ends in .csv")
    assert_refused(study_units, [str(ROOT / "agents" / "hnppo_six_doors")], capfd, "RUN_DIR", "give a run of Procgen")


def test_the_picture_has_each_run_beside_the_published():
    """Two runs of 10 levels with a line through their mean, one of all levels at the right end."""
    setting = {"method": "PPO", "encoder": "nature", "hidden": "32", "normalized error": "0.5", "step": "2000"}
    ours = [
        setting | {"on": on, "training levels": levels, "normalized": str(value + (on == "test"))}
        for levels, value in (("10", 3), ("10", 5), ("0", 7))
        for on in ("train", "test")
    ]
    theirs = [setting | {"training levels": "10", "train": "11.4", "test": "6.5"}]
    theirs += [setting | {"method": "TRPO", "training levels": "1000", "train": "1", "test": "1"}]
    figure = study_units.draw(ours, theirs)
    for axis, more, published in zip(figure.axes, (0, 1), (11.4, 6.5), strict=True):
        seen = [tuple(zip(*line.get_data(), strict=True)) for line in axis.lines]
        assert ((10, 3 + more), (10, 5 + more), (3000, 7 + more)) in seen
        assert ((10, 4 + more), (3000, 7 + more)) in seen
        assert ((10, published),) in seen
        assert not any(y == 1 for line in seen for _, y in line)  # of a method that ours are not
        assert [label.get_text() for label in axis.get_xticklabels()] == ["10", "1000", "all"]


def test_rows_are_not_added_to_another_table(tmp_path):
    path = tmp_path / "rows.csv"
    records.write_rows(path, [{"run": "a", "raw": 1}])
    records.add_rows(path, [{"run": "a", "raw": 2}, {"run": "b", "raw": 3}], ("run",))
    before = path.read_text()
    assert before.split() == ["run,raw", "a,2", "b,3"]
    (tmp_path / "empty.csv").touch()
    records.append_rows(str(tmp_path / "empty.csv"), records.read_rows(path))
    assert (tmp_path / "empty.csv").read_text() == before
    for row in ({"run": "a", "other": 1}, {"raw": 1}):
        with pytest.raises(runs.UsageError, match="has other columns than"):
            records.add_rows(path, [row], tuple(row)[:1])
    assert path.read_text() == before
    path.write_text("run,raw\na,1")  # cut short
    records.append_rows(str(path), [{"run": "b", "raw": 2}])
    assert path.read_text().split() == ["run,raw", "a,1", "b,2"]


def test_a_row_says_that_its_commit_is_not_clean(monkeypatch):
    said = {"status": " M a\n", "rev-parse": "abc\n"}
    monkeypatch.setattr(records.subprocess, "run", lambda words, **_: types.SimpleNamespace(stdout=said[words[1]]))
    assert records.commit() == "abc+"
    said["status"] = ""
    assert records.commit() == "abc"


def test_half_a_run_is_no_measurement(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        records.lines_of(types.SimpleNamespace(stop="SIGINT", path=tmp_path))


def test_constant_actions_are_played_and_the_best_one_anew(tmp_path, monkeypatch, capfd):
    """Of standing still and running right and jumping on coinrun; the same seeds make the same table."""
    monkeypatch.setattr(constant_actions, "ACTIONS", constant_actions.ACTIONS[:9])
    rows = constant_actions.main(constant_actions.Args(("coinrun",), episodes=4, seed=3, out=str(tmp_path / "a")))
    by_name = {row["action"]: row for row in rows}
    assert float(by_name["right up"]["mean"]) > float(by_name["none"]["mean"]) == 0
    best = by_name["right up, played anew"]
    assert best["episodes"] == 16
    assert constant_actions.play("coinrun", 8, "right up, played anew", episodes=16, seed=4).items() <= best.items()
    assert len(records.read_rows(tmp_path / "a.csv")) == len(rows) == 11
    with monkeypatch.context() as patch:
        patch.setattr(envs, "play_episodes", lambda *_, **how: (np.array([1.0, 2, 3, 6]),))
        row = constant_actions.play("maze", 0, "left", episodes=4, seed=0)
        assert list(row.values())[2:6] == ["3.000", "1.080", "1", "6"]
        constant_actions.main(constant_actions.Args(("maze",), episodes=4, out=str(tmp_path / "a")))
    assert {row["game"] for row in records.read_rows(tmp_path / "a.csv")} == {"coinrun", "maze"}
    capfd.readouterr()
    assert_refused(constant_actions, ["bigfsh"], capfd, "GAMES bigfsh", "did you mean bigfish?")
    assert_refused(constant_actions, [], capfd, "GAMES", "give at least one")
    assert_refused(constant_actions, ["bigfish", "--episodes", 1], capfd, "--episodes 1", "2")
