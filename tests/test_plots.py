"""Learning curves and normalised scores, from made-up run directories."""

import contextlib
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
from common.envs import GAMES, RANDOM_RETURNS
from experiments import plot, records, trials

RANGES = {"bigfish": (1, 40), "coinrun": (5, 10), "starpilot": (2.5, 64)}  # easy: openai/train-procgen, constants.py
EVALUATION = "eval/test_levels/mean_return"


def write_run(root, game="bigfish", script="ppo_procgen", seed=1, lines=(), steps=(1000, 2000, 3000), **args):
    """A run directory whose episodic return is the step / 1000, plus `lines`; returns its path."""
    path = root / f"{game}__{script}__{seed}__{len(list(root.glob('*')))}"
    path.mkdir(parents=True)
    saved = {"env_id": game, "seed": seed, "run_dir": str(path), "resume": "", "wandb_mode": "offline",
             "total_timesteps": 3000 + seed} | args  # fmt: skip
    (path / "args.json").write_text(json.dumps({"script": script, "args": saved}))
    own = [{"global_step": s, "seconds": 3.6 * s, "charts/episodic_return": s / 1000} for s in steps]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*own, *lines]))
    return str(path)


def scored(value, step=3000):
    return [{"global_step": step, "seconds": 9e4, EVALUATION: value}]


def read(paths):
    return [plot.read_run(path) for path in paths]


def draw(tmp_path, run_dirs, **args):
    plot.main(plot.Args(tuple(run_dirs), out=str(tmp_path / "out"), **args))
    assert not list(tmp_path.glob("*.tmp"))
    return records.read_rows(tmp_path / "out.csv")


def figure_of(paths, games=("bigfish",), references=(), **args):
    figure = plot.draw_curves(
        plot.Args(tuple(paths), **args), plot.group_runs(read(paths), ()), list(games), dict(references)
    )
    plot.plt.close("all")
    return figure


def assert_drawn(path, colors):
    """The picture is mostly white and has each of these colours."""
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3).astype(int)
    assert 0.5 < (pixels.min(axis=1) > 200).mean() < 0.99
    for color in colors:
        rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - rgb).max(axis=1) < 12).sum() > 50, color


# STATISTICS


def test_bootstrap_of_few_runs_matches_all_resamples():
    """Quantiles over the 4^4 equally likely resamples of four runs."""
    values = np.random.default_rng(1).normal(size=(4, 3)).cumsum(axis=1)
    all_means = np.array([values[list(drawn)].mean(axis=0) for drawn in itertools.product(range(4), repeat=4)])
    mean, low, high = plot.bootstrap_mean(values, draws=100_000)
    np.testing.assert_allclose(mean, values.mean(axis=0))
    assert np.isnan(plot.bootstrap_mean(values[:1])[1:]).all()  # a single run has no interval
    for got, share in ((low, 0.025), (high, 0.975)):
        around = np.quantile(all_means, [share - 0.006, share + 0.006], axis=0)
        assert (around[0] - 1e-9 <= got).all()
        assert (got <= around[1] + 1e-9).all()


@pytest.mark.parametrize(("count", "share"), [(2, 0.5), (3, 0.75), (4, 0.79), (5, 0.83), (10, 0.9), (30, 0.94)])
def test_interval_of_normal_runs_covers_the_mean_as_documented(count, share):
    samples = np.random.default_rng(2).normal(3, 2, size=(count, 4000))
    _, low, high = plot.bootstrap_mean(samples, draws=1000)
    assert abs(np.mean((low < 3) & (high > 3)) - share) < 0.02


