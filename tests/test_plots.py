"""Learning curves and scores over games, from run directories that are written here."""

import csv
import errno
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_refused, flags_of
from PIL import Image

from common import files, films
from common.envs import GAMES
from experiments import plot, trials

RANGES = {"bigfish": (1, 40), "coinrun": (5, 10), "starpilot": (2.5, 64)}  # easy: openai/train-procgen, constants.py
EVALUATION = "eval/test_levels/mean_return"


def write_run(root, game="bigfish", script="ppo_procgen", seed=1, lines=(), steps=(1000, 2000, 3000), **args):
    """A run directory whose episodic return is the step / 1000, plus `lines`; returns its path."""
    path = root / f"{game}__{script}__{seed}__{len(list(root.glob('*')))}"
    path.mkdir(parents=True)
    saved = {"env_id": game, "seed": seed, "run_dir": str(path), "resume": "", "wandb_mode": "offline",
             "total_timesteps": 3000 + seed} | args  # fmt: skip
    (path / "args.json").write_text(json.dumps({"script": script, "wandb_id": path.name, "args": saved}))
    own = [{"global_step": s, "time": 100.0 + 3.6 * s, "charts/episodic_return": s / 1000} for s in steps]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*own, *lines]))
    return str(path)


def scored(value, step=3000):
    return [{"global_step": step, "time": 9e4, EVALUATION: value}]


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def draw(tmp_path, run_dirs, module=plot, **args):
    module.main(module.Args(tuple(run_dirs), out=str(tmp_path / "out"), **args))
    assert not list(tmp_path.glob("*.tmp"))
    return rows_of(tmp_path / "out.csv")


def assert_drawn(path, colors):
    """The picture shows each of these colours, and not much of anything else but white."""
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3).astype(int)
    assert 0.5 < (pixels.min(axis=1) > 200).mean() < 0.99
    for color in colors:
        rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - rgb).max(axis=1) < 12).sum() > 50, color


# NUMBERS


def test_bootstrap_is_that_of_all_resamples():
    """Four runs: the quantiles over all 4^4 equally likely resamples, counted out."""
    values = np.random.default_rng(1).normal(size=(4, 3)).cumsum(axis=1)
    all_means = np.array([values[list(drawn)].mean(axis=0) for drawn in itertools.product(range(4), repeat=4)])
    mean, low, high = plot.bootstrap_mean(values, draws=100_000)
    np.testing.assert_allclose(mean, values.mean(axis=0))
    for got, share in ((low, 0.025), (high, 0.975)):
        around = np.quantile(all_means, [share - 0.006, share + 0.006], axis=0)
        assert (around[0] - 1e-9 <= got).all()
        assert (got <= around[1] + 1e-9).all()


@pytest.mark.parametrize(("count", "share"), [(2, 0.5), (3, 0.75), (4, 0.79), (5, 0.83), (10, 0.9), (30, 0.94)])
def test_interval_covers_the_mean_as_often_as_docs_say(count, share):
    """Of normal runs. With 30 of them percentile intervals of a mean at 90 or 99 % would not."""
    samples = np.random.default_rng(2).normal(3, 2, size=(count, 4000))
    _, low, high = plot.bootstrap_mean(samples, draws=1000)
    assert abs(np.mean((low < 3) & (high > 3)) - share) < 0.02


def test_one_run_has_no_interval():
    mean, low, high = plot.bootstrap_mean(np.array([[1.0, 2.0]]))
    assert mean.tolist() == [1, 2]
    assert np.isnan([low, high]).all()


def test_different_grids_meet_where_all_runs_are():
    long = np.array([[0.0, 10, 20, 30, 40, 50], [0, 1, 2, 3, 4, 5]])
    short = np.array([[5.0, 15, 25], [10, 20, 30]])
    grid, values = plot.common_grid([long, short], 100)
    assert grid.tolist() == [5, 15, 25]
    np.testing.assert_allclose(values, [[0.5, 1.5, 2.5], [10, 20, 30]])
    sparse = np.array([[-10.0, 22, 90], [0, 1, 2]])  # begins before and goes on after the others
    assert plot.common_grid([long, short, sparse], 100)[0].tolist() == [5, 15, 25]
    assert plot.common_grid([long, sparse], 100)[0].tolist() == [22]
    early = np.array([[0.0, 4], [1, 1]])
    assert plot.common_grid([short, early], 100)[0].size == 0
    assert plot.common_grid([early, short], 100)[1].shape == (2, 0)


