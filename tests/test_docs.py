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
from experiments import reproduce

SCRIPTS = sorted(
    path.stem for path in [*ROOT.glob("*_procgen.py"), ROOT / "rnd_montezuma.py", ROOT / "hnppo_doorgym.py"]
)


def pages():
    """Markdown files that git knows, or would."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(ROOT / line for line in listed.splitlines() if (ROOT / line).exists())


def anchors(text):
    """What a page's headings are called in links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    names = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", name.lower()).strip().replace(" ", "-") for name in names}


def broken_links(page):
    for target in re.findall(r"\[[^\]\[]*\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if re.match(r"[a-z]+:", target):
            continue
        if not path.exists() or (anchor and (path.suffix != ".md" or anchor not in anchors(path.read_text()))):
            yield f"{page}: {target}"


def test_links_of_the_docs_lead_to_files_and_sections():
    assert not [link for page in pages() for link in broken_links(page)]


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "b.md").write_text("# One, two\n```\n# not one\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[b](b.md#one-two) [c](b.md#not-one) [d](gone.md) [e](page.md) [f](a:b) ![g](b.md#x)")
    assert [link.split()[-1] for link in broken_links(page)] == ["b.md#not-one", "gone.md", "b.md#x"]


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
    for page in pages():
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