def test_common_grid_of_different_curves_is_their_overlap():
    long = np.array([[0.0, 10, 20, 30, 40, 50], [0, 1, 2, 3, 4, 5]])
    short = np.array([[5.0, 15, 25], [10, 20, 30]])
    grid, values = plot.common_grid([long, short], 100)
    assert grid.tolist() == [5, 15, 25]
    np.testing.assert_allclose(values, [[0.5, 1.5, 2.5], [10, 20, 30]])
    sparse = np.array([[-10.0, 22, 90], [0, 1, 2]])  # begins before the others and ends after them
    assert plot.common_grid([long, short, sparse], 100)[0].tolist() == [5, 15, 25]
    assert plot.common_grid([long, sparse], 100)[0].tolist() == [22]
    early = np.array([[0.0, 4], [1, 1]])
    assert plot.common_grid([short, early], 100)[0].size == 0
    assert plot.common_grid([early, short], 100)[1].shape == (2, 0)
    # Evaluations a few steps apart count as simultaneous.
    late, early = np.array([[1010.0, 2005], [1, 2]]), np.array([[1000.0, 2000], [3, 4]])
    assert plot.common_grid([late, early], 9)[1].tolist() == [[1, 2], [pytest.approx(3.01), 4]]
    assert plot.common_grid([early, late], 9)[0].tolist() == [1000, 2000]
    x = np.arange(1000.0)
    grid, values = plot.common_grid([np.stack([x, x**2])], 7)  # thinned, with both ends
    assert (len(grid), grid[0], grid[-1]) == (7, 0, 999)
    np.testing.assert_array_equal(values[0], grid**2)


def interquartile_mean(scores):
    """By sorting (Agarwal et al. 2021)."""
    ordered = np.sort(scores.ravel())
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut].mean()


def test_aggregate_matches_its_definition():
    scores = {"a": np.random.default_rng(3).normal(0.6, 0.5, (5, 4)), "b": np.array([[0.2, 1.7]])}
    taus = np.array([0.0, 0.5, 1.0])
    estimates, profiles = plot.aggregate(scores, taus)
    for name, x in scores.items():
        definition = [interquartile_mean(x), x.mean(axis=0).mean(), np.maximum(0, 1 - x).mean()]
        np.testing.assert_allclose(estimates[name][0], definition, rtol=1e-12)
        np.testing.assert_allclose(profiles[name][0], [np.mean([v > tau for v in x.ravel()]) for tau in taus])
    assert np.isnan(estimates["b"][1:]).all()
    assert np.isnan(profiles["b"][1:]).all()


def test_aggregate_interval_matches_a_stratified_bootstrap():
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
        (("total-timesteps",), {"total_timesteps 3001": 3, "total_timesteps 3002": 3}),
        (("async",), {"async_ False": 4, "async_ none": 2}),
    ],
)
def test_runs_are_grouped_by_script_and_changed_flags_or_as_asked(study, group_by, groups):
    found = plot.group_runs(read(study), group_by)
    assert {name: len(group) for name, group in found.items()} == groups


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        # Seeds and places do not, nor do two spellings of a number, nor an older run without the flag.
        ([{"seed": s, "wandb_project": f"p{s}", "learning_rate": r} for s, r in ((1, "5e-4"), (2, "0.0005"))], {"": 2}),
        ([{}, {"vf_clip": 30.0}], {"": 2}),
        # A flag of a fork, which its baseline lacks, does.
        ([{}, {}, {"trick": True}, {"trick": True}], {"trick none": 2, "trick True": 2}),
        ([{"a": 0.1}, {}, {"a": 0.2}, {"a": 0.1}], {"a 0.1": 2, "a none": 1, "a 0.2": 1}),
    ],
)
def test_flags_that_differ_in_meaning_tell_groups_apart(tmp_path, flags, groups):
    found = plot.group_runs(read(write_run(tmp_path, **own) for own in flags), ())
    assert {name.partition(", ")[2]: len(group) for name, group in found.items()} == groups


def test_longest_run_of_each_seed_and_flags_is_kept(tmp_path, capsys):
    """Two that are alike on a CPU are no two samples; nondeterministic ones are."""
    each = ((1, 30, 0.1), (2, 30, 0.1), (1, 90, 0.1), (1, 60, 0.1), (1, 30, 0.2))
    made = [write_run(tmp_path, seed=seed, lines=scored(5, step), lr=lr) for seed, step, lr in each]
    made += [write_run(tmp_path, script="impala_procgen", seed=1, deterministic=False) for _ in range(2)]
    assert {run.path for run in plot.drop_repeats(read(made))} == {made[1], made[2], *made[4:]}
    assert f"{made[0]}, with the seed and flags of {made[2]}" in capsys.readouterr().out
    rows = draw(tmp_path, made[:4], group_by=("lr",))  # also in a group that was asked for
    assert [row["seed"] for row in rows].count("1") == len(rows) / 2