def test_grid_is_thinned_with_both_ends():
    x = np.arange(1000.0)
    grid, values = plot.common_grid([np.stack([x, x**2])], 7)
    assert len(grid) == 7
    assert (grid[0], grid[-1]) == (0, 999)
    np.testing.assert_array_equal(values[0], grid**2)


def test_evaluations_a_few_steps_apart_are_the_same():
    late, early = np.array([[1010.0, 2005], [1, 2]]), np.array([[1000.0, 2000], [3, 4]])
    assert plot.common_grid([late, early], 9)[1].tolist() == [[1, 2], [pytest.approx(3.01), 4]]


def quarters(scores):
    """Mean of the scores between the quartiles, by sorting (Agarwal et al. 2021)."""
    ordered = np.sort(scores.ravel())
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut].mean()


def test_aggregate_by_definition():
    scores = {"a": np.random.default_rng(3).normal(0.6, 0.5, (5, 4)), "b": np.array([[0.2, 1.7]])}
    taus = np.array([0.0, 0.5, 1.0])
    estimates, profiles = plot.aggregate(scores, taus)
    for name, x in scores.items():
        definition = [quarters(x), x.mean(axis=0).mean(), np.maximum(0, 1 - x).mean()]
        np.testing.assert_allclose(estimates[name][0], definition, rtol=1e-12)
        np.testing.assert_allclose(profiles[name][0], [np.mean([v > tau for v in x.ravel()]) for tau in taus])
    assert np.isnan(estimates["b"][1:]).all()
    assert np.isnan(profiles["b"][1:]).all()


def test_aggregate_resamples_runs_within_games():
    """Against the stratified bootstrap written out; and the same twice."""
    x = np.random.default_rng(4).normal(0.5, 0.2, (4, 3)) + np.array([0.0, 5.0, 10.0])
    (estimates, _), (again, _) = (plot.aggregate({"a": x}, np.array([0.5])) for _ in range(2))
    np.testing.assert_array_equal(estimates["a"], again["a"])
    rng = np.random.default_rng(5)
    drawn = np.stack([x[rng.integers(0, 4, (20_000, 4)), game] for game in range(3)], axis=-1)
    means = drawn.mean(axis=(1, 2))
    np.testing.assert_allclose(estimates["a"][1:, 1], np.quantile(means, [0.025, 0.975]), atol=0.012)


# RUNS AND GROUPS


@pytest.fixture
def study(tmp_path):
    """Two scripts, two encoders, two seeds on one game."""
    root = tmp_path / "runs"
    ppo = [write_run(root, seed=s, encoder=e, lr=1e-4, async_=False) for e in ("nature", "impala") for s in (1, 2)]
    return [*ppo, *(write_run(root, script="impala_procgen", seed=s, encoder="nature", lr=3e-4) for s in (1, 2))]


@pytest.mark.parametrize(
    ("group_by", "groups"),
    [
        ((), {"ppo_procgen, encoder nature": 2, "ppo_procgen, encoder impala": 2, "impala_procgen": 2}),
        (("encoder",), {"encoder nature": 4, "encoder impala": 2}),
        (("script",), {"ppo_procgen": 4, "impala_procgen": 2}),
        (("lr", "seed"), {f"lr {lr} seed {s}": n for lr, n in ((0.0001, 2), (0.0003, 1)) for s in (1, 2)}),
        (("env-id",), {"env_id bigfish": 6}),
        (("total-timesteps",), {"total_timesteps 3001": 3, "total_timesteps 3002": 3}),
        (("async",), {"async_ False": 4, "async_ none": 2}),
    ],
)
def test_groups(study, group_by, groups):
    found = plot.group_runs([plot.read_run(path) for path in study], group_by)
    assert {name: len(group) for name, group in found.items()} == groups


