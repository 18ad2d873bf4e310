"""The docs: links lead somewhere, commands are valid, the example of a fork trains."""

import importlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import tyro
from conftest import ROOT, TINY, documented_flags, read_metrics, start

from common import runs
from experiments import docs, reproduce

SCRIPTS = sorted(
    path.stem for path in [*ROOT.glob("*_procgen.py"), ROOT / "rnd_montezuma.py", ROOT / "hnppo_doorgym.py"]
)


def test_links_of_the_docs_lead_to_files_sections_and_lines():
    problems, changed = [], []
    for page in docs.pages():
        text, wrong = docs.look(page)
        problems += wrong
        changed += [page.name] if text != page.read_text() else []
    assert not problems
    assert not changed, "python -m experiments.docs"


def test_broken_links_are_reported_and_line_numbers_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("X = 1\n\n\ndef gae(x):\n    y: int = 2\n")
    (tmp_path / "b.md").write_text("# One, two\n```\n# not one\n```\n")
    page = tmp_path / "page.md"
    links = "[`gae`](a.py#L1) [`y`](a.py#L9) [`X`](a.py#L3) [`no`](a.py#L1) [b](b.md#one-two) [c](b.md#not-one)"
    page.write_text(f"{links} [d](gone.md) [e](page.md)")
    text, wrong = docs.look(page)
    assert text.startswith("[`gae`](a.py#L4) [`y`](a.py#L5) [`X`](a.py#L1) [`no`](a.py#L1)")
    assert wrong == [
        "page.md: a.py has no `no`",
        "page.md: b.md has no section #not-one",
        "page.md: (gone.md) leads nowhere",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_commands_of_a_script_in_the_docs_are_valid(script):
    module = importlib.import_module(script)
    flags = list(documented_flags(f"{script}.py"))
    assert len(flags) >= 4
    for words in flags:
        runs.check_args(tyro.cli(module.Args, args=words), script)
    if script in ("ppo_procgen", "impala_procgen"):  # the competition entry's, which are said to be the defaults
        assert any(tyro.cli(module.Args, args=words) == module.Args() for words in flags if len(words) > 20)


def test_commands_of_modules_in_the_docs_are_valid():
    """On lines of their own and inside sentences; those of a published table with settings that its cells accept."""
    seen, wrong = set(), []
    for page in docs.pages():
        text = page.read_text()
        commands = re.findall(r"`(python -m [^`]+)`", text) + re.findall(r"^ *(python -m .+)$", text, re.MULTILINE)
        for command in commands:
            name, *words = shlex.split(command.replace("\\\n", " "), comments=True)[2:]
            if words and name.split(".")[0] in ("benchmarks", "doorgym", "experiments"):
                module = importlib.import_module("doorgym.__main__" if name == "doorgym" else name)
                seen.add(name)
                try:
                    args = tyro.cli(module.Args, args=words)
                except SystemExit as stopped:
                    wrong += [f"{page.name}: {command}"] if stopped.code else []
                    continue
                if module is reproduce and args.set:
                    reproduce.check_overrides(args, reproduce.read_table(args.table))
    assert not wrong
    assert len(seen) > 10


def test_example_of_a_fork_applies_and_trains_with_another_loss(tmp_path):
    patch = (ROOT / "docs" / "forking.md").read_text().split("```diff\n")[1].split("```")[0]
    shutil.copy(ROOT / "ppo_procgen.py", tmp_path)
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    spec = importlib.util.spec_from_file_location("my_ppo", tmp_path / "ppo_procgen.py")
    fork = sys.modules["my_ppo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fork)
    last = []
    for script in (importlib.import_module("ppo_procgen"), fork):
        flags = TINY | {"num_steps": 16, "total_timesteps": 200, "num_devices": 1, "run_dir": str(tmp_path)}
        args = script.Args(**flags)
        last.append(read_metrics(script.main(args).path)[-1])
    assert last[0]["global_step"] == last[1]["global_step"]
    assert last[0]["losses/policy_loss"] != last[1]["losses/policy_loss"]


@pytest.mark.slow
def test_notebook_of_the_tour_runs(tmp_path):
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text())["cells"]
    code = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
    process = start("-c", code, TOUR_QUICK=str(tmp_path))
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    assert "mean return" in output
    (run,) = tmp_path.iterdir()
    assert len(list((run / "videos").glob("side_by_side_*.mp4"))) == 1
