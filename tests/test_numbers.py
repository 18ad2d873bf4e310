"""What tables, pictures and studies say of runs that are made up: the numbers by hand."""

import types

import numpy as np
import pytest
from conftest import ROOT
from test_plots import EVALUATION, draw, evaluated, summary, write_run

import ppo_procgen
from common import envs, files
from experiments import curves, levels, plot, records, reproduce, study_units


@pytest.fixture
def maze(tmp_path, monkeypatch):
    """A table of one cell; the rows of its one run's curve."""
    row = reproduce.published()[0] | {"table": "small", "cell": "runs, maze", "flags": "env_id=maze"}
    records.write_rows(tmp_path / "tables.csv", [row])
    monkeypatch.setattr(reproduce, "REFERENCE", tmp_path / "tables.csv")
    about = {"cell": "runs, maze", "seed": 1, "of steps": 1800}
    points = ({"global_step": 10 * i, "hours": f"{i / 100:.4f}", reproduce.RETURN: i} for i in range(1, 181, 3))
    return [about | point for point in points]


def test_marks_stand_beside_their_cells(tmp_path, monkeypatch):
    names = dict.fromkeys(["note", "seconds", "steps", "machine", "jax", "date", "command", "metric"], "")
    rows = [
        names | {"cell": "ours", "published": "", "ours": 2.5, "low": 2.0, "high": 4.0, "seeds": 3, "commit": "abc"},
        names | {"cell": "theirs", "published": "3.5", "ours": "", "low": "", "high": "", "seeds": 0, "commit": ""},
        names | {"cell": "neither", "published": "", "ours": "", "low": "", "high": "", "seeds": 0, "commit": ""},
    ]
    drawn = []
    monkeypatch.setattr(reproduce.plt, "close", drawn.append)
    reproduce.draw(tmp_path / "gamma.png", "gamma", rows[::-1])
    axis = drawn[0].axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["theirs", "ours"]
    assert [(line.get_label(), line.get_xydata().tolist()) for line in axis.lines] == [
        ("published", [[3.5, 0]]),
        ("ours", [[2.5, 1]]),
        ("ours, 95 %", [[2, 1], [4, 1]]),
    ]


def test_evaluations_of_other_runs_stay(tmp_path):
    every = ("cell", "metric", "seed", "of steps", "step")
    found = dict.fromkeys(every, "1") | {"mean": "2.5"}
    others = [found | {name: "2"} for name in every]
    records.write_rows(tmp_path / "e.csv", others)
    records.replace_rows(tmp_path / "e.csv", [found], reproduce.EVALUATION)
    assert records.read_rows(tmp_path / "e.csv") == [*others, found]


def test_batches_of_a_study_are_of_other_games(monkeypatch):
    args = ppo_procgen.Args(env_id="starpilot")
    made, closed = [], types.SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(envs, "make_levels", lambda saved, games, seed, levels: made.append((seed, levels)) or closed)
    monkeypatch.setattr(envs, "play_episodes", lambda *_, episodes, seed: (np.full(episodes, seed),))
    normalized, _ = study_units.play(args, None, "train", batches=3, seed=3)
    assert made == [(envs.derive_seed(3, i), "train") for i in range(3)]
    assert normalized.reshape(3, 32)[:, 0].tolist() == [seed for seed, _ in made]
    assert len({seed for seed, _ in made}) == 3


def test_errors_of_a_study_are_of_the_mean(tmp_path, monkeypatch):
    path, played = tmp_path / "units.csv", {}
    rng = np.random.default_rng(0)

    def play_once(args, policy, levels, **how):
        return played.setdefault(levels, (rng.normal(5, 2, 32), rng.normal(9, 3, 32)))

    monkeypatch.setattr(study_units, "play", play_once)
    study_units.main(study_units.Args((str(ROOT / "agents" / "ppo_coinrun"),), batches=1, csv=str(path)))
    first = records.read_rows(path)
    for row in first:
        for name, returns in zip(("normalized", "raw"), played[row["on"]], strict=True):
            assert (row[name], row[f"{name} error"]) == (f"{returns.mean():.2f}", f"{returns.std() / 31**0.5:.2f}")