@pytest.mark.parametrize(("last", "steps"), [(3060, None), (3090, "3,000 to 3,090 steps")])
def test_runs_of_different_length_are_not_averaged(tmp_path, last, steps):
    """A fiftieth is the limit."""
    group = read(write_run(tmp_path, seed=seed, lines=scored(5, step)) for seed, step in ((1, 3000), (2, last)))
    with pytest.raises(files.UsageError, match=steps) if steps else contextlib.nullcontext():
        plot.scores_of("a", group, ["bigfish"], EVALUATION)


# CURVES


def test_csv_has_a_row_for_each_logged_line(study, tmp_path):
    rows = draw(tmp_path, study)
    assert list(rows[0]) == ["script", "flags", "seed", "hours", "global_step", "episodic_return"]
    assert len(rows) == 18
    assert [row["hours"] for row in rows[:3]] == ["1.0000", "2.0000", "3.0000"]
    assert {(row["script"], row["flags"]) for row in rows} == {
        ("ppo_procgen", "encoder nature"), ("ppo_procgen", "encoder impala"), ("impala_procgen", "")
    }  # fmt: skip
    assert [row["episodic_return"] for row in rows[:3]] == ["1", "2", "3"]
    assert_drawn(tmp_path / "out.png", plot.COLORS[:3])


def test_any_logged_metric_is_drawn_over_steps_and_hours(tmp_path):
    lines = [{"global_step": 3000, "seconds": 1e4, "custom/thing": 7.5, "charts/episodic_return": 1}]
    path = write_run(tmp_path / "runs", lines=lines, distribution_mode="easy")
    assert draw(tmp_path, [path], metrics=("custom/thing",), hours=True)[-1]["custom/thing"] == "7.5"
    assert Image.open(tmp_path / "out.png").width > 1200  # two panels
    first, second = figure_of([path], metrics=("custom/thing", "charts/episodic_return")).axes
    random = RANDOM_RETURNS["bigfish"]
    assert [random in line.get_ydata() for axis in (first, second) for line in axis.lines[-1:]] == [False, True]


def test_thinning_keeps_evaluations(tmp_path):
    path = write_run(tmp_path / "runs", steps=range(100, 10_000, 100), lines=scored(5))
    rows = draw(tmp_path, [path], points=10)
    assert 10 <= len(rows) <= 13
    assert [row["test_levels"] for row in rows if row["test_levels"]] == ["5"]


def test_each_game_has_a_panel_unless_grouped(tmp_path):
    ends = dict(zip(RANGES, (2000, 3000, 4000), strict=True))
    paths = [
        write_run(tmp_path / "runs", game, seed=s, steps=(1000, end)) for game, end in ends.items() for s in (1, 2)
    ]
    figure = figure_of(paths, RANGES, metrics=("charts/episodic_return",))
    assert {axis.get_title(): axis.lines[0].get_xdata()[-1] for axis in figure.axes} == ends
    assert len(figure_of(paths, RANGES, group_by=("env-id",)).axes) == 1
    assert {row["game"] for row in draw(tmp_path, paths)} == set(RANGES)


def test_mean_is_drawn_where_all_runs_of_a_group_are(tmp_path):
    """One was stopped at 3,000 steps: the line ends there, at the mean."""
    paths = [write_run(tmp_path, seed=1), write_run(tmp_path, seed=2, steps=(500, 1500, 2500, 3500, 4500))]
    axis = figure_of(paths).axes[0]
    (line,) = (x for x in axis.lines if x.get_label() == "ppo_procgen, 2 runs")
    np.testing.assert_allclose(line.get_xydata(), [[1000, 1], [2000, 2], [3000, 3]])
    assert len(axis.collections) == 1  # the band