def test_of_one_seed_and_flags_the_longest_run_counts(tmp_path, capsys):
    """Two that are alike on a CPU are no two samples; where threads play they are."""
    each = ((1, 30, 0.1), (2, 30, 0.1), (1, 90, 0.1), (1, 60, 0.1), (1, 30, 0.2))
    made = [write_run(tmp_path, seed=seed, lines=scored(5, step), lr=lr) for seed, step, lr in each]
    made += [write_run(tmp_path, script="impala_procgen", seed=1, deterministic=False) for _ in range(2)]
    kept = plot.drop_repeats([plot.read_run(path) for path in made])
    assert {run.path for run in kept} == {made[1], made[2], *made[4:]}
    assert f"{made[0]}, with the seed and flags of {made[2]}" in capsys.readouterr().out


def test_seeds_and_places_tell_no_runs_apart(tmp_path):
    places = [{"seed": s, "wandb_project": f"p{s}", "checkpoint_every": s} for s in (1, 2)]
    for place, rate in zip(places, ("5e-4", "0.0005"), strict=True):
        place["learning_rate"] = rate
    paths = [write_run(tmp_path, game, **place) for game in RANGES for place in places]
    assert list(plot.group_runs([plot.read_run(path) for path in paths], ())) == ["ppo_procgen"]


def test_a_flag_that_an_older_run_lacks_tells_the_others_apart(tmp_path):
    paths = [write_run(tmp_path, **flags) for flags in ({"min_alpha": 0.1}, {}, {"min_alpha": 0.2}, {"min_alpha": 0.1})]
    groups = plot.group_runs([plot.read_run(path) for path in paths], ())
    assert {name.partition(", ")[2]: len(group) for name, group in groups.items()} == {
        "min_alpha 0.1": 2, "min_alpha none": 1, "min_alpha 0.2": 1
    }  # fmt: skip


def test_a_flag_that_a_fork_adds_tells_its_runs_apart(tmp_path):
    """The baseline has none, all others have the same. The script's default tells no older run apart."""
    tricks = [{}, {"my_trick": True}, {"vf_clip": 30.0}]
    paths = [write_run(tmp_path, seed=seed, **flags) for flags in tricks for seed in (1, 2)]
    kept = plot.drop_repeats([plot.read_run(path) for path in paths[:4]])
    assert {name: len(group) for name, group in plot.group_runs(kept, ()).items()} == {
        "ppo_procgen, my_trick none": 2, "ppo_procgen, my_trick True": 2
    }  # fmt: skip
    assert list(plot.group_runs([plot.read_run(path) for path in [*paths[:2], *paths[4:]]], ())) == ["ppo_procgen"]


def test_of_one_seed_a_chosen_group_has_one_run_too(tmp_path):
    """Seed 1 twice, which would weigh it twice in the group's mean."""
    each = ((1, 30, 20), (1, 90, 20), (2, 90, 5))
    paths = [write_run(tmp_path, seed=seed, lines=scored(score, step), encoder="nature") for seed, step, score in each]
    rows = draw(tmp_path, paths, group_by=("encoder",))
    assert {row["seed"] for row in rows} == {"1", "2"}
    assert len(rows) == 8


def test_last_values_of_runs_of_different_length_are_not_averaged(tmp_path, capsys):
    runs_of = [
        write_run(tmp_path, seed=seed, lines=scored(5, step), num_levels=0) for seed, step in ((1, 3000), (2, 9000))
    ]
    assert "3,000 to 9,000 steps" in assert_refused(plot, [*runs_of, "--aggregate", "--out", tmp_path / "a"], capsys)


def test_csv_has_a_row_a_logged_line(study, tmp_path):
    rows = draw(tmp_path, study)
    assert list(rows[0]) == ["script", "flags", "seed", "hours", "global_step", "episodic_return"]
    assert len(rows) == 18
    assert [row["hours"] for row in rows[:3]] == ["0.0000", "1.0000", "2.0000"]
    assert {(row["script"], row["flags"]) for row in rows} == {
        ("ppo_procgen", "encoder nature"), ("ppo_procgen", "encoder impala"), ("impala_procgen", "")
    }  # fmt: skip
    assert [row["episodic_return"] for row in rows[:3]] == ["1", "2", "3"]
    assert_drawn(tmp_path / "out.png", plot.COLORS[:3])


