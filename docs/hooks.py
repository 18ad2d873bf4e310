"""For MkDocs: pages link to files of the repository, such as ../ppo_procgen.py and pictures of results. In the site,
pictures are copied and open in full size, and other links lead to `repo_url` where mkdocs.yml has one, else they say
which file."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PICTURE = re.compile(r"!\[([^\]]*)\]\(\.\./([^)]+\.png)\)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)]*)\)")
UNBROKEN = re.compile(r"-?[\d.]+(?: [±/] -?[\d.]+)+|(?<![\w-])--?\w[\w-]*|[\d.]+e-\d+|\d{4}-\d\d-\d\d")


def on_files(files, config):
    for page in Path(config["docs_dir"]).glob("*.md"):
        for _, path in PICTURE.findall(page.read_text()):
            if not files.get_file_from_path(path):
                files.append(File(path, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown, page, config, files):
    markdown = re.sub(r"\(([\w/]+\.ipynb)\)", r"(../docs/\1)", markdown)  # a notebook is read in the repository
    base = (config["repo_url"] or "").rstrip("/")
    markdown = PICTURE.sub(r"[![\1](\2)](\2)", markdown)
    return LINK.sub(lambda link: target(link, base), markdown)


def on_page_content(html, page, config, files):
    """Lines break in losses/policy_loss, but not in 6.4 ± 0.3 or at the hyphens of a flag, 1e-4, 2026-11-29."""
    pieces = re.split(r"(<[^>]*>)", html)
    for i in range(0, len(pieces), 2):  # what is not a tag
        pieces[i] = UNBROKEN.sub(r'<span class="unbroken">\g<0></span>', pieces[i])
        if i and pieces[i - 1] == "<code>":
            pieces[i] = re.sub(r"(?<=\w)[/_](?=\w)", r"\g<0><wbr>", pieces[i])
    return "".join(pieces)


def target(link: re.Match, base: str) -> str:
    """A link to a file of the repository, as the site has it."""
    text, path = link.groups()
    if base:
        return f"[{text}]({base}/blob/main/{path})"
    place = path.split("#")[0].removesuffix("README.md").removesuffix("/")
    return text if place in text else f"{text} ({place.replace('/', '/<wbr>')})"