def test_levels_are_of_the_last_evaluation(tmp_path):
    paths = []
    for seed, mean in ((1, 20.0), (2, 30.0)):
        old = evaluated(train=summary(90.0), test=summary(90.0))
        new = evaluated(train=summary(mean, seed, 40 + seed, seed), test=summary(10.0))
        paths.append(write_run(tmp_path / "runs", seed=seed, lines=old + new, encoder="nature", num_levels=10))
    train, test = draw(tmp_path, paths, levels)
    assert (train["mean"], test["mean"], train["gap"]) == ("25", "10", "15")


def test_levels_have_their_intervals_and_variances():
    numbers = {"mean": 5.0, "low": 4.0, "high": 9.0, "min": 0.0, "max": 12.0, "variance": 7.0, "steps": 3000}
    figure = levels.draw({"a": {10: {"train": numbers, "test": numbers}}}, "title")
    for top, bottom in zip(figure.axes[:2], figure.axes[2:], strict=True):
        (bar,) = top.containers[0][2]
        assert bar.get_segments()[0].tolist() == [[10, 4], [10, 9]]
        assert "a, 3,000 steps" in top.get_legend_handles_labels()[1]
        assert bottom.lines[0].get_ydata().tolist() == [7]
    plot.plt.close(figure)


def test_bands_marks_and_hours_are_of_the_runs(tmp_path):
    paths = []
    for seed, value in ((1, 0.0), (2, 1.0), (3, 5.0)):
        lines = [
            {
                "global_step": 1000 * i,
                "time": 3600.0 * i,
                "charts/episodic_return": i * value,
                EVALUATION: value,
                "eval/train_levels/mean_return": 10 * value,
            }
            for i in (1, 2, 3)
        ]
        paths.append(write_run(tmp_path, seed=seed, steps=(), lines=lines))
    groups = plot.group_runs([plot.read_run(path) for path in paths], ())
    figure = plot.draw_curves(plot.Args(tuple(paths), hours=True), groups, ["bigfish"], {})
    over_steps, over_hours = figure.axes
    mean, low, high, train, _, test, _ = over_steps.lines
    np.testing.assert_allclose([x.get_ydata() for x in (mean, low, high)], np.outer([2, 0, 5], [1, 2, 3]))
    np.testing.assert_allclose([train.get_ydata(), test.get_ydata()], [[20] * 3, [2] * 3])
    assert over_hours.lines[0].get_xdata().tolist() == [0, 1, 2]
    plot.plt.close(figure)


def test_runs_of_one_length_differ_by_a_fiftieth_at_most():
    plot.check_lengths([3000, 3060], "a")
    with pytest.raises(files.UsageError, match="3,000 to 3,090"):
        plot.check_lengths([3000, 3090], "a")


def test_curves_have_their_hours_and_errors(maze, tmp_path):
    _, hours, returns = curves.in_parts(maze)
    records.write_rows(tmp_path / "small_training.csv", maze)
    one = {"cell": "runs, maze", "of steps": 1800, "step": 10, "mean": 2, "error": 3, "seed": 1}
    records.write_rows(tmp_path / "small_evaluations.csv", [one])
    figure = curves.draw(curves.read(curves.Args("small", folder=str(tmp_path))), {"maze": 1.0})
    np.testing.assert_allclose(figure.axes[1].lines[0].get_xydata(), np.stack([hours, returns], axis=1))
    (bar,) = figure.axes[0].containers[0][2]
    assert bar.get_segments()[0][:, 1].tolist() == [-1, 5]
    records.write_rows(tmp_path / "small_evaluations.csv", [one | {"of steps": 900}])
    assert curves.read(curves.Args("small", folder=str(tmp_path)))["maze"]["runs"][1] == []  # of a shorter run


def test_a_longer_run_under_way_hides_no_evaluation(maze, tmp_path):
    """A longer run under way has evaluations and no curve yet: the finished one's stay."""
    records.write_rows(tmp_path / "small_training.csv", maze)
    one = {"cell": "runs, maze", "of steps": 1800, "step": 1800, "mean": 2, "error": 3, "seed": 1}
    longer = one | {"of steps": 9000, "step": 900}
    records.write_rows(tmp_path / "small_evaluations.csv", [one, longer])
    ((_, evaluated),) = curves.read(curves.Args("small", folder=str(tmp_path)))["maze"].values()
    assert [[row["of steps"] for row in rows] for rows in evaluated] == [["1800"]]