def test_lines_bands_and_evaluations_match_the_runs(tmp_path):
    paths = []
    for seed, value in ((1, 0.0), (2, 1.0), (3, 5.0)):
        evaluation = {EVALUATION: value, "eval/train_levels/mean_return": 10 * value}
        own = ({"global_step": 1000 * i, "seconds": 3600.0 * i, "charts/episodic_return": i * value} for i in (1, 2, 3))
        paths.append(write_run(tmp_path, seed=seed, steps=(), lines=[line | evaluation for line in own]))
    over_steps, over_hours = figure_of(paths, hours=True).axes
    mean, low, high, train, _, test, _ = over_steps.lines
    np.testing.assert_allclose([x.get_ydata() for x in (mean, low, high)], np.outer([2, 0, 5], [1, 2, 3]))
    np.testing.assert_allclose([train.get_ydata(), test.get_ydata()], [[20] * 3, [2] * 3])
    assert over_hours.lines[0].get_xdata().tolist() == [1, 2, 3]


BAD_LINES = [
    b"text", b"null", b"[1]", b"1", b"\xff\xfe\x00", b"[" * 100_000, b'{"global_step": 1, "seconds": "now"}',
    b'{"global_step": 1, "seconds": null}', b'{"global_step": null, "seconds": 2}', b'{"global_step": 1}',
    b'{"global_step": 4000, "seconds": 1, "charts/episodic_return": "high"}', b'{"global_step": NaN, "seconds": 2}',
    b'{"global_step": 4000, "seconds": 1, "charts/episodic_return": null}', b'{"global_step": -1, "seconds": 2}',
    b'{"global_step": 4000, "seconds": %s}' % (b"9" * 400), b'{"global_step": %s, "seconds": 1}' % (b"9" * 5000),
    b'{"global_step": 4000, "seconds": Infinity}',
]  # fmt: skip


def test_damaged_lines_of_metrics_are_left_out(tmp_path, capsys):
    path, only = write_run(tmp_path / "runs"), write_run(tmp_path / "runs", steps=())
    for run in (path, only):
        with open(f"{run}/metrics.jsonl", "ab") as file:
            file.write(b"\n".join(BAD_LINES) + b'\n{"global_step": 4000, "seconds": 1')  # half-written
    assert len(plot.read_run(path).lines) == 3
    assert_refused(plot, [only, "--out", tmp_path / "out"], capsys, f"RUN_DIRS {only}: has no line of metrics yet")
    assert trials.values_of(Path(path), "charts/episodic_return") == [1, 2, 3]


def test_infinite_and_huge_values_are_no_points(tmp_path):
    lines = [{"global_step": 4000, "seconds": 4e4, "charts/episodic_return": x} for x in (-1e308, np.nan)]
    path = write_run(tmp_path / "runs", lines=lines)
    huge = '{"global_step": 3500, "seconds": 3e4, "charts/episodic_return": %s}\n'
    with open(f"{path}/metrics.jsonl", "a") as file:
        file.write(huge % ("9" * 400) + huge % "1e308" + huge % "-Infinity")
    run = plot.read_run(path)
    assert plot.curve(run.lines, "global_step", "charts/episodic_return")[0].tolist() == [1000, 2000, 3000]
    draw(tmp_path, [path, write_run(tmp_path / "runs", seed=2)], hours=True, each_run=True)


def test_names_with_dollar_signs_are_drawn_as_they_are(tmp_path):
    lines = [{"global_step": 3000, "seconds": 1e6, "$\\frac{$": 1.0}]
    path = write_run(tmp_path / "runs", "$\\frac{$", "$\\frac{$", lines=lines, encoder="$\\frac{$")
    draw(tmp_path, [path], metrics=("$\\frac{$",), group_by=("encoder",))


def test_films_side_by_side_have_names_and_the_shorter_one_stands_still():
    both = {"a": np.full((3, 8, 8, 3), 50, np.uint8), "b": np.full((5, 8, 8, 3), 200, np.uint8)}
    both["a"][-1] = 90
    pictures = np.stack(list(films.side_by_side(both, size=64)))
    assert pictures.shape == (5, 64 + 32, 128, 3)
    assert pictures[:, 40, 5, 0].tolist() == [50, 50, 90, 90, 90]
    assert (pictures[:, 32:, 64:] == 200).all()
    assert pictures[0, :32].min() < 100 < pictures[0, :32].max()  # a name is written there


# REFERENCES


def test_reference_files_are_read_by_game_and_split(tmp_path):
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