def test_any_logged_metric_over_steps_and_hours(tmp_path):
    lines = [{"global_step": 3000, "time": 1e4, "custom/thing": 7.5, "charts/episodic_return": 1}]
    rows = draw(tmp_path, [write_run(tmp_path / "runs", lines=lines)], metrics=("custom/thing",), hours=True)
    assert rows[-1]["custom/thing"] == "7.5"
    both = plot.Args((), metrics=("custom/thing", "charts/episodic_return"), random=0.25)
    run = plot.read_run(write_run(tmp_path / "runs", seed=2, lines=lines))
    first, second = plot.draw_curves(both, plot.group_runs([run], ()), ["bigfish"], {}).axes
    assert [0.25 in line.get_ydata() for axis in (first, second) for line in axis.lines[-1:]] == [False, True]
    assert Image.open(tmp_path / "out.png").width > 1200  # two panels


def test_points_keep_evaluations(tmp_path):
    path = write_run(tmp_path / "runs", steps=range(100, 10_000, 100), lines=scored(5))
    rows = draw(tmp_path, [path], points=10)
    assert 10 <= len(rows) <= 13
    assert [row["test_levels"] for row in rows if row["test_levels"]] == ["5"]


def test_a_panel_a_game(tmp_path):
    paths = [write_run(tmp_path / "runs", game, seed=s) for game in RANGES for s in (1, 2)]
    groups = plot.group_runs([plot.read_run(path) for path in paths], ())
    args = plot.Args(tuple(paths), metrics=("charts/episodic_return",))
    figure = plot.draw_curves(args, groups, list(RANGES), {})
    assert [axis.get_title() for axis in figure.axes] == list(RANGES)
    together = plot.Args(tuple(paths), group_by=("env-id",))
    assert len(plot.draw_curves(together, groups, list(RANGES), {}).axes) == 1
    plot.plt.close("all")
    assert {row["game"] for row in draw(tmp_path, paths)} == set(RANGES)


def test_band_and_mean_are_drawn_where_all_runs_are(tmp_path):
    """One run was stopped at 3,000 steps: the line of its group ends there, at the mean."""
    paths = [write_run(tmp_path, seed=1), write_run(tmp_path, seed=2, steps=(500, 1500, 2500, 3500, 4500))]
    groups = plot.group_runs([plot.read_run(path) for path in paths], ())
    figure = plot.draw_curves(plot.Args(tuple(paths)), groups, ["bigfish"], {})
    (line,) = (x for x in figure.axes[0].lines if x.get_label() == "ppo_procgen, 2 runs")
    np.testing.assert_allclose(line.get_xydata(), [[1000, 1], [2000, 2], [3000, 3]])
    assert len(figure.axes[0].collections) == 1  # the band
    plot.plt.close(figure)


def test_half_written_last_line_is_left_out(tmp_path):
    path = write_run(tmp_path / "runs")
    with open(f"{path}/metrics.jsonl", "a") as file:
        file.write('{"global_step": 4000, "time": 1')
    assert len(draw(tmp_path, [path])) == 3


BAD_LINES = [
    b"text", b"null", b"[1]", b"1", b"\xff\xfe\x00", b"[" * 100_000, b'{"global_step": 1, "time": "now"}',
    b'{"global_step": 1, "time": null}', b'{"global_step": null, "time": 2}', b'{"global_step": 1}',
    b'{"global_step": 4000, "time": 1, "charts/episodic_return": "high"}', b'{"global_step": NaN, "time": 2}',
    b'{"global_step": 4000, "time": 1, "charts/episodic_return": null}', b'{"global_step": -1, "time": 2}',
    b'{"global_step": 4000, "time": %s}' % (b"9" * 400), b'{"global_step": %s, "time": 1}' % (b"9" * 5000),
    b'{"global_step": 4000, "time": 1, "seconds": Infinity}',
]  # fmt: skip


def test_bad_lines_are_left_out(tmp_path, capsys):
    """Among good ones; where there are no others, it is said that there are none."""
    path, only = write_run(tmp_path / "runs"), write_run(tmp_path / "runs", steps=())
    for run in (path, only):
        with open(f"{run}/metrics.jsonl", "ab") as file:
            file.write(b"\n".join(BAD_LINES))
    assert len(plot.read_run(path).lines) == 3
    assert_refused(plot, [only, "--out", tmp_path / "out"], capsys, f"RUN_DIRS {only}: has no line of metrics yet")
    assert trials.values_of(Path(path), "charts/episodic_return") == [1, 2, 3]


