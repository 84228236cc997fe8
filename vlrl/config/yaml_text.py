"""YAML texts with errors that name the line: each key of a mapping once, and merge keys that bring no flood."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError

MOST_MERGED = 10_000
"""Keys that the merge keys (`<<`) of a config may bring."""
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML in which a mapping has each key once; YAML's own loader lets the last one win. Merged mappings (`<<`) may
    bring so many keys, as each of a chain of them brings all of the one before."""

    merged = 0

    def flatten_mapping(self, node: Any) -> None:
        """Adds merged keys to the mapping's own, which win, as the first of several merged ones does. PyYAML 6.0.4
        itself lets what a merged mapping has merged win over its own.
        """
        merged = next((value for key, value in node.value if key.tag == _MERGE), None)
        node.value = [pair for pair in node.value if pair[0].tag != _MERGE]
        named = {str(key.value): (key, value) for key, value in node.value}
        for source in [] if merged is None else merged.value if isinstance(merged, yaml.SequenceNode) else [merged]:
            if not isinstance(source, yaml.MappingNode):
                raise ComposerError(None, None, "a merge key (<<) takes a mapping or a list of them", source.start_mark)
            self.flatten_mapping(source)
            self.merged += len(source.value)
            if self.merged > MOST_MERGED:
                raise ComposerError(None, None, f"its merge keys (<<) bring more than {MOST_MERGED:,} settings", None)
            for pair in source.value:
                named.setdefault(str(pair[0].value), pair)
        node.value = list(named.values())
        super().flatten_mapping(node)

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ComposerError(None, None, f"line {line}: the key '{name}' stands in line {lines[name]} already; "
                                    "keep one of them", None)
            lines[name] = line
        return node


def parse(text: str) -> Any:
    """Returns the value of a YAML text. Raises ValueError that says what is wrong with it."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{mark}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # its constructors raise ValueError, KeyError, ... on values like 2020-13-45
        raise ValueError(f"{type(error).__name__}: {error}") from None
