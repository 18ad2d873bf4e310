"""Tables of the docs and README, from committed files."""

import json

import numpy as np
import pytest

from common import envs, runs
from experiments import records, tables


def test_tables_of_the_docs_match_the_committed_files():
    tables.main(tables.Args(check=True))


def test_random_returns_of_the_code_are_those_of_the_table():
    rows = records.read_rows(tables.EXPERIMENTS / "studies" / "constant_actions" / "constant_actions.csv")
    measured = {row["game"]: float(row["mean"]) for row in rows if row["action"] == "random"}
    assert {*measured} == {*envs.RANDOM_RETURNS} == {*envs.GAMES}
    assert all(abs(measured[game] - value) <= 0.05 for game, value in envs.RANDOM_RETURNS.items())


def test_new_number_changes_its_table_and_nothing_else(tmp_path, monkeypatch):
    for path in tables.SPEED.glob("*.csv"):
        (tmp_path / path.name).write_text(path.read_text().replace(",1595,", ",98765,"))
    monkeypatch.setattr(tables, "SPEED", tmp_path)
    old = (tables.DOCS / "hnppo.md").read_text()
    assert "| 1,595 |" in old
    assert tables.fill(old, "hnppo.md") == old.replace("| 1,595 |", "| 98,765 |")
    with pytest.raises(runs.UsageError, match="one of the two marks"):
        tables.fill("<!-- end of apex -->", "a page")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("")
    monkeypatch.setattr(tables, "DOCS", tmp_path / "docs")
    page = tmp_path / "docs" / "hnppo.md"
    page.write_text(old)
    monkeypatch.setattr(tables, "PARTS", {"doors_update": tables.doors})
    with pytest.raises(runs.UsageError, match=r"hnppo\.md is old"):
        tables.main(tables.Args(check=True))
    tables.main(tables.Args())
    assert "| 98,765 |" in page.read_text()


def test_seeds_are_pooled_in_the_table_of_all_algorithms(tmp_path, monkeypatch):
    """(2 + 4) / 2 and their standard error; of a seed the longer run; speeds of one machine."""
    row = {"cell": "PPO, starpilot", "seed": 1, "step": 507_904, "mean": 2, "error": 0.3, "steps/s": ""}
    row |= {"of steps": 1_000_000, "machine": "AMD EPYC, 1 cores"}
    shorter = row | {"of steps": 500_000, "mean": 9}
    other = row | {"seed": 2, "step": 499_000, "mean": 4, "error": 0.4, "steps/s": 77}
    elsewhere = other | {"step": 1_000_900, "steps/s": 99, "machine": "a faster one"}
    rows = [row, shorter, other, elsewhere]
    records.write_rows(tmp_path / "algorithms_nature_evaluations.csv", rows)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.side_by_side()[-1] == "| PPO | 3.0 ± 1.0 | 4.0 ± 0.4 (1 seed) |  |  | 77 |"


def test_number_beside_the_published_is_the_end_of_a_curve_or_the_last_evaluation(tmp_path, monkeypatch):
    """Of curves the mean over the last tenth of the steps; then over seeds."""

    def end(file, rows="", column=""):
        return tables.final_score({"file": file, "rows": rows, "column": column})

    rows = [{"seed": seed, "global_step": i, "episodic_return": i + seed} for seed in (1, 2) for i in range(101)]
    rows = [row | {"test_levels": row["global_step"] * row["seed"]} for row in rows]
    rows[-1]["test_levels"] = rows[-2]["test_levels"] = ""  # not evaluated
    records.write_rows(tmp_path / "a.csv", rows)
    monkeypatch.setattr(tables, "EXPERIMENTS", tmp_path)
    assert end("a.csv", column="episodic_return") == pytest.approx((96.5, 0.5, 2, 100))
    mean, error, *counts = end("a.csv", "seed=2", "test_levels")
    assert (mean, *counts) == (187, 1, 98)
    assert np.isnan(error)  # a curve has no error of its own

    records.write_rows(tmp_path / "b.csv", [{"whose": "ours", "ACC": 0.9}, {"whose": "published", "ACC": 0.8}])
    mean, error, seeds, step = end("b.csv", "whose=ours", "ACC")
    assert (mean, seeds) == (0.9, 1)
    assert np.isnan([error, step]).all()

    names = "seed", "step", "mean", "error"
    rows = [(1, 10, 2, 0.3), (1, 20, 4, 0.3), (2, 20, 4.5, 0.4), (2, 10, 1, 0.4)]
    records.write_rows(tmp_path / "c.csv", [dict(zip(names, row, strict=True)) for row in rows])
    assert end("c.csv", column="mean") == pytest.approx((4.25, 0.25, 2, 20))  # over episodes and over seeds alike

    saved = {"global_step": 8, "test_levels": {"mean_return": 9.5, "std": 3, "episodes": 10}}
    (tmp_path / "d.json").write_text(json.dumps(saved))
    assert end("d.json") == (9.5, 1, 1, 8)


@pytest.mark.parametrize(
    ("mean", "error", "text"),
    [
        (2303.1, 109.9, "2,303 ± 110"),
        (25.12, 0.756, "25.1 ± 0.8"),
        (9.394, 0.1055, "9.39 ± 0.11"),
        (0.9752, np.nan, "0.975"),
        (0, np.nan, "0"),
        (2500, np.nan, "2,500"),
    ],
)
def test_error_decides_the_digits(mean, error, text):
    assert tables.plus_minus(mean, error) == text


def test_notes_of_published_rows_are_numbered_once():
    lines = tables.published()
    empty = lines.index("")
    numbers = {line.split(" | ")[-1].removesuffix(" |") for line in lines[2:empty]}
    assert numbers == {line.split(".")[0] for line in lines[empty + 1 :]}
    assert len(tables.headlines()) == 2 + 5


def test_normalized_mean_needs_all_games():
    scores = {game: f"{low} / {high}" for game, (low, high) in envs.RETURN_RANGES["easy"].items()}
    assert tables.mean_normalized(scores, "easy") == "0.00 / 1.00"
    scores.pop("maze")
    assert tables.mean_normalized(scores, "easy") == ""


def test_curve_is_above_a_score_after_its_last_point_below(monkeypatch):
    monkeypatch.setattr(tables, "openai", lambda game: np.array([[1e5, 2e5, 3e5, 4e5], [5, 7, 6, 8]]))
    assert tables.steps_above("coinrun", 6.5) == "0.4M"
    assert tables.steps_above("coinrun", 9) == ""
    assert tables.steps_above("coinrun", 4) == "0.1M"