def test_numbers_of_any_size_are_drawn(tmp_path):
    """400 digits are infinity, which is no point."""
    huge = '{"global_step": 3500, "time": 3e4, "charts/episodic_return": %s}\n'
    path = write_run(tmp_path / "runs", lines=[{"global_step": 4000, "time": 4e4, "charts/episodic_return": -1e308}])
    with open(f"{path}/metrics.jsonl", "a") as file:
        file.write(huge % ("9" * 400) + huge % "1e308" + huge % "-Infinity")
    assert len(draw(tmp_path, [path, write_run(tmp_path / "runs", seed=2)], hours=True, each_run=True)) == 10


def test_hours_are_those_of_the_runs_clock(tmp_path):
    """Which goes on over a resume; in older runs, the computer's, which may be set back."""

    def hours(*lines):
        own = [{"global_step": i} | line for i, line in enumerate(lines)]
        return [line["hours"] for line in plot.read_run(write_run(tmp_path, steps=(), lines=own)).lines]

    assert hours({"time": 9e9, "seconds": 360}, {"time": 1, "seconds": 720}, {"time": 2, "seconds": 3600}) == [
        0.1,
        0.2,
        1,
    ]
    assert hours({"time": 9e6}, {"time": 9e6 + 3600}, {"time": 9e6 - 7200}, {"time": 9e6}) == [0, 1, 1, 3]
    older = {"time": 100}, {"time": 460}, {"time": 9e6, "seconds": 0}, {"time": 9e6, "seconds": 360}
    assert hours(*older)[:2] == [0, 0.1]
    assert hours(*older)[3] - hours(*older)[2] == pytest.approx(0.1)


def test_names_are_no_formulas(tmp_path):
    """A run's, a game's or a metric's: what is between two $ is drawn as it is."""
    lines = [{"global_step": 3000, "time": 1e6, "$\\frac{$": 1.0}]
    path = write_run(tmp_path / "runs", "$\\frac{$", "$\\frac{$", lines=lines, encoder="$\\frac{$")
    draw(tmp_path, [path], metrics=("$\\frac{$",), group_by=("encoder",))


def test_nan_is_no_point(tmp_path):
    run = plot.read_run(write_run(tmp_path, lines=[{"global_step": 4, "time": 1, "charts/episodic_return": np.nan}]))
    assert plot.curve(run.lines, "global_step", "charts/episodic_return").tolist() == [[1000, 2000, 3000], [1, 2, 3]]


def test_films_side_by_side():
    """Each on its side, under its name; the shorter one stands still."""
    both = {"a": np.full((3, 8, 8, 3), 50, np.uint8), "b": np.full((5, 8, 8, 3), 200, np.uint8)}
    both["a"][-1] = 90
    pictures = np.stack(list(films.side_by_side(both, size=64)))
    assert pictures.shape == (5, 64 + 32, 128, 3)
    assert pictures[:, 40, 5, 0].tolist() == [50, 50, 90, 90, 90]
    assert (pictures[:, 32:, 64:] == 200).all()
    assert pictures[0, :32].min() < 100 < pictures[0, :32].max()  # a name is written there


# REFERENCES


def test_references(tmp_path):
    ((key, points),) = plot.read_reference("easy-200-test", ["bigfish"]).items()
    assert key == ("OpenAI's PPO, easy-200-test", "bigfish")
    assert points[0, :2].tolist() == [100_000, 200_000]
    assert plot.read_reference("hard-500-train", ["bigfish"])["OpenAI's PPO, hard-500-train", "bigfish"][0, -1] == 2e8
    for name in plot.REFERENCES:
        assert {game for _, game in plot.read_reference(name, list(GAMES))} == set(GAMES)
    own = tmp_path / "own.csv"
    own.write_text("mean_return,env_steps\n5,200\n3,100\n")
    (curve,) = plot.read_reference(str(own), ["maze"]).items()
    assert curve[0] == ("own", "")
    assert curve[1].tolist() == [[100, 200], [3, 5]]
    own.write_text("split,game,env_steps,mean_return\na,maze,1,2\nb,maze,1,3\na,miner,1,4\n")
    assert set(plot.read_reference(str(own), ["maze"])) == {("own, a", "maze"), ("own, b", "maze")}


