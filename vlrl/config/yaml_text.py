"""Parses YAML. Error messages name the line, duplicate keys are refused, and aliases and merge keys are limited."""

from typing import Any

import yaml
from yaml.composer import ComposerError

MOST_VALUES = 100_000
"""Maximum number of values in a document after its aliases (`*name`) are expanded. A few lines can expand to billions
of values."""
MOST_MERGED = 10_000
"""Maximum number of keys that the merge keys (`<<`) of a document may add."""
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys and limits the number of merged keys (`<<`). PyYAML's own loader
    silently keeps the last of duplicate keys, and merged keys can grow along a chain of merges."""

    merged = 0

    def flatten_mapping(self, node: Any) -> None:
        """Adds the keys of the mappings merged by `<<` to a mapping. The mapping's own keys win over merged keys, and
        earlier merged mappings win over later ones. In PyYAML 6.0.4, the keys that a merged mapping has inherited by
        its own `<<` would win over the keys that are written in it."""
        merged = next((value for key, value in node.value if key.tag == _MERGE), None)
        node.value = [pair for pair in node.value if pair[0].tag != _MERGE]
        named = {str(key.value): (key, value) for key, value in node.value}
        for source in [] if merged is None else merged.value if isinstance(merged, yaml.SequenceNode) else [merged]:
            if not isinstance(source, yaml.MappingNode):
                raise ComposerError(None, None, "a merge key (<<) must have a mapping or a list of mappings as its "
                                                "value", source.start_mark)
            self.flatten_mapping(source)
            self.merged += len(source.value)
            if self.merged > MOST_MERGED:
                raise ComposerError(None, None, f"the merge keys (<<) add more than {MOST_MERGED:,} settings", None)
            for pair in source.value:
                named.setdefault(str(pair[0].value), pair)
        node.value = list(named.values())
        super().flatten_mapping(node)

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _count(node, {})
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ComposerError(None, None, f"line {line}: the key '{name}' is already in line {lines[name]}; "
                                    "keep one of them", None)
            lines[name] = line
        return node


def _count(node: Any, known: dict[int, int]) -> int:
    """The number of values in a node, with aliases expanded. `known` caches the numbers by the id of the node. Raises
    ComposerError for more than MOST_VALUES values, or for an alias that contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if (count := known.get(id(node))) is None:
        known[id(node)] = 0  # for as long as it is being counted
        mapping = isinstance(node, yaml.MappingNode)  # what is merged is counted as it is merged
        inner = [value for key, value in node.value if key.tag != _MERGE] if mapping else node.value
        known[id(node)] = count = 1 + sum(_count(one, known) for one in inner)
    if not 0 < count <= MOST_VALUES:
        what = (f"its aliases (*name) expand to more than {MOST_VALUES:,} values" if count
                else "an alias (*name) contains itself")
        raise ComposerError(None, None, what, node.start_mark)
    return count


def parse(text: str) -> Any:
    """Parses a YAML document to a value. Raises ValueError with the reason."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{mark}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("the text is nested too deeply") from None
    except Exception as error:  # its constructors raise ValueError, KeyError, ... on values like 2020-13-45
        raise ValueError(f"{type(error).__name__}: {error}") from None
