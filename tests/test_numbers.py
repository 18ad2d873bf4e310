"""What tables, pictures and studies say of runs that are made up: the numbers by hand."""

import numpy as np
import pytest
from test_plots import EVALUATION, write_run

from common import files
from experiments import plot, records, reproduce


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