def test_reference_is_drawn(tmp_path):
    path = write_run(tmp_path / "runs", steps=(100_000, 600_000))
    groups = plot.group_runs([plot.read_run(path)], ())
    references = plot.read_reference("easy-all", ["bigfish"])
    figure = plot.draw_curves(plot.Args((path,)), groups, ["bigfish"], references)
    (line,) = (x for x in figure.axes[0].lines if x.get_label() == "OpenAI's PPO, easy-all")
    assert line.get_xdata().tolist() == [i * 100_000 for i in range(1, 8)]  # not past 1.3 times the runs' last step
    plot.plt.close(figure)


# SCORES


def test_scores_are_the_competitions(tmp_path, capsys):
    """Returns for which normalised scores are known; the newer evaluation counts, and of seeds the lowest."""
    wanted = {"bigfish": (0.0, 0.5, 0.9), "coinrun": (1.0, -0.2), "starpilot": (0.25, 0.75)}
    paths = []
    for game, scores in wanted.items():
        low, high = RANGES[game]
        for seed, score in reversed(list(enumerate(scores))):
            lines = scored(99, 2000) + scored(low + score * (high - low))
            paths.append(write_run(tmp_path / "runs", game, seed=seed, lines=lines))
    draw(tmp_path, paths, aggregate=True)
    rows = {(r["game"], r["statistic"]): r for r in rows_of(tmp_path / "out_aggregate.csv")}
    used = np.array([scores[:2] for scores in wanted.values()]).T
    assert float(rows["all", "mean"]["value"]) == pytest.approx(used.mean(), abs=1e-6)
    assert float(rows["all", "iqm"]["value"]) == pytest.approx(quarters(used), abs=1e-6)
    assert float(rows["all", "optimality_gap"]["value"]) == pytest.approx(np.maximum(0, 1 - used).mean(), abs=1e-6)
    assert float(rows["coinrun", "mean"]["value"]) == pytest.approx(0.4, abs=1e-6)
    assert float(rows["all", "mean"]["low"]) < used.mean() < float(rows["all", "mean"]["high"])
    printed = capsys.readouterr().out
    assert f"ppo_procgen: mean normalised score {used.mean():.4f} over 3 games after 3,000 steps, 2 runs" in printed
    assert "1 more left out" in printed
    assert_drawn(tmp_path / "out_aggregate.png", plot.COLORS[:1])


def test_scores_of_hard_games_and_other_metrics(tmp_path):
    run = plot.read_run(write_run(tmp_path, "starpilot", distribution_mode="hard"))
    scores = plot.scores_of("a", [run], ["starpilot"], "charts/episodic_return")
    np.testing.assert_allclose(scores, [[(3 - 1.5) / (35 - 1.5)]])


# LEVELS


# BAD INPUT


@pytest.mark.parametrize(
    ("flags", "said", "valid"),
    [
        ({"group_by": "colour"}, "--group-by colour", "encoder"),
        ({"metrics": "charts/nothing"}, "--metrics charts/nothing", "charts/episodic_return"),
        ({"reference": "openai"}, "--reference openai", "easy-200-test"),
        ({"reference": "empty.csv"}, "--reference empty.csv", "env_steps and mean_return"),
        ({"reference": "nan.csv"}, "--reference nan.csv", "env_steps and mean_return"),
        ({"reference": "maze.csv"}, "--reference maze.csv", "bigfish"),
        ({"points": 0}, "--points 0", "1 or more"),
        ({"aggregate": True}, f"--score-metric {EVALUATION}", "charts/episodic_return"),
        ({"score_metric": "charts/episodic_return"}, "--score-metric charts/episodic_return", "--aggregate"),
        ({"random": "nan"}, "--random nan", "not a number"),
        ({"metrics": ("losses/x",), "random": 1}, "--random", "give one in --metrics"),
        ({"metrics": ("losses/x",), "reference": ("easy-all",)}, "--reference", "give one in --metrics"),
        ({"out": ""}, "--out ''", "name of a file"),
        ({"out": "somewhere/"}, "--out 'somewhere/'", "name of a file"),
        ({"out": "a" * 300}, "--out aaa", "File name too long"),
        ({"out": "empty.csv/there"}, "--out empty.csv/there", "cannot write"),
    ],
)
def test_bad_flags(study, tmp_path, monkeypatch, capsys, flags, said, valid):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.csv").write_text("steps,mean_return\n1,2\n")
    (tmp_path / "nan.csv").write_text("env_steps,mean_return\n1,nan\n")
    (tmp_path / "maze.csv").write_text("game,env_steps,mean_return\nmaze,1,2\n")
    error = assert_refused(plot, [*study, *flags_of(flags)], capsys)
    assert said in error
    assert valid in error
    assert not list(tmp_path.glob("curve*"))


