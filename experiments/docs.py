"""Checks the links of all Markdown files, and keeps those to functions of a script on the line where they are:

    python -m experiments.docs           # rewrites line numbers, and says which links lead nowhere
    python -m experiments.docs --check   # changes nothing; fails if there is something to do

A link to code is [`name`](../file.py#L12): the line of `def name`, `class name`, or of a field or
constant of that name.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from common import files, runs
from experiments import records

ROOT = records.ROOT
LINK = re.compile(r"(\[([^\]\[]*)\]\()([^)\s]+)(\))")


@dataclass(frozen=True)
class Args:
    check: bool = False
    """change nothing; exit code 2 if a link leads nowhere or to another line"""


def pages() -> list[Path]:
    """Markdown files that git knows, or would."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    runs.check(listed.returncode == 0, f"{ROOT}: is no git checkout, run it in one")
    return sorted(ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists())


def anchors(text: str) -> set[str]:
    """What a page's headings are called in links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    names = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", name.lower()).strip().replace(" ", "-") for name in names}


def line_of(name: str, source: str) -> int | None:
    """The line, from 1, where something of this name is defined."""
    named = re.escape(name)
    pattern = rf"^\s*(?:(?:def|class) {named}\b|{named}\s*(?::|=[^=])|(?:\w+, )*{named}(?:, \w+)* = )"
    found = re.search(pattern, source, re.MULTILINE)
    return source.count("\n", 0, found.end()) + 1 if found else None


def look(page: Path) -> tuple[str, list[str]]:
    """The page with its links to code on their lines, and what is wrong with others."""
    wrong = []

    def visit(match: re.Match) -> str:
        before, label, target, after = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            wrong.append(f"{page.relative_to(ROOT)}: ({target}) leads nowhere")
        elif anchor and path.suffix == ".py":
            line = line_of(label.strip("`"), path.read_text())
            if line is None:
                wrong.append(f"{page.relative_to(ROOT)}: {name} has no {label}")
            else:
                return f"{before}{name}#L{line}{after}"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text()):
            wrong.append(f"{page.relative_to(ROOT)}: {name or 'it'} has no section #{anchor}")
        return match[0]

    return LINK.sub(visit, page.read_text()), wrong


def main(args: Args) -> None:
    problems = []
    for page in pages():
        text, wrong = look(page)
        problems += wrong
        if text != page.read_text():
            if args.check:
                problems.append(f"{page.relative_to(ROOT)}: links to other lines, run python -m experiments.docs")
            else:
                with files.atomic_write(page) as temporary:
                    temporary.write_text(text)
    runs.check(not problems, "; ".join(problems))


if __name__ == "__main__":
    runs.cli(Args, main)
