"""Hooks of `make docs`: measurements and the API reference become pages, links to files of the code become text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REFERENCE = {
    "vlrl": ("vlrl.task.base.Task", "vlrl.types", "vlrl.media", "vlrl.task.environment", "vlrl.environments.tools",
             "vlrl.tools.train", "vlrl.tools.evaluate", "vlrl.tools.run", "vlrl.config.loading", "vlrl.errors"),
    "data": ("vlrl.data.samples", "vlrl.data.sources.dataset", "vlrl.data.sources.json_rows",
             "vlrl.data.coordinates", "vlrl.data.media"),
    "rewards": tuple(f"vlrl.rewards.{path.stem}" for path in sorted((ROOT / "vlrl" / "rewards").glob("*.py"))
                     if not path.stem.startswith("_") and "worker" not in path.stem),
    "algo": tuple(f"vlrl.algo.{path.stem}" for path in sorted((ROOT / "vlrl" / "algo").glob("*.py"))
                  if not path.stem.startswith("_")),
    "curriculum": tuple(f"vlrl.curriculum.{path.stem}" for path in sorted((ROOT / "vlrl" / "curriculum").glob("*.py"))
                        if not path.stem.startswith("_")),
    "methods": tuple(f"vlrl.methods.{path.parent.name}.{path.stem}"
                     for path in sorted((ROOT / "vlrl" / "methods").glob("*/*.py")) if not path.stem.startswith("_")),
    "store": ("vlrl.store.run_folder", "vlrl.store.rollout_rows"),
}
"""Page -> modules whose public names it describes."""


def _nav(entries: list[Any], pages: dict[str, list[str]]) -> list[Any]:
    """Returns the navigation with the pages of a folder in place of its name."""
    return [{title: pages[inner] if isinstance(inner, str) and inner in pages else inner}
            for entry in entries if isinstance(entry, dict) for title, inner in entry.items()]


def on_config(config: Any) -> Any:
    pages = {"reference": [f"reference/{name}.md" for name in REFERENCE],
             "results": [f"results/{path.name}" for path in sorted(RESULTS.glob("*.md"))]}
    first = [entry for entry in config.nav if not isinstance(entry, dict)]
    config.nav = [*first, *_nav(config.nav, pages)]
    return config


def on_files(files: Any, config: Any) -> Any:
    for name, modules in REFERENCE.items():
        text = f"# {name}\n\n" + "\n\n".join(f"::: {module}" for module in modules) + "\n"
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for path in sorted(RESULTS.iterdir()):
        if path.suffix in (".md", ".png"):
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links into benchmarks/results lead to its pages; what else lies outside docs/ is named and not linked."""
    if page.file.src_uri.startswith("results/"):
        markdown = markdown.replace("](../../docs/", "](../")
    else:
        markdown = markdown.replace("](../benchmarks/results/", "](results/")
    outside = r"\[([^\]]+)\]\(\.\./(?!results/)[^)]*\.(?:py|yaml|toml)[^)]*\)"
    return re.sub(outside, r"\1", markdown)
