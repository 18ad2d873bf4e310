"""Modules of experiments/studies import, and rows of results say where they were measured."""

import importlib
import types

import pytest
from conftest import ROOT

from common import runs
from experiments import records

STUDIES = sorted((ROOT / "experiments" / "studies").glob("*/"))


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_study_has_a_readme_and_its_modules_import(study):
    for path in study.glob("*.py"):
        importlib.import_module(f"experiments.studies.{study.name}.{path.stem}")
    assert (study / "README.md").exists()


def test_rows_are_added_by_key_and_only_to_a_table_of_their_columns(tmp_path):
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


def test_commit_of_a_changed_checkout_has_a_plus(monkeypatch):
    said = {"status": " M a\n", "rev-parse": "abc\n"}
    monkeypatch.setattr(records.subprocess, "run", lambda words, **_: types.SimpleNamespace(stdout=said[words[1]]))
    assert records.commit() == "abc+"
    said["status"] = ""
    assert records.commit() == "abc"