def test_reference_is_drawn_up_to_the_end_of_the_runs(tmp_path):
    path = write_run(tmp_path / "runs", steps=(100_000, 600_000))
    axis = figure_of([path], references=plot.read_reference("easy-all", ["bigfish"])).axes[0]
    (line,) = (x for x in axis.lines if x.get_label() == "OpenAI's PPO, easy-all")
    assert line.get_xdata().tolist() == [i * 100_000 for i in range(1, 8)]  # and a little past it


# SCORES


def test_time_to_a_published_score_is_that_of_the_first_line_above_it(tmp_path):
    """OpenAI's PPO has 18.8 on bigfish after 25M steps; the run's return is its step / 1000. Lines count from the step
    on at which four games have reached a limit of 1,000."""
    lucky = {"global_step": 3999, "seconds": 9.0, "charts/episodic_return": 40.0}
    several = (9000, 20_000, 1000, 30_000), (9000, 18_000)
    paths = [write_run(tmp_path / "runs", steps=steps, num_envs=4) for steps in several]
    paths.append(write_run(tmp_path / "runs", steps=(), lines=[lucky, lucky | {"global_step": 4000}], num_envs=4))
    passed, never, lucky = plot.times_to("easy-all", read(paths), ["bigfish"])
    assert (passed["score"], passed["steps"], passed["minutes"]) == ("18.8", "20,000", "1200.0")
    assert (never["steps"], never["minutes"]) == ("", "")
    assert lucky["steps"] == "4,000"


def test_scores_of_several_games_are_normalised_as_in_the_competition(tmp_path, capsys):
    """The newest evaluation counts, and the lowest seeds that all games have."""
    wanted = {"bigfish": (0.0, 0.5, 0.9), "coinrun": (1.0, -0.2), "starpilot": (0.25, 0.75)}
    paths = []
    for game, scores in wanted.items():
        low, high = RANGES[game]
        for seed, score in reversed(list(enumerate(scores))):
            lines = scored(99, 2000) + scored(low + score * (high - low))
            paths.append(write_run(tmp_path / "runs", game, seed=seed, lines=lines))
    draw(tmp_path, paths, aggregate=True)
    rows = {(r["game"], r["statistic"]): r for r in records.read_rows(tmp_path / "out_aggregate.csv")}
    used = np.array([scores[:2] for scores in wanted.values()]).T
    assert float(rows["all", "mean"]["value"]) == pytest.approx(used.mean(), abs=1e-6)
    assert float(rows["all", "iqm"]["value"]) == pytest.approx(interquartile_mean(used), abs=1e-6)
    assert float(rows["all", "optimality_gap"]["value"]) == pytest.approx(np.maximum(0, 1 - used).mean(), abs=1e-6)
    assert float(rows["coinrun", "mean"]["value"]) == pytest.approx(0.4, abs=1e-6)
    assert float(rows["all", "mean"]["low"]) < used.mean() < float(rows["all", "mean"]["high"])
    printed = capsys.readouterr().out
    assert f"ppo_procgen: mean normalised score {used.mean():.4f} over 3 games after 3,000 steps, 2 runs" in printed
    assert "1 more left out" in printed
    assert_drawn(tmp_path / "out_aggregate.png", plot.COLORS[:1])


def test_scores_of_hard_games_use_their_own_range(tmp_path):
    run = plot.read_run(write_run(tmp_path, "starpilot", distribution_mode="hard"))
    scores = plot.scores_of("a", [run], ["starpilot"], "charts/episodic_return")
    np.testing.assert_allclose(scores, [[(3 - 1.5) / (35 - 1.5)]])


# BAD INPUT