def test_references_of_one_name_are_refused(study, capsys):
    words = [*study, "--reference", "a/maze.csv", "b/maze.csv"]
    assert_refused(plot, words, capsys, "--reference a/maze.csv b/maze.csv", "give each its own")


def test_bad_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good, empty = write_run(tmp_path / "a", lines=scored(3)), write_run(tmp_path / "b", steps=())
    assert "at least one" in assert_refused(plot, [], capsys)
    assert "RUN_DIRS nowhere" in assert_refused(plot, ["nowhere"], capsys)
    assert f"RUN_DIRS {empty}: has no line of metrics" in assert_refused(plot, [good, empty], capsys)
    other = write_run(tmp_path / "a", "coinrun")
    assert "--metrics: give at least one" in assert_refused(plot, [good, "--metrics"], capsys)
    (tmp_path / "link").symlink_to(good)
    for again in (good, "link", f"a/../{Path(good).relative_to(tmp_path)}"):
        assert f"RUN_DIRS {again}: is the same run as {good}" in assert_refused(plot, [good, again], capsys)
    assert "--random 1.0" in assert_refused(plot, [good, other, "--random", "1"], capsys)
    said = assert_refused(plot, [good, other, "--aggregate"], capsys)
    assert f"{other} has logged none" in said
    assert "--score-metric" in said
    doors = write_run(tmp_path / "a", "DoorGym", lines=scored(3))
    assert "DoorGym has no normalisation constants" in assert_refused(plot, [doors, "--aggregate"], capsys)
    fork = write_run(tmp_path / "a", "coinrun", script="mine", lines=scored(3))
    assert "'ppo_procgen' has no run of coinrun" in assert_refused(plot, [good, fork, "--aggregate"], capsys)
    assert not list(tmp_path.glob("curve*"))


@pytest.mark.parametrize(
    "content",
    [
        "[]", "1", "{", "\0", "[" * 100_000, '{"script": "a"}', '{"script": 1, "args": {}}',
        '{"script": "a", "args": []}', '{"script": "a", "args": "b"}', '{"script": "a", "args": {"seed": "1"}}',
        '{"script": "a", "args": {"env_id": []}}', '{"script": "a", "args": {"num_levels": "all"}}',
        '{"script": "a", "args": {"distribution_mode": {}}}',
    ],
)  # fmt: skip
def test_damaged_arguments_are_answered_in_one_sentence(content, tmp_path, capsys):
    run = write_run(tmp_path, lines=scored(3))
    Path(run, "args.json").write_text(content)
    assert_refused(plot, [run, "--out", tmp_path / "out"], capsys, f"RUN_DIRS {run}/args.json: ", "give run direc")


def test_a_full_disk_is_no_bad_flag(tmp_path, monkeypatch):
    """What was there stays."""

    def fail(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "out.csv").write_text("old")
    monkeypatch.setattr(csv.DictWriter, "writeheader", fail)
    with pytest.raises(files.FullError, match="the disk is full"):
        plot.main(plot.Args((write_run(tmp_path / "runs"),), out=str(tmp_path / "out")))
    assert [path.name for path in tmp_path.glob("out*")] == ["out.csv"]
    assert (tmp_path / "out.csv").read_text() == "old"
    full = files.full_disk(
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), tmp_path / "out.png"
    )  # of a cluster's user
    assert "out.png" in str(full)
    assert files.full_disk(full, tmp_path) is full


def test_plot_runs_as_a_module_without_what_only_scores_need(tmp_path):
    path = write_run(tmp_path / "a", encoder="nature")
    code = f"import runpy, sys; sys.argv = {['plot', path, '--out', str(tmp_path / 'new')]}\n"
    code += "runpy.run_module('experiments.plot', run_name='__main__', alter_sys=True)\n"
    code += "sys.exit('rliable' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "new.png").exists()
