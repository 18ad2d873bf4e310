"""For MkDocs: pages link to files of the repository, such as ../ppo_procgen.py and pictures of results. In the site,
pictures are copied, and other links lead to `repo_url` where mkdocs.yml has one, else they say which file."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PICTURE = re.compile(r"!\[([^\]]*)\]\(\.\./([^)]+\.png)\)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)]*)\)")


def on_files(files, config):
    for page in Path(config["docs_dir"]).glob("*.md"):
        for _, path in PICTURE.findall(page.read_text()):
            if not files.get_file_from_path(path):
                files.append(File(path, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown, page, config, files):
    markdown = re.sub(r"\(([\w/]+\.ipynb)\)", r"(../docs/\1)", markdown)  # a notebook is read in the repository
    base = (config["repo_url"] or "").rstrip("/")
    markdown = PICTURE.sub(r"![\1](\2)", markdown)
    return LINK.sub(lambda link: target(link, base), markdown)


def target(link: re.Match, base: str) -> str:
    """A link to a file of the repository, as the site has it."""
    text, path = link.groups()
    if base:
        return f"[{text}]({base}/blob/main/{path})"
    place = path.removesuffix("/")
    return text if place.split("#")[0] in text else f"{text} ({place})"