@pytest.mark.parametrize(
    ("flags", "said", "valid"),
    [
        ({"group_by": "colour"}, "--group-by colour", "encoder"),
        ({"metrics": "charts/nothing"}, "--metrics charts/nothing", "charts/episodic_return"),
        ({"reference": "openai"}, "--reference openai", "easy-200-test"),
        ({"reference": "empty.csv"}, "--reference empty.csv", "env_steps and mean_return"),
        ({"reference": "maze.csv"}, "--reference maze.csv", "bigfish"),
        ({"points": 0}, "--points 0", "1 or more"),
        ({"time_to": "easy"}, "--time-to easy", "easy-all"),
        ({"aggregate": True}, f"--score-metric {EVALUATION}", "charts/episodic_return"),
        ({"score_metric": "charts/episodic_return"}, "--score-metric charts/episodic_return", "--aggregate"),
        ({"metrics": ("losses/x",), "reference": ("easy-all",)}, "--reference", "give one in --metrics"),
        ({"out": ""}, "--out ''", "name of a file"),
        ({"out": "a" * 300}, "--out aaa", "File name too long"),
        ({"out": "empty.csv/there"}, "--out empty.csv/there", "cannot write"),
    ],
)
def test_bad_flag_is_refused_in_one_sentence(study, tmp_path, monkeypatch, capsys, flags, said, valid):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.csv").write_text("env_steps,mean_return\n1,nan\n")
    (tmp_path / "maze.csv").write_text("game,env_steps,mean_return\nmaze,1,2\n")
    assert_refused(plot, [*study, *flags_of(flags)], capsys, said, valid)
    assert not list(tmp_path.glob("curve*"))


def test_bad_run_is_refused_in_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good, empty = write_run(tmp_path / "a", lines=scored(3)), write_run(tmp_path / "b", steps=())
    other, doors = write_run(tmp_path / "a", "coinrun"), write_run(tmp_path / "a", "DoorGym", lines=scored(3))
    fork = write_run(tmp_path / "a", "coinrun", script="mine", lines=scored(3))
    (tmp_path / "link").symlink_to(good)
    for words, *parts in (
        ([], "at least one"),
        (["nowhere"], "RUN_DIRS nowhere"),
        ([good, empty], f"RUN_DIRS {empty}: has no line of metrics"),
        ([good, "--metrics"], "--metrics: give at least one"),
        ([good, "link"], f"RUN_DIRS link: is the same run as {good}"),
        ([good, other, "--aggregate"], f"{other} has logged none", "--score-metric"),
        ([good, "--reference", "a/maze.csv", "b/maze.csv"], "--reference a/maze.csv b/maze.csv", "give each its own"),
        ([doors, "--aggregate"], "DoorGym has no normalisation constants"),
        ([good, fork, "--aggregate"], "'ppo_procgen' has no run of coinrun"),
    ):
        assert_refused(plot, words, capsys, *parts)
    assert not list(tmp_path.glob("curve*"))


@pytest.mark.parametrize(
    "content",
    [
        "[]", "{", "\0", "[" * 100_000, '{"script": "a"}', '{"script": 1, "args": {}}', '{"script": "a", "args": []}',
        '{"script": "a", "args": {"seed": "1"}}', '{"script": "a", "args": {"env_id": []}}',
        '{"script": "a", "args": {"env_id": "\\ud800"}}', '{"script": "a", "args": {"num_levels": "all"}}',
        '{"script": "a", "args": {"distribution_mode": {}}}',
    ],
)  # fmt: skip
def test_damaged_args_json_is_refused_in_one_sentence(content, tmp_path, capsys):
    run = write_run(tmp_path, lines=scored(3))
    Path(run, "args.json").write_text(content)
    assert_refused(plot, [run, "--out", tmp_path / "out"], capsys, f"RUN_DIRS {run}/args.json: ", "give run direc")


@pytest.mark.parametrize(("number", "why"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "Disk quota exceeded")])
def test_full_disk_is_reported_and_old_files_stay(number, why, tmp_path, monkeypatch):
    def fail(*given):
        raise OSError(number, os.strerror(number))

    (tmp_path / "out.csv").write_text("old")
    monkeypatch.setattr(csv.DictWriter, "writeheader", fail)
    with pytest.raises(files.FullError, match=f"out.csv.*: {why}"):
        plot.main(plot.Args((write_run(tmp_path / "runs"),), out=str(tmp_path / "out")))
    assert [path.name for path in tmp_path.glob("out*")] == ["out.csv"]
    assert (tmp_path / "out.csv").read_text() == "old"


def test_plot_run_as_a_module_does_not_import_rliable(tmp_path):
    path = write_run(tmp_path / "a", encoder="nature")
    code = f"import runpy, sys; sys.argv = {['plot', path, '--out', str(tmp_path / 'new')]}\n"
    code += "runpy.run_module('experiments.plot', run_name='__main__', alter_sys=True)\n"
    code += "sys.exit('rliable' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "new.png").exists()
